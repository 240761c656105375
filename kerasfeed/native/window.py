"""The window of `core/window.h` with the interface of `kerasfeed.producer.window`, which is the reference.

The control plane calls it from Python, while other threads put elements in and take them out without Python. So news
are not called back from within: they are told after each call that may cause some, and by `deliver`.
"""

from __future__ import annotations

import collections
import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kerasfeed.native.library import (
    BYTES,
    FLAG,
    HANDLE,
    MADE,
    NUMBER,
    NUMBERS,
    SECONDS,
    TEXT,
    Answer,
    Library,
    array,
    decoded,
    flat,
    sized,
)
from kerasfeed.producer.window import (
    NO_LAST_EPOCH,
    Delivery,
    EpochCount,
    EpochEnd,
    Failure,
    FailureKind,
    Item,
    Pause,
    Produce,
    Seek,
)
from kerasfeed.schedule import Position, Segment

if TYPE_CHECKING:  # TensorFlow comes with it, which takes seconds to import
    from kerasfeed.spec import EncodedElement

# Also how long the main thread may be in a call, and not look at its signals.
_POLL_SECONDS = 0.5
_KINDS = tuple(FailureKind)


_COUNTS = ("size", "prefetch", "ready_bytes", "max_bytes", "steps_per_epoch", "cardinality")


class _Options(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _COUNTS),
        *((name, ctypes.c_double) for name in ("start_timeout", "rank_timeout", "cut_grace", "poll_seconds")),
        *((name, ctypes.c_int32) for name in ("own_clock", "holds_ends")),
    )


# What each kf_window_* takes between the window and the reply.
_CALLS: dict[str, tuple[Any, ...]] = {
    "work": (FLAG, SECONDS, NUMBER),
    "wake_pump": (),
    "pump_wakes": (),
    "untrained": (NUMBER, NUMBER),
    "put": (NUMBER, HANDLE),
    "end_pass": (NUMBER, NUMBER, NUMBER),
    "note_pass_length": (NUMBER, NUMBER),
    "pass_length": (NUMBER,),
    "fail": (NUMBER, *TEXT, NUMBER),
    "first_pass": (),
    "attend": (NUMBER, NUMBER, NUMBER, NUMBERS),
    "read": (NUMBER, NUMBER, NUMBER, NUMBER, FLAG, NUMBER, NUMBER, NUMBER, NUMBERS, FLAG),
    "progress": (NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBERS, NUMBER, FLAG),
    "bind": (NUMBER, NUMBER, NUMBER, NUMBER, NUMBER),
    "locate": (NUMBER, NUMBER),
    "leave": (NUMBER, *TEXT),
    "disconnected": (NUMBER,),
    "item": (NUMBER, SECONDS, NUMBER),
    "broken": (),
    "wake": (NUMBER,),
    "wakes": (NUMBER,),
    "refuse": TEXT,
    "abandon": TEXT,
    "stop": (),
    "drained": (SECONDS,),
    "segment": (),
    "furthest": (),
    "waiting_for": (NUMBER,),
    "statistics": (),
    "news": (),
    "reported_epoch_end": (NUMBER,),
    "wait_for_news": (SECONDS,),
    "held": (),
}


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    **{f"kf_window_{name}": (HANDLE, *types) for name, types in _CALLS.items()},
    "kf_window_new": (ctypes.POINTER(_Options), NUMBERS, *(NUMBERS, NUMBER) * 3, MADE),
    "kf_element_new": (NUMBER, NUMBERS, ctypes.POINTER(BYTES), NUMBER, MADE),
    "kf_element_describe": (HANDLE,),
}


