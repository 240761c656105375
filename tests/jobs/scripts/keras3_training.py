"""Trains on Keras 3 with kerasfeed.horovod, from a feed, and reports what came out: the tests know the right values."""

from __future__ import annotations

import lean  # noqa: F401 (before TensorFlow)

# isort: split

import keras
import numpy as np
import tensorflow as tf
from reporting import RANK, report

import kerasfeed
import kerasfeed.horovod as hvd

STEPS = 8
FEATURES = 3
X = np.random.default_rng(1).normal(size=(2 * STEPS, 4, FEATURES)).astype(np.float32)
Y = X.sum(2, keepdims=True) + 1


def batches():
    return tf.data.Dataset.from_tensor_slices((X, Y))


class Rates(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate.numpy()))


def linear(scale: float) -> keras.Model:
    return keras.Sequential(
        [keras.Input([FEATURES]), keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(scale))]
    )


def weights(model: keras.Model) -> list[float]:
    return [float(value) for weight in model.get_weights() for value in np.ravel(weight)]


def train(name: str, model: keras.Model, optimizer: keras.optimizers.Optimizer, callbacks=(), epochs: int = 1) -> None:
    model.compile(optimizer, "mse")
    feeder = kerasfeed.DataFeeder(batches, name=name)
    rates = Rates()
    history = model.fit(
        feeder, epochs=epochs, verbose=0, callbacks=[kerasfeed.callbacks.FeedCallback(feeder), *callbacks, rates]
    )
    report(
        name,
        weights=weights(model),
        rates=rates.rates,
        losses=[float(loss) for loss in history.history["loss"]],
        trained=[epoch.trained for epoch in feeder.statistics()],
        iterations=int(model.optimizer.iterations.numpy()),
    )


def main() -> None:
    hvd.init()
    hvd_callbacks = hvd.callbacks
    train("averaged", linear(0.5), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
    train("clipped", linear(0.5), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, clipnorm=0.5)))
    train(
        "passes",
        linear(0.5),
        hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=True
        ),
    )
    # A learning rate of 0: what the ranks have in common at the end, they got from rank 0.
    train(
        "broadcast",
        linear(float(RANK)),
        hvd.DistributedOptimizer(keras.optimizers.Adam(0.0)),
        [hvd_callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    train(
        "warmup",
        linear(0.5),
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        [
            hvd_callbacks.MetricAverageCallback(),
            hvd_callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, steps_per_epoch=STEPS),
            hvd_callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=2),
        ],
        epochs=4,
    )


if __name__ == "__main__":
    main()
