"""A rank: opens ways across, and runs the same graph loop over whatever they yield, until its process ends."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from benchmarks.suite import elements, processes, ways


def consumer(opened: ways.Opened) -> Callable[[Any], Any]:
    """Returns a function that pulls that many elements in a graph loop and looks at one value of each."""
    import tensorflow as tf

    iterator = iter(opened.dataset)

    @tf.function
    def consume(count: tf.Tensor) -> tf.Tensor:
        total = tf.constant(0, tf.int64)
        for _ in tf.range(count):
            with tf.control_dependencies([total]):  # an element is done with before the next one is pulled
                element = opened.receive(next(iterator))
            if element.dtype == tf.string:
                total += tf.cast(tf.strings.length(element[0]), tf.int64)
            else:
                total += tf.cast(tf.reshape(element, [-1])[0], tf.int64)
        return total

    return consume


class Rank:
    """What a rank does when it is asked: open, run.

    Args:
        place: Where it stands.
    """

    def __init__(self, place: ways.Place):
        self._place = place
        self._open: dict[str, tuple[ways.Opened, Callable[[Any], Any]]] = {}

    def open(self, way: str, name: str, folder: str, service: str) -> list[int] | ways.NotAvailable:
        """Makes a way ready and pulls a first element. Returns the process ids of its producers, as far as known."""
        processes.run_on_all_cores()  # a producer inherits that
        place = dataclasses.replace(self._place, folder=folder, service=service)
        open_way = ways.WAYS[way].open
        assert open_way is not None
        opened = open_way(elements.named(name), place)
        consume = consumer(opened)
        self._open[way] = opened, consume
        self.run(way, 1)
        opened.check()
        processes.run_on_one_core(self._place.rank)
        return opened.producers()

    def run(self, way: str, count: int) -> tuple[float, float]:
        """Pulls that many elements. Returns when it began and when it ended."""
        import tensorflow as tf

        consume = self._open[way][1]
        number = tf.constant(count)
        began = time.monotonic()
        consume(number).numpy()
        return began, time.monotonic()

    def commands(self) -> dict[str, Callable[..., Any]]:
        """What can be asked."""
        return {"ready": lambda: None, "open": self.open, "run": self.run}


def main(connection_: connection.Connection, rank: int, size: int, queue: Any) -> None:
    """Runs a rank."""
    import tensorflow as tf  # noqa: F401

    processes.serve(connection_, Rank(ways.Place(rank, size, queue=queue)).commands())
    # Iterators are alive, and threads wait in them: interpreters have hung over that.
    os._exit(0)


def horovod_main(address: str) -> None:
    """Runs a rank that `horovodrun` has started."""
    import horovod.tensorflow as hvd

    hvd.init()
    connection_ = connection.Client(address)
    connection_.send((hvd.rank(), os.getpid()))
    processes.serve(connection_, Rank(ways.Place(hvd.rank(), hvd.size())).commands())
    os._exit(0)


if __name__ == "__main__":
    horovod_main(sys.argv[1])
