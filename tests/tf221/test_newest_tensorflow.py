"""The newest TensorFlow, without Horovod: the native engine is built for it, and feeds Keras 3."""

from __future__ import annotations

import importlib.util

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasfeed
from kerasfeed.callbacks import FeedCallback
from kerasfeed.native import engine

pytestmark = pytest.mark.once("tf221")
COUNT = 11


def test_this_environment_has_the_newest_tensorflow_and_no_horovod():
    assert tf.__version__.startswith("2.21.")
    assert keras.__version__.startswith("3.")
    assert importlib.util.find_spec("horovod") is None


def test_the_native_engine_feeds_fit_each_element_once_in_each_epoch(monkeypatch):
    monkeypatch.setenv("KERASFEED_ENGINE", "native")
    assert engine.load() is not None
    seen = []

    class Seeing(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, data):
            tf.py_function(lambda ids: seen.append(int(ids[0, 0])), [data[0]], [])
            return super().train_step(data)

    def dataset_fn():
        import tensorflow as tf

        return tf.data.Dataset.range(COUNT).map(lambda i: (tf.fill([2, 3], tf.cast(i, tf.float32)), tf.zeros([2, 1])))

    model = Seeing()
    model.compile("sgd", "mse")
    feeder = kerasfeed.DataFeeder(dataset_fn)
    history = model.fit(feeder, epochs=3, verbose=0, callbacks=[FeedCallback(feeder)])
    assert feeder.session._feed is not None  # what the native engine reads from
    assert seen == [*range(COUNT)] * 3
    assert np.isfinite(history.history["loss"]).all()
