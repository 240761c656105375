"""A rank of `memory_growth.py`, and the pipeline that feeds it."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from benchmarks.suite.processes import serve

if TYPE_CHECKING:
    import tensorflow as tf

RANKS = 2
EARLY, LATE = 10_000, 100_000  # elements of all ranks together
MIB = 1 << 20
BUFFER_BYTES = 64 * MIB
SMALL = (100, 64_000)
LARGE = (2_000_000, 4_000_000)
LARGE_EVERY = 500
# First come tiny elements: what the processes have after them is their fixed part. Then come the largest: what is kept
# in reserve is full before the first look, and what comes on top later is growth.
TINY = 2_000
TINY_BYTES = 100.0
LARGEST = 200


def dataset_fn() -> tf.data.Dataset:
    """Elements whose sizes differ from one to the next, always the same ones."""
    import tensorflow as tf

    def element(index: tf.Tensor) -> tf.Tensor:
        draw = tf.random.stateless_uniform([], tf.stack([index, 4]))
        low, high = SMALL
        small = low * (high / low) ** draw
        large = LARGE[0] + draw * (LARGE[1] - LARGE[0])
        size = tf.where(index % LARGE_EVERY == LARGE_EVERY - 1, large, small)
        size = tf.where(index < TINY + LARGEST, float(LARGE[1]), size)
        size = tf.where(index < TINY, TINY_BYTES, size)
        return tf.fill([tf.cast(size, tf.int64)], tf.cast(index % 251, tf.uint8))

    return tf.data.Dataset.range(LATE).map(element)


class Rank:
    """Pulls from the feed in a graph loop."""

    def __init__(self, rank: int, folder: str, transport: str):
        self._rank = rank
        self._folder = folder
        self._transport = transport
        self._consume: Callable[[Any], Any] | None = None
        self._feeder: Any = None

    def start(self) -> int | None:
        """Starts the feed, without pulling. Returns the producer's process id on the rank that has it."""
        import tensorflow as tf

        import kerasfeed

        self._feeder = feeder = kerasfeed.DataFeeder(
            dataset_fn,
            transport=self._transport,
            max_buffer_bytes=BUFFER_BYTES,
            check_replay=False,
            topology=kerasfeed.Topology(self._rank, RANKS, meeting_dir=self._folder),
        )
        _ = feeder.element_spec
        iterator = iter(feeder)

        @tf.function
        def consume(count: tf.Tensor) -> tf.Tensor:
            total = tf.constant(0, tf.int64)
            for _ in tf.range(count):
                total += tf.cast(next(iterator)[-1], tf.int64)
            return total

        self._consume = consume
        pid: int | None = feeder.session.producer_pid
        return pid

    def pull(self, count: int) -> str:
        """Pulls that many elements. Returns how they came."""
        import tensorflow as tf

        assert self._consume is not None
        self._consume(tf.constant(count)).numpy()
        way: str = self._feeder.session.way
        return way

    def close(self) -> None:
        """Leaves the feed."""
        self._consume = None
        self._feeder.close()


def rank_main(connection_: connection.Connection, rank: int, folder: str, transport: str) -> None:
    """Runs a rank."""
    worker = Rank(rank, folder, transport)
    serve(connection_, {"start": worker.start, "pull": worker.pull, "close": worker.close})
    os._exit(0)
