"""The window in C++ against the reference: whatever is called, in whatever order, both answer the same.

Both get the same calls, and after each of them all that can be asked is compared. Calls are partly what pump and ranks
would do, so that the windows get somewhere, and partly what they would never do.
"""

from __future__ import annotations

import dataclasses
import gc
import struct
import threading
import types
import weakref

import engines
import pytest
import tensorflow as tf
from engines import ENGINES, Waits, WouldBlock, held
from hypothesis import given, settings
from hypothesis import strategies as st

from kerasfeed.producer import window as reference
from kerasfeed.producer.window import (
    NO_LAST_EPOCH,
    BindError,
    Delivery,
    EpochCount,
    EpochEnd,
    Failure,
    FailureKind,
    Produce,
    Seek,
)
from kerasfeed.schedule import Position, Segment
from kerasfeed.spec import Component, EncodedElement, encode_element

START = Position(0, 0)
PLENTY = 1 << 30
PASS = 1000


@pytest.fixture(autouse=True, scope="module")
def _waits():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "threading", types.SimpleNamespace(RLock=threading.RLock, Condition=Waits))
        yield


def made(number, words):
    data = struct.pack("<q", number) + bytes(8 * (words - 1))
    return EncodedElement((Component((words,), 0, len(data)),), (memoryview(data),), len(data))


def plain(answer):
    """Returns an answer of a window as what compares with `==`."""
    if isinstance(answer, EncodedElement):
        return (answer.components, [bytes(buffer) for buffer in answer.buffers], answer.size)
    if isinstance(answer, Delivery):
        return ("delivery", answer.reader, answer.position, plain(answer.element))
    if isinstance(answer, list):
        return [plain(each) for each in answer]
    return answer


class Broken(Exception):
    """The reference itself can't go on."""


class Both:
    """Both windows, and what they are told and tell."""

    def __init__(self, size, **options):
        self.size = size
        self.now = 1000.0
        self.news = [[], []]
        self.windows = [
            engines.new_window(engine, size, clock=lambda: self.now, **self.listeners(news), **options)
            for engine, news in zip(ENGINES, self.news, strict=True)
        ]

    @staticmethod
    def listeners(news):
        return {
            "log": lambda text: news.append(("log", text)),
            "complete": lambda: news.append(("complete",)),
            "pass_ended": lambda pass_, elements: news.append(("pass", pass_, elements)),
            "epoch_ended": lambda epoch, count: news.append(("epoch", epoch, dataclasses.astuple(count))),
            "rank_left": lambda rank, trained: news.append(("left", rank, dict(trained))),
        }

    def ask(self, what):
        """Asks both windows the same; returns the answer, or the exception."""
        answers = []
        for window in self.windows:
            try:
                answers.append(what(window))
            except (WouldBlock, BindError, ValueError) as error:
                answers.append(error)
        theirs, ours = answers
        if isinstance(theirs, Exception):
            assert (type(ours), str(ours)) == (type(theirs), str(theirs))
        else:
            assert plain(ours) == plain(theirs)
        return theirs

    def call(self, name, *args):
        return self.ask(lambda window: getattr(window, name)(*args))

    def work(self, interrupted):
        window = self.windows[0]
        if window._seek_pending and window._head < window.segment.start:
            # Here it raises, and the pump takes that for its own end.
            raise Broken
        return self.call("wait_for_work", lambda: interrupted)

    def compare(self):
        assert self.news[1] == self.news[0]
        for rank in range(self.size):
            self.call("waiting_for", rank)
        self.call("statistics")
        self.ask(held)
        self.ask(lambda window: (window.size, window.segment, window.furthest, window.first_pass))


@dataclasses.dataclass
class Rank:
    """What one rank knows."""

    came: bool = False
    reader: int = 0
    next: Position = START
    pulled: Position = START
    acknowledged: Position = START


