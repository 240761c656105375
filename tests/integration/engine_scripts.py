"""Pipelines and what ranks do with them, as data, and how to run them on either engine, all in this process.

A plan says what a dataset yields and what each rank reads, acknowledges, reads again, and when its connection or the
producer is replaced. `run` does that with the parts of one engine, and returns what every rank got. There is no
producer process: its pipeline, window and pump (and the native engine's sockets) are here, in threads, so that a plan
takes some 30 ms.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from kerasfeed import auth, spec
from kerasfeed.native.dataset import FeedDataset
from kerasfeed.native.engine import Engine
from kerasfeed.native.feed import Feed
from kerasfeed.native.reader import Reader
from kerasfeed.options import SMALL_BYTES
from kerasfeed.producer import digest, pump
from kerasfeed.producer.launch import Progress
from kerasfeed.producer.parts import Settings, make_parts
from kerasfeed.producer.pipeline import Pipeline
from kerasfeed.producer.verifier import Verifier
from kerasfeed.producer.way_back import WayBack
from kerasfeed.producer.window import NO_LAST_EPOCH, BindError, Delivery, EpochEnd, Failure, FailureKind
from kerasfeed.schedule import Position, Segment

PATIENCE_SECONDS = 20.0
_TOKEN, _FEED = b"of the tests that compare engines", "train"
START = Position(0, 0)

Pair = collections.namedtuple("Pair", "first second")

# ---- What a dataset yields ----

_BY_CAST = ("int4", "uint4", "bfloat16", "float8_e5m2", "float8_e4m3fn")
_QUANTIZED = {"qint8": "int8", "quint8": "uint8", "qint16": "int16", "quint16": "uint16", "qint32": "int32"}
DTYPES = (
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "bfloat16", "complex64", "complex128"),
    *("int4", "uint4"),
    *_QUANTIZED,
)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A tensor of an element.

    Attributes:
        kind: "dense", "ragged", "sparse" or "none".
        dtype: Its name; "string" for bytes.
        rank: Dimensions of a dense one; ragged dimensions of a ragged one.
    """

    kind: str
    dtype: str
    rank: int


def values(dtype: str, count: int, random: np.random.Generator) -> tf.Tensor:
    """Returns a vector of any values that there are."""
    if dtype == "string":
        lengths = random.choice([0, 1, 7, 22, 23, 24, 200], count)
        return tf.constant([random.bytes(int(length)) for length in lengths], tf.string, [count])
    if dtype == "bool":
        return tf.constant(random.integers(0, 2, count).astype(bool))
    if dtype in ("int4", "uint4"):
        return tf.cast(tf.constant(random.integers(0, 8, count).astype(np.int8)), tf.dtypes.as_dtype(dtype))
    if dtype in _QUANTIZED:
        return tf.bitcast(values(_QUANTIZED[dtype], count, random), tf.dtypes.as_dtype(dtype))
    if dtype == "bfloat16":
        return tf.bitcast(values("uint16", count, random), tf.bfloat16)
    numpy = np.dtype(dtype)
    return tf.constant(np.frombuffer(random.bytes(count * numpy.itemsize), numpy))


def _tensor(leaf: Leaf, scale: int, random: np.random.Generator) -> Any:
    """Returns a tensor of about `scale` values."""
    if leaf.kind == "none":
        return None
    if leaf.dtype == "string":
        # Each of them is an object.
        scale = min(scale, 500)
    if leaf.kind == "ragged":
        rows = int(random.integers(0, 4))
        lengths = random.multinomial(scale, np.full(rows, 1 / rows)) if rows else np.zeros(0, np.int64)
        ragged = tf.RaggedTensor.from_row_lengths(values(leaf.dtype, int(lengths.sum()), random), lengths)
        return ragged if leaf.rank == 1 else tf.RaggedTensor.from_row_lengths(ragged, [rows, 0])
    if leaf.kind == "sparse":
        places = np.sort(random.choice(scale + 9, min(scale, 5), replace=False)).astype(np.int64)
        return tf.SparseTensor(places[:, None], values(leaf.dtype, len(places), random), [scale + 9])
    shape = _shape(leaf.rank, scale, random)
    return tf.reshape(values(leaf.dtype, int(np.prod(shape)), random), shape)


