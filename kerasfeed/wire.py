"""What both ends of the gRPC stream share: its name, its settings, and messages <-> values."""

from __future__ import annotations

from typing import Any

from kerasfeed.proto import feed_pb2
from kerasfeed.schedule import Position, Segment

PROTOCOL = 3
SERVICE = "kerasfeed.Feed"
METHOD = "Attend"
CHUNK_BYTES = 2 << 20

# Messages are bounded by CHUNK_BYTES plus a header; a proxy for the outside world must not catch traffic between ranks.
_COMMON: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", 2 * CHUNK_BYTES),
    ("grpc.max_receive_message_length", 2 * CHUNK_BYTES),
]
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON,
    ("grpc.enable_http_proxy", 0),
    # A producer that restarts listens on the same address: ask again soon, and not through a shared dead channel.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A producer whose host is gone would be waited for forever. A rank that is silent is only slow: its launcher knows.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 60_000),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON,
    # Without this a second server could listen on a taken port, and ranks would reach either.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
]


def position_message(position: Position) -> feed_pb2.Position:
    """Returns a position as a message."""
    return feed_pb2.Position(epoch=position.epoch, step=position.step)


def position_of(message: feed_pb2.Position) -> Position:
    """Returns a message as a position."""
    return Position(message.epoch, message.step)


def segment_message(segment: Segment) -> feed_pb2.Segment:
    """Returns a segment as a message."""
    return feed_pb2.Segment(
        first_epoch=segment.first_epoch,
        origin_pass=segment.origin_pass,
        origin_element=segment.origin_element,
        steps_per_epoch=segment.steps_per_epoch or 0,
        first_step=segment.first_step,
    )


def segment_of(message: feed_pb2.Segment) -> Segment:
    """Returns a message as a segment."""
    return Segment(
        message.first_epoch,
        message.origin_pass,
        message.origin_element,
        message.steps_per_epoch or None,
        message.first_step,
    )
