"""The window: steps that were produced and may have to be served (again), and how far each rank has come.

The pump puts elements in, the service takes steps out, and ranks report progress; nothing here starts a thread, knows a
socket or touches TensorFlow. One lock guards it all, and every wait happens in `wait_for_work` or `wait_for_item`.

Room is governed by what was delivered, never by what was acknowledged: a rank may pull as far ahead of its training as
it likes. Acknowledgement only says what will never be asked for again.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kerasfeed.schedule import Position, Segment

if TYPE_CHECKING:  # TensorFlow comes with it, which takes seconds to import
    from kerasfeed.spec import EncodedElement

_FREE_STEPS_AHEAD = 2
_MIN_ROOM_STEPS = 2
_POLL_SECONDS = 0.5
_START = Position(0, 0)
NO_LAST_EPOCH = -1


class FailureKind(enum.Enum):
    """Why no more steps can be delivered: the producer, a pipeline that does not repeat itself, or the ranks."""

    PRODUCER = "producer"
    MISMATCH = "mismatch"
    RANKS = "ranks"


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why nothing is delivered from `position` on (from anywhere, if it is `None`)."""

    kind: FailureKind
    message: str
    position: Position | None = None


@dataclasses.dataclass(frozen=True)
class Delivery:
    """The element that a rank gets in a step."""

    reader: int
    position: Position
    element: EncodedElement


@dataclasses.dataclass(frozen=True)
class EpochEnd:
    """The answer to a read past the last step of an epoch."""

    reader: int
    epoch: int
    steps: int


Item = Delivery | EpochEnd | Failure


@dataclasses.dataclass(frozen=True)
class Seek:
    """Work for the pump: stand at this element of this pass, counting on through later passes in a joined stream."""

    generation: int
    pass_: int
    element: int
    joined: bool


@dataclasses.dataclass(frozen=True)
class Produce:
    """Work for the pump: the next element."""

    generation: int


@dataclasses.dataclass(frozen=True)
class Pause:
    """Work for the pump: none, but somebody waits for it to stand still."""


@dataclasses.dataclass
class EpochCount:
    """What was produced of an epoch."""

    elements: int = 0
    steps: int = 0
    dropped: int = 0
    complete: bool = False


