"""Which Keras `tf.keras` is, and whether Horovod can work with it."""

from __future__ import annotations

import tensorflow as tf

# The one in TensorFlow 2.15 does not say.
KERAS_3 = int(getattr(tf.keras, "__version__", "2").split(".")[0]) >= 3

if KERAS_3:
    _backend = tf.keras.backend.backend()
    if _backend != "tensorflow":
        raise ImportError(f"kerasfeed.horovod: expected KERAS_BACKEND=tensorflow. Received: {_backend}")
