"""The life of a feed on one rank: starts or finds the producer, connects, hands out steps, closes, starts again.

A session outlives producers: each start is a run, whose address all ranks find under the run's number. What was trained
stays with the session, so that a later run goes on where the last one ended. Lock order: the session's, then the
connection's; the connection never calls back into the session's lock.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import logging
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf

from kerasfeed import auth, interrupt, rendezvous, schedule
from kerasfeed import spec as spec_lib
from kerasfeed.cursor import Cursor, Ticket
from kerasfeed.errors import FeedClosedError, FeedError, ProducerError
from kerasfeed.options import FeedOptions
from kerasfeed.producer.launch import Launch
from kerasfeed.producer.supervisor import Supervisor, end_all_producers
from kerasfeed.producer.window import NO_LAST_EPOCH, FailureKind
from kerasfeed.proto import feed_pb2
from kerasfeed.schedule import Position, Segment
from kerasfeed.state import FeedState
from kerasfeed.topology import Topology
from kerasfeed.transport.data_socket import DataStream
from kerasfeed.transport.grpc_stream import Connection, Identity, Wait
from kerasfeed.transport.items import End, Step

if TYPE_CHECKING:
    from kerasfeed.native.feed import Feed
    from kerasfeed.quiet_check import QuietCheck

_LOG = logging.getLogger("kerasfeed")
_STATUS_SECONDS = 5.0
_MAX_CREDIT_STEPS = 16
_PORT_SECONDS = 10.0
_SETTLE_SECONDS = 1.0

_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_ordinals: dict[str, int] = {}
_exiting = False


@dataclasses.dataclass(frozen=True)
class EpochStatistics:
    """What became of one epoch.

    Attributes:
        epoch: The feed's number of the epoch, from 0, over all calls of `fit`.
        elements: Elements that the producer made.
        steps: Complete steps they make.
        dropped: Elements at the end that make no complete step.
        complete: Whether the epoch's end was reached.
        trained: Steps trained, by rank.
    """

    epoch: int
    elements: int
    steps: int
    dropped: int
    complete: bool
    trained: dict[int, int]


@dataclasses.dataclass
class _Reading:
    """What an iterator over a data socket reads, and how much of it the cursor has been told.

    Attributes:
        ticket: The iterator's.
        read: The number of its read.
        next: The first step that the cursor has not been told of.
        steps: How many steps it was told of.
    """

    ticket: Ticket
    read: int
    next: Position
    steps: int = 0


@dataclasses.dataclass(frozen=True)
class Source:
    """The user's dataset, ready to travel to the producer."""

    payload: bytes
    kind: str
    spec: str = ""
    modules: list[str] = dataclasses.field(default_factory=list)
    sources: dict[str, str] = dataclasses.field(default_factory=dict)

    def for_launch(self) -> dict[str, Any]:
        """What a `Launch` says of the dataset and of the script that it comes from."""
        return {
            "module_path": [path or os.getcwd() for path in sys.path],
            "payload": self.payload,
            "payload_kind": self.kind,
            "source_spec": self.spec,
            "script": getattr(sys.modules.get("__main__"), "__file__", None) or "",
            "modules": self.modules,
            "sources": self.sources,
        }


