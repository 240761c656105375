"""Serialised iterators of the pipeline, taken ahead of need: the pump takes them, the service hands them out.

A state is asked for at a position that ranks have trained, and the pump is already beyond it: only an iterator that was
saved earlier can help. So whoever asks says how many elements later it will ask again, and the pump saves the iterator
when it comes by there. Saving may take a twentieth of the time at most; what is asked for in between is reached by
skipping.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_SHARE = 0.05
_KEPT = 4


class Snapshots:
    """The newest serialised iterators, by (pass, element).

    Args:
        max_bytes: The largest one that is kept: where one is larger, no more are taken.
        unfit: Why this pipeline's iterator must not be saved; empty if it may be.
        log: Called once with what was chosen, and why.
        clock: Monotonic seconds; a test may replace it.
    """

    def __init__(
        self, max_bytes: int, unfit: str, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ):
        self._max_bytes = max_bytes
        self._unfit = unfit
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._saved: dict[tuple[int, int], bytes] = {}
        self._asked: tuple[int, int] | None = None
        self._every = 0
        self._not_before = 0.0
        self._said = False

    def plan(self, place: tuple[int, int], every: int) -> None:
        """A state is asked for at `place`, and will be again each `every` elements (0: that is not known)."""
        with self._lock:
            self._asked = place
            self._every = every or self._every
            if self._every and not self._said:
                self._said = True
                way = f"by replay: {self._unfit}" if self._unfit else "by a snapshot of the iterator, and skipping"
                self._log(f"the state of this feed is brought back {way}")
            useful = [saved for saved in self._saved if saved <= place]
            for saved in useful[:-1]:
                del self._saved[saved]

    def due(self, place: tuple[int, int]) -> bool:
        """Whether the iterator, which stands at `place`, is to be saved."""
        with self._lock:
            if self._unfit or not self._every or self._asked is None or place in self._saved:
                return False
            pass_, element = place
            first = self._asked[1] if pass_ == self._asked[0] else 0
            on_time = element > 0 and (element - first) % self._every == 0
            return on_time and len(self._saved) < _KEPT and self._clock() >= self._not_before

    def take(self, place: tuple[int, int], save: Callable[[], bytes]) -> None:
        """Saves the iterator, which stands at `place`."""
        began = self._clock()
        try:
            data, unfit = save(), ""
        except Exception as error:  # what can't be saved says so in many ways
            data, unfit = b"", f"its iterator can't be saved ({str(error).splitlines()[0][:200]})"
        if len(data) > self._max_bytes:
            unfit = f"its iterator has {len(data)} bytes (max_state_bytes={self._max_bytes})"
        ended = self._clock()
        with self._lock:
            self._not_before = ended + (ended - began) * (1 / _SHARE - 1)
            if unfit:
                self._unfit = unfit
                self._saved.clear()
                self._log(f"the state of this feed is brought back by replay: {unfit}")
            else:
                self._saved[place] = data

    def best(self, pass_: int, element: int) -> tuple[int, bytes] | None:
        """Returns (element, bytes) of the newest iterator that stands at or before an element of a pass."""
        with self._lock:
            fitting = [place for place in self._saved if place[0] == pass_ and place[1] <= element]
            return (max(fitting)[1], self._saved[max(fitting)]) if fitting else None
