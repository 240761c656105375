"""The producer's gRPC service: one conversation per rank, from the proof of the token to the last step.

A conversation has two threads: gRPC's own, in which the rank's messages arrive, and the one that sends. The first tells
the window what the rank said and puts replies into the outbox; the second sends the outbox and what the window hands
out. A rank that connects again takes the place of its earlier conversation.

With the native engine a rank may fetch its elements over a data socket: it is let in there for as long as its
conversation lasts. The window hands out each step once, so only one of both asks it: the conversation, from the moment
when the rank reads here, or the data socket.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, Protocol

import grpc

from kerasfeed import auth, wire
from kerasfeed.producer.way_back import WayBack
from kerasfeed.producer.window import BindError, Delivery, EpochEnd, Failure, FailureKind, Window
from kerasfeed.proto import feed_pb2

_PROOF_SECONDS = 10.0
_POLL_SECONDS = 0.5
_SPARE_WORKERS = 16
_MAX_MESSAGE = 100_000

_FAILURE_KINDS = {
    FailureKind.PRODUCER: feed_pb2.Failure.PRODUCER,
    FailureKind.MISMATCH: feed_pb2.Failure.MISMATCH,
    FailureKind.RANKS: feed_pb2.Failure.RANKS,
}


class DataSockets(Protocol):
    """Where ranks may fetch their elements without this service (`kerasfeed.native.server.Server`)."""

    addresses: list[str]

    def admit(self, rank: int, expected: bytes, answer: bytes) -> None:
        """This rank may connect, once, with the proof `expected`, and is answered with `answer`."""

    def dismiss(self, rank: int) -> None:
        """What this rank has there ends: nothing that it says is heard any more."""


@dataclasses.dataclass(frozen=True)
class StateKeeper:
    """What belongs into a feed's state beside its position.

    Attributes:
        digest_before: Called with (pass, element, first): returns the digest of a pass's elements from `first` to
            `element`; empty if it is not known.
        way_back: How a later job gets to a position.
    """

    digest_before: Callable[[int, int, int], str]
    way_back: WayBack


class FeedService:
    """Answers ranks; at first only that the pipeline is being built, then from the window.

    Args:
        feed: The feed's name.
        size: Number of ranks.
        token: The job's token.
        agreed: The options that each rank must have given too.
        log: Called with each warning.
    """

    def __init__(self, feed: str, size: int, token: bytes, agreed: dict[str, Any], log: Callable[[str], None] = print):
        self._log = log
        self._feed = feed
        self._size = size
        self._token = token
        self._agreed = agreed
        self._state = threading.Condition()
        self._window: Window | None = None
        self._welcome: feed_pb2.Welcome | None = None
        self._keeper: StateKeeper | None = None
        self._data: DataSockets | None = None
        self._failure: str | None = None
        self._mismatch: str | None = None
        self._conversations: dict[int, _Conversation] = {}

    def start(self, host: str, port: int) -> tuple[grpc.Server, int]:
        """Starts to listen; returns the server and the port.

        Raises:
            OSError: The port is taken, or the address is not this host's.
        """
        server = grpc.server(
            futures.ThreadPoolExecutor(2 * self._size + _SPARE_WORKERS, thread_name_prefix="kerasfeed-serve"),
            options=wire.SERVER_OPTIONS,
        )
        handler = grpc.stream_stream_rpc_method_handler(
            self._attend,
            request_deserializer=feed_pb2.RankMessage.FromString,
            response_serializer=feed_pb2.ProducerMessage.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, {wire.METHOD: handler}),))
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            bound = 0
            cause: Exception | None = error
        else:
            cause = None
        if not bound:
            raise OSError(f"can't listen on {host}:{port}: is the port taken?") from cause
        server.start()
        return server, bound

    def ready(
        self, window: Window, welcome: feed_pb2.Welcome, keeper: StateKeeper, data: DataSockets | None = None
    ) -> None:
        """The pipeline is built: ranks are let in.

        Args:
            window: Where steps come from.
            welcome: What is said to each rank.
            keeper: What belongs into a feed's state.
            data: Where ranks may fetch their elements; `None`: only here.
        """
        with self._state:
            self._window, self._welcome, self._keeper, self._data = window, welcome, keeper, data
            if self._mismatch is not None:
                window.refuse(self._mismatch)
            self._state.notify_all()

    def _refuse_all(self, message: str) -> None:
        """The ranks don't fit together: all that are here, or come, are told."""
        with self._state:
            self._mismatch = self._mismatch or message
            if self._window is not None:
                self._window.refuse(message)

    def failed(self, message: str) -> None:
        """The pipeline can't be built: every rank that comes is told."""
        with self._state:
            self._failure = message
            self._state.notify_all()

    def _attend(
        self, requests: Iterator[feed_pb2.RankMessage], context: grpc.ServicerContext
    ) -> Iterator[feed_pb2.ProducerMessage]:
        watchdog = threading.Timer(_PROOF_SECONDS, context.cancel)
        watchdog.daemon = True
        watchdog.start()
        try:
            rank, proof, nonces = yield from self._authenticate(requests)
        finally:
            watchdog.cancel()
        if proof is None:
            return
        difference = self._difference(json.loads(proof.options))
        if difference:
            message = f"rank {rank} built this feed otherwise: {difference}"
            self._refuse_all(message)
            yield _failure(feed_pb2.Failure.RANKS, message)
            return
        with self._state:
            while self._window is None and self._failure is None and context.is_active():
                self._state.wait(_POLL_SECONDS)
            window, welcome, failure = self._window, self._welcome, self._failure
        if failure is not None:
            yield _failure(feed_pb2.Failure.PRODUCER, failure)
            return
        if window is None or welcome is None or self._keeper is None:
            return
        data = self._data
        conversation = _Conversation(rank, window, self._keeper, context, serves=data is None)
        segment = wire.segment_of(proof.segment) if proof.HasField("segment") else None
        with self._state:
            earlier = self._conversations.get(rank)
            if earlier is not None:
                earlier.end()
            if data is not None:
                data.dismiss(rank)
            try:
                window.attend(rank, wire.position_of(proof.acknowledged), segment)
            except BindError as error:
                window.refuse(str(error))
            self._conversations[rank] = conversation
            if data is not None:
                data.admit(rank, *auth.data_proofs(self._token, self._feed, rank, nonces))
        reply = feed_pb2.Welcome()
        reply.CopyFrom(welcome)
        reply.segment.CopyFrom(wire.segment_message(window.segment))
        reply.data.extend(data.addresses if data is not None else ())
        try:
            yield feed_pb2.ProducerMessage(welcome=reply)
            yield from conversation.talk(requests)
        finally:
            conversation.end()
            with self._state:
                if self._conversations.get(rank) is conversation:
                    del self._conversations[rank]
                    if data is not None:
                        data.dismiss(rank)
                    window.disconnected(rank)

    def _authenticate(
        self, requests: Iterator[feed_pb2.RankMessage]
    ) -> Any:  # a generator of messages that returns (rank, Proof or None, both nonces)
        hello = next(requests).hello
        if hello.protocol != wire.PROTOCOL:
            text = f"the producer speaks protocol {wire.PROTOCOL}, rank {hello.rank} protocol {hello.protocol}"
            yield _failure(feed_pb2.Failure.REFUSED, text + ": install the same kerasfeed everywhere")
            return hello.rank, None, ()
        if hello.feed != self._feed or not 0 <= hello.rank < self._size or len(hello.nonce) < auth.NONCE_BYTES:
            text = f"this is the producer of feed {self._feed!r} for {self._size} ranks"
            yield _failure(feed_pb2.Failure.REFUSED, f"{text}, not of feed {hello.feed!r} for rank {hello.rank}")
            return hello.rank, None, ()
        nonce = auth.new_nonce()
        conversation = (self._feed, hello.rank, hello.nonce, nonce)
        challenge = feed_pb2.Challenge(nonce=nonce, proof=auth.prove(self._token, "producer", *conversation))
        yield feed_pb2.ProducerMessage(challenge=challenge)
        proof = next(requests).proof
        if not auth.proven(auth.prove(self._token, "rank", *conversation), proof.proof):
            text = f"rank {hello.rank} does not know this job's token (KERASFEED_TOKEN must be the same on all ranks)"
            self._log(f"refused: {text}")
            yield _failure(feed_pb2.Failure.REFUSED, text)
            return hello.rank, None, ()
        return hello.rank, proof, (hello.nonce, nonce)

    def _difference(self, options: dict[str, Any]) -> str:
        found = [
            f"{name}={options.get(name)!r} instead of {value!r}"
            for name, value in self._agreed.items()
            if options.get(name) != value
        ]
        return ", ".join(found)