@dataclasses.dataclass(frozen=True)
class _Step:
    elements: tuple[EncodedElement, ...]
    size: int


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A rank left an epoch before its end, and the producer did so too."""

    rank: int
    left_at: Position
    went_to: Position


@dataclasses.dataclass
class _Rank:
    """How far a rank has come, and what it has asked for."""

    woken: threading.Condition
    connected: bool = True
    since: float = 0.0
    left: bool = False
    reader: int | None = None
    next: Position = _START
    through_epochs: bool = False
    at_end: bool = False
    waiting: bool = False
    told_failure: bool = False
    direct: bool = False
    began: int = 0
    finished: int = -1
    left_epochs: set[int] = dataclasses.field(default_factory=set)
    credit_steps: int = 1
    credit_bytes: int = 1
    inflight: collections.deque[tuple[Position, int]] = dataclasses.field(default_factory=collections.deque)
    inflight_bytes: int = 0
    pulled: Position = _START
    acknowledged: Position = _START
    trained: dict[int, int] = dataclasses.field(default_factory=dict)
    last_epoch: int = NO_LAST_EPOCH
    stuck_since: float | None = None

    def has_credit(self, size: int) -> bool:
        if not self.inflight:
            return True
        return len(self.inflight) < self.credit_steps and self.inflight_bytes + size <= self.credit_bytes


class BindError(ValueError):
    """The ranks do not agree on where a `fit` begins."""


class Window:
    """Steps between the pump and the ranks.

    Args:
        size: Number of ranks.
        prefetch: Steps to keep ready ahead of the rank that is furthest.
        max_bytes: Most bytes to hold; room for two steps is made all the same.
        steps_per_epoch: Steps of each epoch, or `None`: an epoch is a pass over the dataset.
        segment: Where the stream begins. Default `None`: with the first element of all.
        start_timeout: Seconds to wait for all ranks to come, from the first one on.
        rank_timeout: Seconds after which a rank whose connection broke counts as gone.
        cut_grace: Seconds that a rank may want a step of an epoch which another rank has left for a later one.
        log: Called with each warning.
        complete: Called once, when the last rank has come.
        pass_ended: Called with (pass, elements) whenever the end of a pass over the dataset was met.
        epoch_ended: Called with (epoch, count) whenever an epoch's end was produced.
        counts: What is known already of earlier epochs, from a producer before this one.
        pass_lengths: Elements of the passes that ended under producers before this one.
        cardinality: Elements in a pass, as the dataset says; negative if it does not.
        left: Ranks that left under producers before this one, with the steps they trained, by epoch: nobody waits for
            them.
        rank_left: Called with (rank, trained steps by epoch) when a rank leaves without an error.
        clock: Monotonic seconds; a test may replace it.
    """

    def __init__(
        self,
        size: int,
        prefetch: int,
        max_bytes: int,
        steps_per_epoch: int | None = None,
        segment: Segment | None = None,
        start_timeout: float = 600.0,
        rank_timeout: float = 60.0,
        cut_grace: float = 10.0,
        log: Callable[[str], None] = print,
        complete: Callable[[], None] = lambda: None,
        pass_ended: Callable[[int, int], None] = lambda pass_, elements: None,
        epoch_ended: Callable[[int, EpochCount], None] = lambda epoch, count: None,
        counts: dict[int, EpochCount] | None = None,
        pass_lengths: dict[int, int] | None = None,
        cardinality: int = -2,
        left: dict[int, dict[int, int]] | None = None,
        rank_left: Callable[[int, dict[int, int]], None] = lambda rank, trained: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._size = size
        self._prefetch = prefetch
        self._max_bytes = max_bytes
        self._own_steps = steps_per_epoch
        self._segment = segment or Segment(steps_per_epoch=steps_per_epoch)
        self._start_timeout = start_timeout
        self._rank_timeout = rank_timeout
        self._cut_grace = cut_grace
        self._log = log
        self._complete = complete
        self._pass_ended = pass_ended
        self._epoch_ended = epoch_ended
        self._clock = clock
        self._lock = threading.RLock()
        self._pump_woken = threading.Condition(self._lock)
        self._ranks: dict[int, _Rank] = {}
        self._rank_left = rank_left
        for rank, trained in (left or {}).items():
            self._ranks[rank] = _Rank(threading.Condition(self._lock), left=True, trained=dict(trained))
        self._first_came: float | None = None
        self._steps: dict[Position, _Step] = {}
        self._bytes = 0
        self._head: Position | None = None
        self._partial: list[EncodedElement] = []
        self._ends: dict[int, int] = {}
        # What an epoch dropped, until all have trained it: with another number of ranks it is not dropped.
        self._remainders: dict[int, list[EncodedElement]] = {}
        self._cuts: dict[int, _Cut] = {}
        self._left: dict[int, _Cut] = {}
        self._counts: dict[int, EpochCount] = dict(counts or {})
        self._pass_lengths = dict(pass_lengths or {})
        self._cardinality = cardinality
        self._failure: Failure | None = None
        self._generation = 0
        self._seek_pending = False
        self._working_since: float | None = None
        self._binds: dict[int, tuple[Position, int | None, Segment, Position]] = {}
        self._stopped = False
        self._warned_room = False
        self._said_dropped = False

    # ---- The pump's side ----

    def wait_for_work(self, interrupted: Callable[[], bool] = lambda: False) -> Seek | Produce | Pause | None:
        """Blocks until there is something for the pump to do; `None` means: stop.

        Args:
            interrupted: Whether the pump is wanted elsewhere; `wake_pump` lets it be asked.
        """
        with self._lock:
            while not self._stopped and not self._drained():
                self._check_ranks()
                if self._head is None:
                    self._start_where_ranks_are()
                if self._seek_pending:
                    assert self._head is not None
                    self._seek_pending = False
                    pass_, element = self._segment.locate(self._head, self._size)
                    self._working_since = self._clock()
                    return Seek(self._generation, pass_, element, self._segment.steps_per_epoch is not None)
                if interrupted():
                    return Pause()
                if self._may_produce():
                    self._working_since = self._clock()
                    return Produce(self._generation)
                self._working_since = None
                self._pump_woken.wait(_POLL_SECONDS)
            return None

    def wake_pump(self) -> None:
        """Lets `wait_for_work` look whether it is interrupted."""
        with self._lock:
            self._pump_woken.notify_all()

    def untrained(self, position: Position) -> list[EncodedElement] | None:
        """Returns all elements from a step on up to the one that the pump comes to next, in their order.

        `None` if some of them are not in memory. For the pump itself, between two elements.
        """
        with self._lock:
            if self._head is None or self._seek_pending or position > self._head:
                return None
            elements: list[EncodedElement] = []
            while position < self._head:
                if position.step == self._ends.get(position.epoch):
                    if position.epoch not in self._remainders:
                        return None
                    elements += self._remainders[position.epoch]
                    position = Position(position.epoch + 1, 0)
                elif position in self._steps:
                    elements += self._steps[position].elements
                    position = Position(position.epoch, position.step + 1)
                else:
                    return None
            return elements + self._partial

    def put(self, generation: int, element: EncodedElement) -> None:
        """Adds the next element. One that was produced before the window went elsewhere is forgotten."""
        with self._lock:
            if generation != self._generation:
                return
            assert self._head is not None
            epoch = self._head.epoch
            count = self._counts.setdefault(epoch, EpochCount())
            self._partial.append(element)
            produced = self._head.step - self._first_step(epoch)
            count.elements = max(count.elements, produced * self._size + len(self._partial))
            if len(self._partial) < self._size:
                return
            step = _Step(tuple(self._partial), sum(e.size for e in self._partial))
            self._partial = []
            self._steps[self._head] = step
            self._bytes += step.size
            self._head = Position(epoch, self._head.step + 1)
            count.steps = max(count.steps, produced + 1)
            if self._head.step == self._segment.steps_per_epoch:
                self._end_epoch()
            self._trim()
            self._wake_ranks()

    def end_pass(self, generation: int, pass_: int, elements: int) -> None:
        """Says that pass `pass_` over the dataset had `elements` elements in all, and is over."""
        with self._lock:
            self.note_pass_length(pass_, elements)
            if generation != self._generation:
                return
            if self._segment.steps_per_epoch is None:
                self._end_epoch()
            elif elements == 0:
                steps = self._segment.steps_per_epoch
                self._fail(FailureKind.PRODUCER, f"the dataset is empty: it can't fill an epoch of {steps} steps")
            self._wake_ranks()

    def note_pass_length(self, pass_: int, elements: int) -> None:
        """Says how many elements pass `pass_` over the dataset has."""
        with self._lock:
            self._pass_lengths[pass_] = elements
            self._pass_ended(pass_, elements)

    def pass_length(self, pass_: int) -> int | None:
        """How many elements pass `pass_` over the dataset had, if it has ended."""
        with self._lock:
            return self._pass_lengths.get(pass_)

    def fail(self, generation: int, message: str, kind: FailureKind = FailureKind.PRODUCER) -> None:
        """Says that the next element can't be produced. Steps that are complete are still delivered."""
        with self._lock:
            if generation == self._generation:
                self._fail(kind, message, self._head)

    @property
    def first_pass(self) -> int:
        """The first pass over the dataset of which a rank may still ask for something."""
        with self._lock:
            start = self._segment.start
            acknowledged = min((r.acknowledged for r in self._active()), default=start)
            return self._locate(max(acknowledged, start))[0] if len(self._ranks) == self._size else 0

    def _first_step(self, epoch: int) -> int:
        return self._segment.first_step if epoch == self._segment.first_epoch else 0

    def _end_epoch(self) -> None:
        assert self._head is not None
        epoch = self._head.epoch
        count = self._counts.setdefault(epoch, EpochCount())
        count.steps = self._head.step - self._first_step(epoch)
        count.dropped = len(self._partial)
        # This producer need not have made them all, nor any of them.
        count.elements = count.steps * self._size + count.dropped
        count.complete = True
        if self._partial and not self._said_dropped:
            self._said_dropped = True
            all_of_them = ", all that there are" if not count.steps else ""
            self._log(
                f"epoch {epoch} drops {_count(len(self._partial), 'element')} of {count.elements}{all_of_them}: "
                f"no complete step for {self._size} ranks (statistics() counts what is dropped; this is said once)"
            )
        self._remainders[epoch], self._partial = self._partial, []
        self._ends[epoch] = self._head.step
        self._cuts.pop(epoch, None)
        self._epoch_ended(epoch, count)
        self._head = Position(epoch + 1, 0)

    def _fail(self, kind: FailureKind, message: str, position: Position | None = None) -> None:
        if self._failure is None:
            self._failure = Failure(kind, message, position)
            self._wake_ranks()

    def _wake_ranks(self) -> None:
        for state in self._ranks.values():
            state.woken.notify_all()

    def _start_where_ranks_are(self) -> None:
        readers = [r for r in self._ranks.values() if r.reader is not None and not r.left]
        if readers and len(self._ranks) == self._size and self._failure is None:
            start = min(r.next for r in readers)
            if start < self._segment.start:
                what = f"the producer died while ranks began a fit: one asks for {start}, which lies before it"
                self._fail(FailureKind.RANKS, f"{what} and can't be produced again")
            else:
                self._go_to(start)

    def _go_to(self, position: Position) -> None:
        """Lets the pump produce from `position` on. Steps before it stay, for ranks that have yet to get them."""
        for later in [key for key in self._steps if key >= position]:
            self._drop(later)
        self._head = position
        self._partial = []
        self._generation += 1
        self._seek_pending = True
        self._pump_woken.notify_all()

    def _active(self) -> Iterator[_Rank]:
        return (r for r in self._ranks.values() if not r.left)

    def _may_produce(self) -> bool:
        if self._head is None or self._failure is not None:
            return False
        if self._partial:
            return True
        readers = [r for r in self._active() if r.reader is not None]
        if not readers:
            return False
        last_epoch = max(r.last_epoch for r in self._active())
        beyond_fit = NO_LAST_EPOCH < last_epoch <= self._head.epoch
        if any(not r.at_end and r.next >= self._head and (r.waiting or not beyond_fit) for r in readers):
            return self._has_room()
        if beyond_fit:
            return False
        current = max(r.next.epoch - 1 if r.at_end else r.next.epoch for r in readers)
        if self._head.epoch > current:
            if self._head.epoch > current + 1:
                return False
            if last_epoch == NO_LAST_EPOCH and self._head.step >= _FREE_STEPS_AHEAD:
                return False
        return self._steps_from(max(r.next for r in readers)) < self._prefetch and self._has_room()

    def _steps_from(self, position: Position) -> int:
        count = 0
        for key in reversed(self._steps):
            if key < position:
                break
            count += 1
        return count

    def _has_room(self) -> bool:
        last = next(reversed(self._steps.values()), None)
        expected = last.size if last is not None else 0
        delivered = min((r.next for r in self._active()), default=Position(0, 0))
        while self._steps and self._bytes + expected > self._max_bytes:
            oldest = next(iter(self._steps))
            if oldest >= delivered:
                break
            self._drop(oldest)
        if self._bytes + expected <= self._max_bytes:
            return True
        if self._steps_from(delivered) >= _MIN_ROOM_STEPS:
            return False
        if not self._warned_room:
            self._warned_room = True
            self._log(
                f"max_buffer_bytes={self._max_bytes} holds less than two steps of {expected} bytes each; "
                "room for two steps is kept all the same"
            )
        return True

    def _drop(self, position: Position) -> None:
        self._bytes -= self._steps.pop(position).size

    def _trim(self) -> None:
        """Forgets what every rank has trained."""
        if len(self._ranks) < self._size:
            return
        trained = min((r.acknowledged for r in self._active()), default=None)
        while self._steps:
            oldest = next(iter(self._steps))
            if trained is not None and oldest >= trained:
                break
            self._drop(oldest)
        for epoch in [e for e in self._remainders if trained is None or e < trained.epoch]:
            del self._remainders[epoch]

    # ---- The ranks' side ----

    def attend(self, rank: int, acknowledged: Position, segment: Segment | None) -> None:
        """A rank has come (back).

        Raises:
            BindError: It believes in other segments than the ranks that came before it.
        """
        with self._lock:
            if segment is not None and segment != self._segment:
                if self._ranks and segment.first_epoch == self._segment.first_epoch:
                    raise BindError(f"rank {rank} goes on from {segment}, but another rank from {self._segment}")
                if segment.first_epoch >= self._segment.first_epoch:
                    self._segment = segment
            known = self._ranks.get(rank)
            if known is None:
                known = self._ranks[rank] = _Rank(threading.Condition(self._lock))
                if len(self._ranks) == self._size:
                    self._complete()
            known.connected, known.left, known.since = True, False, self._clock()
            known.reader, known.told_failure = None, False
            known.acknowledged = max(known.acknowledged, acknowledged)
            known.pulled = max(known.pulled, acknowledged)
            known.next = max(known.next, acknowledged)
            if self._first_came is None:
                self._first_came = self._clock()
            self._pump_woken.notify_all()

    def read(
        self,
        rank: int,
        reader: int,
        position: Position,
        through_epochs: bool,
        credit_steps: int,
        credit_bytes: int,
        last_epoch: int = NO_LAST_EPOCH,
        left: Position | None = None,
        direct: bool = False,
    ) -> None:
        """A rank asks for the steps from `position` on; what it asked for earlier is void.

        Args:
            rank: Who asks.
            reader: The number of this read, counted by the rank.
            position: The first step it wants.
            through_epochs: Whether it reads on after the epoch's end.
            credit_steps: Most steps to send it ahead of what it has pulled.
            credit_bytes: Most bytes to send it ahead of what it has pulled; one step is always sent.
            last_epoch: The first epoch that its `fit` will not run, or `NO_LAST_EPOCH`.
            left: Where it left an epoch before its end, for the one that it asks for now.
            direct: Whether what it pulls is what its user gets, so that ranks must leave epochs at the same step.
        """
        with self._lock:
            state = self._ranks[rank]
            if left is None and state.direct and position.epoch > state.began:
                # It needs not have pulled the end of an epoch whose length it knows.
                self._note_finished(rank, state.began)
            state.last_epoch, state.direct, state.began = last_epoch, direct, position.epoch
            if left is not None and direct:
                state.left_epochs.add(left.epoch)
                self._check_left(rank, left, position)
            state.reader, state.next, state.pulled = reader, position, position
            state.told_failure = False
            state.through_epochs, state.at_end, state.waiting = through_epochs, False, False
            state.credit_steps, state.credit_bytes = credit_steps, credit_bytes
            state.inflight.clear()
            state.inflight_bytes = 0
            state.stuck_since = None
            if self._head is not None:
                if left is not None and position.epoch > self._head.epoch:
                    for epoch in range(self._head.epoch, position.epoch):
                        self._cuts[epoch] = _Cut(rank, left, position)
                    self._go_to(position)
                first = self._first_step_for(position, through_epochs)
                if first is not None and first < self._head and first not in self._steps:
                    if first >= self._segment.start:
                        self._go_to(first)
                    else:
                        what = f"rank {rank} asks again for {position}, which lies before the present fit"
                        self._fail(FailureKind.RANKS, f"{what} and is no longer in memory")
            self._pump_woken.notify_all()
            state.woken.notify_all()

    def _first_step_for(self, position: Position, through_epochs: bool) -> Position | None:
        """Returns the first step for who reads from `position` on, beyond known ends; `None`: an end is all."""
        while position.step >= self._ends.get(position.epoch, position.step + 1):
            if not through_epochs:
                return None
            position = Position(position.epoch + 1, 0)
        return position

    def progress(
        self,
        rank: int,
        reader: int,
        pulled: Position,
        acknowledged: Position,
        trained: dict[int, int],
        waiting: bool = False,
    ) -> None:
        """A rank has pulled all steps before `pulled`, trained all before `acknowledged`, and waits for more or not."""
        with self._lock:
            state = self._ranks[rank]
            if reader == state.reader:
                state.pulled = max(state.pulled, pulled)
                while state.inflight and state.inflight[0][0] < pulled:
                    state.inflight_bytes -= state.inflight.popleft()[1]
                state.waiting = waiting and not state.inflight
                end = self._ends.get(state.began)
                if state.direct and end is not None and state.pulled >= (state.began, end):
                    self._note_finished(rank, state.began)
            state.acknowledged = max(state.acknowledged, acknowledged)
            state.trained.update(trained)
            self._trim()
            self._pump_woken.notify_all()
            state.woken.notify_all()

    def bind(
        self, rank: int, binding: int, position: Position, steps_per_epoch: int | None
    ) -> tuple[Segment, Position]:
        """A `fit` begins at `position`; returns the segment that holds from now on, and the position in its terms.

        The first rank to bind settles it, the others must say the same.

        Raises:
            BindError: They don't.
        """
        with self._lock:
            state = self._ranks[rank]
            state.reader = None
            settled = self._binds.get(binding)
            if settled is None:
                segment, start = self._resolve(position, steps_per_epoch)
                if segment != self._segment:
                    if start.epoch > position.epoch:
                        self._close_epoch(position)
                    self._segment = segment
                    self._forget_epochs(start.epoch)
                    if self._head is not None:
                        self._go_to(start)
                settled = self._binds[binding] = (position, steps_per_epoch, segment, start)
            if (position, steps_per_epoch) != settled[:2]:
                raise BindError(
                    f"rank {rank} begins its fit at {position} with steps_per_epoch={steps_per_epoch}, "
                    f"but another rank at {settled[0]} with steps_per_epoch={settled[1]}"
                )
            state.acknowledged = max(state.acknowledged, settled[3])
            self._pump_woken.notify_all()
            return settled[2], settled[3]

    def _resolve(self, position: Position, fit_steps: int | None) -> tuple[Segment, Position]:
        current = self._segment
        if position < current.start:
            return current, current.start
        steps = fit_steps if fit_steps is not None else self._own_steps
        # A fit that was restored inside an epoch ends that epoch; one that follows another begins one of its own.
        realign = fit_steps is not None and position.step > 0 and position != current.start
        if steps == current.steps_per_epoch and not realign:
            return current, position
        start = position if position.step == 0 else Position(position.epoch + 1, 0)
        return Segment(start.epoch, *self._locate(position), steps), start

    def locate(self, position: Position) -> tuple[int, int]:
        """Returns (pass, element) of what is trained first at `position`.

        Raises:
            ValueError: It lies before the present segment.
        """
        with self._lock:
            return self._locate(position)

    def _locate(self, position: Position) -> tuple[int, int]:
        pass_, element = self._segment.locate(position, self._size)
        claimed = self._cardinality if self._cardinality > 0 else element + 1
        while element and element >= (length := self._pass_lengths.get(pass_, claimed)):
            element -= length
            pass_ += 1
        return pass_, element

    def _close_epoch(self, position: Position) -> None:
        """Ends an epoch where a `fit` broke off and the next one starts an epoch of its own."""
        count = self._counts.setdefault(position.epoch, EpochCount())
        count.steps, count.dropped = position.step - self._first_step(position.epoch), 0
        count.elements = count.steps * self._size
        count.complete = True
        self._ends[position.epoch] = position.step
        self._remainders.pop(position.epoch, None)
        self._epoch_ended(position.epoch, count)

    def _forget_epochs(self, first: int) -> None:
        """Forgets what was known of epochs from `first` on: they get other elements now."""
        known: tuple[dict[int, Any], ...] = (self._counts, self._ends, self._cuts, self._remainders)
        for by_epoch in known:
            for epoch in [e for e in by_epoch if e >= first]:
                del by_epoch[epoch]

    def leave(self, rank: int, error: str) -> None:
        """A rank needs no more steps; with an error, the others can't go on either."""
        with self._lock:
            self._ranks[rank].left = True
            if error:
                self._fail(FailureKind.RANKS, f"rank {rank} left with an error: {error}")
            else:
                self._rank_left(rank, self._ranks[rank].trained)
            self._trim()
            self._pump_woken.notify_all()

    def disconnected(self, rank: int) -> None:
        """A rank's connection is gone; it may come back."""
        with self._lock:
            state = self._ranks[rank]
            state.connected, state.reader, state.since = False, None, self._clock()
            self._pump_woken.notify_all()

    def wait_for_item(self, rank: int, interrupted: Callable[[], bool]) -> Item | None:
        """Blocks for what `rank` gets next; `None` when `interrupted()` (looked at after each `wake`).

        A failure is told once for each read: a rank that knows of it gets nothing more until it asks again.
        """
        with self._lock:
            state = self._ranks[rank]
            while not interrupted():
                self._check_ranks()
                item = self._take(rank)
                if item is not None:
                    self._pump_woken.notify_all()
                    return item
                state.woken.wait(_POLL_SECONDS)
            return None

    def broken(self) -> Failure | None:
        """Returns the failure after which no rank gets anything any more, wherever it reads."""
        with self._lock:
            self._check_ranks()
            failure = self._failure
            return failure if failure is not None and failure.position is None else None

    def wake(self, rank: int) -> None:
        """Lets `wait_for_item` of this rank look at its condition again."""
        with self._lock:
            self._ranks[rank].woken.notify_all()

    def _take(self, rank: int) -> Item | None:
        state = self._ranks[rank]
        if state.told_failure:
            return None
        if self._failure is not None:
            position = self._failure.position
            reached = state.reader is not None and not state.at_end and position is not None and state.next >= position
            if position is None or reached:
                state.told_failure = True
                return self._failure
        if state.reader is None or state.at_end or self._head is None or len(self._ranks) < self._size:
            return None
        position = state.next
        end = self._ends.get(position.epoch)
        if end is not None and position.step >= end:
            state.next = Position(position.epoch + 1, 0)
            state.at_end = not state.through_epochs
            return EpochEnd(state.reader, position.epoch, end)
        step = self._steps.get(position)
        if step is None:
            self._check_cut(rank, state)
            return None
        element = step.elements[rank]
        if not state.has_credit(element.size):
            return None
        state.inflight.append((position, element.size))
        state.inflight_bytes += element.size
        state.next = Position(position.epoch, position.step + 1)
        state.stuck_since, state.waiting = None, False
        return Delivery(state.reader, position, element)

    def _check_left(self, rank: int, left: Position, went_to: Position) -> None:
        """Fails if another rank has trained all of the epoch that this one left: they are no longer in step."""
        cut = self._left.setdefault(left.epoch, _Cut(rank, left, went_to))
        for other, state in self._ranks.items():
            if state.finished >= left.epoch and left.epoch not in state.left_epochs:
                self._compare(cut, other)

    def _note_finished(self, rank: int, epoch: int) -> None:
        """A rank has pulled all of an epoch; what was sent to it does not count, as it may not have been wanted."""
        state = self._ranks[rank]
        state.finished = max(state.finished, epoch)
        if epoch in self._left and epoch not in state.left_epochs:
            self._compare(self._left[epoch], rank)

    def _compare(self, cut: _Cut, finished: int) -> None:
        epoch, end = cut.left_at.epoch, self._ends.get(cut.left_at.epoch)
        if finished != cut.rank and end is not None and cut.left_at.step < end:
            self._fail_apart(cut, finished, f"finished epoch {epoch}, of {_count(end, 'step')}")

    def _fail_apart(self, cut: _Cut, rank: int, what: str) -> None:
        self._fail(
            FailureKind.RANKS,
            f"the ranks iterate over different epochs: rank {cut.rank} left epoch {cut.left_at.epoch} at step "
            f"{cut.left_at.step} and went on to {cut.went_to}, but rank {rank} {what}. "
            "All ranks must leave an epoch at the same step, and pull the same number of iterators",
        )

    def _check_cut(self, rank: int, state: _Rank) -> None:
        cut = self._cuts.get(state.next.epoch)
        if cut is None or not state.waiting or (self._head is not None and self._head <= state.next):
            return
        now = self._clock()
        if state.stuck_since is None:
            state.stuck_since = now
        if now - state.stuck_since >= self._cut_grace:
            self._fail_apart(cut, rank, f"still asks for {state.next}")

    def _check_ranks(self) -> None:
        now = self._clock()
        if self._first_came is not None and now - self._first_came >= self._start_timeout:
            missing = self._missing()
            if missing:
                self._fail(
                    FailureKind.RANKS,
                    f"{_ranks(missing)} of {self._size} did not come within {self._start_timeout:g} s "
                    f"(present: {_ranks(sorted(self._ranks))}). All ranks must use it, and build the same feeders",
                )
        for rank, state in self._ranks.items():
            if not state.connected and not state.left and now - state.since >= self._rank_timeout:
                self._fail(
                    FailureKind.RANKS,
                    f"rank {rank} is gone: its connection broke {self._rank_timeout:g} s ago at {state.pulled}",
                )

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in self._ranks]

    # ---- Life and news ----

    def refuse(self, message: str) -> None:
        """The ranks don't fit together: every rank is told at once."""
        with self._lock:
            self._fail(FailureKind.RANKS, message)

    def abandon(self, message: str) -> None:
        """Nothing can be produced at all: every rank is told at once."""
        with self._lock:
            self._fail(FailureKind.PRODUCER, message)

    def stop(self) -> None:
        """Lets the pump return from its wait."""
        with self._lock:
            self._stopped = True
            self._pump_woken.notify_all()

    def wait_until_drained(self) -> None:
        """Blocks until all ranks have come and left."""
        with self._lock:
            while not self._drained():
                self._pump_woken.wait()

    def _drained(self) -> bool:
        return len(self._ranks) == self._size and all(r.left for r in self._ranks.values())

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def segment(self) -> Segment:
        """The segment that holds now."""
        with self._lock:
            return self._segment

    @property
    def furthest(self) -> Position:
        """The next step that will be produced."""
        with self._lock:
            return self._head or Position(0, 0)

    def waiting_for(self, rank: int) -> str:
        """Returns in words what keeps `rank` from its next step."""
        with self._lock:
            if len(self._ranks) < self._size:
                return f"{_ranks(self._missing())} to use this feed"
            state = self._ranks[rank]
            if self._failure is not None:
                return f"nothing: {self._failure.message}"
            if self._working_since is not None:
                seconds = self._clock() - self._working_since
                where = f"{self._head}, element {len(self._partial) + 1} of {self._size}"
                return f"the pipeline, at work on {where} for {seconds:.0f} s"
            if state.reader is not None and state.next in self._steps:
                return "this rank to pull what it was sent"
            slowest, behind = min(
                ((r, s) for r, s in self._ranks.items() if not s.left),
                key=lambda item: item[1].next,
                default=(rank, state),
            )
            return (
                f"rank {slowest}, which was sent steps before {behind.next}, and pulled before {behind.pulled}; "
                f"the window holds {len(self._steps)} steps of {self._bytes} bytes (max_buffer_bytes={self._max_bytes})"
            )

    def statistics(self) -> list[tuple[int, EpochCount, dict[int, int]]]:
        """Returns for each epoch what was produced, and how many steps each rank has trained of it."""
        with self._lock:
            epochs = sorted(set(self._counts) | {e for r in self._ranks.values() for e in r.trained})
            return [
                (
                    epoch,
                    dataclasses.replace(self._counts.get(epoch, EpochCount())),
                    {rank: state.trained.get(epoch, 0) for rank, state in sorted(self._ranks.items())},
                )
                for epoch in epochs
            ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


__all__ = [
    "NO_LAST_EPOCH",
    "BindError",
    "Delivery",
    "EpochCount",
    "EpochEnd",
    "Failure",
    "FailureKind",
    "Item",
    "Produce",
    "Seek",
    "Window",
]
