"""Trains for ever, a step after the other, until something ends it."""

from __future__ import annotations

import lean  # noqa: F401 (before TensorFlow)

# isort: split

import os

import horovod.tensorflow as hvd
import tensorflow as tf
from reporting import report

import kerasfeed


def endless():
    return tf.data.Dataset.range(1000).repeat()


if __name__ == "__main__":
    hvd.init()
    feeder = kerasfeed.DataFeeder(endless)
    for step, element in enumerate(feeder):
        hvd.allreduce(tf.cast(element, tf.float32), name="step")
        if step == 20:
            report("running", pid=os.getpid(), producer=feeder.session.producer_pid)