def _shape(rank: int, scale: int, random: np.random.Generator) -> list[int]:
    if rank == 0:
        return []
    few = [int(random.integers(1, 4)) for _ in range(rank - 1)]
    return [max(scale // int(np.prod(few)), min(scale, 1)), *few]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A dataset.

    Attributes:
        structure: Nested dicts, tuples and `Pair`s of `Leaf`s.
        scales: About how many values the tensors of each element have.
        seed: Of the values.
        steps: What is done with the elements, in order.
        raises_at: The element that raises, if one does.
    """

    structure: Any
    scales: tuple[int, ...]
    seed: int
    steps: tuple[str, ...] = ()
    raises_at: int | None = None

    def __call__(self) -> tf.data.Dataset:
        """Is a `dataset_fn`."""
        dataset = None
        for index, element in enumerate(self._elements):
            one = tf.data.Dataset.from_tensors(element)
            if index == self.raises_at:
                one = one.filter(_raise)
            dataset = one if dataset is None else dataset.concatenate(one)
        dataset = dataset.take(len(self.scales))
        for step in self.steps:
            dataset = STEPS[step](dataset)
        return dataset

    @functools.cached_property
    def _elements(self) -> list[Any]:
        random = np.random.default_rng(self.seed)
        # One of none is there for its structure.
        return [
            mapped(self.structure, lambda leaf, scale=scale: _tensor(leaf, scale, random))
            for scale in self.scales or (1,)
        ]


def mapped(structure: Any, function: Callable[[Leaf], Any]) -> Any:
    """Returns the structure with something else in the place of each leaf."""
    if isinstance(structure, Leaf):
        return function(structure)
    if isinstance(structure, dict):
        return {key: mapped(value, function) for key, value in structure.items()}
    parts = [mapped(part, function) for part in structure]
    return Pair(*parts) if isinstance(structure, Pair) else tuple(parts)


def _raise(*element: Any) -> tf.Tensor:
    with tf.control_dependencies([tf.debugging.Assert(False, ["this element raises"])]):
        return tf.constant(True)


def _some(*element: Any) -> tf.Tensor:
    return tf.random.uniform([]) < 0.7


STEPS: dict[str, Callable[[tf.data.Dataset], tf.data.Dataset]] = {
    "shuffle": lambda dataset: dataset.shuffle(4),
    "cache": lambda dataset: dataset.cache(),
    "repeat": lambda dataset: dataset.repeat(2),
    "prefetch": lambda dataset: dataset.prefetch(2),
    # Another length in each pass.
    "some": lambda dataset: dataset.filter(_some),
    "claims less": lambda dataset: dataset.apply(tf.data.experimental.assert_cardinality(1)),
}


# ---- What ranks do with it ----


@dataclasses.dataclass(frozen=True)
class Phase:
    """What all ranks do at the same time. Then all of them wait for each other.

    Attributes:
        kind: Where they read: "on", where they stopped; "back", at a place before that; "leave", in the next epoch,
            with this one unfinished; "bind", where a `fit` begins; "killed", as before, from another producer.
        back: How many steps back.
        pulls: How many steps and ends of epochs the furthest rank pulls.
        lags: How many less each rank pulls.
        reconnects: Before which of its pulls each rank's connection is replaced; -1: it is not.
        trained: How many of the steps that each rank has pulled count as trained then.
        through: Whether they read on after the end of an epoch.
        free: Whether what is pulled counts as trained when the next one is.
        steps_per_epoch: Of the `fit`.
        epochs: How many epochs the `fit` runs; 0: that is not known.
    """

    kind: str
    back: int
    pulls: int
    lags: tuple[int, ...]
    reconnects: tuple[int, ...]
    trained: tuple[int, ...]
    through: bool
    free: bool
    steps_per_epoch: int | None
    epochs: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """A pipeline and what is done with it.

    Attributes:
        recipe: The dataset.
        size: How many ranks.
        transports: Of each rank with the native engine: "unix" or "tcp".
        keeps: Whether each rank keeps all that it gets.
        max_kept_bytes: How much shared memory a rank may keep.
        steps_per_epoch: Of the feed.
        prefetch: Steps to keep ready.
        max_bytes: Room for steps.
        credit_steps: How many steps are sent ahead.
        credit_bytes: How many bytes are.
        direct: Whether ranks must leave epochs at the same step.
        phases: What the ranks do.
    """

    recipe: Recipe
    size: int
    transports: tuple[str, ...]
    keeps: tuple[bool, ...]
    max_kept_bytes: int
    steps_per_epoch: int | None
    prefetch: int
    max_bytes: int
    credit_steps: int
    credit_bytes: int
    direct: bool
    phases: tuple[Phase, ...]


# ---- The producer ----


class Remembered:
    """What outlives a producer."""

    def __init__(self) -> None:
        self.journal_fd = digest.Journal.create("test", 1 << 12)
        self.progress_fd = os.memfd_create("progress", os.MFD_CLOEXEC)
        os.ftruncate(self.progress_fd, Progress.SIZE)
        self.pass_lengths: dict[int, int] = {}
        self.log: list[str] = []

    def close(self) -> None:
        os.close(self.journal_fd)
        os.close(self.progress_fd)


class Producer:
    """A producer without its process: `kerasfeed.producer.__main__` in short."""

    def __init__(self, engine: Engine | None, plan: Plan, remembered: Remembered, restarted: bool):
        log, lengths = remembered.log.append, remembered.pass_lengths
        pipeline = Pipeline(plan.recipe, None, plan.size, 7, restarted, dict(lengths), log=log)
        self.spec = pipeline.spec
        options = {
            "size": plan.size,
            "prefetch": plan.prefetch,
            "max_bytes": plan.max_bytes,
            "steps_per_epoch": plan.steps_per_epoch,
            "pass_ended": lengths.__setitem__,
            "pass_lengths": dict(lengths),
            "cardinality": pipeline.cardinality,
        }
        settings = Settings(
            spec=pipeline.spec,
            full=True,
            journal_fd=remembered.journal_fd,
            host="127.0.0.1",
            port=0,
            max_buffer_bytes=plan.max_bytes,
            ahead=plan.prefetch * plan.size,
            free_bytes=min(SMALL_BYTES, plan.max_bytes),
        )
        progress = Progress(remembered.progress_fd)
        if not restarted:
            progress.clear()
        self.parts = make_parts(engine, settings, options, progress, log)
        self.window, self.data = self.parts.window, self.parts.data
        verifier = Verifier(self.parts.digester, self.parts.journal, full=True)
        way_back = WayBack("replay", 0, "", "", "", log)
        arguments = (self.window, pipeline, verifier, way_back, progress, self.parts.flow)
        self._thread = threading.Thread(target=pump.run, args=arguments, name="pump", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Is gone, whatever it was about to do."""
        self.window.stop()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the pump does not end"
        self.parts.close()
        # The window last: the others use it.
        del self._thread, self.parts, self.data, self.window


# ---- The ranks ----


@dataclasses.dataclass
class Asked:
    """A read."""

    position: Position
    through: bool
    last_epoch: int
    left: Position | None
    free: bool


Events = list[Any]


class Rank:
    """One rank, by the rules of `kerasfeed.cursor`, with what it has got."""

    def __init__(self, plan: Plan, number: int):
        self.plan = plan
        self.number = number
        self.events: Events = []
        self.next = self.acknowledged = START
        self.trained: collections.Counter[int] = collections.Counter()
        self.untrained: collections.deque[Position] = collections.deque()
        self.segment: Segment | None = None
        self.ends: dict[int, int] = {}
        self.asked: Asked | None = None
        self.over = True
        self.failed = False
        self.left_pulls = 0
        self._kept: list[tuple[Any, Any]] = []

    # In one engine or the other.

    def meet(self, producer: Producer) -> None:
        raise NotImplementedError

    def ask(self) -> None:
        raise NotImplementedError

    def take(self) -> None:
        raise NotImplementedError

    def tell(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    # In both.

    def read(self, asked: Asked) -> None:
        if asked.free:
            self._train(len(self.untrained))
            self.acknowledged = max(self.acknowledged, asked.position)
        elif not asked.through:
            self.untrained = collections.deque(p for p in self.untrained if p < asked.position)
        self.next, self.asked, self.over = asked.position, asked, False
        self.ask()

    def pull(self, pulls: int, reconnect: int, producer: Producer) -> None:
        """Pulls so many steps and ends; fewer if there are no more."""
        self.left_pulls = pulls
        while self.left_pulls > 0 and not self.over and not self.failed:
            if pulls - self.left_pulls == reconnect:
                reconnect = -1
                self.meet(producer)
            self.take()

    def got(self, tensors: list[Any]) -> None:
        asked = self.asked
        assert asked is not None
        self.left_pulls -= 1
        if asked.free:
            self._train(len(self.untrained))
            self.acknowledged = max(self.acknowledged, self.next)
        self.untrained.append(self.next)
        said = [described(tensor) for tensor in tensors]
        self.events.append((self.next, said))
        if self.plan.keeps[self.number]:
            self._kept.append((tensors, said))
        self.next = Position(self.next.epoch, self.next.step + 1)

    def ended(self, epoch: int, steps: int) -> bool:
        """Returns whether this read goes on."""
        asked = self.asked
        assert asked is not None
        self.left_pulls -= 1
        self.events.append(("end", epoch, steps))
        self.ends[epoch] = steps
        self.next = Position(epoch + 1, 0)
        if asked.free:
            self._train(len(self.untrained))
            self.acknowledged = max(self.acknowledged, self.next)
        self.over = not (asked.through and self.left_pulls > 0)
        return not self.over

    def fail(self, kind: FailureKind, message: str) -> None:
        self.failed = True
        # What follows is a traceback.
        self.events.append((kind, message.partition("\n")[0], self.next))

    def acknowledge(self, steps: int) -> None:
        self._train(min(steps, len(self.untrained)))
        self.acknowledged = max(self.acknowledged, self.untrained[0] if self.untrained else self.next)
        self.tell()

    def bound(self, segment: Segment, position: Position) -> None:
        self.segment = segment
        self.untrained.clear()
        self.acknowledged = max(self.acknowledged, position)
        self.next = position

    def check_kept(self) -> None:
        """What was kept is as it was."""
        for tensors, said in self._kept:
            assert [described(tensor) for tensor in tensors] == said
        self._kept.clear()

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            self.trained[self.untrained.popleft().epoch] += 1


def described(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Returns dtype, shape and bytes of a tensor or an array."""
    # As in `encode_element`: numpy() would copy.
    array = value if isinstance(value, np.ndarray) else np.asarray(value._numpy())
    name = tf.dtypes.as_dtype(value.dtype).name
    if name in ("object", "string"):
        return "string", array.shape, repr(array.reshape(-1).tolist()).encode()
    data = np.ascontiguousarray(array).tobytes()
    # What went wrong is to be readable.
    return name, array.shape, data if len(data) < 100 else hashlib.sha256(data).digest()


class PythonRank(Rank):
    """Gets its steps from the window itself, as the service of gRPC does it."""

    def __init__(self, plan: Plan, number: int):
        super().__init__(plan, number)
        self._reader = 0

    def meet(self, producer: Producer) -> None:
        self._window = producer.window
        self._elements = spec.ElementReader(spec.decode_spec(producer.spec))
        self._window.attend(self.number, self.acknowledged, self.segment)
        if self.asked is not None and not self.over:
            self.ask()

    def ask(self) -> None:
        asked, plan = self.asked, self.plan
        assert asked is not None
        self._reader += 1
        # What was left is said when the iterator begins.
        left = asked.left if self.next == asked.position else None
        credit = (plan.credit_steps, plan.credit_bytes)
        direct = plan.direct and asked.free
        self._window.read(self.number, self._reader, self.next, asked.through, *credit, asked.last_epoch, left, direct)

    def tell(self, waiting: bool = False) -> None:
        trained = dict(self.trained)
        self._window.progress(self.number, self._reader, self.next, self.acknowledged, trained, waiting)

    def take(self) -> None:
        self.tell(waiting=True)
        deadline = time.monotonic() + PATIENCE_SECONDS
        item = self._window.wait_for_item(self.number, lambda: time.monotonic() > deadline)
        if isinstance(item, Delivery):
            assert (item.reader, item.position) == (self._reader, self.next)
            block = np.frombuffer(b"".join(item.element.chunks(1 << 30)), np.uint8)
            self.got(
                [a for a in tf.nest.flatten(self._elements.decode(item.element.components, block)) if a is not None]
            )
        elif isinstance(item, EpochEnd):
            self.ended(item.epoch, item.steps)
        elif isinstance(item, Failure):
            self.fail(item.kind, item.message)
        else:
            raise AssertionError(f"rank {self.number} waits for {self._window.waiting_for(self.number)}")
        self.tell()

    def close(self) -> None:
        self.tell()
        self._window.leave(self.number, "")
        del self._window


class NativeRank(Rank):
    """Gets its steps through a reader and the op of a dataset; it is the owner of its feed."""

    def __init__(self, engine: Engine, plan: Plan, number: int):
        super().__init__(plan, number)
        self._engine = engine
        self._reader = Reader(engine.library, min(SMALL_BYTES, plan.max_bytes), plan.max_kept_bytes)
        self._feed = Feed(engine.library, _FEED, self)
        self._feed.begin(self._reader)
        self._dataset: tf.data.Dataset | None = None
        self._iterator: Any = None

    def meet(self, producer: Producer) -> None:
        self._window = producer.window
        if self._dataset is None:
            signature = spec.ElementReader(spec.decode_spec(producer.spec)).signature
            dataset = FeedDataset(self._engine.ops, self._feed, self.plan.direct, signature)
            options = tf.data.Options()
            options.experimental_optimization.inject_prefetch = False
            self._dataset = dataset.with_options(options)
        nonces = (auth.new_nonce(), auth.new_nonce())
        mine, theirs = auth.data_proofs(_TOKEN, _FEED, self.number, nonces)
        data = producer.data
        assert data is not None
        data.dismiss(self.number)
        self._window.attend(self.number, self.acknowledged, self.segment)
        data.admit(self.number, mine, theirs)
        unix, tcp = data.addresses
        address = unix if self.plan.transports[self.number] == "unix" else tcp.replace("tcp:", "tcp:127.0.0.1:")
        self._reader.attach(address, self.number, mine, theirs, PATIENCE_SECONDS)

    def ask(self) -> None:
        asked, plan = self.asked, self.plan
        assert asked is not None
        self.tell()
        credit = (plan.credit_steps, plan.credit_bytes)
        direct = plan.direct and asked.free
        self._read = self._reader.read(
            self.next, asked.through, *credit, asked.last_epoch, asked.left, direct, asked.free
        )
        self._iterator = iter(self._dataset)

    def tell(self) -> None:
        self._reader.acknowledge(self.acknowledged, dict(self.trained))

    def take(self) -> None:
        try:
            value = next(self._iterator)
        except StopIteration:
            assert self.over
        except tf.errors.OpError as error:
            assert self.failed, str(error)  # noqa: PT017
        else:
            self.got([tensor for tensor in tf.nest.flatten(value) if tensor is not None])
            pulls = self._reader.pulls(self._read)
            assert pulls is not None
            assert pulls.next == self.next

    # kerasfeed.native.feed.Owner

    def read_begins(self, direct: bool) -> int:
        return self._read

    def read_comes_to_end(self, read: int, epoch: int, steps: int) -> bool:
        assert read == self._read
        return self.ended(epoch, steps)

    def read_waits(self, read: int, seconds: float, interrupted: bool) -> None:
        waits_for = self._window.waiting_for(self.number)
        assert seconds < PATIENCE_SECONDS, f"rank {self.number} waits for {waits_for}; {self._reader.trouble}"

    def read_fails(self, read: int, kind: FailureKind | None, message: str) -> None:
        assert kind is not None
        self.fail(kind, message)
        raise RuntimeError(message)

    def close(self) -> None:
        self.tell()
        assert self._reader.sync(PATIENCE_SECONDS), self._reader.trouble
        self._window.leave(self.number, "")
        self._iterator = None
        self._feed.close()
        self._reader.detach()
        del self._window


# ---- All of it ----

_threads = concurrent.futures.ThreadPoolExecutor(8, thread_name_prefix="rank")


def run(engine: Engine | None, plan: Plan) -> list[Events]:
    """Returns what each rank got with this engine (`None`: the Python engine), and what came of the epochs."""
    remembered = Remembered()
    ranks = [PythonRank(plan, r) if engine is None else NativeRank(engine, plan, r) for r in range(plan.size)]
    producer = Producer(engine, plan, remembered, restarted=False)
    try:
        together(ranks, lambda rank: rank.meet(producer))
        binds = 0
        for phase in plan.phases:
            if phase.kind == "killed":
                producer.end()
                producer = Producer(engine, plan, remembered, restarted=True)
                together(ranks, lambda rank, producer=producer: rank.meet(producer))
                binds = 0
            elif phase.kind == "bind":
                binds += 1
                bind(ranks, producer, binds, phase)
            asked = where(ranks, phase)

            def act(rank: Rank, phase: Phase = phase, asked: Any = asked, producer: Producer = producer) -> None:
                number = rank.number
                if phase.kind != "killed" or rank.over:
                    rank.read(asked[number])
                rank.pull(phase.pulls - phase.lags[number], phase.reconnects[number], producer)
                if not asked[number].free:
                    rank.acknowledge(phase.trained[number])

            together(ranks, act)
            if any(rank.failed for rank in ranks):
                break
        window = producer.window
        for rank in ranks:
            rank.close()
        trained = [
            (epoch, sorted(trained.items())) for epoch, _, trained in window.statistics() if any(trained.values())
        ]
        del window
        for rank in ranks:
            rank.check_kept()
        return [*(rank.events for rank in ranks), trained]
    except AssertionError as error:
        error.add_note(f"engine: {engine and 'native'}; log: {remembered.log}; so far: {[r.events for r in ranks]}")
        raise
    finally:
        producer.end()
        remembered.close()


def together(ranks: list[Any], act: Callable[[Any], None]) -> None:
    """Lets all ranks do this at the same time."""
    # The first error is that of the test.
    for future in [_threads.submit(act, rank) for rank in ranks]:
        future.result(3 * PATIENCE_SECONDS)


def bind(ranks: list[Any], producer: Producer, binding: int, phase: Phase) -> None:
    """A `fit` begins behind all that is trained."""
    position = max(rank.acknowledged for rank in ranks)
    for rank in ranks:
        try:
            rank.bound(*producer.window.bind(rank.number, binding, position, phase.steps_per_epoch))
        except BindError as error:
            rank.events.append(str(error))


def where(ranks: list[Any], phase: Phase) -> list[Asked]:
    """Returns what each rank reads in this phase."""
    free = phase.free and phase.kind != "bind"
    through = phase.through and not free
    first = min(rank.next for rank in ranks)
    last_epoch = first.epoch + phase.epochs if phase.epochs and not free else NO_LAST_EPOCH
    if phase.kind == "leave":
        epoch = max(rank.next.epoch + (rank.next.step > 0) for rank in ranks)
        start = Position(epoch, 0)
        return [Asked(start, False, NO_LAST_EPOCH, rank.next if rank.next != start else None, True) for rank in ranks]
    if phase.kind == "back":
        step = first.step - phase.back
        if step < 0 and first.epoch - 1 in ranks[0].ends:
            first = Position(first.epoch - 1, max(0, ranks[0].ends[first.epoch - 1] + step))
        else:
            first = Position(first.epoch, max(0, step))
        return [Asked(max(first, rank.acknowledged), through, last_epoch, None, free) for rank in ranks]
    return [Asked(rank.next, through, last_epoch, None, free) for rank in ranks]
