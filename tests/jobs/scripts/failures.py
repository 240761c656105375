"""One thing after the other goes wrong, each in a feed of its own; every rank reports what it was told, and when."""

from __future__ import annotations

import quick  # noqa: F401 (before TensorFlow)

# isort: split

import contextlib
import os
import signal
import sys
import time

import horovod.tensorflow as hvd
import tensorflow as tf
from models import Recorder, batches, build_network
from reporting import RANK, error_of, hear, meet, report, tell

import kerasfeed

BAD_ELEMENT = 36
KILLED_ELEMENTS = 400
KILLED_STEPS = (10, 70, 130)
MISSING = "/nowhere/missing.tfrecord"


@contextlib.contextmanager
def expected(check: str, steps: list | None = None):
    began = time.monotonic()
    try:
        yield
    except Exception as error:
        seconds = time.monotonic() - began
        report(check, steps=len(steps or []), seconds=seconds, kind=kind_of(error), **error_of(error))
    else:
        report(check, steps=len(steps or []), error=None, message="")


def kind_of(error: Exception) -> list[str]:
    return [cls.__name__ for cls in type(error).__mro__]


def missing_file():
    return tf.data.TFRecordDataset([MISSING])


def bad_element():
    def check(index):
        if index == BAD_ELEMENT:
            raise ValueError(f"record {index} is broken")
        return index

    return tf.data.Dataset.range(100).map(lambda index: tf.numpy_function(check, [index], tf.int64))


def raising():
    raise LookupError("no such table: digits")


def numbers():
    return tf.data.Dataset.range(40)


def suicide():
    os.kill(os.getpid(), signal.SIGKILL)


def many():
    return tf.data.Dataset.range(KILLED_ELEMENTS)


def bad_batch():
    def check(features, y):
        factor = tf.where(features["id"] == BAD_ELEMENT, float("nan"), 1.0)
        return features, tf.debugging.check_numerics(y * factor, "a broken label")

    return batches(100).map(check)


def collect(feeder, steps) -> None:
    for element in feeder:
        steps.append(int(element) if element.dtype == tf.int64 else 0)


def pipeline_errors() -> None:
    for check, dataset_fn in (("missing file", missing_file), ("bad element", bad_element), ("raising", raising)):
        steps: list[int] = []
        feeder = kerasfeed.DataFeeder(dataset_fn, name=check)
        with expected(check, steps):
            collect(feeder, steps)
        # The error is final: asking again does not skip the element.
        with expected(f"{check}, again", steps):
            collect(feeder, steps)


def wrong_token() -> None:
    feeder = kerasfeed.DataFeeder(numbers, name="token", start_timeout=5)
    if RANK == 0:
        report("token producer", spec=str(feeder.element_spec))
        tell("token producer")
    else:
        hear("token producer")
        os.environ["KERASFEED_TOKEN"] = "not the token of this job"
    with expected("wrong token"):
        collect(feeder, [])
    os.environ.pop("KERASFEED_TOKEN", None)
    meet("wrong token")


def absent_rank() -> None:
    feeder = kerasfeed.DataFeeder(numbers, name="absent", start_timeout=5)
    if RANK == 0:
        with expected("absent rank"):
            collect(feeder, [])
    absent = kerasfeed.DataFeeder(numbers, name="absent producer", start_timeout=5)
    if RANK == 1:
        with expected("absent producer"):
            collect(absent, [])
    meet("absent")


def killed_producer() -> None:
    """The producer is killed three times, each time ahead of all that comes after the kill, and goes on."""
    feeder = kerasfeed.DataFeeder(many, name="killed")
    elements, kills = [], 0
    for step, element in enumerate(feeder):
        elements.append(int(element))
        if step in KILLED_STEPS and RANK == 0:
            # Rank 1 does not wait for this one, so that the epoch is soon produced whole.
            while not ((epoch := feeder.statistics()[0]).complete and epoch.trained.get(1, 0) > step):
                time.sleep(0.02)
            os.kill(feeder.session.producer_pid, signal.SIGKILL)
            kills += 1
    report("killed producer", elements=elements, kills=kills)


def dying_producer() -> None:
    feeder = kerasfeed.DataFeeder(suicide, name="dying")
    with expected("dying producer"):
        collect(feeder, [])


def error_in_fit() -> None:
    """Nobody catches this one, but for the report."""
    network = build_network(Recorder())
    feeder = kerasfeed.DataFeeder(bad_batch, name="fit")
    steps: list[int] = []
    count = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    try:
        network.fit(feeder, verbose=0, callbacks=[kerasfeed.callbacks.FeedCallback(feeder), count])
    except Exception as error:
        report(
            "error in fit", steps=len(steps), kind=kind_of(error), pid=feeder.session.producer_pid, **error_of(error)
        )
        meet("error in fit")
        raise


PARTS = {
    "pipeline": (pipeline_errors, wrong_token, absent_rank, error_in_fit),
    "deaths": (dying_producer, killed_producer),
}

if __name__ == "__main__":
    hvd.init()
    for part in PARTS[sys.argv[1]]:
        part()
