"""The committed protobuf code works under protobuf 7: run in an environment of its own, without TensorFlow."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import google.protobuf
import pytest

PROTO = Path(__file__).resolve().parents[2] / "kerasfeed" / "proto"


def _load():
    """Returns feed_pb2, loaded by its path: `import kerasfeed` would import TensorFlow."""
    spec = importlib.util.spec_from_file_location("feed_pb2", PROTO / "feed_pb2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pb = _load()

POSITION = {"epoch": 3, "step": 2**40}
SEGMENT = {"first_epoch": 1, "origin_pass": 2, "origin_element": 3, "steps_per_epoch": 4, "first_step": 5}
MESSAGES = {
    "Position": POSITION,
    "Segment": SEGMENT,
    "Hello": {"protocol": 1, "feed": "träin", "rank": 2, "nonce": b"\x00\xff" * 16},
    "Proof": {"proof": b"\x00p", "options": '{"name": "train"}', "segment": SEGMENT, "acknowledged": POSITION},
    "Read": {
        "reader": 7,
        "position": POSITION,
        "through_epochs": True,
        "credit_steps": 8,
        "credit_bytes": 2**33,
        "last_epoch": -1,
        "left": POSITION,
        "direct": True,
    },
    "Progress": {
        "reader": 7,
        "pulled": POSITION,
        "acknowledged": {"epoch": 3},
        "trained": {0: 51, 2**40: 2},
        "waiting": True,
    },
    "Bind": {"binding": 1, "position": POSITION, "steps_per_epoch": 5},
    "Leave": {"error": "Ctrl-C"},
    "AskStatus": {},
    "Challenge": {"nonce": b"n" * 32, "proof": b"p" * 32},
    "Welcome": {
        "spec": b"{}",
        "cardinality": -2,
        "seed": 2**31 - 1,
        "segment": SEGMENT,
        "elements": -1,
        "fingerprint": "ab12",
        "foreseen": "cd34",
        "data": ["unix:ab12", "tcp:4711"],
    },
    "Component": {"shape": [0, 2**33, 3], "offset": 64, "length": 12},
    "Chunk": {
        "reader": 1,
        "position": POSITION,
        "size": 2**33,
        "components": [{"shape": [2, 3], "offset": 8, "length": 24}, {"offset": 64, "length": 4}],
        "offset": 2**32,
        "data": bytes(range(256)),
    },
    "AskState": {"position": POSITION, "again_after": 500},
    "Part": {"name": "kept", "size": 2**33},
    "State": {
        "position": POSITION,
        "pass": 1,
        "element": 2,
        "digest": "0f",
        "way": "window",
        "parts": [{"name": "kept", "size": 2**33}, {"name": "empty"}],
        "offset": 2**32,
        "data": b"\x00\xff",
    },
    "End": {"reader": 1, "epoch": 2, "steps": 3},
    "Bound": {"binding": 1, "segment": SEGMENT, "position": POSITION},
    "Failure": {"kind": "REFUSED", "message": "no"},
    "RankStatistics": {"rank": 1, "trained": 51},
    "EpochStatistics": {
        "epoch": 1,
        "elements": 103,
        "steps": 51,
        "dropped": 1,
        "complete": True,
        "ranks": [{"rank": 2, "trained": 51}, {"rank": 1, "trained": 50}],
    },
    "Status": {"waiting_for": "rank 1 to use this feed", "epochs": [{"epoch": 1, "ranks": [{"rank": 1}]}]},
}
KINDS = {
    "RankMessage": {
        "hello": "Hello",
        "proof": "Proof",
        "read": "Read",
        "progress": "Progress",
        "bind": "Bind",
        "leave": "Leave",
        "ask_status": "AskStatus",
        "ask_state": "AskState",
    },
    "ProducerMessage": {
        "challenge": "Challenge",
        "welcome": "Welcome",
        "chunk": "Chunk",
        "end": "End",
        "bound": "Bound",
        "failure": "Failure",
        "status": "Status",
        "state": "State",
    },
}


def as_values(message):
    """Returns a message as a dictionary of what is set in it, written as in MESSAGES."""
    values = {}
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = dict(value)
        elif hasattr(value, "ListFields"):
            value = as_values(value)
        elif field.message_type is not None:
            value = [as_values(item) for item in value]
        elif field.enum_type is not None:
            value = field.enum_type.values_by_number[value].name
        elif not isinstance(value, (int, str, bytes)):
            value = list(value)
        values[field.name] = value
    return values


def travelled(message):
    return type(message).FromString(message.SerializeToString())


def test_this_environment_has_protobuf_7():
    assert google.protobuf.__version__.split(".")[0] == "7"


def test_tensorflow_is_not_needed():
    assert "tensorflow" not in sys.modules
    assert importlib.util.find_spec("tensorflow") is None


def test_no_message_is_forgotten_here():
    assert set(pb.DESCRIPTOR.message_types_by_name) == set(MESSAGES) | set(KINDS)


@pytest.mark.parametrize("name", MESSAGES)
def test_each_field_of_a_message_is_tried_and_travels(name):
    message = getattr(pb, name)(**MESSAGES[name])
    assert as_values(message) == MESSAGES[name]
    assert set(MESSAGES[name]) == {field.name for field in message.DESCRIPTOR.fields}
    assert travelled(message) == message
    assert as_values(travelled(message)) == MESSAGES[name]


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_with_nothing_set_travels(name):
    assert as_values(travelled(getattr(pb, name)())) == {}


@pytest.mark.parametrize(("envelope", "kind"), [(e, kind) for e, kinds in KINDS.items() for kind in kinds])
def test_an_envelope_says_which_message_it_holds(envelope, kind):
    inner = KINDS[envelope][kind]
    received = travelled(getattr(pb, envelope)(**{kind: getattr(pb, inner)(**MESSAGES[inner])}))
    assert received.WhichOneof("kind") == kind
    assert as_values(getattr(received, kind)) == MESSAGES[inner]


@pytest.mark.parametrize("envelope", KINDS)
def test_an_envelope_holds_one_message_and_no_kind_is_forgotten_here(envelope):
    message = getattr(pb, envelope)()
    assert message.WhichOneof("kind") is None
    kinds = [field.name for field in message.DESCRIPTOR.oneofs_by_name["kind"].fields]
    assert kinds == list(KINDS[envelope])
    for kind in kinds:
        getattr(message, kind).SetInParent()
        assert [field.name for field, _ in message.ListFields()] == [kind]


def test_an_unset_message_can_be_told_from_one_of_zeros():
    assert not travelled(pb.Proof()).HasField("segment")
    assert travelled(pb.Proof(segment=pb.Segment())).HasField("segment")


def test_a_map_is_changed_like_a_dictionary():
    progress = pb.Progress(trained={1: 2})
    progress.trained[5] = 6
    progress.trained.update({1: 3})
    assert dict(travelled(progress).trained) == {1: 3, 5: 6}


def test_failure_kinds_have_the_numbers_of_the_proto():
    assert dict(pb.Failure.Kind.items()) == {"PRODUCER": 0, "RANKS": 1, "REFUSED": 2, "MISMATCH": 3}