class Session:
    """One feed on this rank.

    Args:
        source: The dataset, or a function that makes it ready, called on the producer's rank only.
        options: What the user asked for; a callback may replace what was left open, before the first start.
        topology: The place of this rank, or `None` to find it at first use.
    """

    def __init__(self, source: Callable[[], Source], options: FeedOptions, topology: Topology | None):
        self._source = source
        self.options = options
        self._given_topology = topology
        self._topology: Topology | None = None
        self._lock = threading.RLock()
        self._closing = threading.Lock()
        self._ordinal = _ordinals.get(options.name, 0)
        _ordinals[options.name] = self._ordinal + 1
        # A process that this one forks must not close what is this one's.
        self.owner = os.getpid()
        self._run = 0
        self._store: rendezvous.Store | None = None
        self._supervisor: Supervisor | None = None
        self._quiet_check: QuietCheck | None = None
        self._meeting: rendezvous.Meeting = rendezvous.Meeting(None, "")
        self._connection: Connection | None = None
        self._seed = options.seed
        self._spec: Any = None
        self._cardinality = 0
        self._binds = 0
        self._last_epoch = NO_LAST_EPOCH
        self._segment: Segment | None = None
        self._cursor = Cursor(options.name)
        self._snapshot: tuple[Segment | None, Position, dict[int, int]] = (None, Position(0, 0), self._cursor.trained)
        self._peeked: Position | None = None
        self._peeked_read = 0
        # Whether steps come over data sockets: settled by the first connection, as the dataset is built for it.
        self._by_socket: bool | None = None
        self._feed: Feed | None = None
        self._ops: Any = None
        self._reading: _Reading | None = None
        self._read_wait: tuple[float, Wait] | None = None
        self._restored: FeedState | None = None
        # Asked on the producer's rank before the first start: which state this feed will be restored from, probably.
        # `fit` wants to know the dataset's structure before a callback can say so, and the producer would start twice.
        self.foresee: Callable[[Session], FeedState | None] | None = None
        self._elements = tf.data.UNKNOWN_CARDINALITY
        self._said_empty = False
        self._fingerprint = ""
        self._statistics: dict[int, EpochStatistics] = {}
        self.failure: FeedError | None = None
        interrupt.install()

    # ---- Start and end ----

    @property
    def name(self) -> str:
        """The feed's name."""
        return self.options.name

    @property
    def cursor(self) -> Cursor:
        """Where this rank's iterators start, and what they have pulled by now."""
        with self._lock:
            self._settle_pulls()
            return self._cursor

    @property
    def started(self) -> bool:
        """Whether the feed was ever started: settings that come later are too late."""
        return self._run > 0

    @property
    def running(self) -> bool:
        """Whether the feed is connected, or about to be."""
        return self._connection is not None

    @property
    def way(self) -> str:
        """How this rank's steps come, in words: "shared memory", "TCP" or "gRPC"; empty while the feed does not run."""
        connection = self._connection
        return connection.way if connection is not None and connection.ready else ""

    @property
    def producer_pid(self) -> int | None:
        """The process id of the producer, on the rank that started it."""
        return self._supervisor.pid if self._supervisor is not None else None

    def topology(self) -> Topology:
        """Returns the place of this rank, found out at the first call."""
        with self._lock:
            if self._topology is None:
                topology = self._given_topology or Topology.detect()
                if self.options.producer_rank >= topology.size:
                    raise ValueError(
                        f"feed {self.name!r}: producer must be a rank from 0 to {topology.size - 1}. "
                        f"Received: {self.options.producer_rank}"
                    )
                self._store = rendezvous.find_store(topology)
                self._topology = topology
            return self._topology

    def configure(self, **settings: Any) -> None:
        """Sets options that were left open; those that are `None` stay as they are.

        Raises:
            ValueError: An option has another value already.
            RuntimeError: The feed has started.
        """
        for name, value in settings.items():
            present = getattr(self.options, name)
            if value is None or value == present:
                continue
            if present is not None:
                raise ValueError(
                    f"feed {self.name!r}: {name} is {present} already, given to DataFeeder. Received: {value}"
                )
            if self.started:
                raise RuntimeError(
                    f"feed {self.name!r}: {name}={value} comes too late, the feed has started. Give it to DataFeeder"
                )
            self.options = dataclasses.replace(self.options, **{name: value})

    def meet(self) -> None:
        """Does what all ranks must do together where they build the feeder.

        They agree on the job's token, unless `KERASFEED_TOKEN` holds it; and where there is no store, by which they
        could find the producer one by one, they start it and learn its address.
        """
        topology = self.topology()
        if topology.size > 1:
            rendezvous.job_token(topology)
            if self._store is None:
                self.start()

    def start(self) -> None:
        """Starts the producer on its rank, and connects; does nothing while the feed runs.

        Raises:
            FeedError: The producer can't be started; the message says why.
        """
        with self._lock:
            if self._connection is not None:
                return
            if os.getpid() != self.owner:
                raise FeedClosedError(f"feed {self.name!r} can't be used in a process that was forked from its own")
            if _exiting:
                raise FeedClosedError(f"feed {self.name!r} can't start: the script is at its end")
            topology = self.topology()
            token = rendezvous.job_token(topology)
            self._run += 1
            self._warn_of_namesakes()
            _open_sessions.add(self)
            key = f"{self.name}.{self._ordinal}.{self._run}"
            if topology.meeting_dir is not None:
                # A folder may hold what an earlier job has left; a launcher's store is the job's own.
                key += f".{auth.job_mark(token)}"
            meeting = rendezvous.Meeting(self._store, key)
            if topology.rank == self.options.producer_rank:
                self._supervisor = self._start_producer(meeting, token, topology)
            self._meeting = meeting
            if self._store is None and topology.size > 1:
                rendezvous.meet_by_broadcast(meeting, topology, self.options.producer_rank, f"{self.name}.{self._run}")
            identity = Identity(
                feed=self.name,
                rank=topology.rank,
                size=topology.size,
                producer_rank=self.options.producer_rank,
                token=token,
                agreed=self.options.agreed(),
                credit_steps=max(2, min(self.options.prefetch_steps, _MAX_CREDIT_STEPS)),
                transport=self.options.transport,
            )
            self._binds = 0
            self._peeked = None
            snapshot = weakref.ref(self)

            def progress() -> tuple[Segment | None, Position, dict[int, int]]:
                session = snapshot()
                return session._snapshot if session is not None else (None, Position(0, 0), {})

            def open_stream() -> DataStream | None:
                session = snapshot()
                return session._open_stream() if session is not None else None

            def settle() -> None:
                session = snapshot()
                if session is not None:
                    session._settle_soon()

            by_grpc = self.options.transport == "grpc" or self._by_socket is False
            self._connection = Connection(
                identity, meeting.locate, progress, self.options.start_timeout, None if by_grpc else open_stream, settle
            )

    def _open_stream(self) -> DataStream | None:
        """Called by the connection's thread, without its lock."""
        from kerasfeed.native import engine as engines
        from kerasfeed.native.feed import Feed
        from kerasfeed.native.reader import Reader

        engine = engines.load()
        if engine is None:
            return None
        if self._feed is None:
            self._feed, self._ops = Feed(engine.library, self.name, self), engine.ops
            interrupt.register_feed(self._feed)
        return DataStream(self._feed, Reader(engine.library, self.options.free_bytes), self.name)

    def _warn_of_namesakes(self) -> None:
        for other in list(_open_sessions):
            if other is not self and other.name == self.name and other.running and other.topology() == self.topology():
                _LOG.warning(
                    "feed %r: another feeder of this name is in use. Ranks tell them apart only by the order in which "
                    "they were built: give each a name of its own, DataFeeder(..., name=...)",
                    self.name,
                )
                return

    def _start_producer(self, meeting: rendezvous.Meeting, token: bytes, topology: Topology) -> Supervisor:
        foreseen = self._foreseen() if self._run == 1 and self._restored is None else None
        state = foreseen or self._restored
        if foreseen is not None:
            self._seed = foreseen.seed
        if self._seed is None:
            self._seed = random.SystemRandom().randrange(2**31)
        if self._supervisor is not None and self.options.port:
            # The producer of the run before may still listen on the port that was asked for.
            self._supervisor.wait(_PORT_SECONDS)
        try:
            source = self._source()
            launch = Launch(
                options=self.options.to_json(),
                size=topology.size,
                token=token,
                seed=self._seed,
                host=rendezvous.listening_host(topology),
                port=self.options.port,
                counts=self._supervisor.counts if self._supervisor is not None else [],
                pass_lengths=self._supervisor.pass_lengths if self._supervisor is not None else {},
                **self._way_to(state),
                foreseen=foreseen.mark if foreseen is not None else "",
                **source.for_launch(),
            )
            supervisor = Supervisor(launch, meeting.publish, meeting.publish_failure)
            supervisor.start()
        except Exception as error:
            # The other ranks wait for an address: they must hear why there will be none.
            meeting.publish_failure(f"feed {self.name!r}: rank {topology.rank} can't start the producer: {error}")
            raise
        return supervisor

    def connection(self) -> Connection:
        """Returns the connection, started if need be, once the producer has built its pipeline."""
        with self._lock:
            self.start()
            connection = self._connection
            assert connection is not None
        welcome = connection.welcome()
        with self._lock:
            by_socket = connection.stream is not None
            if self._by_socket is None:
                self._by_socket = by_socket
            elif self._by_socket != by_socket:
                raise ProducerError(
                    f"feed {self.name!r}: its steps came over a data socket when it was started first, and now they "
                    "can't: build a new DataFeeder"
                )
            spec = spec_lib.decode_spec(welcome.spec)
            if self._spec is None:
                self._spec, self._cardinality = spec, welcome.cardinality
                self._elements = welcome.elements
                self._cursor.epoch_steps = welcome.cardinality if welcome.cardinality >= 0 else None
            elif spec_lib.encode_spec(self._spec) != welcome.spec:
                raise ProducerError(
                    f"feed {self.name!r}: dataset_fn now yields {spec}, but the dataset was built for {self._spec}"
                )
            self._fingerprint, self._seed = welcome.fingerprint, welcome.seed
            if not self._cardinality and welcome.elements > 0 and not self._said_empty:
                self._said_empty = True
                _LOG.warning(
                    "feed %r: an epoch has %d elements, which make no step for %d ranks: it is empty. Use smaller "
                    "batches, or fewer ranks",
                    self.name,
                    welcome.elements,
                    self.topology().size,
                )
            self._check_restored()
        return connection

    @property
    def element_spec(self) -> Any:
        """The structure of the producer's elements."""
        self.connection()
        return self._spec

    @property
    def cardinality(self) -> int:
        """Steps in a whole epoch, or tf.data's INFINITE or UNKNOWN cardinality."""
        self.connection()
        return self._cardinality

    def close(self, error: str = "") -> None:
        """Leaves the producer, which ends when all ranks have left. An error fails them, too.

        When it returns, the producer has been left, by this call or by one that was under way.
        """
        if os.getpid() != self.owner:
            return
        self.end_replay_check()
        with self._closing:
            with self._lock:
                if self._reading is not None and self.failure is None:
                    # Its op is told, but asks nobody any more: the script may be at its end.
                    self._failed(FeedClosedError(f"feed {self.name!r} was closed while an iterator was in use"))
                self._settle_pulls(void=True)
                connection, self._connection = self._connection, None
                self._unbind()
            if connection is None:
                return
            if not error:
                self._note_status(connection.status(_STATUS_SECONDS) if connection.ready else None)
            connection.close(error)
            supervisor = self._supervisor
            if supervisor is None:
                return
            # The producer lives on for ranks that are slower: they get what is complete, and then the same error.
            if supervisor.build_failed or (self.topology().size == 1 and not connection.left):
                supervisor.stop()

    def tell_late_ranks(self, error: str) -> None:
        """Lets ranks that look for the producer only now know why there is none."""
        if self._supervisor is not None:
            rank = self.topology().rank
            with contextlib.suppress(FeedError):
                self._meeting.publish_failure(f"feed {self.name!r}: rank {rank} has ended: {error}")

    # ---- Steps ----

    def open_iterator(self, direct: bool) -> Ticket:
        """An iterator pulls for the first time: settles where it starts, and asks for the steps from there on.

        Args:
            direct: Whether what is pulled is what the user gets: nothing in between pulls ahead.
        """
        try:
            connection = self._own_connection()
        except FeedError as error:
            self.failure = error
            raise
        with self._lock:
            self._settle_pulls(void=True)
            self.failure = None
            ticket = self._cursor.open()
            self._update()
            free = not self._cursor.bound
            if self._peeked == ticket.start and not ticket.through_epochs:
                self._peeked, read = None, self._peeked_read
            else:
                read = connection.read(
                    ticket.start, ticket.through_epochs, self._last_epoch, ticket.left, direct and free, free
                )
            if connection.stream is not None:
                self._reading = _Reading(ticket, read, ticket.start)
        return ticket

    def _settle_pulls(self, void: bool = False) -> None:
        """Tells the cursor what was pulled over the data socket since it was told last. With the lock held.

        Args:
            void: Whether nothing more may be pulled by that read.
        """
        reading, connection = self._reading, self._connection
        stream = connection.stream if connection is not None else None
        if reading is None or stream is None:
            return
        if void:
            stream.void()
            self._reading = None
        pulls = stream.pulls(reading.read)
        if pulls is None or reading.ticket.number != self._cursor.tickets:
            return
        count = pulls.steps - reading.steps
        # Where it has come to an epoch's end of which this session is not told yet, all of them are of that epoch.
        self._cursor.note_steps(reading.ticket, reading.next, count)
        reading.steps += count
        reading.next = Position(reading.next.epoch, reading.next.step + count)
        self._update()

    def _settle_soon(self) -> None:
        """For the connection's thread: whoever has the lock may wait for it."""
        if self._lock.acquire(timeout=_SETTLE_SECONDS):
            try:
                self._settle_pulls()
            finally:
                self._lock.release()

    # ---- What a dataset over a data socket asks, in TensorFlow's threads (kerasfeed.native.feed.Owner) ----

    def read_begins(self, direct: bool) -> int:
        """An iterator pulls for the first time. Returns the number of its read."""
        self.open_iterator(direct)
        reading = self._reading
        if reading is None:
            raise self._failed(FeedClosedError(f"feed {self.name!r} was closed while an iterator was in use"))
        return reading.read

    def read_comes_to_end(self, read: int, epoch: int, steps: int) -> bool:
        """A read has come to the end of an epoch. Returns whether it goes on with the next one."""
        with self._lock:
            self._settle_pulls()
            reading = self._reading
            if reading is None or reading.read != read or reading.ticket.number != self._cursor.tickets:
                raise self._void(reading)
            self._cursor.note_end(reading.ticket, epoch)
            reading.next = Position(epoch + 1, 0)
            self._update()
        self.report()
        return reading.ticket.through_epochs

    def read_waits(self, read: int, seconds: float, interrupted: bool) -> None:
        """A read has waited for `seconds` for its next step. Raises if it is not to wait on."""
        connection = self._connection
        if connection is None or connection.stream is None:
            raise self._void(self._reading)
        known = self._read_wait
        if known is None or known[0] > seconds:
            with self._lock:
                self._settle_pulls()
                step = self._reading.next if self._reading is not None else "its next step"
            known = (seconds, connection.begin_wait(f"{step}", seconds))
        self._read_wait = (seconds, known[1])
        try:
            known[1].raise_what_ends_it(interrupted)
        except FeedError as error:
            raise self._failed(error) from None
        if not connection.stream.connected:
            connection.renew()
        if known[1].notice_due:
            known[1].give_notice()

    def read_fails(self, read: int, kind: FailureKind | None, message: str) -> NoReturn:
        """There is no next step."""
        connection = self._connection
        if kind is None or connection is None or connection.stream is None:
            raise self._void(self._reading)
        raise self._failed(connection.stream.error(kind, message))

    def native_dataset(self, element_spec: Any, direct: bool) -> tf.data.Dataset:
        """Returns a dataset of the steps that come over a data socket.

        Args:
            element_spec: A structure of `tf.TensorSpec`.
            direct: Whether what is pulled is what the user gets.
        """
        from kerasfeed.native.dataset import FeedDataset

        assert self._feed is not None
        return FeedDataset(self._ops, self._feed, direct, element_spec)

    def _void(self, reading: _Reading | None) -> FeedError:
        """Returns what is raised where a read is void."""
        at = f"that started at {reading.ticket.start} " if reading is not None else ""
        return self._failed(
            FeedClosedError(
                f"feed {self.name!r}: an iterator {at}pulls again, after another one took its place. A feed can't be "
                "iterated twice at the same time; cache() it, or build a second feeder"
            )
        )

    def _failed(self, error: FeedError) -> FeedError:
        self.failure = error
        return error

    def pull(self, ticket: Ticket) -> Any | None:
        """Returns the next step's element as NumPy arrays, or `None` at the end of the epoch.

        Raises:
            FeedError: There is none; the message says why.
        """
        while True:
            try:
                connection = self._connection
                if connection is None:
                    raise FeedClosedError(f"feed {self.name!r} was closed while an iterator was in use")
                item = connection.next(lambda: self._cursor.check(ticket))
            except FeedError as error:
                self.failure = error
                raise
            with self._lock:
                if isinstance(item, Step):
                    self._cursor.note_step(ticket, item.position)
                else:
                    self._cursor.note_end(ticket, item.epoch)
                self._update()
            connection.report()
            if isinstance(item, Step):
                return item.value
            if not ticket.through_epochs:
                return None

    def _update(self) -> None:
        self._snapshot = (self._segment, self._cursor.acknowledged, self._cursor.trained)

    # ---- State ----

    def state(self, position: Position | None = None, again_after: int = 0) -> FeedState:
        """Returns what it takes to go on at `position` (default: what is trained) in another job.

        Args:
            position: The first step not trained.
            again_after: In how many steps it will be asked for again; 0 if that is not known.
        """
        connection = self._own_connection()
        with self._lock:
            self._settle_pulls()
            position = self._cursor.settle(self._cursor.acknowledged if position is None else position)
        place = connection.state(position, again_after)
        parts, at = {}, 0
        for part in place.parts:
            parts[part.name] = place.data[at : at + part.size]
            at += part.size
        with self._lock:
            segment = self._segment or Segment(steps_per_epoch=self.options.steps_per_epoch)
            assert self._seed is not None
            return FeedState(
                feed=self.name,
                pass_=getattr(place, "pass"),
                element=place.element,
                elements=self._elements,
                epoch=position.epoch,
                step=position.step,
                size=self.topology().size,
                policy=self.options.policy,
                remainder=self.options.remainder,
                steps_per_epoch=segment.steps_per_epoch,
                seed=self._seed,
                element_spec=spec_lib.encode_spec(self._spec).decode(),
                fingerprint=self._fingerprint,
                digest=place.digest,
                way=place.way,
                parts=parts,
            )

    def restore(self, state: FeedState) -> Position:
        """Goes on where `state` stood; returns where that is. A feed that runs is left, and starts again.

        Raises:
            StateError: The state is another feed's.
        """
        self.check(state)
        there = self._restored is None and self._foresaw(state)
        if not there:
            self.close()
        with self._lock:
            self._segment = self._segment_of(state)
            self._seed = state.seed
            self._restored = state
            if not there:
                # What an earlier producer counted belongs to another stream.
                self._supervisor = None
            self._statistics.clear()
            self._cursor.restore(self._segment.start)
            self._update()
            return self._segment.start

    def _foresaw(self, state: FeedState) -> bool:
        """Whether a producer is there, and has foreseen this state."""
        if not self.running:
            return False
        try:
            # All ranks must come to the same answer: one that has just connected waits.
            return self.connection().welcome().foreseen == state.mark
        except FeedError:
            return False

    def check(self, state: FeedState) -> None:
        """Compares a state with this feed; with its pipeline, too, once the producer has built that.

        Raises:
            StateError: The state is another feed's.
        """
        known, steps = self._spec is not None, self.options.steps_per_epoch
        state.check(
            feed=self.name,
            policy=self.options.policy,
            remainder=self.options.remainder,
            element_spec=spec_lib.encode_spec(self._spec).decode() if known else state.element_spec,
            fingerprint=self._fingerprint,
            seed=self.options.seed,
            steps_per_epoch=... if steps is None else steps,
        )

    def _check_restored(self) -> None:
        """Compares the pipeline with the one of the state that this feed was restored from."""
        if self._restored is not None:
            self.check(self._restored)

    def _way_to(self, state: FeedState | None) -> dict[str, Any]:
        """What a `Launch` says of the state that the feed goes on from."""
        if state is None:
            return {}
        return {
            "restored": [state.pass_, state.element, state.digest],
            "parts": dict(state.parts) if self.options.resume != "replay" else {},
            "segment": dataclasses.asdict(self._segment_of(state)),
        }

    def _segment_of(self, state: FeedState) -> Segment:
        size = self.topology().size
        step = schedule.resumed_step(
            state.element, state.step, state.elements, size, state.steps_per_epoch, size == state.size
        )
        return Segment(state.epoch, state.pass_, state.element, state.steps_per_epoch, step)

    def _foreseen(self) -> FeedState | None:
        try:
            state = self.foresee(self) if self.foresee is not None else None
            if state is not None:
                self.check(state)
        except Exception as error:
            # Whoever restores it will be told.
            _LOG.debug("feed %r: the state that is there can't be used: %s", self.name, error)
            return None
        return state

    def _own_connection(self) -> Connection:
        """Returns the connection to a producer that stands where this feed does.

        One that foresaw a state which was not restored starts again: on all ranks, as each finds that out.
        """
        connection = self.connection()
        if connection.welcome().foreseen and self._restored is None:
            _LOG.info("feed %r: goes on from no backup, the producer starts again", self.name)
            self.close()
            with self._lock:
                self._seed = self.options.seed
            connection = self.connection()
        return connection

    def check_replay(self) -> None:
        """Has it tried in the background whether the pipeline can be replayed; where that is of use, and once.

        That is on the producer's rank, in the first run of a feed that was not restored: there the producer has made
        the first elements of all.
        """
        # It stands above this module.
        from kerasfeed.quiet_check import QuietCheck

        with self._lock:
            supervisor, spec = self._supervisor, self._spec
            if not self.options.check_replay or supervisor is None or spec is None or self._connection is None:
                return
            if self._quiet_check is None and self._run == 1 and self._restored is None:
                self._quiet_check = QuietCheck(supervisor, spec_lib.encode_spec(spec).decode(), self._fingerprint)
                self._quiet_check.start()

    def end_replay_check(self) -> None:
        """Ends what `check_replay` began, if it still goes on."""
        if self._quiet_check is not None and os.getpid() == self.owner:
            self._quiet_check.stop()

    # ---- What a callback does ----

    def bind(self, steps_per_epoch: int | None, through_epochs: bool, epochs: int | None) -> Position:
        """A `fit` begins; returns where.

        Args:
            steps_per_epoch: What `fit` was given, if it keeps one iterator over its epochs; else `None`.
            through_epochs: Whether it keeps one iterator.
            epochs: How many epochs it will run at most, or `None` if that is not known.
        """
        connection = self._own_connection()
        with self._lock:
            self._settle_pulls(void=True)
            self._binds += 1
            binds, position = self._binds, self._cursor.acknowledged
            self._peeked = None
        segment, position = connection.bind(binds, position, steps_per_epoch)
        with self._lock:
            self._last_epoch = position.epoch + epochs if epochs is not None else NO_LAST_EPOCH
            self._segment = segment
            self._cursor.bind(position, through_epochs)
            self._cursor.epoch_steps = segment.steps_per_epoch
            if segment.steps_per_epoch is None and self._cardinality >= 0:
                self._cursor.epoch_steps = self._cardinality
            # A pass that begins at another element than its first has fewer steps, but only the producer knows how
            # many.
            size, elements, first = self.topology().size, self._elements, segment.origin_element
            rest = segment.first_step + schedule.steps_in(elements, size, first)
            irregular = segment.steps_per_epoch is None and first > 0
            # One that was restored has as many as every other.
            irregular = irregular and (elements < 0 or rest != schedule.steps_in(elements, size))
            self._cursor.irregular_epoch = segment.first_epoch if irregular else None
            self._statistics = {e: s for e, s in self._statistics.items() if e <= position.epoch}
            self._update()
        return position

    def begin_epoch(self) -> Position:
        """A Keras epoch begins; returns the position from which a new iterator will pull.

        Where only the producer knows whether the present epoch has more steps, it is asked.
        """
        connection = self.connection()
        with self._lock:
            self._settle_pulls(void=not self._cursor.through_epochs)
            self._cursor.begin_epoch()
            # A kept iterator hears of an epoch's end only with its next pull.
            start = self._cursor.settle(self._cursor.acknowledged)
            may_be_over = start.step > 0 or start.epoch == self._cursor.irregular_epoch
            if self._cursor.through_epochs or not may_be_over or self._cursor.steps_in(start.epoch) is not None:
                return start
            self._peeked_read = connection.read(start, False, self._last_epoch)
        item = connection.peek()
        with self._lock:
            if isinstance(item, End):
                self._cursor.skip_end(item.epoch)
                self._update()
            else:
                self._peeked = start
            return self._cursor.acknowledged

    def acknowledge(self, steps: int) -> int:
        """Says that `steps` more steps are trained. Returns how many of them were never pulled."""
        with self._lock:
            self._settle_pulls()
            excess = self._cursor.acknowledge(steps)
            self._update()
            connection = self._connection
        if connection is not None:
            connection.note_progress()
        return excess

    def end_epoch(self, stopped: bool) -> int:
        """A Keras epoch is over. Returns how many steps of it were pulled but not acknowledged.

        They count as trained if the epoch's end was pulled, too: then Keras used all that there was. Unless training
        `stopped`: then what was pulled ahead may not have been used, and what is not acknowledged is served again.
        """
        with self._lock:
            self._settle_pulls()
            if stopped or self._cursor.through_epochs or self._cursor.pulled.step:
                left = 0
            else:
                left = self._cursor.untrained
                self._cursor.acknowledge(left)
                self._update()
        self.report()
        return left

    def report(self) -> None:
        """Tells the producer what is trained, now rather than with the next pull."""
        connection = self._connection
        if connection is not None:
            connection.report()

    def unbind(self) -> None:
        """The `fit` is over."""
        with self._lock:
            self._settle_pulls(void=True)
            self._unbind()

    def _unbind(self) -> None:
        self._cursor.unbind()
        self._last_epoch = NO_LAST_EPOCH
        self._update()

    # ---- News ----

    def statistics(self) -> list[EpochStatistics]:
        """Returns what became of each epoch so far."""
        connection, supervisor = self._connection, self._supervisor
        with self._lock:
            self._settle_pulls()
        if connection is not None and connection.ready:
            self._note_status(connection.status(_STATUS_SECONDS))
        elif supervisor is not None:
            supervisor.wait(_STATUS_SECONDS)
            if supervisor.statistics is not None:
                self._note_status(feed_pb2.Status.FromString(supervisor.statistics))
        return [self._statistics[epoch] for epoch in sorted(self._statistics)]

    def _note_status(self, status: feed_pb2.Status | None) -> None:
        for e in status.epochs if status is not None else ():
            trained = {r.rank: r.trained for r in e.ranks}
            self._statistics[e.epoch] = EpochStatistics(e.epoch, e.elements, e.steps, e.dropped, e.complete, trained)


