"""The pump's loop (`core/pump.h`) for Python: elements flow from an iterator into the window, until it comes back."""

from __future__ import annotations

import dataclasses
import enum
import types
import weakref

import tensorflow as tf

from kerasfeed.native.digest import Digester, Journal
from kerasfeed.native.library import HANDLE, NUMBER, Library
from kerasfeed.native.server import Server
from kerasfeed.native.window import Window
from kerasfeed.producer.launch import Progress
from kerasfeed.producer.verifier import Tolerance
from kerasfeed.producer.window import Seek

_FUNCTIONS = {
    "kf_pump_new": (HANDLE, HANDLE, HANDLE, HANDLE, HANDLE, NUMBER),
    "kf_pump_outcome": (NUMBER,),
    "kf_pump_free": (NUMBER,),
}


class _Kind(enum.IntEnum):
    """`PumpOutcome::Kind`."""

    INTERRUPTED = 0
    SEEK = 1
    PAUSE = 2
    STOP = 3
    END = 4
    ERROR = 5
    LIMIT = 6
    MISMATCH = 7
    PAST_END = 8


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a flow came to its end.

    Attributes:
        produced: How many elements the iterator yielded.
        ended: Whether the pass is over.
        error: What the iterator raised.
        seek: Where the window wants the pipeline to go.
        strange: Whether the last element is another one than it was, or there was none.
        was: The digest that it had; `None` if the pass had less elements.
        now: The digest that it has.
    """

    produced: int
    ended: bool = False
    error: Exception | None = None
    seek: Seek | None = None
    strange: bool = False
    was: int | None = None
    now: int = 0


class Flow:
    """The native pump of one producer.

    Args:
        library: The engine's library.
        ops: The ops of the same library.
        window: Where elements go.
        server: Who serves ranks that share memory.
        digester: Makes digests.
        journal: What was produced.
        progress: Where it is noted how far the producer has come.
        ahead: How many elements are made ahead.
    """

    def __init__(
        self,
        library: Library,
        ops: types.ModuleType,
        window: Window,
        server: Server,
        digester: Digester,
        journal: Journal,
        progress: Progress,
        ahead: int,
    ):
        self._library = library
        self._pump = ops.kerasfeed_pump
        self._window = window
        library.declare(_FUNCTIONS)
        # C++ has pointers to these.
        self._used = (server, digester, journal, progress)
        handles = (window.handle, server.handle, digester.handle, journal.handle, progress.address)
        (self._number,) = library.ask("kf_pump_new", *handles, ahead).numbers
        weakref.finalize(self, library.ask, "kf_pump_free", self._number).atexit = False

    @property
    def wakes(self) -> int:
        """How often the pump was woken."""
        return self._window.pump_wakes

    def run(
        self, iterator: tf.Tensor, place: tuple[int, int], limit: int, *, wakes: int, tolerance: Tolerance
    ) -> Outcome:
        """Takes elements from an iterator until something is rare.

        Args:
            iterator: Its resource.
            place: (pass, element) of what it yields next.
            limit: Most elements to take; negative: as many as are wanted.
            wakes: What `wakes` was when the caller last looked what else there is to do.
            tolerance: What becomes of an element that is another one than it was.
        """
        error: Exception | None = None
        try:
            self._pump(iterator, self._number, *place, limit, wakes, int(tolerance))
        except tf.errors.OpError as raised:
            error = raised
        _, numbers, _ = self._library.ask("kf_pump_outcome", self._number)
        kind, produced, _, generation, pass_, element, joined, was, now = numbers
        if error is None and kind == _Kind.ERROR:
            raise RuntimeError("the native pump failed and raised nothing")
        return Outcome(
            produced=produced,
            ended=kind == _Kind.END,
            error=error,
            seek=Seek(generation, pass_, element, bool(joined)) if kind == _Kind.SEEK else None,
            strange=kind in (_Kind.MISMATCH, _Kind.PAST_END),
            was=was & (1 << 64) - 1 if kind == _Kind.MISMATCH else None,
            now=now & (1 << 64) - 1,
        )
