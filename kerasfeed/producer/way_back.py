"""Which way leads back to a position, in a later job: chosen here, prepared by the pump, handed out by the service.

A state is asked for at a position that ranks have trained, and the pump is already beyond it: an iterator that is saved
then yields what comes after. So whoever asks says how many elements later it will ask again, and the pump saves the
iterator when it comes by there. What is asked for in between is reached by skipping; or, where a pipeline can't be
relied on to repeat itself, the pump stops, saves the iterator, and adds the elements that it is ahead. Saving ahead may
take a twentieth of the time at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # It needs TensorFlow, which this module does not.
    from kerasfeed.producer.waypoint import Place, Waypoint
    from kerasfeed.schedule import Position

_SHARE = 0.05
_KEPT = 4
_POLL_SECONDS = 0.5


class WayBack:
    """The newest waypoints, and whether they are used at all.

    Args:
        resume: What the user asked for: "auto", "snapshot", "window" or "replay".
        max_bytes: The largest waypoint that is kept.
        unfit: Why an iterator can't be saved and taken up again; empty if it can.
        unfaithful: Why an iterator that was saved may yield other elements than it did; empty if it does not.
        unsteady: Why the pipeline may yield other elements when they are produced again; empty if nothing says so.
        log: Called with what was chosen, and why, whenever that changes.
        clock: Monotonic seconds; a test may replace it.
    """

    def __init__(
        self,
        resume: str,
        max_bytes: int,
        unfit: str,
        unfaithful: str,
        unsteady: str,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._max_bytes = max_bytes
        self._log = log
        self._clock = clock
        self._changed = threading.Condition()
        self._saved: dict[Place, Waypoint] = {}
        self._asked: Place | None = None
        self._every = 0
        self._not_before = 0.0
        self._said = ""
        self._waiting: Position | None = None
        self._answered = False
        self._answer: Waypoint | None = None
        self._closed = False
        self._way, self._reason = _choose(resume, unfit, unfaithful, unsteady)

    # ---- The service's side ----

    def plan(self, place: Place, every: int) -> None:
        """A state is asked for at `place`, and will be again each `every` elements (0: that is not known)."""
        with self._changed:
            self._asked = place
            self._every = every or self._every
            if self._every:
                self._say()
            useful = [saved for saved in self._saved if saved <= place]
            for saved in useful[:-1]:
                del self._saved[saved]

    def find(
        self,
        place: Place,
        position: Position,
        wake_pump: Callable[[], None] = lambda: None,
        given_up: Callable[[], bool] = lambda: True,
    ) -> Waypoint | None:
        """Returns the best waypoint at or before `place`; `None`: the pipeline is replayed.

        May wait until the pump is between two elements.

        Args:
            place: (pass, element) of the first element that is not trained.
            position: The same as epoch and step.
            wake_pump: Makes the pump look at `wanted`.
            given_up: Whether nobody waits for the answer any more.
        """
        with self._changed:
            found = self._best(place)
            if self._way != "window" or (found is not None and found.place == place):
                return found
            # One at a time: another rank's question comes first.
            while self._waiting is not None and not self._closed and not given_up():
                self._changed.wait(_POLL_SECONDS)
            if self._closed or self._waiting is not None:
                return found
            self._waiting, self._answered, self._answer = position, False, None
            wake_pump()
            while not self._answered and not self._closed and not given_up():
                self._changed.wait(_POLL_SECONDS)
            self._waiting = None
            self._changed.notify_all()
            return self._answer or self._best(place)

    # ---- The pump's side ----

    def wanted(self) -> bool:
        """Whether somebody waits for `answer`."""
        return self._waiting is not None and not self._answered

    def answer(self, make: Callable[[Position], Waypoint | None]) -> None:
        """Makes the waypoint that somebody waits for, with the pump between two elements.

        Args:
            make: Returns it, or `None` if elements that it needs are not in memory any more.
        """
        with self._changed:
            position = self._waiting
        if position is None:
            return
        waypoint, reason, final = None, "elements that were not trained have left memory (max_buffer_bytes)", False
        try:
            waypoint = make(position)
        except Exception as error:  # what can't be saved says so in many ways
            reason, final = _cant_be_saved(error), True
        if waypoint is not None and (size := _size(waypoint)) > self._max_bytes:
            reason = f"its iterator and the elements ahead have {size} bytes (max_state_bytes={self._max_bytes})"
            waypoint = None
        with self._changed:
            if waypoint is None:
                self._log_once(f"the state of this feed is brought back by replay: {reason}")
                if final:
                    self._give_up(reason)
            # Whoever asked may have given up meanwhile, and another rank may ask for another place.
            if self._waiting is position:
                self._answer, self._answered = waypoint, True
                self._changed.notify_all()

    def due(self, place: Place) -> bool:
        """Whether the iterator, which stands at `place`, is to be saved."""
        with self._changed:
            if self._way == "replay" or not self._every or self._asked is None or place in self._saved:
                return False
            pass_, element = place
            first = self._asked[1] if pass_ == self._asked[0] else 0
            on_time = element > 0 and (element - first) % self._every == 0
            return on_time and len(self._saved) < _KEPT and self._clock() >= self._not_before

    def until_due(self, place: Place) -> int | None:
        """In how many elements from `place` on, at least one, `due` may say so; `None`: not before the next `plan`."""
        with self._changed:
            if self._way == "replay" or not self._every or self._asked is None:
                return None
            pass_, element = place
            first = self._asked[1] if pass_ == self._asked[0] else 0
            return self._every - (element - first) % self._every

    def take(self, place: Place, make: Callable[[], Waypoint]) -> None:
        """Saves the iterator, which stands at `place`."""
        began = self._clock()
        waypoint, unfit = None, ""
        try:
            waypoint = make()
        except Exception as error:
            unfit = _cant_be_saved(error)
        if waypoint is not None and (size := _size(waypoint)) > self._max_bytes:
            unfit = f"its iterator has {size} bytes (max_state_bytes={self._max_bytes})"
        ended = self._clock()
        with self._changed:
            self._not_before = ended + (ended - began) * (1 / _SHARE - 1)
            if unfit or waypoint is None:
                self._give_up(unfit)
            else:
                self._saved[place] = waypoint

    def close(self) -> None:
        """The pump has ended: nobody waits any longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _best(self, place: Place) -> Waypoint | None:
        fitting = [saved for saved in self._saved if saved[0] == place[0] and saved <= place]
        return self._saved[max(fitting)] if fitting else None

    def _give_up(self, reason: str) -> None:
        self._way, self._reason = "replay", reason
        self._saved.clear()
        self._say()

    def _say(self) -> None:
        how = {
            "replay": "by replay",
            "snapshot": "by a snapshot of the iterator, and skipping",
            "window": "by its iterator and the elements that it is ahead",
        }[self._way]
        self._log_once(f"the state of this feed is brought back {how}{self._reason and f': {self._reason}'}")

    def _log_once(self, message: str) -> None:
        if message != self._said:
            self._said = message
            self._log(message)


def _choose(resume: str, unfit: str, unfaithful: str, unsteady: str) -> tuple[str, str]:
    """Returns the way, and the reason for it where the user might expect another."""
    if resume == "replay":
        return "replay", "resume='replay'"
    if resume == "window" or (resume == "auto" and unsteady and not unfit):
        return ("replay", unfit) if unfit else ("window", unsteady if resume == "auto" else "resume='window'")
    if unfit or unfaithful:
        return "replay", unfit or unfaithful
    return "snapshot", ""


def _size(waypoint: Waypoint) -> int:
    return len(waypoint.iterator) + sum(element.size for element in waypoint.kept)


def _cant_be_saved(error: Exception) -> str:
    return f"its iterator can't be saved ({(str(error).splitlines() or [''])[0][:200]})"
