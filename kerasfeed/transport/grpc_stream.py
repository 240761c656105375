"""A rank's connection to the producer: one gRPC stream, opened again whenever it breaks.

One thread, the receiver, owns the channel: it finds the producer, proves the token, and puts what arrives into the
reader's queue. Whoever pulls waits on that queue. After a break the receiver asks again from the first step that the
queue does not hold, so that nothing is lost and nothing comes twice, whoever died meanwhile.

With the native engine steps come over a data socket (`data_socket.py`), to which the receiver connects each time that
the producer has let it in: reads and what is trained are said there, and all else here.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
import numpy as np

from kerasfeed import auth, interrupt, spec, wire
from kerasfeed.errors import FeedClosedError, FeedError, FeedInterrupted, ProducerError, RankError, ReplayMismatchError
from kerasfeed.proto import feed_pb2
from kerasfeed.rendezvous import Address
from kerasfeed.schedule import Position, Segment
from kerasfeed.transport.data_socket import NATIVE_TRANSPORTS, DataStream, data_addresses
from kerasfeed.transport.items import End, Step

_LOG = logging.getLogger("kerasfeed")
_FIRST_NOTICE_SECONDS = 30.0
_NOTICE_SECONDS = 60.0
_POLL_SECONDS = 0.5
_RETRY_SECONDS = 0.2
_STORE_POLL_SECONDS = 0.1
_LOST_SECONDS = 60.0
_CREDIT_BYTES = 64 << 20
_SYNC_SECONDS = 5.0
# A producer that died has to be back before it can be told.
_LEAVE_SECONDS = 60.0
_FAILED_LEAVE_SECONDS = 5.0
_LEAVE_NOTICE_SECONDS = 5.0

_T = TypeVar("_T")

_ERRORS: dict[int, type[FeedError]] = {
    feed_pb2.Failure.PRODUCER: ProducerError,
    feed_pb2.Failure.RANKS: RankError,
    feed_pb2.Failure.REFUSED: FeedError,
    feed_pb2.Failure.MISMATCH: ReplayMismatchError,
}


@dataclasses.dataclass(frozen=True)
class Identity:
    """Who this rank is, and what it asks the feed to be."""

    feed: str
    rank: int
    size: int
    producer_rank: int
    token: bytes
    agreed: dict[str, Any]
    credit_steps: int
    transport: str


_Item = Step | End | FeedError


class _Reader:
    """One read: where it stands, and what has arrived for it."""

    def __init__(
        self,
        number: int,
        position: Position,
        through_epochs: bool,
        last_epoch: int,
        left: Position | None,
        direct: bool,
    ):
        self.number = number
        self.next = position
        self.through_epochs = through_epochs
        self.last_epoch = last_epoch
        # Said until an answer shows that the producer has heard it.
        self.left = left
        self.direct = direct
        self.waiting = False
        self.items: collections.deque[_Item] = collections.deque()
        self.block: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self.components: list[spec.Component] = []
        self.received = 0


class Connection:
    """The connection of one rank to one run of one feed's producer.

    Args:
        identity: Who this rank is.
        locate: Returns where the producer listens, or `None` while that is not known; raises when it never will be.
        progress: Returns (segment, acknowledged, trained steps by epoch) at once, without waiting for any lock.
        start_timeout: Seconds to wait for the producer to be started.
        open_stream: Makes the stream for steps over a data socket, or returns `None` if that can't be; `None` itself
            if steps are to come over gRPC.
        settle: Brings what `progress` returns up to date, and may wait for locks for a moment.
    """

    def __init__(
        self,
        identity: Identity,
        locate: Callable[[], Address | None],
        progress: Callable[[], tuple[Segment | None, Position, dict[int, int]]],
        start_timeout: float,
        open_stream: Callable[[], DataStream | None] | None = None,
        settle: Callable[[], None] = lambda: None,
    ):
        self._identity = identity
        self._open_stream = open_stream
        self._settle = settle
        self._stream: DataStream | None = None
        self._locate = locate
        self._progress = progress
        self._start_timeout = start_timeout
        self._changed = threading.Condition()
        interrupt.register(self._changed)
        self._outgoing: queue.SimpleQueue[feed_pb2.RankMessage | None] | None = None
        # Any: the types that come with gRPC don't know that a call is an iterator that can be cancelled.
        self._call: Any = None
        self._welcome: feed_pb2.Welcome | None = None
        self._elements: spec.ElementReader | None = None
        self._reader: _Reader | None = None
        self._readers = 0
        self._bind: feed_pb2.Bind | None = None
        self._bound: feed_pb2.Bound | None = None
        self._status: feed_pb2.Status | None = None
        self._statuses = 0
        self._state: feed_pb2.State | None = None
        self._ask: feed_pb2.AskState | None = None
        self._error: FeedError | None = None
        self._closed = False
        self._leaving = False
        self._left = False
        self._leave_error = ""
        self._leave_deadline = 0.0
        self._seen = 0.0
        self._where: Address | None = None
        self._nonces = (b"", b"")
        self._way = ""
        self._doing = "to start"
        self._thread = threading.Thread(target=self._run, name=f"kerasfeed-receive-{identity.feed}", daemon=True)
        self._thread.start()

    # ---- What the session calls ----

    def welcome(self) -> feed_pb2.Welcome:
        """Waits until the producer has built its pipeline, and returns what it says about it."""
        return self._wait("the producer to build its pipeline", lambda: self._welcome)

    def elements(self) -> spec.ElementReader:
        """Returns the reader of elements that fits the producer's spec."""
        self.welcome()
        assert self._elements is not None
        return self._elements

    @property
    def stream(self) -> DataStream | None:
        """Where steps come from if they come over a data socket."""
        return self._stream

    @property
    def way(self) -> str:
        """How steps come, in words: "shared memory", "TCP" or "gRPC"."""
        return self._way or "gRPC"

    def read(
        self,
        position: Position,
        through_epochs: bool,
        last_epoch: int,
        left: Position | None = None,
        direct: bool = False,
        free: bool = False,
    ) -> int:
        """Asks for the steps from `position` on. What an earlier read has in flight is dropped. Returns its number.

        Args:
            position: The first step to get.
            through_epochs: Whether to read on after the epoch's end.
            last_epoch: The first epoch that `fit` will not run, or `NO_LAST_EPOCH`.
            left: Where this rank left an epoch before its end, if it goes on with a later one.
            direct: Whether what is pulled is what the user gets.
            free: Whether a step counts as trained when the next one is pulled.
        """
        if self._stream is not None:
            _, acknowledged, trained = self._progress()
            self._stream.acknowledge(acknowledged, _recent(trained, acknowledged))
            credit = (self._identity.credit_steps, _CREDIT_BYTES)
            return self._stream.read(position, through_epochs, *credit, last_epoch, left, direct, free)
        with self._changed:
            self._readers += 1
            self._reader = _Reader(self._readers, position, through_epochs, last_epoch, left, direct)
            self._send_read()
            return self._readers

    def next(self, cancelled: Callable[[], None]) -> Step | End:
        """Waits for the next item of the present read.

        Args:
            cancelled: Called while waiting; raises if the wait is to be given up.

        Raises:
            FeedError: There will be no next item; the message says why.
        """
        reader = self._reader
        if reader is None:
            raise FeedClosedError(f"feed {self._identity.feed!r} was closed while an iterator was in use")

        def arrived() -> _Item | None:
            cancelled()
            if reader.items:
                reader.waiting = False
                return reader.items.popleft()
            if not reader.waiting:
                reader.waiting = True
                self._send_progress(waiting=True)
            return None

        item = self._wait(f"{reader.next}", arrived)
        assert isinstance(item, (Step, End, FeedError))
        if isinstance(item, FeedError):
            # The error is final: whoever asks again gets it again.
            reader.items.appendleft(item)
            raise type(item)(str(item))
        return item

    def peek(self) -> Step | End:
        """Waits for the next item of the present read, and leaves it for `next`."""
        if self._stream is not None:
            return self._peek(self._stream)
        reader = self._reader
        assert reader is not None
        item = self._wait(f"{reader.next}", lambda: reader.items[0] if reader.items else None)
        assert isinstance(item, (Step, End, FeedError))
        if isinstance(item, FeedError):
            raise type(item)(str(item))
        return item

    def _peek(self, stream: DataStream) -> Step | End:
        wait = self.begin_wait("the first step")
        while (item := stream.peek(_POLL_SECONDS)) is None:
            wait.check()
        if isinstance(item, FeedError):
            raise item
        return item

    @property
    def ready(self) -> bool:
        """Whether the producer has let this rank in."""
        return self._welcome is not None

    def report(self) -> None:
        """Tells the producer how far this rank has come."""
        if self._stream is not None:
            self._stream.acknowledge(*self._recent_progress())
            self._stream.flush()
            return
        with self._changed:
            self._send_progress(waiting=False)

    def note_progress(self) -> None:
        """More is trained: where steps come over a data socket the producer hears of it, soon."""
        if self._stream is not None:
            self._stream.acknowledge(*self._recent_progress())

    def bind(self, number: int, position: Position, steps_per_epoch: int | None) -> tuple[Segment, Position]:
        """Says that a `fit` begins; returns (segment, position) when that is settled."""
        with self._changed:
            self._reader = None
            self._bound = None
            self._bind = feed_pb2.Bind(
                binding=number,
                position=wire.position_message(position),
                steps_per_epoch=steps_per_epoch or 0,
            )
            self._send(bind=self._bind)
        bound = self._wait("the producer to begin a fit", lambda: self._bound)
        with self._changed:
            self._bind = None
        return wire.segment_of(bound.segment), wire.position_of(bound.position)

    def status(self, timeout: float) -> feed_pb2.Status | None:
        """Returns what the producer says about itself, or `None` if it does not answer in `timeout` seconds."""
        deadline = time.monotonic() + timeout
        if self._stream is not None:
            self._stream.sync(timeout)
        with self._changed:
            before = self._statuses
            self._send(ask_status=feed_pb2.AskStatus())
            while self._statuses == before and self._error is None and not self._closed:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    return None
            return self._status if self._statuses != before else None

    def state(self, position: Position, again_after: int) -> feed_pb2.State:
        """Returns what the producer knows of the stream at `position`; it is to be asked again in so many steps."""

        def whole() -> feed_pb2.State | None:
            state = self._state
            return state if state is not None and len(state.data) >= sum(part.size for part in state.parts) else None

        with self._changed:
            self._state = None
            self._ask = feed_pb2.AskState(position=wire.position_message(position), again_after=again_after)
            self._send(ask_state=self._ask)
        state = self._wait(f"what the producer knows of {position}", whole)
        with self._changed:
            self._ask = None
        return state

    def close(self, error: str = "") -> None:
        """Takes leave of the producer and ends the receiver. Waits that are under way raise `FeedClosedError`."""
        stream = self._stream
        if stream is not None and not error:
            # What is said of the same over gRPC comes later, then.
            stream.sync(_SYNC_SECONDS)
        with self._changed:
            if self._closed:
                return
            self._closed, self._leave_error = True, error
            patience = _FAILED_LEAVE_SECONDS if error else _LEAVE_SECONDS
            self._leave_deadline = time.monotonic() + patience
            if self._outgoing is not None:
                self._take_leave(self._outgoing)
            self._changed.notify_all()
        if stream is not None:
            stream.close()
        if self._thread is threading.current_thread():
            return
        if self._welcome is not None:
            self._thread.join(_LEAVE_NOTICE_SECONDS)
            if self._thread.is_alive() and time.monotonic() < self._leave_deadline:
                me = self._identity
                _LOG.warning("feed %r: rank %d waits to take leave of the producer, which is down", me.feed, me.rank)
                self._thread.join(max(0.0, self._leave_deadline - time.monotonic()))
        # Whoever was not let in yet, or can't reach the producer, hangs up.
        while self._thread.is_alive():
            call = self._call
            if call is not None:
                call.cancel()
            self._thread.join(_POLL_SECONDS)

    @property
    def left(self) -> bool:
        """Whether the producer knows that this rank has left."""
        return self._left

    def _take_leave(self, outgoing: queue.SimpleQueue[Any]) -> None:
        self._send_progress(waiting=False, all_epochs=True)
        self._send(leave=feed_pb2.Leave(error=self._leave_error))
        # The end of the requests is sent after all of them: when it has heard them, the producer ends the stream.
        self._leaving = True
        outgoing.put(None)

    # ---- Waiting ----

    def _wait(self, what: str, ready: Callable[[], _T | None]) -> _T:
        wait = self.begin_wait(what)
        while True:
            with self._changed:
                while (result := ready()) is None:
                    wait.raise_what_ends_it()
                    if wait.notice_due:
                        break
                    self._changed.wait(_POLL_SECONDS)
                else:
                    return result
            wait.give_notice()

    def begin_wait(self, what: str, seconds: float = 0.0) -> Wait:
        """Somebody waits for `what`, for so many seconds by now, and will ask the wait whether it is worth it."""
        return Wait(self, what, seconds)

    def renew(self) -> None:
        """The data socket is broken: ends the conversation that it belongs to, so that another begins at once."""
        with self._changed:
            # Else another is about to begin, and will bring a data socket of its own.
            call = self._call if self._outgoing is not None else None
        if call is not None:
            call.cancel()

    def _recent_progress(self) -> tuple[Position, dict[int, int]]:
        _, acknowledged, trained = self._progress()
        return acknowledged, _recent(trained, acknowledged)

    # ---- Sending (with the lock held) ----

    def _send(self, **kind: Any) -> None:
        if self._outgoing is not None:
            self._outgoing.put(feed_pb2.RankMessage(**kind))

    def _send_read(self) -> None:
        reader = self._reader
        if reader is not None and self._welcome is not None:
            self._send(
                read=feed_pb2.Read(
                    left=wire.position_message(reader.left) if reader.left is not None else None,
                    reader=reader.number,
                    position=wire.position_message(reader.next),
                    through_epochs=reader.through_epochs,
                    credit_steps=max(1, self._identity.credit_steps - len(reader.items)),
                    credit_bytes=_CREDIT_BYTES,
                    last_epoch=reader.last_epoch,
                    direct=reader.direct,
                )
            )

    def _send_progress(self, waiting: bool, all_epochs: bool = False) -> None:
        reader = self._reader
        if self._welcome is None:
            return
        _, acknowledged, trained = self._progress()
        if not all_epochs:
            trained = _recent(trained, acknowledged)
        pulled = Position(0, 0)
        if reader is not None:
            first = reader.items[0] if reader.items else None
            if isinstance(first, Step):
                pulled = first.position
            else:
                pulled = Position(first.epoch, first.steps) if isinstance(first, End) else reader.next
        self._send(
            progress=feed_pb2.Progress(
                reader=reader.number if reader is not None else 0,
                pulled=wire.position_message(pulled),
                acknowledged=wire.position_message(acknowledged),
                trained=trained,
                waiting=waiting,
            )
        )

    # ---- The receiver's thread ----

    def _run(self) -> None:
        try:
            self._receive()
        except Exception as error:
            self._fail(FeedError(f"feed {self._identity.feed!r}: {type(error).__name__}: {error}"))

    def _receive(self) -> None:
        began = time.monotonic()
        while not self._closed or self._must_take_leave():
            try:
                address, trouble = self._locate(), ""
            except ProducerError as error:
                self._fail(error)
                return
            except FeedError as error:
                address, trouble = None, f" ({error})"
            if address is None:
                self._doing = f"rank {self._identity.producer_rank} to start the producer{trouble}"
                if time.monotonic() - began >= self._start_timeout:
                    self._fail(
                        RankError(
                            f"feed {self._identity.feed!r}: rank {self._identity.producer_rank} has not started the "
                            f"producer within {self._start_timeout:g} s{trouble}. "
                            "All ranks must build and use the same feeders, "
                            f"with the same {auth.TOKEN_VARIABLE}"
                        )
                    )
                    return
                self._pause(_STORE_POLL_SECONDS)
                continue
            self._where, where = address, f"{address.host}:{address.port}"
            self._seen = self._seen or time.monotonic()
            self._doing = f"the producer at {where} to answer"
            try:
                self._converse(where)
            except FeedError as error:
                self._fail(error)
                return
            except grpc.RpcError as error:
                broke = f"{error.code().name}: {error.details()}" if hasattr(error, "code") else str(error)
                self._doing = f"the producer at {where} to answer ({broke})"
            if time.monotonic() - self._seen >= _LOST_SECONDS:
                self._fail(
                    ProducerError(
                        f"feed {self._identity.feed!r}: the producer of rank {self._identity.producer_rank} could not "
                        f"be reached at {where} for {_LOST_SECONDS:.0f} s ({self._doing})"
                    )
                )
                return
            self._pause(_RETRY_SECONDS)

    def _must_take_leave(self) -> bool:
        """Whether the producer knows this rank, which was closed while the connection was down."""
        return self._welcome is not None and not self._left and time.monotonic() < self._leave_deadline

    def _pause(self, seconds: float) -> None:
        with self._changed:
            if not self._closed:
                self._changed.wait(seconds)

    def _fail(self, error: FeedError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
        if self._stream is not None:
            self._stream.alert()

    def _converse(self, where: str) -> None:
        """Talks with the producer until the stream ends."""
        outgoing: queue.SimpleQueue[feed_pb2.RankMessage | None] = queue.SimpleQueue()
        with grpc.insecure_channel(where, options=wire.CHANNEL_OPTIONS) as channel:
            attend = channel.stream_stream(
                f"/{wire.SERVICE}/{wire.METHOD}",
                request_serializer=feed_pb2.RankMessage.SerializeToString,
                response_deserializer=feed_pb2.ProducerMessage.FromString,
            )
            call: Any = attend(iter(outgoing.get, None))
            self._call = call
            try:
                self._nonces = self._prove(call, outgoing)
                for message in call:
                    self._seen = time.monotonic()
                    self._hear(message, outgoing)
                self._left = self._leaving
            finally:
                # How long the producer can't be reached counts from here, however long it had nothing to say.
                self._seen = time.monotonic() if self._doing == "" else self._seen
                with self._changed:
                    self._outgoing = None
                    self._call = None
                    self._leaving = False
                outgoing.put(None)
                call.cancel()

    def _prove(self, call: Iterator[feed_pb2.ProducerMessage], outgoing: queue.SimpleQueue[Any]) -> tuple[bytes, bytes]:
        """Returns both nonces of this conversation."""
        me, nonce = self._identity, auth.new_nonce()
        hello = feed_pb2.Hello(protocol=wire.PROTOCOL, feed=me.feed, rank=me.rank, nonce=nonce)
        outgoing.put(feed_pb2.RankMessage(hello=hello))
        message = _next(call)
        self._raise_failure(message)
        conversation = (me.feed, me.rank, nonce, message.challenge.nonce)
        if not auth.proven(auth.prove(me.token, "producer", *conversation), message.challenge.proof):
            raise FeedError(
                f"feed {me.feed!r}: what listens there does not know this job's token, so it is not this job's "
                f"producer, or {auth.TOKEN_VARIABLE} differs from rank to rank"
            )
        self._settle()
        segment, acknowledged, _ = self._progress()
        proof = feed_pb2.Proof(
            proof=auth.prove(me.token, "rank", *conversation),
            options=json.dumps({**me.agreed, "size": me.size}),
            acknowledged=wire.position_message(acknowledged),
        )
        if segment is not None:
            proof.segment.CopyFrom(wire.segment_message(segment))
        self._doing = "the producer to build its pipeline (dataset_fn)"
        outgoing.put(feed_pb2.RankMessage(proof=proof))
        return nonce, message.challenge.nonce

    def _raise_failure(self, message: feed_pb2.ProducerMessage) -> None:
        if message.WhichOneof("kind") == "failure":
            failure = message.failure
            raise _ERRORS[failure.kind](f"feed {self._identity.feed!r}: {failure.message}")

    def _hear(self, message: feed_pb2.ProducerMessage, outgoing: queue.SimpleQueue[Any]) -> None:
        kind = message.WhichOneof("kind")
        if kind == "failure" and self._outgoing is None:
            self._raise_failure(message)
        if kind == "welcome":
            self._connect_stream(message.welcome)
        with self._changed:
            if kind == "welcome":
                self._let_in(message.welcome, outgoing)
            elif kind == "chunk":
                self._take_chunk(message.chunk)
            elif kind == "end":
                reader = self._reader
                if reader is not None and reader.number == message.end.reader:
                    reader.items.append(End(message.end.epoch, message.end.steps))
                    reader.left = None
                    reader.next = Position(message.end.epoch + 1, 0)
            elif kind == "bound":
                if self._bind is not None and message.bound.binding == self._bind.binding:
                    self._bound = message.bound
            elif kind == "status":
                self._status, self._statuses = message.status, self._statuses + 1
            elif kind == "state":
                piece = message.state
                if self._ask is not None and piece.position == self._ask.position:
                    if piece.offset == 0:
                        self._state = piece
                    elif self._state is not None and piece.offset == len(self._state.data):
                        self._state.data += piece.data
            elif kind == "failure":
                error = _ERRORS[message.failure.kind](f"feed {self._identity.feed!r}: {message.failure.message}")
                if self._reader is not None:
                    self._reader.items.append(error)
                else:
                    self._error = error
            self._changed.notify_all()
        if self._error is not None and self._stream is not None:
            self._stream.alert()

    def _connect_stream(self, welcome: feed_pb2.Welcome) -> None:
        """Connects to the data socket, if steps are to come over it.

        Raises:
            FeedError: The user asked for what can't be, or the producer is another one than it was.
            grpc.RpcError: It could be the next time.
        """
        me, first = self._identity, self._welcome is None
        if first and self._open_stream is not None and welcome.data:
            self._stream = self._open_stream()
        if self._stream is None:
            if first and me.transport in NATIVE_TRANSPORTS:
                why = "it does not run the native engine" if not welcome.data else "this rank has not the native engine"
                raise FeedError(f"feed {me.feed!r}: transport={me.transport!r} is not to be had of the producer: {why}")
            return
        if not welcome.data:
            raise ProducerError(f"feed {me.feed!r}: the restarted producer does not run the native engine")
        assert self._where is not None
        addresses = data_addresses(welcome.data, self._where.host, me.transport)
        proofs = auth.data_proofs(me.token, me.feed, me.rank, self._nonces)
        try:
            way = self._stream.connect(addresses, me.rank, proofs)
        except ConnectionError as error:
            if not first:
                raise grpc.RpcError(f"its data socket: {error}") from None
            if me.transport in NATIVE_TRANSPORTS:
                raise FeedError(f"feed {me.feed!r}: transport={me.transport!r} does not work: {error}") from None
            _LOG.warning("feed %r: rank %d gets its steps over gRPC, which is slower: %s", me.feed, me.rank, error)
            self._stream.close()
            self._stream = None
            return
        if way != self._way:
            _LOG.info("feed %r: rank %d gets its steps over %s", me.feed, me.rank, way)
            self._way = way

    def _let_in(self, welcome: feed_pb2.Welcome, outgoing: queue.SimpleQueue[Any]) -> None:
        if self._elements is None:
            self._elements = spec.ElementReader(spec.decode_spec(welcome.spec))
        elif self._welcome is not None and self._welcome.spec != welcome.spec:
            raise ProducerError(
                f"feed {self._identity.feed!r}: the restarted producer's elements have another structure: "
                f"{spec.decode_spec(welcome.spec)} instead of {spec.decode_spec(self._welcome.spec)}"
            )
        self._welcome = welcome
        self._outgoing = outgoing
        self._doing = ""
        if self._bind is not None:
            self._send(bind=self._bind)
        if self._ask is not None:
            self._send(ask_state=self._ask)
        if self._reader is not None:
            self._reader.block = None
            self._send_read()
        self._send_progress(waiting=self._reader is not None and self._reader.waiting, all_epochs=True)
        if self._closed and not self._left:
            self._take_leave(outgoing)

    def _take_chunk(self, chunk: feed_pb2.Chunk) -> None:
        reader = self._reader
        if reader is None or reader.number != chunk.reader or self._elements is None:
            return
        position = wire.position_of(chunk.position)
        if chunk.offset == 0:
            reader.block, reader.received = spec.aligned_buffer(chunk.size), 0
            reader.components = [spec.Component(tuple(c.shape), c.offset, c.length) for c in chunk.components]
        block = reader.block
        end = chunk.offset + len(chunk.data)
        if block is None or position != reader.next or chunk.offset != reader.received or end > block.size:
            raise FeedError(
                f"feed {self._identity.feed!r}: a piece of {position} at byte {chunk.offset} came, "
                f"byte {reader.received} of {reader.next} was expected"
            )
        block[chunk.offset : end] = np.frombuffer(chunk.data, np.uint8)
        reader.received = end
        if end == block.size:
            try:
                value = self._elements.decode(reader.components, block)
            except ValueError as error:
                raise FeedError(f"feed {self._identity.feed!r}: {position} does not fit its spec: {error}") from error
            reader.items.append(Step(position, value))
            reader.left = None
            reader.block = None
            reader.next = Position(position.epoch, position.step + 1)


class Wait:
    """A wait for something of a producer: says why it is given up, and, when it is long, what it waits for.

    Args:
        connection: To the producer.
        what: What is waited for, in words.
        seconds: For how long, by now.
    """

    def __init__(self, connection: Connection, what: str, seconds: float):
        self._connection = connection
        self._what = what
        self._began = time.monotonic() - seconds
        self._notice = self._began + _FIRST_NOTICE_SECONDS
        self._interrupts = interrupt.count()

    def check(self) -> None:
        """Raises what ends the wait, if something does, and gives notice if that is due."""
        self.raise_what_ends_it()
        if self.notice_due:
            self.give_notice()

    def raise_what_ends_it(self, interrupted: bool = False) -> None:
        """Raises the `FeedError` that ends the wait, if there is one."""
        connection = self._connection
        feed = connection._identity.feed
        if connection._error is not None:
            raise type(connection._error)(str(connection._error))
        if connection._closed:
            raise FeedClosedError(f"feed {feed!r} was closed while it waited for {self._what}")
        if interrupted or interrupt.count() != self._interrupts:
            raise FeedInterrupted(f"feed {feed!r}: Ctrl-C while waiting for {self._what}")

    @property
    def notice_due(self) -> bool:
        """Whether it has waited so long that the user should know."""
        return time.monotonic() >= self._notice

    def give_notice(self) -> None:
        """Logs what it waits for. Not to be called with the connection's lock held."""
        connection, now = self._connection, time.monotonic()
        doing = connection._doing
        connected = connection._welcome is not None and doing == ""
        status = connection.status(_POLL_SECONDS) if connected else None
        reason = status.waiting_for if status is not None else doing or "the producer, which does not answer"
        _LOG.warning(
            "feed %r: rank %d has waited %.0f s for %s; it waits for %s",
            connection._identity.feed,
            connection._identity.rank,
            now - self._began,
            self._what,
            reason,
        )
        self._notice = time.monotonic() + _NOTICE_SECONDS


def _recent(trained: dict[int, int], acknowledged: Position) -> dict[int, int]:
    """Returns the counts that may have changed since they were said last."""
    recent = range(acknowledged.epoch - 1, acknowledged.epoch + 2)
    return {epoch: trained[epoch] for epoch in recent if epoch in trained}


def _next(call: Iterator[feed_pb2.ProducerMessage]) -> feed_pb2.ProducerMessage:
    try:
        return next(call)
    except StopIteration:
        raise grpc.RpcError("it hung up") from None
