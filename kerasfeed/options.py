"""The arguments of a `DataFeeder`, checked once: a frozen value that travels to the producer as JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from kerasfeed import schedule

DEFAULT_PRODUCER = 0
DEFAULT_PREFETCH = 8
DEFAULT_MAX_BUFFER_BYTES = 1 << 30
TRANSPORTS = ("auto", "shm", "tcp", "grpc")
VERIFY = ("blocks", "full", "warn")
RESUME = ("auto", "snapshot", "window", "replay")
DEFAULT_MAX_STATE_BYTES = 64 << 20
# Waking a process for each small element would cost more than all else that is done for it.
SMALL_BYTES = 128 << 10
MAX_SEED = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class FeedOptions:
    """What the user asked of a feed. `None` in `producer` and `prefetch` means: left open, a callback may set it.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range, or names what is not supported yet.
    """

    name: str = "train"
    producer: int | None = None
    policy: str = "round_robin"
    remainder: str = "drop"
    steps_per_epoch: int | None = None
    seed: int | None = None
    deterministic: bool = False
    prefetch: int | None = None
    max_buffer_bytes: int = DEFAULT_MAX_BUFFER_BYTES
    transport: str = "auto"
    verify: str = "blocks"
    check_replay: bool = True
    resume: str = "auto"
    max_state_bytes: int = DEFAULT_MAX_STATE_BYTES
    port: int = 0
    start_timeout: float = 600.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"DataFeeder: name must be a string of at least one character. Received: {self.name!r}")
        self._choice("policy", schedule.POLICIES)
        self._choice("remainder", schedule.REMAINDERS)
        self._choice("transport", TRANSPORTS)
        self._choice("verify", VERIFY)
        self._choice("resume", RESUME)
        self._whole("max_state_bytes", low=0)
        self._whole("producer", low=0, optional=True)
        self._whole("steps_per_epoch", low=1, optional=True)
        self._whole("prefetch", low=1, optional=True)
        self._whole("max_buffer_bytes", low=1)
        self._whole("port", low=0, high=65535)
        self._whole("seed", low=0, high=MAX_SEED, optional=True)
        self._truth("deterministic")
        self._truth("check_replay")
        timeout = self.start_timeout
        if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not timeout > 0 or math.isinf(timeout):
            raise ValueError(f"DataFeeder: start_timeout must be seconds, more than 0. Received: {timeout!r}")

    def _choice(self, name: str, supported: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in supported:
            raise ValueError(
                f"DataFeeder: {name}={value!r} is not supported. Supported: {', '.join(map(repr, supported))}"
            )

    def _truth(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise TypeError(f"DataFeeder: {name} must be True or False. Received: {value!r}")

    def _whole(self, name: str, low: int, high: int | None = None, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"DataFeeder: {name} must be an int{' or None' if optional else ''}. Received: {value!r}")
        if value < low or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ValueError(f"DataFeeder: {name} must be {bounds}. Received: {value}")

    @property
    def producer_rank(self) -> int:
        """The rank that starts the producer."""
        return DEFAULT_PRODUCER if self.producer is None else self.producer

    @property
    def prefetch_steps(self) -> int:
        """Steps to keep ready ahead of the ranks; at least two, so that one is made while one is taken."""
        return max(2, DEFAULT_PREFETCH if self.prefetch is None else self.prefetch)

    @property
    def free_bytes(self) -> int:
        """How much of small elements may be ready, and sent ahead, beyond `prefetch` steps, with the native engine."""
        return min(SMALL_BYTES, self.max_buffer_bytes)

    def agreed(self) -> dict[str, Any]:
        """The options that all ranks must have given alike, by name."""
        names = ("name", "producer_rank", "policy", "remainder", "steps_per_epoch", "seed", "deterministic")
        return {name: getattr(self, name) for name in names}

    def to_json(self) -> dict[str, Any]:
        """This value as a dictionary of JSON values; `FeedOptions(**d)` is its inverse."""
        return dataclasses.asdict(self)
