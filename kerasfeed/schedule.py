"""Which element is trained where: pure functions of (element, size, remainder), and the segments of a stream.

Everything here is arithmetic on integers. The producer uses it to cut elements into steps, the tests use it as oracle.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

REMAINDERS = ("drop",)
POLICIES = ("round_robin",)


class Position(NamedTuple):
    """A place in the stream of steps: the first step that is still to come.

    Positions compare like tuples: by epoch first, then by step.
    """

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"epoch {self.epoch}, step {self.step}"


class Place(NamedTuple):
    """Where an element is trained: its step within the epoch, and the rank that gets it."""

    step: int
    rank: int


def place_of(element: int, size: int, first: int = 0) -> Place:
    """Returns the place of an element under `round_robin`.

    Example:
        >>> place_of(5, size=2)
        Place(step=2, rank=1)

    Args:
        element: Index of the element within its epoch, at least `first`.
        size: Number of ranks, at least 1.
        first: Index of the first element that step 0 takes. Larger than 0 where a stream goes on inside an epoch.
    """
    return Place(*divmod(element - first, size))


def element_at(step: int, rank: int, size: int, first: int = 0) -> int:
    """Returns the index of the element that `rank` trains in `step` under `round_robin`: the inverse of `place_of`."""
    return first + step * size + rank


def steps_in(elements: int, size: int, first: int = 0) -> int:
    """Returns how many complete steps an epoch of `elements` elements has when step 0 starts at element `first`."""
    return max(0, elements - first) // size


def dropped_in(elements: int, size: int, first: int = 0) -> int:
    """Returns how many elements at the end of an epoch make no complete step and are dropped (`remainder="drop"`)."""
    return max(0, elements - first) % size


@dataclasses.dataclass(frozen=True)
class Segment:
    """From `first_epoch` on: where epochs lie in the passes over the user's dataset.

    Without `steps_per_epoch` an epoch is a pass: epoch `first_epoch` is pass `origin_pass` from element
    `origin_element` on, the next epoch is the next pass, and so on. With it the passes are joined to one stream, which
    is cut every `steps_per_epoch` steps, so that only the stream's very end has a remainder.

    A feed that was restored inside an epoch keeps the numbers of its steps: `origin_element` is then what step
    `first_step` of `first_epoch` starts with.

    Args:
        first_epoch: The first epoch that this segment describes.
        origin_pass: The pass over the dataset in which `first_epoch` starts.
        origin_element: The element of that pass with which it starts.
        steps_per_epoch: Steps in each epoch, or `None` where an epoch is a pass.
        first_step: The first step of `first_epoch` that there is.
    """

    first_epoch: int = 0
    origin_pass: int = 0
    origin_element: int = 0
    steps_per_epoch: int | None = None
    first_step: int = 0

    def __post_init__(self) -> None:
        for name in ("first_epoch", "origin_pass", "origin_element", "first_step"):
            if getattr(self, name) < 0:
                raise ValueError(f"Segment: {name} must be at least 0. Received: {getattr(self, name)}")
        if self.steps_per_epoch is not None and self.steps_per_epoch < 1:
            raise ValueError(f"Segment: steps_per_epoch must be at least 1 or None. Received: {self.steps_per_epoch}")

    @property
    def start(self) -> Position:
        """The first position of this segment."""
        return Position(self.first_epoch, self.first_step)

    def locate(self, position: Position, size: int) -> tuple[int, int]:
        """Returns (pass, element) to start from for `position`.

        In a joined stream the element may lie beyond the end of that pass: it is then counted on through the passes
        that follow, whose lengths only the walk itself can tell.
        """
        if position < self.start:
            raise ValueError(f"{position} lies before this segment, which starts at {self.start}")
        epochs = position.epoch - self.first_epoch
        if self.steps_per_epoch is not None:
            steps = epochs * self.steps_per_epoch + position.step - self.first_step
            return self.origin_pass, self.origin_element + steps * size
        if epochs == 0:
            return self.origin_pass, self.origin_element + (position.step - self.first_step) * size
        return self.origin_pass + epochs, position.step * size


def resumed_step(
    element: int, step: int, elements: int, size: int, steps_per_epoch: int | None, same_size: bool
) -> int:
    """Returns the number of the step that starts with `element`, the first one of an epoch that was not trained.

    With the number of ranks that the epoch was begun with it is `step` itself. With another one there is no such step;
    then it is chosen so that the epoch has as many steps in all as every other.

    Args:
        element: Index of the element within its pass.
        step: The step that it was the first element of, when the epoch was begun.
        elements: Elements in a pass; negative if that is not known.
        size: Number of ranks now.
        steps_per_epoch: Steps in each epoch, or `None` where an epoch is a pass.
        same_size: Whether `size` is what it was.
    """
    if same_size or steps_per_epoch is not None:
        return step
    return steps_in(elements, size) - steps_in(elements, size, element) if elements >= 0 else element // size