def close_in_background(session: Session) -> None:
    """Closes a session whose feeder is gone: from a thread of its own, since a collector may call this anywhere."""
    if session.running and not _exiting:
        threading.Thread(target=session.close, name=f"kerasfeed-close-{session.name}", daemon=True).start()


def _end_all() -> None:
    """At exit, while Python is still whole: releases waits, drops live iterators, ends producers."""
    global _exiting
    _exiting = True
    sessions = [session for session in list(_open_sessions) if session.owner == os.getpid()]
    # The interpreter keeps the exception that ended the script here.
    last = getattr(sys, "last_value", None)
    error = f"its script ended with an exception: {_in_one_line(last)}" if last is not None else ""
    for session in sessions:
        session.close(error)
    if sessions:
        _drop_iterators()
    end_all_producers(failed=bool(error))
    if error:
        for session in sessions:
            session.tell_late_ranks(error)


def _in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _drop_iterators() -> None:
    """Lets go of iterators over feeds: one that is alive when the interpreter is torn down can hang it."""
    from tensorflow.python.data.ops import iterator_ops

    from kerasfeed.feeder import FeedIterator, derives_from_feeder

    for thing in gc.get_objects():
        # Not isinstance: that would wake proxies of what is gone.
        kind = type(thing)
        if issubclass(kind, FeedIterator) or (
            issubclass(kind, iterator_ops.OwnedIterator) and derives_from_feeder(getattr(thing, "_dataset", None))
        ):
            thing._iterator_resource = None
    gc.collect()


atexit.register(_end_all)
