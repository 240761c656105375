"""The ways across that are compared: how each gives a rank an iterator over its elements.

All of it runs in the rank's process, but for what stands at the end: which ways there are, and where they are measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.suite import elements

if TYPE_CHECKING:
    import tensorflow as tf


# Elements that a rank's dataset keeps ready, where it is not kerasfeed that does. Without this tf.data would inject a
# `prefetch` whose buffer grows to thousands of elements: a run would then find all that it pulls in memory, made while
# another way was being measured.
_AHEAD = 8


class NotAvailable(Exception):
    """This way is not to be had here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank stands, and what it needs to reach the others.

    Attributes:
        rank: Its number.
        size: How many ranks there are.
        folder: Where ranks of a feed meet.
        service: The address of the tf.data service.
        queue: The `multiprocessing.Queue` of this rank and element.
    """

    rank: int
    size: int
    folder: str = ""
    service: str = ""
    queue: Any = None


@dataclasses.dataclass
class Opened:
    """A way that is ready to be pulled from.

    Attributes:
        dataset: What yields the elements.
        producers: Process ids of the producers that this rank has started.
        receive: What the consumer does with what it pulls, to get its element.
        check: Raises `NotAvailable` if the first element has come another way.
    """

    dataset: tf.data.Dataset
    producers: Callable[[], list[int]] = list
    receive: Callable[[tf.Tensor], tf.Tensor] = lambda element: element
    check: Callable[[], None] = lambda: None


@contextlib.contextmanager
def _engine(name: str | None) -> Iterator[None]:
    before = os.environ.pop("KERASFEED_ENGINE", None)
    if name is not None:
        os.environ["KERASFEED_ENGINE"] = name
    try:
        yield
    finally:
        os.environ.pop("KERASFEED_ENGINE", None)
        if before is not None:
            os.environ["KERASFEED_ENGINE"] = before


def feed(transport: str) -> Callable[[elements.Element, Place], Opened]:
    """kerasfeed; `"grpc"` is its Python engine, on both sides."""

    def open_feed(element: elements.Element, place: Place) -> Opened:
        import kerasfeed

        build = element.build  # the producer needs no more of it
        with _engine("python" if transport == "grpc" else None):
            try:
                feeder = kerasfeed.DataFeeder(
                    lambda: build(),
                    name=f"{transport} {element.name}",
                    transport=transport,
                    check_replay=False,
                    topology=kerasfeed.Topology(place.rank, place.size, meeting_dir=place.folder or None),
                )
                _ = feeder.element_spec  # it starts here
            except (ValueError, kerasfeed.FeedError) as error:
                if f"transport={transport!r}" in str(error):
                    raise NotAvailable(str(error)) from None
                raise

        def check() -> None:
            expected = {"shm": "shared memory", "tcp": "TCP", "grpc": "gRPC"}[transport]
            way = getattr(feeder.session, "way", "gRPC")
            if way != expected:
                raise NotAvailable(f"expected elements by {expected}. Received: by {way}")

        def producers() -> list[int]:
            pid = feeder.session.producer_pid
            return [] if pid is None else [pid]

        return Opened(feeder, producers, check=check)

    return open_feed


def service(mode: str, compression: str | None) -> Callable[[elements.Element, Place], Opened]:
    """tf.data service: `"coordinated"`, or by its processing mode as elements are ready."""

    def open_service(element: elements.Element, place: Place) -> Opened:
        from tensorflow.data.experimental import service as tf_service

        shared: dict[str, Any] = {}
        if mode == "coordinated":
            shared = {"consumer_index": place.rank, "num_consumers": place.size}
        distributed = tf_service.distribute(
            "parallel_epochs" if mode == "coordinated" else mode,
            place.service,
            job_name=f"{mode} {compression} {element.name}",
            compression=compression,
            **shared,
        )
        return Opened(element.build().apply(distributed).prefetch(_AHEAD))

    return open_service


def queue(element: elements.Element, place: Place) -> Opened:
    """A `multiprocessing.Queue` for each rank, and `from_generator`."""
    import tensorflow as tf

    def pull() -> Iterator[Any]:
        while True:
            yield place.queue.get()

    dataset = tf.data.Dataset.from_generator(pull, output_signature=element.build().element_spec)
    return Opened(dataset.prefetch(_AHEAD))


def broadcast(element: elements.Element, place: Place) -> Opened:
    """Rank 0 has the batch of all ranks; Horovod's broadcast hands it to all, and each keeps its part."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    spec = element.build().element_spec
    if spec.dtype == tf.string:
        raise NotAvailable("Horovod does not broadcast strings")
    part = spec.shape[0]
    whole = (tf.ones if place.rank == 0 else tf.zeros)([part * place.size, *spec.shape[1:]], spec.dtype)

    def receive(batch: tf.Tensor) -> tf.Tensor:
        batch = hvd.broadcast(batch, root_rank=0, name=f"batch.{element.bytes}")
        return batch[part * place.rank : part * (place.rank + 1)]

    return Opened(tf.data.Dataset.from_tensors(whole).repeat().prefetch(_AHEAD), receive=receive)


def whole_pipeline(element: elements.Element, place: Place) -> Opened:
    """Each rank runs the whole pipeline and keeps one element of `size`."""
    return Opened(element.build().shard(place.size, place.rank).prefetch(_AHEAD))


def local(element: elements.Element, place: Place) -> Opened:
    """Each rank runs a pipeline that yields its own elements only: what no transport can be faster than."""
    return Opened(element.build().prefetch(_AHEAD))


@dataclasses.dataclass(frozen=True)
class Way:
    """One row of the tables.

    Attributes:
        key: Its name in the JSON file.
        title: Its name in tables.
        open: Makes it ready, in a rank. `None`: a program of its own measures it (`floors.cc`).
        ready: How many elements may be ready for a rank that has not pulled for a while. They are pulled before time
            is taken.
        horovod: Whether its ranks run under Horovod.
    """

    key: str
    title: str
    open: Callable[[elements.Element, Place], Opened] | None
    ready: int = _AHEAD + 2
    horovod: bool = False


WAYS = {
    way.key: way
    for way in (
        Way("shm", "kerasfeed, shared memory", feed("shm"), 17),
        Way("tcp", "kerasfeed, TCP", feed("tcp"), 17),
        Way("grpc", "kerasfeed, Python engine (gRPC)", feed("grpc"), 17),
        Way("ready", "tf.data service, as ready", service("parallel_epochs", None), _AHEAD + 4),
        Way("ready-auto", "tf.data service, as ready, compression", service("parallel_epochs", "AUTO"), _AHEAD + 4),
        Way("dynamic", "tf.data service, as ready, dynamic sharding", service("distributed_epoch", None), _AHEAD + 4),
        Way("coordinated", "tf.data service, coordinated", service("coordinated", None), _AHEAD + 4),
        Way(
            "coordinated-auto", "tf.data service, coordinated, compression", service("coordinated", "AUTO"), _AHEAD + 4
        ),
        Way("queue", "multiprocessing.Queue, from_generator", queue, _AHEAD + 6),
        Way("broadcast", "hvd.broadcast of the global batch", broadcast, horovod=True),
        Way("whole", "every rank runs the pipeline, keeps 1/N", whole_pipeline),
        Way("local", "floor: local pipeline, no transport", local),
        Way("copy", "floor: plain copying, one thread", None),
        Way("plain-tcp", "floor: plain TCP", None),
    )
}
SERVICE_READY = ("ready", "ready-auto", "dynamic")
SERVICE_COORDINATED = ("coordinated", "coordinated-auto")
