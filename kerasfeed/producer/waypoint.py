"""Places where a pipeline can be taken up again: its saved iterator, and the elements that came out of it too early.

A state is asked for at an element that comes next in training; the pump, and its iterator, are further ahead. Either
an iterator was saved in time, and what lies between is produced again and skipped (a snapshot); or the elements in
between are kept, and come out before the iterator goes on (a window), for which nothing has to repeat itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from kerasfeed.spec import EncodedElement, pack_elements, unpack_elements

Place = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Waypoint:
    """What it takes to go on at an element of a pass, without what came before it.

    Attributes:
        place: (pass, element) of the first element that comes out.
        stop: Where the iterator stands: at `place`, or further ahead if elements are kept.
        iterator: What `Pipeline.save` returned; empty where a pass begins, if its iterator was not yet made.
        kept: The elements from `place` to `stop`.
        lengths: Elements of the passes that end between `place` and `stop`.
    """

    place: Place
    stop: Place
    iterator: bytes
    kept: tuple[EncodedElement, ...] = ()
    lengths: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def way(self) -> str:
        """What a `FeedState` calls it."""
        return "snapshot" if self.place == self.stop else "window"

    def to_parts(self) -> dict[str, bytes]:
        """Returns this as the parts of a `FeedState`, whose pass is that of `place`."""
        parts = {"element": str(self.place[1]).encode(), "iterator": self.iterator}
        if self.way == "window":
            head = {"stop": self.stop, "lengths": sorted(self.lengths.items())}
            parts.update(ahead=json.dumps(head).encode(), kept=pack_elements(self.kept))
        return parts

    @classmethod
    def from_parts(cls, pass_: int, parts: Mapping[str, bytes]) -> Waypoint:
        """Returns what `to_parts` wrote into a state of this pass.

        Raises:
            KeyError, ValueError: It did not write that.
        """
        place = (pass_, int(parts["element"]))
        if "ahead" not in parts:
            return cls(place, place, parts["iterator"])
        head = json.loads(parts["ahead"])
        kept = tuple(unpack_elements(parts["kept"]))
        return cls(place, tuple(head["stop"]), parts["iterator"], kept, dict(head["lengths"]))
