"""A feed state comes back as it was, is refused when damaged or strange, and says why it does not fit a feed."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasfeed import state as state_module
from kerasfeed.errors import FeedError, StateError
from kerasfeed.state import FeedState

pytestmark = pytest.mark.once

FIXTURE = pathlib.Path(__file__).parent / "data" / "feed_state_v1.bin"
FIELDS = {
    "feed": "train",
    "pass_": 3,
    "element": 1000,
    "elements": 1200,
    "epoch": 4,
    "step": 500,
    "size": 2,
    "policy": "round_robin",
    "remainder": "drop",
    "steps_per_epoch": None,
    "seed": 7,
    "element_spec": "TensorSpec(shape=(None, 28), dtype=tf.float32, name=None)",
    "fingerprint": "ab12",
    "digest": "0f" * 32,
    "way": "replay",
}
FIT = {name: FIELDS[name] for name in ("feed", "policy", "remainder", "element_spec", "fingerprint")}
whole = st.integers(0, 2**63 - 1)
hexes = st.binary(max_size=64).map(bytes.hex)
states = st.builds(
    FeedState,
    feed=st.text(min_size=1),
    pass_=whole,
    element=whole,
    elements=st.integers(-2, 2**63 - 1),
    epoch=whole,
    step=whole,
    size=st.integers(1, 2**63 - 1),
    policy=st.sampled_from(["round_robin", "split", "broadcast", "dynamic"]),
    remainder=st.sampled_from(["drop", "pad", "keep"]),
    steps_per_epoch=st.none() | st.integers(1, 2**63 - 1),
    seed=st.integers(0, 2**31 - 1),
    element_spec=st.text(max_size=3000),
    fingerprint=hexes,
    digest=hexes,
    way=st.sampled_from(["snapshot", "window"]),
    parts=st.dictionaries(st.text(max_size=9), st.binary(max_size=200), max_size=4),
)


def make(**changes):
    return FeedState(**{**FIELDS, **changes})


def with_json(change, data=None):
    """Returns a state's bytes after `change` of its JSON, as another program would have written them."""
    data = make().to_bytes() if data is None else data
    version, size = struct.unpack_from(">IQ", data, 49)
    text = change(data[61 : 61 + size])
    return sealed(struct.pack(">IQ", version, len(text)) + text + data[61 + size :])


def with_fields(**changes):
    def change(text):
        return json.dumps({**json.loads(text), **changes}).encode()

    return with_json(change)


def sealed(body):
    return struct.pack(">9sQ32s", b"KFSTATE\r\n", 49 + len(body), hashlib.sha256(body).digest()) + body


@given(state=states)
def test_a_state_comes_back_from_its_bytes(state):
    back = FeedState.from_bytes(state.to_bytes())
    assert back == state
    assert list(back.parts) == list(state.parts)
    assert back.to_bytes() == state.to_bytes()


def test_a_state_of_version_1_is_readable_for_good():
    state = FeedState.from_bytes(FIXTURE.read_bytes())
    assert dataclasses.asdict(state) == {
        "feed": "träin",
        "pass_": 3,
        "element": 19000,
        "elements": 60000,
        "epoch": 9,
        "step": 500,
        "size": 2,
        "policy": "round_robin",
        "remainder": "drop",
        "steps_per_epoch": 1000,
        "seed": 2147483647,
        "element_spec": "(TensorSpec(shape=(None, 28, 28), dtype=tf.uint8, name=None), "
        "TensorSpec(shape=(None,), dtype=tf.int64, name=None))",
        "fingerprint": "00112233445566778899aabbccddeeff",
        "digest": "fe" * 32,
        "way": "window",
        "parts": {"elements": bytes(range(256)), "empty": b"", "iterator": b"\x00iterator\r\n"},
        "version": 1,
    }


def test_bytes_of_a_state_do_not_depend_on_the_order_of_its_parts():
    there = make(way="window", parts={"a": b"1", "b": b"2"})
    back = make(way="window", parts={"b": b"2", "a": b"1"})
    assert there.to_bytes() == back.to_bytes()


def test_a_state_cut_off_at_any_byte_is_refused():
    data = make(way="snapshot", parts={"iterator": bytes(100)}).to_bytes()
    assert len(data) > 500
    for length in range(len(data)):
        with pytest.raises(StateError, match=r"feed state: .*it was cut off"):
            FeedState.from_bytes(data[:length])


def test_a_state_with_any_flipped_bit_is_refused():
    data = make(way="snapshot", parts={"iterator": bytes(20)}).to_bytes()
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            with pytest.raises(StateError, match=r"feed state: .*damaged"):
                FeedState.from_bytes(bytes(damaged))


@pytest.mark.parametrize("more", [b"\0", b"\n", b"more"])
def test_a_state_with_something_behind_it_is_refused(more):
    data = make().to_bytes() + more
    with pytest.raises(StateError, match=rf"must have {len(data) - len(more)} bytes. Received: {len(data)}: something"):
        FeedState.from_bytes(data)


