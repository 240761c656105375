"""What a native dataset asks Python, and what becomes of an exception that can't pass through C++."""

from __future__ import annotations

import ctypes
import gc

import pytest
import tensorflow as tf

from kerasfeed.native import engine as engines
from kerasfeed.native import feed as feeds
from kerasfeed.native.dataset import FeedDataset
from kerasfeed.native.feed import Feed
from kerasfeed.native.reader import Reader
from kerasfeed.producer.window import FailureKind


@pytest.fixture(scope="module")
def engine():
    loaded = engines.load()
    assert loaded is not None
    return loaded


class Owner:
    """Answers as it is told, and notes what it was asked."""

    def __init__(self, engine, answer=0):
        self.feed = Feed(engine.library, "train", self)
        self.answer = answer
        self.asked = []

    def _asked(self, *question):
        self.asked.append(question)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def read_begins(self, direct):
        return self._asked("begins", direct)

    def read_comes_to_end(self, read, epoch, steps):
        return self._asked("ends", read, epoch, steps)

    def read_waits(self, read, seconds, interrupted):
        return self._asked("waits", read, seconds, interrupted)

    def read_fails(self, read, kind, message):
        return self._asked("fails", read, kind, message)


class Message:
    """The memory in which the op finds why it failed, with more behind it that is not its own."""

    def __init__(self):
        self._bytes = ctypes.create_string_buffer(b"\xff" * (feeds._MESSAGE_BYTES + 16))
        self.address = ctypes.addressof(self._bytes)

    @property
    def text(self):
        assert self._bytes.raw[feeds._MESSAGE_BYTES :].startswith(b"\xff" * 16), "written past its end"
        return self._bytes.value


@pytest.fixture
def message():
    return Message()


def test_questions_reach_the_owner_and_answers_the_op(engine, message):
    owner = Owner(engine, 7)
    number = owner.feed.number
    assert feeds._open(number, 1, message.address) == 7
    assert feeds._ended(number, 3, 2, 10, message.address) == 7
    assert feeds._waiting(number, 3, 1.5, 1, message.address) == 7
    assert owner.asked == [("begins", True), ("ends", 3, 2, 10), ("waits", 3, 1.5, True)]


@pytest.mark.parametrize(("answer", "told"), [(None, 0), (True, 1), (False, 0)])
def test_what_is_not_a_number_is_told_as_one(engine, message, answer, told):
    owner = Owner(engine, answer)
    assert feeds._ended(owner.feed.number, 3, 2, 10, message.address) == told


@pytest.mark.parametrize("kind", FailureKind)
def test_the_kind_of_a_failure_is_told(engine, message, kind):
    owner = Owner(engine)
    number = list(FailureKind).index(kind)
    feeds._failed(owner.feed.number, 3, number, "größer".encode(), message.address)
    feeds._failed(owner.feed.number, 3, -1, b"\xff void", message.address)
    assert owner.asked == [("fails", 3, kind, "größer"), ("fails", 3, None, "\ufffd void")]


@pytest.mark.parametrize("error", [ValueError("not so"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_becomes_the_message_of_the_op(engine, message, error):
    owner = Owner(engine, error)
    assert feeds._open(owner.feed.number, 0, message.address) == -1
    assert message.text.decode() == f"{type(error).__name__}: {error}"


def test_a_feed_whose_owner_is_gone_says_so(engine, message):
    owner = Owner(engine)
    number = owner.feed.number
    del owner
    gc.collect()
    assert feeds._open(number, 0, message.address) == -1
    assert b"the DataFeeder of this dataset is gone" in message.text


@pytest.mark.parametrize("pad", range(4))
@pytest.mark.parametrize("character", ["x", "é", "€", "😀"])
def test_a_long_message_is_cut_between_two_characters(engine, message, character, pad):
    said = "x" * pad + character * feeds._MESSAGE_BYTES
    owner = Owner(engine, ValueError(said))
    feeds._open(owner.feed.number, 0, message.address)
    got = message.text.decode()
    assert f"ValueError: {said}".startswith(got)
    assert feeds._MESSAGE_BYTES - 4 <= len(message.text) < feeds._MESSAGE_BYTES


def test_what_is_no_unicode_at_all_can_be_told(engine, message):
    owner = Owner(engine, ValueError("a file \udcff"))
    feeds._open(owner.feed.number, 0, message.address)
    assert message.text == b"ValueError: a file \\udcff"


def test_an_exception_of_the_owner_is_raised_by_the_op(engine):
    """A long one, too: what TensorFlow can't read as text it could not raise."""
    owner = Owner(engine, ValueError("x" + "€" * feeds._MESSAGE_BYTES))
    owner.feed.begin(Reader(engine.library, free_bytes=0))
    dataset = FeedDataset(engine.ops, owner.feed, True, tf.TensorSpec([], tf.int64))
    with pytest.raises(tf.errors.InternalError, match="ValueError: x€€€"):
        next(iter(dataset))
    # tf.data may pull once more.
    assert set(owner.asked) == {("begins", True)}
