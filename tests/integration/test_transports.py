"""The ways across, seen by users: each rank finds its own, all bring the same, and what breaks is put right.

With the native engine, which these tests need.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import struct

import pytest
import tensorflow as tf
from helpers import by_value, together, wait_until

import kerasfeed

by_value(__name__)

WAYS = {"shm": "shared memory", "tcp": "TCP", "grpc": "gRPC"}
LENGTH = 60


@pytest.fixture(autouse=True)
def native_engine(monkeypatch):
    monkeypatch.setenv("KERASFEED_ENGINE", "native")


def varied():
    """Elements of sizes from none to 300 KB, strings, ragged and sparse tensors."""

    def element(index):
        numbers = tf.range(tf.cast(index % 7, tf.int32) * 10_000, dtype=tf.int32)
        return {
            "id": index,
            "numbers": numbers,
            "words": tf.strings.as_string(numbers[: tf.minimum(50, tf.size(numbers))]),
            "ragged": tf.RaggedTensor.from_row_lengths(tf.range(6, dtype=tf.int64) * index, [1, 0, 3, 2]),
            "sparse": tf.sparse.from_dense([index, tf.constant(0, tf.int64), index + 1]),
            "flag": index % 2 == 0,
        }

    return tf.data.Dataset.range(LENGTH).map(element)


def check_element(element, index):
    assert int(element["id"]) == index
    numbers = tf.range(index % 7 * 10_000)
    tf.debugging.assert_equal(element["numbers"], numbers)
    assert element["words"].numpy().tolist() == [str(n).encode() for n in numbers.numpy()[:50]]
    assert element["ragged"].to_list() == [[0], [], [index, 2 * index, 3 * index], [4 * index, 5 * index]]
    assert tf.sparse.to_dense(element["sparse"]).numpy().tolist() == [index, 0, index + 1]
    assert bool(element["flag"]) == (index % 2 == 0)


def consume(feeder, rank, size, epochs=1):
    """Checks every element of some epochs; returns the way they came."""
    for _ in range(epochs):
        count = 0
        for step, element in enumerate(feeder):
            check_element(element, step * size + rank)
            count += 1
        assert count == LENGTH // size
    return feeder.session.way


@pytest.mark.parametrize(
    "transports", [("shm", "shm"), ("tcp", "tcp"), ("grpc", "grpc"), ("shm", "tcp", "grpc")], ids="-".join
)
def test_ranks_get_the_same_whichever_way_it_comes(make_ranks, transports):
    size = len(transports)
    feeders = make_ranks(size, varied, per_rank=[{"transport": transport} for transport in transports])
    outcomes = together(*(lambda r=r: consume(feeders[r], r, size, epochs=2) for r in range(size)))
    assert [outcome.result() for outcome in outcomes] == [WAYS[transport] for transport in transports]
    trained = feeders[0].statistics()[0].trained
    for feeder in feeders:
        feeder.close()
    assert feeders[0].statistics()[0].trained == dict.fromkeys(range(size), LENGTH // size), trained


def test_the_way_that_was_found_is_logged(make_feeder, caplog):
    with caplog.at_level(logging.INFO, logger="kerasfeed"):
        feeder = make_feeder(varied)
        assert consume(feeder, 0, 1) == "shared memory"
    assert "feed 'train': rank 0 gets its steps over shared memory" in caplog.text


def test_a_rank_of_the_python_engine_is_served_over_grpc(make_ranks, monkeypatch):
    feeders = make_ranks(2, varied)
    assert feeders[0].element_spec is not None  # The producer runs, with the native engine.
    first = feeders[0].session.way
    monkeypatch.setenv("KERASFEED_ENGINE", "python")
    outcomes = together(lambda: consume(feeders[0], 0, 2), lambda: consume(feeders[1], 1, 2))
    assert [outcome.result() for outcome in outcomes] == [first, "gRPC"] == ["shared memory", "gRPC"]


def test_a_producer_of_the_python_engine_serves_all_over_grpc(make_ranks, monkeypatch):
    monkeypatch.setenv("KERASFEED_ENGINE", "python")
    feeders = make_ranks(2, varied)
    assert feeders[0].element_spec is not None
    monkeypatch.setenv("KERASFEED_ENGINE", "native")
    outcomes = together(lambda: consume(feeders[0], 0, 2), lambda: consume(feeders[1], 1, 2))
    assert [outcome.result() for outcome in outcomes] == ["gRPC", "gRPC"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_way_that_is_not_to_be_had_is_an_error_that_says_why(make_feeder, monkeypatch, transport):
    monkeypatch.setenv("KERASFEED_ENGINE", "python")
    feeder = make_feeder(varied, transport=transport)
    with pytest.raises(kerasfeed.FeedError, match=f"transport='{transport}' .*does not run the native engine"):
        next(iter(feeder))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_data_socket_that_breaks_is_replaced_and_nothing_is_lost(make_ranks, transport):
    feeders = make_ranks(2, varied, transport=transport)

    def broken(rank):
        ids = []
        for element in feeders[rank]:
            ids.append(int(element["id"]))
            if len(ids) in (3, 11, 12) and rank == 1:
                # As a switch between the hosts may do; the control plane lives on.
                feeders[1].session.connection().stream._reader.detach()
        return ids

    outcomes = together(lambda: broken(0), lambda: broken(1))
    assert [outcome.result() for outcome in outcomes] == [list(range(rank, LENGTH, 2)) for rank in range(2)]


def endless():
    return tf.data.Dataset.from_tensors(tf.zeros([100_000])).repeat()


def test_tensors_that_are_kept_do_not_hold_up_the_feed(make_feeder):
    # More than all shared memory that the producer may have.
    feeder = make_feeder(endless, steps_per_epoch=200, max_buffer_bytes=8 << 20, transport="shm")
    kept = list(feeder)
    assert len(kept) == 200
    assert all(float(tf.reduce_sum(tensor)) == 0 for tensor in kept)


def frame(kind, payload):
    return struct.pack("<IIQ", kind, 0, len(payload)) + payload


def strangers_words():
    """What somebody may say who is no rank of the job."""
    hello = struct.pack("<q", 0) + secrets.token_bytes(32)
    yield b""
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield secrets.token_bytes(4096)
    yield frame(1, hello)
    yield frame(1, hello[:-1])
    yield struct.pack("<IIQ", 1, 0, 1 << 62)
    yield frame(10, bytes(64))


def test_strangers_on_the_data_sockets_are_turned_away_and_harm_nobody(make_ranks):
    feeders = make_ranks(2, varied)
    welcome = feeders[0].session.connection().welcome()
    unix, tcp = (address.partition(":")[2] for address in welcome.data)
    strangers = []
    for words in strangers_words():
        for family, address in ((socket.AF_UNIX, f"\0{unix}"), (socket.AF_INET, ("127.0.0.1", int(tcp)))):
            stranger = socket.socket(family)
            stranger.settimeout(30)
            stranger.connect(address)
            stranger.sendall(words)
            strangers.append((stranger, words))
    outcomes = together(lambda: consume(feeders[0], 0, 2), lambda: consume(feeders[1], 1, 2))
    assert [outcome.result() for outcome in outcomes] == ["shared memory"] * 2
    for stranger, words in strangers:
        # Nothing is said to them; who says nothing himself may stay for a while.
        with stranger, contextlib.suppress(ConnectionResetError):
            assert not words or not stranger.recv(1)


def test_a_proof_serves_once(make_feeder, monkeypatch):
    feeder = make_feeder(varied)
    iterator = iter(feeder)
    check_element(next(iterator), 0)
    connection = feeder.session.connection()
    name = connection.welcome().data[0].partition(":")[2]
    from kerasfeed import auth

    mine, _ = auth.data_proofs(connection._identity.token, "train", 0, connection._nonces)
    with socket.socket(socket.AF_UNIX) as again:
        again.settimeout(30)
        again.connect(f"\0{name}")
        again.sendall(frame(1, struct.pack("<q", 0) + mine))
        assert not again.recv(1)
    for index in range(1, LENGTH):
        check_element(next(iterator), index)


def shared_memory():
    """Returns what of the feeds' shared memory is mapped here: how it may be used, by its address."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        lines = [line.split() for line in maps if "memfd:kerasfeed (" in line]
    return {line[0]: line[1] for line in lines}


def test_memory_that_is_shared_has_no_name_and_goes_with_its_users(make_feeder):
    before = shared_memory()
    feeder = make_feeder(endless, steps_per_epoch=1_000_000)
    iterator = iter(feeder)
    kept = [next(iterator) for _ in range(20)]
    mapped = {address: use for address, use in shared_memory().items() if address not in before}
    # Read-only: a rank can't spoil what others may get.
    assert set(mapped.values()) == {"r--s"}
    feeder.close()
    assert float(tf.reduce_sum(kept[0])) == 0
    del kept, iterator
    wait_until(lambda: not set(shared_memory()) & set(mapped), what="shared memory to be unmapped")