def test_what_is_no_state_is_refused_as_such():
    with pytest.raises(StateError, match="not a feed state"):
        FeedState.from_bytes(b"\x80\x04pickle" * 20)
    with pytest.raises(StateError, match="not a feed state"):
        FeedState.from_bytes(make().to_bytes().replace(b"\r\n", b"\n", 1) + b"\0")


def test_a_newer_version_is_refused_with_the_version_that_is_read():
    with pytest.raises(StateError, match=r"reads version 1. Received: version 2. Update kerasfeed"):
        FeedState.from_bytes(sealed(struct.pack(">I", 2) + b"in a way that only version 2 knows"))


def test_a_field_that_a_later_release_adds_is_ignored():
    assert FeedState.from_bytes(with_fields(host="node7", more={"a": [1]})) == make()


@pytest.mark.parametrize("name", [*(name for name in FIELDS if name != "pass_"), "pass", "parts"])
def test_a_missing_field_is_named(name):
    def change(text):
        fields = json.loads(text)
        del fields[name]
        return json.dumps(fields).encode()

    with pytest.raises(StateError, match=f"the field '{name}' is missing"):
        FeedState.from_bytes(with_json(change))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("element", -1),
        ("element", "3"),
        ("size", 0),
        ("policy", ["split"]),
        ("seed", float("inf")),
        ("parts", 3),
        ("parts", [["a", 1]]),
        ("parts", [["a", -1], ["b", 1]]),
        ("parts", [["a", None]]),
        ("parts", [[["a"], 0]]),
        ("parts", [["a", float("nan")]]),
    ],
)
def test_a_wellformed_state_with_a_wrong_value_is_refused(name, value):
    with pytest.raises(StateError, match="not as this release writes it"):
        FeedState.from_bytes(with_fields(**{"way": "window", name: value}))


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b"9" * 5000])
def test_a_sealed_state_without_proper_json_is_refused(text):
    with pytest.raises(StateError, match="feed state: "):
        FeedState.from_bytes(with_json(lambda _: text))


@pytest.mark.parametrize("body", [b"", b"\0\0\0\1", struct.pack(">IQ", 1, 2**63) + b"{}"])
def test_a_sealed_state_with_a_wrong_length_is_refused(body):
    with pytest.raises(StateError, match=r"feed state: its .* must have"):
        FeedState.from_bytes(sealed(body))


@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_raise_nothing_but_a_state_error(data):
    for candidate in (data, sealed(data), sealed(struct.pack(">IQ", 1, len(data)) + data)):
        with pytest.raises(StateError):
            FeedState.from_bytes(candidate)


@pytest.mark.parametrize("length", [1, 1024, 1025, 100_000])
def test_a_replay_state_is_smaller_than_4_kb(length):
    for character in ("x", "'", '"', "\0", "é", "\U0001f600", "\ud800"):
        state = make(element_spec=character * length, fingerprint="ab" * 64, digest="cd" * 64)
        assert len(state.to_bytes()) < 4096
        assert FeedState.from_bytes(state.to_bytes()) == state


def test_a_long_element_spec_is_kept_as_its_digest():
    assert make(element_spec="x" * 1024).element_spec == "x" * 1024
    digest = hashlib.sha256(b"x" * 1025).hexdigest()
    assert make(element_spec="x" * 1025).element_spec == f"sha256:{digest}"


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("feed", "", ValueError, "feed must have at least one character. Received: ''"),
        ("feed", b"train", TypeError, "feed must be a str. Received: b'train'"),
        ("pass_", -1, ValueError, "pass_ must be at least 0. Received: -1"),
        ("element", -1, ValueError, "element must be at least 0. Received: -1"),
        ("element", 2**63, ValueError, f"element must be at most {2**63 - 1}. Received: {2**63}"),
        ("element", 1.0, TypeError, "element must be an int. Received: 1.0"),
        ("epoch", True, TypeError, "epoch must be an int. Received: True"),
        ("step", None, TypeError, "step must be an int. Received: None"),
        ("size", 0, ValueError, "size must be at least 1. Received: 0"),
        ("policy", "random", ValueError, "policy must be one of 'round_robin', 'split', .* Received: 'random'"),
        ("policy", None, TypeError, "policy must be a str. Received: None"),
        ("remainder", "lose", ValueError, "remainder must be one of 'drop', 'pad', 'keep'. Received: 'lose'"),
        ("steps_per_epoch", 0, ValueError, "steps_per_epoch must be at least 1. Received: 0"),
        ("steps_per_epoch", "1", TypeError, "steps_per_epoch must be an int or None. Received: '1'"),
        ("seed", 2**31, ValueError, "seed must be at most 2147483647. Received: 2147483648"),
        ("seed", None, TypeError, "seed must be an int. Received: None"),
        ("element_spec", None, TypeError, "element_spec must be a str. Received: None"),
        ("fingerprint", "xy", ValueError, "fingerprint must be hex digits.* Received: 'xy'"),
        ("fingerprint", "abc", ValueError, "fingerprint must be hex digits.* Received: 'abc'"),
        ("digest", "AB", ValueError, "digest must be hex digits.* Received: 'AB'"),
        ("digest", "ab\n", ValueError, "digest must be hex digits"),
        ("digest", "ab" * 65, ValueError, "digest must be hex digits.* at most 128"),
        ("way", "walk", ValueError, "way must be one of 'replay', 'snapshot', 'window'. Received: 'walk'"),
        ("parts", {"a": b""}, ValueError, "way='replay' has no parts. Received: 'a'"),
        ("parts", None, TypeError, "parts must map names to bytes. Received: a NoneType"),
        ("parts", {"a": "text"}, TypeError, "parts must map names to bytes. Received: 'a' with a str"),
        ("parts", {1: b""}, TypeError, "parts must map names to bytes. Received: 1 with a bytes"),
        ("version", 2, ValueError, "version must be 1. Received: 2"),
        ("version", "1", TypeError, "version must be an int. Received: '1'"),
    ],
)
def test_each_field_is_checked(field, value, error, message):
    with pytest.raises(error, match=f"^FeedState: {message}"):
        make(**{field: value})