class Window:
    """Steps between the pump and the ranks; see `kerasfeed.producer.window.Window`, whose arguments these are.

    The callbacks are called one at a time and in order, without any lock that threads without Python would wait for.

    Args:
        ready_bytes: More steps than `prefetch` are kept ready if they have no more bytes than this together.
        library: The engine's library.
        clock: As there. One of a test's own is looked at before each call, and stands still while a call blocks.
    """

    def __init__(
        self,
        size: int,
        prefetch: int,
        max_bytes: int,
        steps_per_epoch: int | None = None,
        segment: Segment | None = None,
        start_timeout: float = 600.0,
        rank_timeout: float = 60.0,
        cut_grace: float = 10.0,
        log: Callable[[str], None] = print,
        complete: Callable[[], None] = lambda: None,
        pass_ended: Callable[[int, int], None] = lambda pass_, elements: None,
        epoch_ended: Callable[[int, EpochCount], None] = lambda epoch, count: None,
        counts: dict[int, EpochCount] | None = None,
        pass_lengths: dict[int, int] | None = None,
        cardinality: int = -2,
        left: dict[int, dict[int, int]] | None = None,
        rank_left: Callable[[int, dict[int, int]], None] = lambda rank, trained: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        ready_bytes: int = 0,
        library: Library,
    ):
        self._library = library
        library.declare(_FUNCTIONS)
        self._buffer = library.function("kf_element_buffer", HANDLE, NUMBER, returns=ctypes.c_void_p)
        self._element_free = library.function("kf_element_free", HANDLE)
        self._set_clock = library.function("kf_window_set_clock", HANDLE, SECONDS)
        self._size = size
        self._log = log
        self._complete = complete
        self._pass_ended = pass_ended
        self._epoch_ended = epoch_ended
        self._rank_left = rank_left
        self._own_clock = None if clock is time.monotonic else clock
        self._telling = threading.RLock()
        self._untold: collections.deque[Callable[[], None]] = collections.deque()
        options = _Options(
            size=size,
            prefetch=prefetch,
            ready_bytes=ready_bytes,
            max_bytes=max_bytes,
            steps_per_epoch=steps_per_epoch or 0,
            cardinality=cardinality,
            start_timeout=start_timeout,
            rank_timeout=rank_timeout,
            cut_grace=cut_grace,
            poll_seconds=_POLL_SECONDS,
            own_clock=self._own_clock is not None,
            holds_ends=True,
        )
        counts, pass_lengths, left = counts or {}, pass_lengths or {}, left or {}
        self.handle, _ = library.make(
            self,
            "kf_window_new",
            "kf_window_free",
            options,
            None if segment is None else _segment_numbers(segment),
            array([n for e, c in counts.items() for n in (e, c.elements, c.steps, c.dropped, c.complete)]),
            len(counts),
            array(flat(pass_lengths)),
            len(pass_lengths),
            array([n for rank, trained in left.items() for n in (rank, len(trained), *flat(trained))]),
            len(left),
        )

    def _call(self, name: str, *args: Any) -> Answer:
        if self._own_clock is not None:
            self._set_clock(self.handle, self._own_clock())
        return self._library.ask(f"kf_window_{name}", self.handle, *args)

    def _wait(self, name: str, *args: Any, wakes: int) -> Answer:
        """Calls what blocks until there is an answer, or somebody was woken since there were `wakes`, or for a while.

        Whether somebody is wanted elsewhere is asked here, between such calls: in there it would be asked with the
        mutex held, and all others would wait for Python.
        """
        return self._call(name, *args, _POLL_SECONDS, wakes)

    # ---- The pump's side ----

    def wait_for_work(self, interrupted: Callable[[], bool] = lambda: False) -> Seek | Produce | Pause | None:
        """Blocks until there is something for the pump to do; `None` means: stop."""
        while True:
            _, (wakes,), _ = self._call("pump_wakes")
            done, work, _ = self._wait("work", interrupted(), wakes=wakes)
            self._tell()
            if done:
                return _work(*work)  # type: ignore[no-any-return]

    def wake_pump(self) -> None:
        """Lets `wait_for_work` look whether it is interrupted."""
        self._call("wake_pump")

    @property
    def pump_wakes(self) -> int:
        """How often `wake_pump` was called."""
        return self._call("pump_wakes").numbers[0]

    def untrained(self, position: Position) -> list[EncodedElement] | None:
        """Returns all elements from a step on up to the one that the pump comes to next, in their order."""
        done, handles, _ = self._call("untrained", *position)
        elements = [self._taken(handle) for handle in handles]
        return elements if done else None

    def put(self, generation: int, element: EncodedElement) -> None:
        """Adds the next element. One that was produced before the window went elsewhere is forgotten."""
        described = [n for c in element.components for n in (c.offset, c.length, len(c.shape), *c.shape)]
        buffers = [bytes(buffer) for buffer in element.buffers]
        pointers = (ctypes.c_char_p * len(buffers))(*buffers)
        handle = ctypes.c_void_p()
        self._library.ask(
            "kf_element_new",
            element.size,
            array(described),
            pointers,
            len(buffers),
            ctypes.byref(handle),
        )
        try:
            self._call("put", generation, handle)
        finally:
            self._element_free(handle)
        self._tell()

    def _taken(self, handle: int) -> EncodedElement:
        """Returns the element behind a handle, and frees that."""
        from kerasfeed.spec import Component, EncodedElement

        try:
            _, described, _ = self._library.ask("kf_element_describe", handle)
            numbers = iter(described)
            size = next(numbers)
            components: list[Component] = []
            buffers: list[memoryview] = []
            for offset in numbers:
                length, dims = next(numbers), next(numbers)
                components.append(Component(tuple(next(numbers) for _ in range(dims)), offset, length))
                data = self._buffer(handle, len(buffers)) if length else None
                buffers.append(memoryview(ctypes.string_at(data, length) if data else b""))
            return EncodedElement(tuple(components), tuple(buffers), size)
        finally:
            self._element_free(handle)

    def end_pass(self, generation: int, pass_: int, elements: int) -> None:
        """Says that pass `pass_` over the dataset had `elements` elements in all, and is over."""
        self._call("end_pass", generation, pass_, elements)
        self._tell()

    def note_pass_length(self, pass_: int, elements: int) -> None:
        """Says how many elements pass `pass_` over the dataset has."""
        self._call("note_pass_length", pass_, elements)
        self._tell()

    def pass_length(self, pass_: int) -> int | None:
        """How many elements pass `pass_` over the dataset had, if it has ended."""
        done, numbers, _ = self._call("pass_length", pass_)
        return numbers[0] if done else None

    def fail(self, generation: int, message: str, kind: FailureKind = FailureKind.PRODUCER) -> None:
        """Says that the next element can't be produced. Steps that are complete are still delivered."""
        self._call("fail", generation, *sized(message), _KINDS.index(kind))

    @property
    def first_pass(self) -> int:
        """The first pass over the dataset of which a rank may still ask for something."""
        return self._call("first_pass")[1][0]

    # ---- The ranks' side ----

    def attend(self, rank: int, acknowledged: Position, segment: Segment | None) -> None:
        """A rank has come (back).

        Raises:
            BindError: It believes in other segments than the ranks that came before it, or is none of 0 to size - 1.
        """
        self._call("attend", rank, *acknowledged, None if segment is None else _segment_numbers(segment))
        self._tell()

    def read(
        self,
        rank: int,
        reader: int,
        position: Position,
        through_epochs: bool,
        credit_steps: int,
        credit_bytes: int,
        last_epoch: int = NO_LAST_EPOCH,
        left: Position | None = None,
        direct: bool = False,
    ) -> None:
        """A rank asks for the steps from `position` on; what it asked for earlier is void."""
        at = None if left is None else array(left)
        self._call("read", rank, reader, *position, through_epochs, credit_steps, credit_bytes, last_epoch, at, direct)

    def progress(
        self,
        rank: int,
        reader: int,
        pulled: Position,
        acknowledged: Position,
        trained: dict[int, int],
        waiting: bool = False,
    ) -> None:
        """A rank has pulled all steps before `pulled`, trained all before `acknowledged`, and waits for more or not."""
        counts = array(flat(trained))
        self._call("progress", rank, reader, *pulled, *acknowledged, counts, len(trained), waiting)

    def bind(
        self, rank: int, binding: int, position: Position, steps_per_epoch: int | None
    ) -> tuple[Segment, Position]:
        """A `fit` begins at `position`; returns the segment that holds from now on, and the position in its terms.

        Raises:
            BindError: Another rank has said something else.
        """
        _, numbers, _ = self._call("bind", rank, binding, *position, steps_per_epoch or 0)
        self._tell()
        return _segment(numbers[:5]), Position(*numbers[5:])

    def locate(self, position: Position) -> tuple[int, int]:
        """Returns (pass, element) of what is trained first at `position`.

        Raises:
            ValueError: It lies before the present segment.
        """
        done, numbers, _ = self._call("locate", *position)
        if not done:
            raise ValueError(f"{position} lies before this segment, which starts at {self.segment.start}")
        pass_, element = numbers
        return pass_, element

    def leave(self, rank: int, error: str) -> None:
        """A rank needs no more steps; with an error, the others can't go on either."""
        self._call("leave", rank, *sized(error))
        self._tell()

    def disconnected(self, rank: int) -> None:
        """A rank's connection is gone; it may come back."""
        self._call("disconnected", rank)

    def wait_for_item(self, rank: int, interrupted: Callable[[], bool]) -> Item | None:
        """Blocks for what `rank` gets next; `None` when `interrupted()` (looked at after each `wake`)."""
        while True:
            _, (wakes,), _ = self._call("wakes", rank)
            if interrupted():
                return None
            done, numbers, text = self._wait("item", rank, wakes=wakes)
            if done:
                return self._item(numbers, text)

    def _item(self, numbers: Sequence[int], text: bytes) -> Item:
        kind, *rest = numbers
        if kind == 0:
            reader, epoch, step, handle = rest
            return Delivery(reader, Position(epoch, step), self._taken(handle))
        if kind == 1:
            return EpochEnd(*rest)
        failure, has_position, epoch, step = rest
        return Failure(_KINDS[failure], decoded(text), Position(epoch, step) if has_position else None)

    def broken(self) -> Failure | None:
        """Returns the failure after which no rank gets anything any more, wherever it reads."""
        done, numbers, text = self._call("broken")
        return Failure(_KINDS[numbers[0]], decoded(text), None) if done else None

    def wake(self, rank: int) -> None:
        """Lets `wait_for_item` of this rank look at its condition again."""
        self._call("wake", rank)

    # ---- Life and news ----

    def refuse(self, message: str) -> None:
        """The ranks don't fit together: every rank is told at once."""
        self._call("refuse", *sized(message))

    def abandon(self, message: str) -> None:
        """Nothing can be produced at all: every rank is told at once."""
        self._call("abandon", *sized(message))

    def stop(self) -> None:
        """Lets the pump return from its wait."""
        self._call("stop")

    def wait_until_drained(self) -> None:
        """Blocks until all ranks have come and left, and all news of them are told."""
        while not self._call("drained", _POLL_SECONDS)[0]:
            pass
        self._tell()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def segment(self) -> Segment:
        """The segment that holds now."""
        return _segment(self._call("segment")[1])

    @property
    def furthest(self) -> Position:
        """The next step that will be produced."""
        return Position(*self._call("furthest")[1])

    def waiting_for(self, rank: int) -> str:
        """Returns in words what keeps `rank` from its next step."""
        return decoded(self._call("waiting_for", rank)[2])

    def statistics(self) -> list[tuple[int, EpochCount, dict[int, int]]]:
        """Returns for each epoch what was produced, and how many steps each rank has trained of it."""
        numbers = iter(self._call("statistics")[1])
        return [(epoch, _epoch_count(numbers), _pairs(numbers)) for epoch in numbers]

    def held(self) -> tuple[int, int, list[int]]:
        """Returns bytes and steps in memory, and the epochs of which dropped elements are."""
        bytes_, steps, *remainders = self._call("held")[1]
        return bytes_, steps, remainders

    def deliver(self, seconds: float) -> None:
        """Calls the callbacks with what has happened; blocks up to `seconds` for something.

        For a thread that tells what others cause who put elements in without Python.
        """
        self._call("wait_for_news", seconds)
        self._tell()

    def _tell(self) -> None:
        with self._telling:
            self._untold.extend(self._news())
            while self._untold:
                self._untold.popleft()()

    def _news(self) -> Iterator[Callable[[], None]]:
        done, values, text = self._call("news")
        if not done:
            return
        numbers = iter(values)
        for kind in numbers:
            number, count, length, trained = next(numbers), _epoch_count(numbers), next(numbers), _pairs(numbers)
            line, text = decoded(text[:length]), text[length:]
            yield self._told(kind, number, count, line, trained)

    def _report_epoch(self, epoch: int, count: EpochCount) -> None:
        """Ranks get the end of an epoch after this, so that its counts outlive whoever is killed then."""
        try:
            self._epoch_ended(epoch, count)
        finally:
            self._call("reported_epoch_end", epoch)

    def _told(
        self, kind: int, number: int, count: EpochCount, text: str, trained: dict[int, int]
    ) -> Callable[[], None]:
        return (
            lambda: self._log(text),
            self._complete,
            lambda: self._pass_ended(number, count.elements),
            lambda: self._report_epoch(number, count),
            lambda: self._rank_left(number, trained),
        )[kind]


def _work(kind: int, generation: int = 0, pass_: int = 0, element: int = 0, joined: int = 0) -> Any:
    return (Seek(generation, pass_, element, bool(joined)), Produce(generation), Pause(), None)[kind]


def _pairs(numbers: Iterator[int]) -> dict[int, int]:
    return {next(numbers): next(numbers) for _ in range(next(numbers))}


def _epoch_count(numbers: Iterator[int]) -> EpochCount:
    return EpochCount(next(numbers), next(numbers), next(numbers), bool(next(numbers)))


def _segment_numbers(segment: Segment) -> Any:
    s = segment
    return array((s.first_epoch, s.origin_pass, s.origin_element, s.steps_per_epoch or 0, s.first_step))


def _segment(numbers: Sequence[int]) -> Segment:
    first_epoch, origin_pass, origin_element, steps_per_epoch, first_step = numbers
    return Segment(first_epoch, origin_pass, origin_element, steps_per_epoch or None, first_step)