class _Conversation:
    """What is said with one rank over one connection."""

    def __init__(self, rank: int, window: Window, keeper: StateKeeper, context: grpc.ServicerContext, serves: bool):
        self._rank = rank
        # Whether steps are sent here: at once, or when the rank reads here.
        self._serves = serves
        self._told = False
        self._changed = threading.Condition()
        self._window = window
        self._keeper = keeper
        self._context = context
        self._outbox: collections.deque[feed_pb2.ProducerMessage] = collections.deque()
        self._over = False
        self._hearing = threading.Lock()

    def end(self) -> None:
        """Lets both threads come to an end. What the rank said is heard until now, and no more."""
        with self._hearing:
            self._over = True
        self._wake()

    def _wake(self) -> None:
        self._window.wake(self._rank)
        with self._changed:
            self._changed.notify_all()

    def talk(self, requests: Iterator[feed_pb2.RankMessage]) -> Iterator[feed_pb2.ProducerMessage]:
        listener = threading.Thread(
            target=self._listen, args=(requests,), name=f"kerasfeed-listen-{self._rank}", daemon=True
        )
        listener.start()
        if not self._context.add_callback(self.end):
            return
        while not self._over:
            while self._outbox:
                yield self._outbox.popleft()
            if not self._serves:
                yield from self._failure()
                continue
            item = self._window.wait_for_item(self._rank, self._interrupted)
            if isinstance(item, Failure):
                yield _failure(_FAILURE_KINDS[item.kind], item.message)
            elif isinstance(item, EpochEnd):
                end = feed_pb2.End(reader=item.reader, epoch=item.epoch, steps=item.steps)
                yield feed_pb2.ProducerMessage(end=end)
            elif isinstance(item, Delivery):
                yield from _chunks(item)

    def _failure(self) -> Iterator[feed_pb2.ProducerMessage]:
        """Waits for something to say, and yields what makes all steps void, once.

        A rank hears of that on its data socket, too, but only when it reads.
        """
        failure = None if self._told else self._window.broken()
        if failure is not None:
            self._told = True
            yield _failure(_FAILURE_KINDS[failure.kind], failure.message)
        with self._changed:
            if not self._interrupted() and not self._serves:
                self._changed.wait(_POLL_SECONDS)

    def _interrupted(self) -> bool:
        return self._over or bool(self._outbox)

    def _reply(self, message: feed_pb2.ProducerMessage) -> None:
        self._outbox.append(message)
        self._wake()

    def _listen(self, requests: Iterator[feed_pb2.RankMessage]) -> None:
        try:
            for message in requests:
                with self._hearing:
                    if self._over:
                        return
                    self._hear(message)
        except grpc.RpcError:
            pass
        except Exception as error:  # gRPC raises bare exceptions when the stream breaks
            if self._context.is_active():
                self._reply(_failure(feed_pb2.Failure.RANKS, f"a message of rank {self._rank} is wrong: {error}"))
        else:
            self.end()

    def _hear(self, message: feed_pb2.RankMessage) -> None:
        kind = message.WhichOneof("kind")
        rank, window = self._rank, self._window
        if kind == "read":
            read = message.read
            self._serves = True
            position = wire.position_of(read.position)
            window.read(
                rank,
                read.reader,
                position,
                read.through_epochs,
                read.credit_steps,
                read.credit_bytes,
                read.last_epoch,
                wire.position_of(read.left) if read.HasField("left") else None,
                read.direct,
            )
            self._wake()
        elif kind == "progress":
            p = message.progress
            pulled, acknowledged = wire.position_of(p.pulled), wire.position_of(p.acknowledged)
            window.progress(rank, p.reader, pulled, acknowledged, dict(p.trained), p.waiting)
        elif kind == "bind":
            self._bind(message.bind)
        elif kind == "leave":
            window.leave(rank, message.leave.error)
        elif kind == "ask_status":
            self._reply(feed_pb2.ProducerMessage(status=status_message(window, rank)))
        elif kind == "ask_state":
            for state in self._states(message.ask_state):
                self._reply(feed_pb2.ProducerMessage(state=state))
        else:
            raise ValueError(f"a {kind} message is not expected here")

    def _states(self, ask: feed_pb2.AskState) -> Iterator[feed_pb2.State]:
        """Yields the answer, in pieces where it has parts."""
        position = wire.position_of(ask.position)
        pass_, element = self._window.locate(position)
        keeper = self._keeper
        keeper.way_back.plan((pass_, element), ask.again_after * self._window.size)
        # It may have planned for a place that is still to come, or for none.
        self._window.wake_pump()
        waypoint = keeper.way_back.find(
            (pass_, element), position, self._window.wake_pump, lambda: not self._context.is_active()
        )
        way, parts = "replay", {}
        if waypoint is not None:
            way, parts = waypoint.way, waypoint.to_parts()
            if waypoint.place[1] < element:
                parts["skipped"] = keeper.digest_before(pass_, element, waypoint.place[1]).encode()
        data = b"".join(parts.values())
        place: dict[str, Any] = {"position": ask.position, "pass": pass_, "element": element, "way": way}
        place["digest"] = keeper.digest_before(pass_, element, 0)
        place["parts"] = [feed_pb2.Part(name=name, size=len(part)) for name, part in parts.items()]
        for offset in range(0, max(1, len(data)), wire.CHUNK_BYTES):
            yield feed_pb2.State(offset=offset, data=data[offset : offset + wire.CHUNK_BYTES], **place)

    def _bind(self, bind: feed_pb2.Bind) -> None:
        try:
            segment, position = self._window.bind(
                self._rank,
                bind.binding,
                wire.position_of(bind.position),
                bind.steps_per_epoch or None,
            )
        except BindError as error:
            self._window.refuse(str(error))
            return
        bound = feed_pb2.Bound(
            binding=bind.binding, segment=wire.segment_message(segment), position=wire.position_message(position)
        )
        self._reply(feed_pb2.ProducerMessage(bound=bound))