class Driver:
    """Does with both windows what the numbers of an action say."""

    # Those that come often are the ones that get somewhere.
    KINDS = (
        *("pump",) * 6,
        *("item",) * 5,
        *("pull",) * 5,
        *("read",) * 2,
        *("acknowledge",) * 2,
        *("attend", "jump", "break_off", "bind", "bind_at", "reconnect", "leave", "disconnect", "wait_long"),
        *("stale", "interrupt", "untrained", "locate", "note", "progress", "segment", "trouble"),
    )

    def __init__(self, size, lengths, direct, last_epoch, **options):
        self.both = Both(size, **options)
        self.lengths = lengths
        self.direct = direct
        self.last_epoch = last_epoch
        self.ranks = [Rank() for _ in range(size)]
        self.pass_, self.element = 0, 0
        self.generation = None
        self.bindings = 0

    def length(self, pass_):
        return self.lengths[pass_ % len(self.lengths)]

    def attend_all(self):
        for number in range(len(self.ranks)):
            self.attend(number, 0, 0, 0)
            self.read(number, 0, 0, 0)

    def do(self, kind, number, a, b, c):
        number %= len(self.ranks)
        if self.ranks[number].came or kind in ("attend", "segment"):
            getattr(self, kind)(number, a, b, c)
            self.both.compare()

    # ---- The pump ----

    def pump(self, number, a, b, c):
        for _ in range(1 + a):
            work = self.both.work(False)
            if isinstance(work, Seek):
                self.generation = work.generation
                self.pass_, self.element = work.pass_, work.element
                while work.joined and 0 < self.length(self.pass_) <= self.element:
                    self.both.call("note_pass_length", self.pass_, self.length(self.pass_))
                    self.element -= self.length(self.pass_)
                    self.pass_ += 1
            elif isinstance(work, Produce):
                self.generation = work.generation
                self.produce(work.generation)
            else:
                break

    def produce(self, generation):
        if self.element >= self.length(self.pass_):
            self.both.call("end_pass", generation, self.pass_, self.length(self.pass_))
            self.pass_, self.element = self.pass_ + 1, 0
        else:
            self.both.call("put", generation, made(self.pass_ * PASS + self.element, 1 + self.element % 3))
            self.element += 1

    def stale(self, number, a, b, c):
        if self.generation is None:
            return
        generation = self.generation - (a % 2)
        if b < 2:
            self.both.call("put", generation, made(c, 1 + c))
        elif b < 4:
            self.both.call("end_pass", generation, c, self.length(c))
        elif b == 4:
            self.both.call("end_pass", generation, c, 0)
        else:
            kind = list(FailureKind)[c % 3]
            self.both.call("fail", generation, f"no element\n\N{BULLET} {c}", kind)

    def interrupt(self, number, a, b, c):
        self.both.work(True)
        self.both.call("wait_for_item", number, lambda: True)

    def note(self, number, a, b, c):
        self.both.call("note_pass_length", a % 4, b + c)
        for pass_ in range(4):
            self.both.call("pass_length", pass_)

    def untrained(self, number, a, b, c):
        self.both.call("untrained", self.ranks[number].pulled if a < 4 else Position(b, c))

    def locate(self, number, a, b, c):
        self.both.call("locate", Position(a, b + c))

    # ---- A rank ----

    def attend(self, number, a, b, c):
        rank = self.ranks[number]
        rank.came = True
        self.both.call("attend", number, rank.acknowledged if a < 6 else Position(b, c), None)

    def segment(self, number, a, b, c):
        believed = self.both.windows[0].segment
        if a > 2:
            believed = Segment(b % 3, c % 3, c, (None, 1, 2, 3)[a % 4], c % 3)
        answer = self.both.call("attend", number, self.ranks[number].acknowledged, believed)
        self.ranks[number].came |= not isinstance(answer, BindError)

    def reconnect(self, number, a, b, c):
        self.both.call("disconnected", number)
        self.attend(number, 0, b, c)
        if a:
            self.ask_for(number, a, self.ranks[number].next)

    def disconnect(self, number, a, b, c):
        self.both.call("disconnected", number)

    def ask_for(self, number, a, position, left=None):
        rank = self.ranks[number]
        rank.reader += 1
        rank.next = rank.pulled = position
        through, credit = a % 2 == 1, 1 + a
        limit = 20 if a == 3 else PLENTY
        last_epoch = self.last_epoch if a < 6 else NO_LAST_EPOCH
        direct = self.direct and a < 7
        self.both.call("read", number, rank.reader, position, through, credit, limit, last_epoch, left, direct)

    def read(self, number, a, b, c):
        rank = self.ranks[number]
        at = rank.pulled
        self.ask_for(number, a, Position(at.epoch, max(0, at.step - b % 4)) if c > 3 else at)

    def jump(self, number, a, b, c):
        self.ask_for(number, a, Position(b % 4, c))

    def break_off(self, number, a, b, c):
        rank = self.ranks[number]
        at = rank.pulled
        self.ask_for(number, a, Position(at.epoch + 1 + b // 7, 0), left=at)

    def item(self, number, a, b, c):
        rank = self.ranks[number]
        for _ in range(1 + a % 4):
            item = self.both.call("wait_for_item", number, lambda: False)
            if isinstance(item, Delivery):
                rank.next = Position(item.position.epoch, item.position.step + 1)
            elif isinstance(item, EpochEnd):
                rank.next = Position(item.epoch + 1, 0)
            elif not isinstance(item, Failure):
                break

    def report(self, number, pulled, trained=None, waiting=False):
        rank = self.ranks[number]
        self.both.call("progress", number, rank.reader, pulled, rank.acknowledged, trained or {}, waiting)

    def pull(self, number, a, b, c):
        rank = self.ranks[number]
        self.item(number, a, b, c)
        rank.pulled = max(rank.pulled, rank.next)
        self.report(number, rank.pulled, waiting=b % 2 == 1)

    def acknowledge(self, number, a, b, c):
        rank = self.ranks[number]
        at = rank.pulled
        rank.acknowledged = max(rank.acknowledged, Position(at.epoch, max(0, at.step - a)))
        self.report(number, rank.pulled, {at.epoch: b, **({at.epoch - 1: c} if at.epoch else {})}, c % 2 == 1)

    def progress(self, number, a, b, c):
        reader = self.ranks[number].reader - a % 2
        self.both.call("progress", number, reader, Position(b % 3, c), Position(b % 2, c // 2), {b: c}, a > 3)

    def bind(self, number, a, b, c):
        """All ranks begin a fit, or all but one, or one of them otherwise."""
        self.bindings += 1
        at = self.ranks[number].acknowledged if a % 2 else self.ranks[number].pulled
        steps = (None, None, 1, 2, 3, 4)[b % 6]
        for other, rank in enumerate(self.ranks):
            if rank.came and not (c == 7 and other):
                bound = self.both.call("bind", other, self.bindings, at, 2 if c == 6 and other else steps)
                if not isinstance(bound, Exception):
                    rank.acknowledged = max(rank.acknowledged, bound[1])
                    if c < 4:
                        self.ask_for(other, a, bound[1])

    def bind_at(self, number, a, b, c):
        at = Position(b % 3, c) if a < 4 else self.both.windows[0].segment.start
        self.both.call("bind", number, a % 4 + (100 if c > 3 else 0), at, (None, 1, 2, 3)[b % 4])

    def leave(self, number, a, b, c):
        self.both.call("leave", number, "KeyError: \N{GREEK SMALL LETTER LAMDA}" if a == 7 else "")

    # ---- All ----

    def wait_long(self, number, a, b, c):
        self.both.now += (0.4, 5.0, 11.0, 29.0, 31.0, 61.0, 0.1, 1.0)[a]

    def trouble(self, number, a, b, c):
        if a == 7 and b > 3:
            self.both.call(("refuse", "abandon", "stop")[c % 3], *(["it's no use"] if c % 3 < 2 else []))


def follow(attend_all, actions, **options):
    """Does all actions; raises `AssertionError` where the windows are not the same."""
    driver = Driver(**options)
    try:
        driver.both.compare()
        if attend_all:
            driver.attend_all()
        for action in actions:
            driver.do(*action)
    except Broken:
        pass
    return driver


SMALL = st.integers(0, 7)
EPOCHS = st.dictionaries(st.integers(0, 3), st.integers(0, 9), max_size=2)


@settings(max_examples=150)
@given(
    attend_all=st.sampled_from([True, True, True, False]),
    actions=st.lists(
        st.tuples(st.sampled_from(Driver.KINDS), st.integers(0, 2), SMALL, SMALL, SMALL), min_size=30, max_size=90
    ),
    size=st.integers(1, 3),
    lengths=st.lists(st.integers(0, 11), min_size=1, max_size=3),
    direct=st.booleans(),
    last_epoch=st.sampled_from([NO_LAST_EPOCH, NO_LAST_EPOCH, 1, 2, 5]),
    prefetch=st.integers(1, 6),
    max_bytes=st.sampled_from([1, 60, 250, PLENTY]),
    steps_per_epoch=st.sampled_from([None, None, 1, 2, 3, 5]),
    start_timeout=st.sampled_from([60.0, 0.5, 1e6]),
    rank_timeout=st.just(30.0),
    cut_grace=st.just(10.0),
    cardinality=st.sampled_from([-2, -1, 0, 5]),
    counts=st.dictionaries(st.integers(0, 3), st.builds(EpochCount, SMALL, SMALL, SMALL, st.booleans()), max_size=2),
    pass_lengths=EPOCHS,
    left=st.sampled_from([{}, {}, {}, {0: {}}, {0: {1: 5, 0: 2}}]),
)
def test_both_windows_answer_the_same_whatever_is_called(attend_all, actions, **options):
    follow(attend_all, actions, **options)


# ---- What the reference has no need of ----


def serving(**options):
    """A window whose only rank reads."""
    window = engines.new_window("native", 1, prefetch=2, max_bytes=PLENTY, **options)
    window.attend(0, START, None)
    window.read(0, 1, START, False, 16, PLENTY)
    return window, window.wait_for_work().generation


@pytest.mark.parametrize(
    "element",
    [
        {"a": [[1.5, 2.5, 3.5]], "b": "text", "c": True},
        (tf.zeros([0, 3]), tf.ones([2, 0, 1], tf.int8), tf.constant([b"", b"x" * 100])),
        (),
    ],
)
def test_an_element_comes_out_as_it_went_in(element):
    encoded = encode_element(tf.nest.map_structure(tf.constant, element))
    window, generation = serving()
    window.put(generation, encoded)
    assert plain(window.untrained(START)) == [plain(encoded)]
    assert plain(window.wait_for_item(0, lambda: False)) == ("delivery", 1, START, plain(encoded))


def test_news_of_what_happens_without_python_are_delivered():
    told = []
    window, _ = serving(pass_ended=lambda *ended: told.append(ended), log=told.append)
    window._call("note_pass_length", 3, 14)
    assert told == []
    window.deliver(10.0)
    assert told == [(3, 14)]
    window.deliver(0.01)
    assert told == [(3, 14)]


def test_news_are_told_in_order_also_where_hearing_them_makes_more():
    told = []

    def ended(pass_, elements):
        if pass_ < 3:
            window.note_pass_length(pass_ + 10, elements)
        told.append(pass_)

    window, _ = serving(pass_ended=ended)
    for pass_ in range(3):
        window._call("note_pass_length", pass_, 1)
    window.deliver(10.0)
    assert sorted(told) == [0, 1, 2, 10, 11, 12]
    assert [p for p in told if p > 9] == [10, 11, 12]


def test_what_is_no_unicode_is_told_all_the_same():
    window, generation = serving()
    window.fail(generation, "raised in a file named \udcff\0")
    assert window.wait_for_item(0, lambda: False).message == "raised in a file named \\udcff\0"


def test_a_window_that_nobody_has_any_more_gives_its_memory_back():
    window, _ = serving()
    freed = weakref.ref(window)
    del window
    gc.collect()
    assert freed() is None
