"""What comes out of a read, whichever way it came."""

from __future__ import annotations

import dataclasses
from typing import Any

from kerasfeed.schedule import Position


@dataclasses.dataclass(frozen=True)
class Step:
    """An element that has arrived, as NumPy arrays in the structure that the generator yields."""

    position: Position
    value: Any


@dataclasses.dataclass(frozen=True)
class End:
    """An epoch is over after `steps` steps."""

    epoch: int
    steps: int