def status_message(window: Window, rank: int) -> feed_pb2.Status:
    """Returns what the window can say about itself."""
    epochs = [
        feed_pb2.EpochStatistics(
            epoch=epoch,
            elements=count.elements,
            steps=count.steps,
            dropped=count.dropped,
            complete=count.complete,
            ranks=[feed_pb2.RankStatistics(rank=r, trained=steps) for r, steps in trained.items()],
        )
        for epoch, count, trained in window.statistics()
    ]
    return feed_pb2.Status(waiting_for=window.waiting_for(rank), epochs=epochs)


def _failure(kind: Any, message: str) -> feed_pb2.ProducerMessage:
    if len(message) > _MAX_MESSAGE:
        message = f"{message[: _MAX_MESSAGE // 2]}\n[...]\n{message[-_MAX_MESSAGE // 2 :]}"
    return feed_pb2.ProducerMessage(failure=feed_pb2.Failure(kind=kind, message=message))


def _chunks(item: Delivery) -> Iterator[feed_pb2.ProducerMessage]:
    offset = 0
    for data in item.element.chunks(wire.CHUNK_BYTES):
        chunk = feed_pb2.Chunk(
            reader=item.reader, position=wire.position_message(item.position), offset=offset, data=data
        )
        if offset == 0:
            chunk.size = item.element.size
            chunk.components.extend(
                feed_pb2.Component(shape=c.shape, offset=c.offset, length=c.length) for c in item.element.components
            )
        yield feed_pb2.ProducerMessage(chunk=chunk)
        offset += len(data)
