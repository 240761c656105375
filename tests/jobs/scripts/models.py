"""A small model whose ranks average their gradients, and a record of which elements it was trained on, in order.

Keras 2 uses Horovod's own optimizer and callbacks. On Keras 3 those fail: there the model's `train_step` averages the
gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow import keras

KERAS3 = hasattr(keras, "ops")
BATCH = 4
FEATURES = 3
LEARNING_RATE = 0.01


def batches(elements: int) -> tf.data.Dataset:
    """Returns a dataset of `elements` elements, each of which carries its number: ({"x", "id"}, y)."""
    return tf.data.Dataset.range(elements).map(element_of)


def element_of(index: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Returns the element with this number."""
    x = tf.random.stateless_uniform([BATCH, FEATURES], tf.stack([index, 0]))
    return {"x": x, "id": index}, tf.reduce_sum(x, axis=1, keepdims=True)


def validation_batches() -> tf.data.Dataset:
    """Returns 9 elements without numbers: (x, y)."""
    return batches(9).map(lambda features, y: (features["x"], y))


class Recorder:
    """Writes down the numbers of the elements that were trained: how often each, and in which order.

    The model does not track these variables: Horovod would broadcast them from rank 0 with the weights.
    """

    def __init__(self, elements: int = 1000, capacity: int = 4096):
        with tf.device("CPU:0"):
            self._counts = tf.Variable(tf.zeros([elements], tf.int64), trainable=False)
            self._order = tf.Variable(tf.zeros([capacity], tf.int64), trainable=False)
            self._length = tf.Variable(tf.constant(0, tf.int64), trainable=False)

    def record(self, ids: tf.Tensor) -> None:
        """Called in each training step."""
        ids = tf.reshape(ids, [-1])
        # How many there are is no news to TensorFlow, which would count a step that then finds no data.
        with tf.control_dependencies([ids]):
            places = self._length + tf.range(tf.size(ids, tf.int64))
            self._counts.scatter_nd_add(ids[:, tf.newaxis], tf.ones_like(ids))
            self._order.scatter_nd_update(places[:, tf.newaxis], ids)
            self._length.assign_add(tf.size(ids, tf.int64))

    def take(self) -> list[int]:
        """Returns the numbers recorded since the last call, in order; checks them against the counts."""
        order = self._order.numpy()[: int(self._length)]
        counts = self._counts.numpy()
        assert (np.bincount(order, minlength=len(counts)) == counts).all()
        self._length.assign(0)
        self._counts.assign(tf.zeros_like(self._counts))
        return [int(number) for number in order]


class Epochs(keras.callbacks.Callback):
    """Takes from the recorder what was trained in each epoch."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder
        self.trained: list[list[int]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.trained.append(self._recorder.take())


class StopAfter(keras.callbacks.Callback):
    """Ends training after some batches, inside an epoch."""

    def __init__(self, batches: int):
        super().__init__()
        self._left = batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            self.model.stop_training = True


class Network(keras.Model):
    """Trains on x, records the numbers; on Keras 3 averages the gradients, too."""

    recorder: Recorder

    def train_step(self, data: Any) -> Any:
        features, y = data
        self.recorder.record(features["id"])
        x = features["x"]
        if x.shape.rank == 3:  # several elements in one
            x, y = tf.reshape(x, [-1, FEATURES]), tf.reshape(y, [-1, 1])
        if not KERAS3:
            return super().train_step((x, y))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_weights)
        averaged = [hvd.allreduce(gradient, name=f"gradient.{i}") for i, gradient in enumerate(gradients)]
        self.optimizer.apply_gradients(zip(averaged, self.trainable_weights, strict=True))
        return {"loss": loss}


def build_network(recorder: Recorder, first_layers: Sequence[Any] = (), **compile_arguments: Any) -> Network:
    """Returns a compiled model with other weights on each rank, which a broadcast has to make equal."""
    keras.utils.set_random_seed(hvd.rank())
    x = y = keras.Input([FEATURES])
    for layer in (*first_layers, keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)):
        y = layer(y)
    network = Network(x, y)
    network.recorder = recorder
    optimizer = keras.optimizers.Adam(LEARNING_RATE * hvd.size())
    if KERAS3:
        compile_arguments["jit_compile"] = False
    else:
        import horovod.tensorflow.keras as hvd_keras

        optimizer = hvd_keras.DistributedOptimizer(optimizer)
    network.compile(optimizer=optimizer, loss="mse", **compile_arguments)
    return network


def horovod_callbacks(network: Network) -> list[keras.callbacks.Callback]:
    """Returns Horovod's own callbacks; on Keras 3 there are none, and the weights are broadcast here."""
    if KERAS3:
        for index, variable in enumerate(network.weights):
            variable.assign(hvd.broadcast(tf.convert_to_tensor(variable), 0, name=f"weight.{index}"))
        return []
    import horovod.tensorflow.keras as hvd_keras

    return [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd_keras.callbacks.MetricAverageCallback(),
        hvd_keras.callbacks.LearningRateWarmupCallback(LEARNING_RATE * hvd.size(), warmup_epochs=2),
    ]


def digest_of(network: Network) -> str:
    """Returns a digest of the weights' bytes."""
    return hashlib.sha256(b"".join(weight.tobytes() for weight in network.get_weights())).hexdigest()