def test_a_state_can_not_be_changed():
    parts = {"iterator": b"abc"}
    state = make(way="snapshot", parts=parts)
    parts["iterator"] = b""
    assert state.parts == {"iterator": b"abc"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.element = 3
    assert hash(state) == hash(copy.deepcopy(state))


def test_the_text_of_a_state_is_short_and_has_no_binary():
    state = make(way="window", parts={"iterator": bytes(100_000)}, element_spec="x" * 1000)
    assert "feed='train', pass_=3, element=1000, elements=1200, epoch=4, step=500, size=2" in repr(state)
    assert "parts={'iterator': 100000 bytes}" in repr(state)
    assert len(repr(state)) < 500


def test_a_state_fits_its_own_feed_under_any_number_of_ranks():
    for size in (1, 2, 7):
        make(size=size).check(**FIT)
        make(size=size).check(**FIT, seed=7, steps_per_epoch=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feed": "eval"}, "feed: the state has 'train', the feed has 'eval'. Give the feeder name='train'"),
        ({"policy": "split"}, "policy: the state has 'round_robin', the feed has 'split'. Give policy='round_robin'"),
        ({"remainder": "pad"}, "remainder: the state has 'drop', the feed has 'pad'. Give remainder='drop'"),
        ({"seed": 8}, "seed: the state has 7, the feed has 8. Leave seed out, or give seed=7"),
        ({"seed": 0}, "seed: the state has 7, the feed has 0"),
        ({"steps_per_epoch": 9}, "steps_per_epoch: the state has None, the feed has 9. Give steps_per_epoch=None"),
        ({"fingerprint": "cd34"}, "fingerprint: the state has 'ab12', the feed has 'cd34'. The pipeline changed"),
        ({"element_spec": "other"}, "element_spec: the state has 'TensorSpec.*', the feed has 'other'. The dataset's"),
    ],
)
def test_a_state_that_does_not_fit_names_both_values_and_what_to_do(change, message):
    with pytest.raises(StateError, match=message) as raised:
        make().check(**{**FIT, **change})
    assert len(str(raised.value).splitlines()) == 2
    assert f"feed {change.get('feed', 'train')!r} can't go on" in str(raised.value)


def test_all_differences_are_named_at_once():
    with pytest.raises(StateError) as raised:
        make(steps_per_epoch=5).check(
            feed="a", policy="b", remainder="c", element_spec="d", fingerprint="e", seed=1, steps_per_epoch=None
        )
    names = re.findall(r"^  (\w+):", str(raised.value), re.MULTILINE)
    assert sorted(names) == sorted([*FIT, "seed", "steps_per_epoch"])


def test_an_unknown_fingerprint_is_not_compared():
    make(fingerprint="").check(**FIT)
    make().check(**{**FIT, "fingerprint": ""})


def test_long_and_short_element_specs_are_compared(monkeypatch):
    long = "x" * 5000
    make(element_spec=long).check(**{**FIT, "element_spec": long})
    with pytest.raises(StateError, match=r"element_spec: the state has 'sha256:.*', the feed has 'sha256:"):
        make(element_spec=long).check(**{**FIT, "element_spec": long + "x"})
    # Another release may draw the line elsewhere.
    monkeypatch.setattr(state_module, "_MAX_SPEC", 10)
    short = make()
    assert short.element_spec.startswith("sha256:")
    monkeypatch.undo()
    short.check(**FIT)
    make().check(**{**FIT, "element_spec": short.element_spec})


def test_a_state_error_is_a_feed_error():
    assert issubclass(StateError, FeedError)


def test_states_and_backups_need_no_tensorflow():
    code = (
        "import sys, kerasfeed.backup, kerasfeed.state; "
        "print({'tensorflow', 'numpy', 'pickle', 'grpc'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "set()"
