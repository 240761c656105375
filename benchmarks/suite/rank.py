"""A rank: opens ways across, and runs the same graph loop over whatever they yield."""

from __future__ import annotations

import gc
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
    """What a rank does when it is asked: open, run, close.

    Args:
        place: Where it stands.
        queues: Its `multiprocessing.Queue` for each element.
    """

    def __init__(self, place: ways.Place, queues: dict[str, Any]):
        self._place = place
        self._queues = queues
        self._open: dict[str, tuple[ways.Opened, Callable[[Any], Any]]] = {}

    def open(self, way: str, name: str, folder: str, service: str) -> list[int] | ways.NotAvailable:
        """Makes a way ready and pulls a first element. Returns the process ids of its producers, as far as known."""
        place = ways.Place(self._place.rank, self._place.size, folder, service, self._queues.get(name))
        open_way = ways.WAYS[way].open
        assert open_way is not None
        opened = open_way(elements.named(name), place)
        consume = consumer(opened)
        self._open[way] = opened, consume
        self.run(way, 1)
        opened.check()
        return opened.producers()

    def run(self, way: str, count: int) -> tuple[float, float]:
        """Pulls that many elements. Returns when it began and when it ended."""
        import tensorflow as tf

        consume = self._open[way][1]
        number = tf.constant(count)
        began = time.monotonic()
        consume(number).numpy()
        return began, time.monotonic()

    def close(self) -> None:
        """Ends all ways that are open."""
        opened = [pair[0] for pair in self._open.values()]
        self._open.clear()
        gc.collect()
        for each in opened:
            each.close()

    def commands(self) -> dict[str, Callable[..., Any]]:
        """What can be asked."""
        return {"open": self.open, "run": self.run, "close": self.close}


def main(connection_: connection.Connection, rank: int, size: int, queues: dict[str, Any]) -> None:
    """Runs a rank."""
    import tensorflow as tf  # noqa: F401

    processes.serve(connection_, Rank(ways.Place(rank, size), queues).commands())
    # Iterators are alive, and threads wait in them: interpreters have hung over that.
    os._exit(0)


def horovod_main(address: str) -> None:
    """Runs a rank that `horovodrun` has started."""
    import horovod.tensorflow as hvd

    hvd.init()
    connection_ = connection.Client(address)
    connection_.send((hvd.rank(), os.getpid()))
    processes.serve(connection_, Rank(ways.Place(hvd.rank(), hvd.size()), {}).commands())
    hvd.shutdown()
    os._exit(0)


if __name__ == "__main__":
    horovod_main(sys.argv[1])
