"""To be imported before TensorFlow, by scripts that use Keras: the garbage collector leaves out what they import.

It would look at all modules again and again, for a sixth of the time that a rank takes to start.
"""

from __future__ import annotations

import gc

gc.disable()
import horovod.tensorflow  # noqa: E402, F401
from tensorflow import keras  # noqa: E402

keras.Model  # noqa: B018 (imports Keras)
gc.freeze()
gc.enable()
