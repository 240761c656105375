"""Trains where steps and pulls don't go hand in hand: epochs of varying length, many steps per call, several pulls."""

from __future__ import annotations

import quick  # noqa: F401 (before TensorFlow)

# isort: split

import horovod.tensorflow as hvd
import tensorflow as tf
from models import Epochs, Recorder, batches, build_network, element_of, horovod_callbacks
from reporting import report

import kerasfeed

ELEMENTS = 140


def varying():
    # Another half of the elements in each epoch.
    return tf.data.Dataset.range(80).filter(lambda _: tf.random.uniform([]) < 0.5).map(element_of)


def many():
    return batches(ELEMENTS)


def varying_epochs() -> None:
    """First in fit, then in a loop over the same feeder, whose producer is kept."""
    recorder = Recorder()
    network = build_network(recorder)
    feeder = kerasfeed.DataFeeder(varying, name="varying", seed=3)
    taken = Epochs(recorder)
    callbacks = [kerasfeed.callbacks.FeedCallback(feeder, keep=True), *horovod_callbacks_without_warmup(network), taken]
    network.fit(feeder, epochs=5, verbose=0, callbacks=callbacks)
    report("varying.fit", epochs=taken.trained)

    epochs = []
    for _ in range(4):
        epochs.append([])
        for features, _ in feeder:
            hvd.allreduce(features["x"], name="step")
            epochs[-1].append(int(features["id"]))
    report("varying.loop", epochs=epochs)
    feeder.close()
    hvd.allreduce(tf.zeros([]), name="all have left")
    report("varying.statistics", epochs=[vars(epoch) for epoch in feeder.statistics()])


def horovod_callbacks_without_warmup(network):
    """Horovod's warm-up wants to know the steps of an epoch, which nobody does here."""
    return [c for c in horovod_callbacks(network) if "Warmup" not in type(c).__name__]


def many_steps_per_call() -> None:
    """A little window, 16 steps per call, and derived datasets that pull ahead or more than once a step."""
    derived = {
        "shuffle": lambda feeder: feeder.shuffle(16),
        "two pulls": lambda feeder: feeder.batch(2, drop_remainder=True),
    }
    for name, derive in derived.items():
        recorder = Recorder()
        network = build_network(recorder, steps_per_execution=16)
        feeder = kerasfeed.DataFeeder(many, name=name, prefetch=2, max_buffer_bytes=100)
        taken = Epochs(recorder)
        callbacks = [kerasfeed.callbacks.FeedCallback(feeder), *horovod_callbacks_without_warmup(network), taken]
        network.fit(derive(feeder), epochs=2, verbose=0, callbacks=callbacks)
        report(f"flow.{name}", epochs=taken.trained)


if __name__ == "__main__":
    hvd.init()
    varying_epochs()
    many_steps_per_call()
