"""Where a rank's iterators start, what they have pulled, and what of it is trained: no thread, no network.

tf.data and Keras make iterators, peek, pull ahead and throw iterators away, so "an iterator goes on where the last one
stopped" would lose steps and "where training stands" would repeat some. Two modes, then. Free: each iterator that pulls
is the next epoch, as with any dataset, and a step counts as trained when the next one is pulled. Bound (by
`FeedCallback`, during a `fit`): an iterator starts at the cursor, which is set to the position that is trained when an
epoch begins, and moves on only at an epoch's end.
"""

from __future__ import annotations

import collections
import dataclasses

from kerasfeed.errors import FeedClosedError
from kerasfeed.schedule import Position


@dataclasses.dataclass(frozen=True)
class Ticket:
    """An iterator's right to pull: it holds until another iterator pulls.

    Attributes:
        number: Counts the iterators.
        start: The first step it pulls.
        through_epochs: Whether it goes on after the end of an epoch.
        left: Where the iterator before it left an epoch before its end, if this one begins a later epoch.
    """

    number: int
    start: Position
    through_epochs: bool
    left: Position | None = None


class Cursor:
    """The cursor of one rank. Not thread-safe: its owner holds a lock.

    Args:
        feed: The feed's name, for messages.
    """

    def __init__(self, feed: str):
        self._feed = feed
        self.epoch_steps: int | None = None
        self.irregular_epoch: int | None = None
        self.bound = False
        self.through_epochs = False
        self.acknowledged = Position(0, 0)
        self.pulled = Position(0, 0)
        self.trained: dict[int, int] = {}
        self._start = Position(0, 0)
        self._resumes = False
        # How many iterators there were; some of them only to make others void.
        self.tickets = 0
        self._untrained: collections.deque[Position] = collections.deque()

    def steps_in(self, epoch: int) -> int | None:
        """Returns how many steps an epoch has, or `None` if only the producer knows."""
        return None if epoch == self.irregular_epoch else self.epoch_steps

    def open(self) -> Ticket:
        """An iterator pulls for the first time."""
        self.tickets += 1
        left = None
        start = self.next_start
        if not self.bound:
            left = self.pulled if start != self.pulled else None
            self._train_all(start)
        elif not self.through_epochs:
            self._untrained = collections.deque(p for p in self._untrained if p < start)
        self.pulled = start
        self._resumes = False
        return Ticket(self.tickets, start, self.bound and self.through_epochs, left)

    def settle(self, position: Position) -> Position:
        """Returns the place behind the last step of an epoch as the first of the next one; others as they are."""
        behind = position.step > 0 and position.step == self.steps_in(position.epoch)
        return Position(position.epoch + 1, 0) if behind else position

    @property
    def next_start(self) -> Position:
        """Where the next iterator will start."""
        if self.bound:
            return self.pulled if self.through_epochs else max(self._start, self.acknowledged)
        if self.pulled.step and not self._resumes:
            return Position(self.pulled.epoch + 1, 0)
        return self.pulled

    def check(self, ticket: Ticket) -> None:
        """Raises `FeedClosedError` if another iterator has pulled since."""
        if ticket.number != self.tickets:
            raise FeedClosedError(
                f"feed {self._feed!r}: an iterator that started at {ticket.start} pulls again, after another one took "
                "its place. A feed can't be iterated twice at the same time; cache() it, or build a second feeder"
            )

    def note_step(self, ticket: Ticket, position: Position) -> None:
        """The iterator got the step at `position`."""
        self.check(ticket)
        if not self.bound:
            self._train_all(position)
        self._untrained.append(position)
        self.pulled = Position(position.epoch, position.step + 1)
        if not ticket.through_epochs and self.pulled.step == self.steps_in(position.epoch):
            self._complete(position.epoch)

    def note_steps(self, ticket: Ticket, first: Position, count: int) -> None:
        """The iterator got `count` steps from `first` on, all of one epoch."""
        self.check(ticket)
        if not count:
            return
        if not self.bound and count > 1:
            # All but the last one are trained by now.
            self._train_all(first)
            self.trained[first.epoch] = self.trained.get(first.epoch, 0) + count - 1
            first = Position(first.epoch, first.step + count - 1)
            count = 1
        for step in range(first.step, first.step + count):
            self.note_step(ticket, Position(first.epoch, step))

    def note_end(self, ticket: Ticket, epoch: int) -> None:
        """The iterator was told that `epoch` is over."""
        self.check(ticket)
        if self.pulled.epoch <= epoch:
            self._complete(epoch)

    def _complete(self, epoch: int) -> None:
        self.pulled = self._start = Position(epoch + 1, 0)
        if not self.bound:
            self._train_all(self.pulled)

    def _train_all(self, acknowledged: Position) -> None:
        self._count(len(self._untrained))
        self.acknowledged = max(self.acknowledged, acknowledged)

    def _count(self, steps: int) -> None:
        for _ in range(steps):
            position = self._untrained.popleft()
            self.trained[position.epoch] = self.trained.get(position.epoch, 0) + 1

    def acknowledge(self, steps: int) -> int:
        """Says that the next `steps` pulled steps are trained. Returns how many of them had not been pulled at all."""
        counted = min(steps, len(self._untrained))
        self._count(counted)
        position = self._untrained[0] if self._untrained else self.pulled
        self.acknowledged = max(self.acknowledged, position)
        return steps - counted

    @property
    def untrained(self) -> int:
        """Steps that were pulled and are not trained."""
        return len(self._untrained)

    def restore(self, position: Position) -> None:
        """The feed goes on at `position`, inside an epoch too: that is where the next iterator starts."""
        self.tickets += 1
        self._untrained.clear()
        self.trained.clear()
        self.acknowledged = self.pulled = self._start = position
        self._resumes = True

    def bind(self, position: Position, through_epochs: bool) -> None:
        """A `fit` begins at `position`. Iterators that are left from before have no say any more."""
        self.tickets += 1
        self.bound, self.through_epochs = True, through_epochs
        self._untrained.clear()
        self.acknowledged = max(self.acknowledged, position)
        self._start = self.pulled = position

    def begin_epoch(self) -> None:
        """A Keras epoch begins: the next iterator starts at the first step not trained."""
        if not self.through_epochs:
            self._start = self.acknowledged

    def skip_end(self, epoch: int) -> None:
        """The producer says that `epoch`, of which everything that was pulled is trained, has no more steps."""
        if self.acknowledged.epoch == epoch:
            self.acknowledged = self.pulled = self._start = Position(epoch + 1, 0)

    def unbind(self) -> None:
        """The `fit` is over: what was pulled and not trained is forgotten, and so are iterators that still pull."""
        self.tickets += 1
        self.bound = self.through_epochs = False
        self._untrained.clear()
        self.pulled = self.acknowledged
