"""Rank 0 waits for one thing after the other, each of which goes on only when it has said what it waits for."""

from __future__ import annotations

import lean  # noqa: F401 (before TensorFlow)

# isort: split

import logging

import horovod.tensorflow as hvd
import tensorflow as tf
from reporting import FOLDER, RANK, hear, meet, report, tell

import kerasfeed
from kerasfeed.transport import grpc_stream

FIRST_NOTICE_SECONDS = 0.5
LATE, SLOW, PIPELINE = "rank that comes late", "rank that trains slowly", "pipeline that is slow"
ELEMENTS = 200


class Notices(logging.Handler):
    """Collects the notices of a feed; one that names the awaited thing lets everybody go on."""

    def __init__(self, feed: str, awaited: str):
        super().__init__()
        self._feed, self._awaited = feed, awaited
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if f"{self._feed!r}: rank" in message and "has waited" in message:
            self.messages.append(message)
            if self._awaited in message:
                tell(self._feed)


def numbers():
    return tf.data.Dataset.range(ELEMENTS)


def slow():
    path = str(FOLDER / f"told-{PIPELINE}")

    def check(index):
        import os
        import time

        while index == 5 and not os.path.exists(path):
            time.sleep(0.02)
        return index

    return tf.data.Dataset.range(8).map(lambda index: tf.numpy_function(check, [index], tf.int64))


def noticing(feed: str, awaited: str) -> Notices | None:
    if RANK != 0:
        return None
    notices = Notices(feed, awaited)
    logging.getLogger("kerasfeed").addHandler(notices)
    return notices


def run(feed: str, awaited: str, feeder: kerasfeed.DataFeeder, stop_at: int | None = None) -> None:
    notices = noticing(feed, awaited)
    for step, _ in enumerate(feeder):
        if RANK == 1 and step == stop_at:
            hear(feed)
    if notices is not None:
        report(feed, messages=notices.messages)
    meet(f"end of {feed}")


if __name__ == "__main__":
    hvd.init()
    grpc_stream._FIRST_NOTICE_SECONDS = FIRST_NOTICE_SECONDS
    grpc_stream._NOTICE_SECONDS = FIRST_NOTICE_SECONDS
    late = kerasfeed.DataFeeder(numbers, name=LATE)
    if RANK == 1:
        hear(LATE)
    run(LATE, "rank 1 to use", late)
    # The window is small: rank 0 has soon pulled all that it holds.
    run(SLOW, "rank 1, which", kerasfeed.DataFeeder(numbers, name=SLOW, max_buffer_bytes=20, prefetch=2), stop_at=3)
    run(PIPELINE, "at work on epoch 0, step 2, element 2", kerasfeed.DataFeeder(slow, name=PIPELINE))
