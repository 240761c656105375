"""The producers of the other ways: tf.data service, and one that fills a `multiprocessing.Queue` for each rank."""

from __future__ import annotations

import itertools
import os
from multiprocessing import connection
from typing import Any

from benchmarks.suite import elements, processes


def service_main(connection_: connection.Connection) -> None:
    """Runs a dispatcher and one worker of tf.data service; says where it listens."""
    from tensorflow.data.experimental import service

    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    processes.serve(connection_, {"address": lambda: dispatcher.target})
    del worker
    os._exit(0)


def queue_main(connection_: connection.Connection, name: str, queues: list[Any]) -> None:
    """Puts the elements of a pipeline into the ranks' queues in turn, until the other side is gone."""
    import threading

    def fill() -> None:
        pipeline = elements.named(name).build().as_numpy_iterator()
        for element, queue in zip(pipeline, itertools.cycle(queues), strict=False):
            queue.put(element)

    threading.Thread(target=fill, name="fill queues", daemon=True).start()
    processes.serve(connection_, {})
    os._exit(0)
