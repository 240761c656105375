"""A rank's steps over a data socket of the native engine: through shared memory on one host, over TCP between hosts.

This is what the session and the connection have to do with it: to connect, to ask for steps, to say what is trained.
The steps themselves go from the socket to TensorFlow in C++, to a dataset that reads from the feed of this stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kerasfeed.errors import FeedError, ProducerError, RankError, ReplayMismatchError
from kerasfeed.producer.window import EpochEnd, Failure, FailureKind
from kerasfeed.schedule import Position
from kerasfeed.transport.items import End, Step

if TYPE_CHECKING:
    from kerasfeed.native.feed import Feed
    from kerasfeed.native.reader import Pulls, Reader

SHARED_MEMORY, TCP = "unix:", "tcp:"
# What the user can ask for, and the addresses that go with it.
NATIVE_TRANSPORTS = {"shm": (SHARED_MEMORY,), "tcp": (TCP,)}
_WAYS = {SHARED_MEMORY: "shared memory", TCP: "TCP"}
# To a host that drops what it does not want.
_CONNECT_SECONDS = 10.0
ERRORS: dict[FailureKind, type[FeedError]] = {
    FailureKind.PRODUCER: ProducerError,
    FailureKind.RANKS: RankError,
    FailureKind.MISMATCH: ReplayMismatchError,
}


def data_addresses(offered: Sequence[str], host: str, transport: str) -> list[str]:
    """Returns where to connect, in order of preference.

    Args:
        offered: What the producer's Welcome says.
        host: Where the producer was reached.
        transport: What the user asked for.
    """
    wanted = NATIVE_TRANSPORTS.get(transport, (SHARED_MEMORY, TCP))
    port = len(TCP)
    return [
        f"{TCP}{host}:{address[port:]}" if address.startswith(TCP) else address
        for address in offered
        if address.startswith(wanted)
    ]


class DataStream:
    """What a rank reads over data sockets, from one start of its feed to the next close of it.

    Args:
        feed: The feed that the rank's datasets name.
        reader: Its reader, which nobody else uses.
        name: The feed's name, for messages.
    """

    def __init__(self, feed: Feed, reader: Reader, name: str):
        self._feed = feed
        self._reader = reader
        self._name = name
        self._number = 0
        feed.begin(reader)

    def connect(self, addresses: Sequence[str], rank: int, proofs: tuple[bytes, bytes]) -> str:
        """Connects to the first address that can be reached; reading goes on where it was. Returns which way that is.

        Raises:
            ConnectionError: None can be reached; the message says why.
        """
        tried = []
        for address in addresses:
            try:
                self._reader.attach(address, rank, *proofs, _CONNECT_SECONDS)
            except ConnectionError as error:
                tried.append(str(error))
            else:
                return next(way for prefix, way in _WAYS.items() if address.startswith(prefix))
        raise ConnectionError("; ".join(tried) or "the producer has no address for it")

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._reader.attached

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
        """Asks for the steps from `position` on; see `Connection.read`. Returns the number of this read."""
        self._number = self._reader.read(
            position, through_epochs, credit_steps, credit_bytes, last_epoch, left, direct, free
        )
        return self._number

    def void(self) -> None:
        """Nobody may pull what was asked for any more."""
        self._reader.void()

    def pulls(self, number: int) -> Pulls | None:
        """Returns how far this read has pulled, also if it is void; `None` if there is a later one."""
        return self._reader.pulls(number)

    def peek(self, seconds: float) -> Step | End | FeedError | None:
        """Returns the next item of the present read, which stays the next one; `None` if none comes in `seconds`."""
        item = self._reader.peek(self._number, seconds)
        if isinstance(item, Failure):
            return self.error(item.kind, item.message)
        if isinstance(item, EpochEnd):
            return End(item.epoch, item.steps)
        return Step(item, None) if item is not None else None

    def error(self, kind: FailureKind, message: str) -> FeedError:
        """Returns what is raised for a failure that the producer has told."""
        return ERRORS[kind](f"feed {self._name!r}: {message}")

    def acknowledge(self, acknowledged: Position, trained: dict[int, int]) -> None:
        """Says what is trained, soon: how many steps of the epochs in `trained`, and all before `acknowledged`."""
        self._reader.acknowledge(acknowledged, trained)

    def flush(self) -> None:
        """Says now what was to be said soon."""
        self._reader.sync(0.0)

    def sync(self, seconds: float) -> bool:
        """Waits until the producer has heard all that was said. Returns whether it has, in `seconds`.

        What was said over a connection that broke, the next one says again: that is not waited for.
        """
        return self._reader.attached and self._reader.sync(seconds)

    @property
    def queued(self) -> int:
        """How many steps and ends have arrived that nobody has pulled."""
        return self._reader.counts.queued

    def alert(self) -> None:
        """Lets whoever waits for a step look whether it is worth it."""
        self._feed.alert()

    def close(self) -> None:
        """Ends it: whoever pulls gets an error."""
        self._feed.close()
        self._reader.detach()
