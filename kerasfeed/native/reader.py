"""A rank's reader (`core/reader.h`) for Python: to connect, to ask for steps, and to say what is trained."""

from __future__ import annotations

from typing import NamedTuple

from kerasfeed.native.library import (
    BYTES,
    FLAG,
    HANDLE,
    MADE,
    NUMBER,
    NUMBERS,
    SECONDS,
    TEXT,
    Library,
    array,
    decoded,
    flat,
    sized,
)
from kerasfeed.producer.window import EpochEnd, Failure, FailureKind
from kerasfeed.schedule import Position

_KINDS = tuple(FailureKind)
_FUNCTIONS = {
    "kf_reader_new": (NUMBER, NUMBER, MADE),
    "kf_reader_attach": (HANDLE, *TEXT, NUMBER, BYTES, BYTES, SECONDS),
    "kf_reader_detach": (HANDLE,),
    "kf_reader_attached": (HANDLE,),
    "kf_reader_read": (HANDLE, NUMBER, NUMBER, FLAG, NUMBER, NUMBER, NUMBER, NUMBERS, FLAG, FLAG),
    "kf_reader_void": (HANDLE,),
    "kf_reader_pulls": (HANDLE, NUMBER),
    "kf_reader_peek": (HANDLE, NUMBER, SECONDS),
    "kf_reader_acknowledge": (HANDLE, NUMBER, NUMBER, NUMBERS, NUMBER),
    "kf_reader_sync": (HANDLE, SECONDS),
    "kf_reader_counts": (HANDLE,),
}


class Pulls(NamedTuple):
    """How far a read has come.

    Attributes:
        steps: Steps that were handed out, over all epochs.
        next: The first one that was not.
    """

    steps: int
    next: Position


class Counts(NamedTuple):
    """Which way elements came.

    Attributes:
        shared: In shared memory, where they stayed.
        copied: In shared memory, of which the user had kept so much that they were copied.
        received: Over the socket.
        kept_bytes: Bytes of shared memory that the user keeps now.
        queued: Steps and ends that have arrived and were not handed out.
    """

    shared: int
    copied: int
    received: int
    kept_bytes: int
    queued: int


class Reader:
    """Reads from one producer after the other.

    Args:
        library: The engine's library.
        free_bytes: So much of small elements may be sent ahead that no credit of steps counts it.
        max_kept_bytes: How much shared memory the user may keep before elements are copied.
    """

    def __init__(self, library: Library, free_bytes: int, max_kept_bytes: int = 256 << 20):
        self._library = library
        library.declare(_FUNCTIONS)
        self.handle, _ = library.make(self, "kf_reader_new", "kf_reader_free", free_bytes, max_kept_bytes)

    def attach(self, address: str, rank: int, proof: bytes, expected: bytes, timeout: float) -> None:
        """Connects to "unix:<abstract name>" or "tcp:<host>:<port>"; reading goes on where it was.

        Args:
            address: Where the producer listens.
            rank: This rank.
            proof: What it says to be let in.
            expected: What the producer has to say.
            timeout: In seconds.

        Raises:
            ConnectionError: It can't; the message says why.
        """
        answer = self._library.ask("kf_reader_attach", self.handle, *sized(address), rank, proof, expected, timeout)
        if not answer.done:
            raise ConnectionError(decoded(answer.text))

    def detach(self) -> None:
        """Ends the connection."""
        self._library.ask("kf_reader_detach", self.handle)

    @property
    def attached(self) -> bool:
        """Whether there is a connection, as far as this side can know."""
        return self._library.ask("kf_reader_attached", self.handle).done

    @property
    def trouble(self) -> str:
        """Why the last connection broke; empty if it did not."""
        return decoded(self._library.ask("kf_reader_attached", self.handle).text)

    def read(
        self,
        position: Position,
        through_epochs: bool,
        credit_steps: int,
        credit_bytes: int,
        last_epoch: int,
        left: Position | None,
        direct: bool,
        free: bool,
    ) -> int:
        """Asks for the steps from `position` on. Returns the number of this read."""
        at = None if left is None else array(left)
        answer = self._library.ask(
            "kf_reader_read",
            self.handle,
            *position,
            through_epochs,
            credit_steps,
            credit_bytes,
            last_epoch,
            at,
            direct,
            free,
        )
        return answer.numbers[0]

    def void(self) -> None:
        """What was asked for is void."""
        self._library.ask("kf_reader_void", self.handle)

    def pulls(self, read: int) -> Pulls | None:
        """Returns how far a read has come, also if it is void; `None` if there is a later one."""
        answer = self._library.ask("kf_reader_pulls", self.handle, read)
        return Pulls(answer.numbers[0], Position(*answer.numbers[1:])) if answer.done else None

    def peek(self, read: int, seconds: float) -> Position | EpochEnd | Failure | None:
        """Returns what comes next, and leaves it; `None` if nothing comes in `seconds`."""
        done, numbers, text = self._library.ask("kf_reader_peek", self.handle, read, seconds)
        if not done:
            return None
        kind, *rest = numbers
        if kind == 0:
            return Position(*rest)
        if kind == 1:
            return EpochEnd(read, *rest)
        if kind == 2:
            return Failure(_KINDS[rest[0]], decoded(text), None)
        return Failure(FailureKind.RANKS, "what was asked for is void: something else was asked for", None)

    def acknowledge(self, acknowledged: Position, trained: dict[int, int]) -> None:
        """Says what is trained, with the next that is said."""
        self._library.ask("kf_reader_acknowledge", self.handle, *acknowledged, array(flat(trained)), len(trained))

    def sync(self, timeout: float) -> bool:
        """Says all that is to be said, and waits until the producer has heard it. Returns whether it has."""
        return self._library.ask("kf_reader_sync", self.handle, timeout).done

    @property
    def counts(self) -> Counts:
        """Which way elements came."""
        return Counts(*self._library.ask("kf_reader_counts", self.handle).numbers)
