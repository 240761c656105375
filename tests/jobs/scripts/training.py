"""Trains with Keras from feeds on every rank, in several ways, and reports what was trained."""

from __future__ import annotations

import quick  # noqa: F401 (before TensorFlow)

# isort: split

import horovod.tensorflow as hvd
import tensorflow as tf
from models import Epochs, Recorder, StopAfter, batches, build_network, digest_of, horovod_callbacks, validation_batches
from reporting import report

import kerasfeed

ELEMENTS = 41  # 20 steps of 2 ranks, one left over
STOP_AFTER = 27  # 7 steps into the second epoch
FIT_STEPS = 7


def ordered():
    return batches(ELEMENTS)


def shuffled():
    return batches(ELEMENTS).shuffle(ELEMENTS)


def two_fits() -> None:
    """The whole list of callbacks, a validation feeder, and a second fit."""
    recorder = Recorder()
    network = build_network(recorder)
    feeder = kerasfeed.DataFeeder(shuffled, name="two fits")
    validation = kerasfeed.DataFeeder(validation_batches, name="validation")
    for fit, epochs in enumerate((3, 2)):
        taken = Epochs(recorder)
        callbacks = [kerasfeed.callbacks.FeedCallback(feeder), *horovod_callbacks(network), taken]
        history = network.fit(feeder, validation_data=validation, epochs=epochs, verbose=0, callbacks=callbacks)
        report(
            f"fit.{fit}", epochs=taken.trained, weights=digest_of(network), validated=len(history.history["val_loss"])
        )
    hvd.allreduce(tf.zeros([]), name="all have left")
    report("fit.statistics", epochs=[vars(epoch) for epoch in feeder.statistics()])


def stopped_inside_an_epoch() -> None:
    """All ranks stop at the same step; the next fit goes on from there. The producer is kept in between, or not."""
    for keep in (False, True):
        recorder = Recorder()
        network = build_network(recorder)
        feeder = kerasfeed.DataFeeder(ordered, name=f"stopped, keep={keep}")
        runs = []
        for extra in ([StopAfter(STOP_AFTER)], []):
            taken = Epochs(recorder)
            callbacks = [
                kerasfeed.callbacks.FeedCallback(feeder, keep=keep),
                *horovod_callbacks(network),
                *extra,
                taken,
            ]
            network.fit(feeder, epochs=2, verbose=0, callbacks=callbacks)
            runs.append(taken.trained)
        report(f"stopped.{keep}", runs=runs, weights=digest_of(network))
        feeder.close()


def steps_per_epoch_in_fit() -> None:
    """Keras keeps one iterator over the epochs; the stream runs on over passes."""
    recorder = Recorder()
    network = build_network(recorder)
    feeder = kerasfeed.DataFeeder(ordered, name="steps in fit")
    taken = Epochs(recorder)
    callbacks = [kerasfeed.callbacks.FeedCallback(feeder), *horovod_callbacks(network), taken]
    network.fit(feeder, epochs=4, steps_per_epoch=FIT_STEPS, verbose=0, callbacks=callbacks)
    report("steps_per_epoch", epochs=taken.trained, weights=digest_of(network))


if __name__ == "__main__":
    hvd.init()
    two_fits()
    stopped_inside_an_epoch()
    steps_per_epoch_in_fit()
