"""The window between pump and ranks, alone: all elements come in order, nobody waits for ever, memory is bounded.

Each test runs with the reference and with the engine in C++. Most run in one thread: every wait of the window raises
`WouldBlock`. Elements are integers that name their pass and index.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import types

import engines
import numpy as np
import pytest
import tensorflow as tf
from engines import ENGINES, Waits, WouldBlock, held
from hypothesis import given, settings
from hypothesis import strategies as st

from kerasfeed import spec as spec_lib
from kerasfeed.native import window as native
from kerasfeed.producer import window as reference
from kerasfeed.producer.window import (
    NO_LAST_EPOCH,
    BindError,
    Delivery,
    EpochCount,
    EpochEnd,
    Failure,
    FailureKind,
    Pause,
    Produce,
    Seek,
)
from kerasfeed.schedule import Position, Segment

START = Position(0, 0)
ELEMENT_BYTES = 8
PLENTY = 1 << 30
PASS = 1_000_000


class Engine:
    """Which of the two windows is tested now."""

    name = ENGINES[0]


@pytest.fixture(autouse=True, scope="module", params=ENGINES)
def _engine(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "threading", types.SimpleNamespace(RLock=threading.RLock, Condition=Waits))
        patch.setattr(Engine, "name", request.param)
        yield


def new_window(*args, **options):
    return engines.new_window(Engine.name, *args, **options)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@functools.cache
def encoded(number):
    return spec_lib.encode_element(tf.constant(number, tf.int64))


def number_of(element):
    return int(np.frombuffer(element.buffers[0], np.int64)[0])


class Pump:
    """What kerasfeed.producer.pump does, with passes of made-up lengths."""

    def __init__(self, window, length_of, fails_at=None, make=encoded):
        self.window = window
        self.length_of = length_of
        self.fails_at = fails_at
        self.make = make
        self.pass_, self.element = 0, 0
        self.produced = []

    def work(self):
        """Does one thing. Returns `False` if the window wants to end."""
        work = self.window.wait_for_work()
        if work is None:
            return False
        if isinstance(work, Seek):
            self.pass_, self.element = work.pass_, work.element
            while work.joined and self.length_of(self.pass_) and self.element >= self.length_of(self.pass_):
                self.window.note_pass_length(self.pass_, self.length_of(self.pass_))
                self.element -= self.length_of(self.pass_)
                self.pass_ += 1
            return True
        assert isinstance(work, Produce)
        if (self.pass_, self.element) == self.fails_at:
            self.window.fail(work.generation, f"element {self.element} is bad")
        elif self.element >= self.length_of(self.pass_):
            self.window.end_pass(work.generation, self.pass_, self.length_of(self.pass_))
            self.pass_, self.element = self.pass_ + 1, 0
        else:
            self.produced.append((self.pass_, self.element))
            self.window.put(work.generation, self.make(self.pass_ * PASS + self.element))
            self.element += 1
        return True


class Rank:
    """What a rank's connection and cursor do: asks, receives, pulls, reports; checks all that it gets."""

    def __init__(self, feed, number, credit=16, through_epochs=False):
        self.feed, self.window, self.number = feed, feed.window, number
        self.credit, self.through_epochs = credit, through_epochs
        self.readers = 0
        self.reading = False
        self.next = self.pulled = self.acknowledged = Position(0, 0)
        self.items = collections.deque()
        self.got = {}
        self.ends = {}
        self.failure = None

    def attend(self, segment=None):
        self.window.attend(self.number, self.acknowledged, segment)
        return self

    def read(self, position, left=None):
        self.readers += 1
        self.items.clear()
        self.next = self.pulled = position
        self.ask(left)
        return self

    def ask(self, left=None):
        self.reading = True
        self.window.read(
            self.number, self.readers, self.next, self.through_epochs, self.credit, PLENTY, self.feed.last_epoch, left
        )

    def receive(self):
        """Takes what the window has for this rank now. Returns whether there was something."""
        try:
            item = self.window.wait_for_item(self.number, lambda: False)
        except WouldBlock:
            return False
        if isinstance(item, Failure):
            self.failure = item
            return True
        assert item.reader == self.readers
        if isinstance(item, EpochEnd):
            assert (item.epoch, item.steps) == self.next
            self.next = Position(item.epoch + 1, 0)
        else:
            assert isinstance(item, Delivery)
            assert item.position == self.next
            assert number_of(item.element) == self.feed.expected(item.position, self.number)
            self.next = Position(item.position.epoch, item.position.step + 1)
        self.items.append(item)
        return True

    def pull(self):
        """Takes an item as the user's iterator does. Returns whether there was one."""
        if not self.items:
            if self.reading:
                self.report(waiting=True)
            return False
        item = self.items.popleft()
        if isinstance(item, EpochEnd):
            self.ends[item.epoch] = item.steps
            self.pulled = Position(item.epoch + 1, 0)
            self.reading = self.through_epochs
        else:
            self.got[item.position] = number_of(item.element)
            self.pulled = Position(item.position.epoch, item.position.step + 1)
        self.report()
        return True

    def report(self, waiting=False):
        trained = collections.Counter(p.epoch for p in self.got if p < self.acknowledged)
        self.window.progress(self.number, self.readers, self.pulled, self.acknowledged, dict(trained), waiting)

    def acknowledge(self, position):
        self.acknowledged = max(self.acknowledged, position)
        self.report()

    def reconnect(self):
        """The connection breaks and comes back: it asks again from the first step that it does not hold."""
        self.window.disconnected(self.number)
        self.attend()
        if self.reading:
            self.ask()

    def drain(self):
        """Receives and pulls all there is, letting the pump work, up to the end of the epoch."""
        while self.feed.pump_all() or self.receive() or self.pull():
            pass
        return self


class Feed:
    """A window, its pump and its ranks."""

    def __init__(self, size, length=0, prefetch=4, max_bytes=PLENTY, steps_per_epoch=None, attend=True, **options):
        self.size = size
        self.length_of = length if callable(length) else lambda pass_: length
        self.clock = Clock()
        self.warnings = []
        self.completed = 0
        rank_options = {name: options.pop(name) for name in ("credit", "through_epochs") if name in options}
        fails_at, make = options.pop("fails_at", None), options.pop("make", encoded)
        self.window = new_window(
            size,
            prefetch,
            max_bytes,
            steps_per_epoch,
            log=self.warnings.append,
            complete=self.complete,
            clock=self.clock,
            **options,
        )
        self.pump = Pump(self.window, self.length_of, fails_at, make)
        self.segments = [Segment(steps_per_epoch=steps_per_epoch)]
        self.most_bytes = 0
        self.last_epoch = NO_LAST_EPOCH
        self.ranks = [Rank(self, r, **rank_options) for r in range(size)]
        if attend:
            for rank in self.ranks:
                rank.attend()

    def complete(self):
        self.completed += 1

    def expected(self, position, rank):
        """Returns the element that a rank must get in a step, found by counting."""
        segment = next(s for s in reversed(self.segments) if s.first_epoch <= position.epoch)
        pass_, element = segment.locate(position, self.size)
        element += rank
        while segment.steps_per_epoch is not None and element >= self.length_of(pass_):
            element -= self.length_of(pass_)
            pass_ += 1
        return pass_ * PASS + element

    def pump_one(self):
        try:
            assert self.pump.work()
        except WouldBlock:
            return False
        self.most_bytes = max(self.most_bytes, held(self.window)[0])
        return True

    def pump_all(self, most=100_000):
        """Lets the pump work until it has nothing to do. Returns whether it did something."""
        worked = 0
        while self.pump_one():
            worked += 1
            assert worked < most, "the pump never rests"
        return worked > 0

    def start(self, position=START):
        for rank in self.ranks:
            rank.read(position)
        return self

    def settle(self):
        """Lets everything happen that can, without any rank pulling."""
        while self.pump_all() or self.all_receive():
            pass
        return self

    def all_receive(self):
        """Lets each rank receive once. Returns how many got something."""
        return sum(rank.receive() for rank in self.ranks)

    def run_until(self, done, next_epoch=lambda rank: rank.read(rank.pulled)):
        """Lets pump and ranks run until `done(rank)` holds for each of them."""
        while not all(done(rank) for rank in self.ranks):
            moved = self.pump_all()
            for rank in self.ranks:
                if done(rank):
                    continue
                if not rank.reading:
                    next_epoch(rank)
                while rank.receive() or (not done(rank) and rank.pull()):
                    moved = True
            # A rank that has just said that it waits gives the pump one more chance.
            moved = self.pump_all() or moved
            assert moved, [self.window.waiting_for(rank.number) for rank in self.ranks]
        return self

    def run_epochs(self, epochs):
        return self.run_until(lambda rank: len(rank.ends) >= epochs)

    def bind_all(self, binding, position, steps_per_epoch=None, last_epoch=NO_LAST_EPOCH):
        self.last_epoch = last_epoch
        for rank in self.ranks:
            segment, start = self.window.bind(rank.number, binding, position, steps_per_epoch)
            rank.reading = False
        if segment != self.segments[-1]:
            self.segments.append(segment)
        return segment, start


def positions(rank, epoch=0):
    return [position.step for position in sorted(rank.got) if position.epoch == epoch]


# ---- Who gets what ----


class Actions:
    """Any order of what pump and ranks can do."""

    KINDS = ("pump", "pump_all", "receive", "pull", "pull", "wait", "reconnect", "go_back", "acknowledge")

    @staticmethod
    def drawn(size):
        return st.lists(
            st.tuples(st.sampled_from(Actions.KINDS), st.integers(0, size - 1), st.integers(0, 3)), max_size=60
        )

    @staticmethod
    def do(feed, kind, number, amount):
        rank = feed.ranks[number]
        if kind == "pump":
            feed.pump_one()
        elif kind == "pump_all":
            feed.pump_all()
        elif kind == "receive":
            rank.receive()
        elif kind == "pull":
            for _ in range(amount + 1):
                rank.receive()
                rank.pull()
            if not rank.reading:
                rank.read(rank.pulled)
        elif kind == "wait":
            while rank.pull():
                pass
        elif kind == "reconnect":
            rank.reconnect()
        elif kind == "go_back":
            known = sorted(p for p in rank.got if rank.acknowledged <= p)
            if known:
                rank.read(known[max(0, len(known) - 1 - amount)])
        elif kind == "acknowledge":
            done = sorted(p for p in rank.got if rank.acknowledged <= p < rank.pulled)
            for position in done[: amount + 1]:
                rank.acknowledge(Position(position.epoch, position.step + 1))


@settings(max_examples=250)
@given(
    data=st.data(),
    size=st.integers(1, 4),
    lengths=st.lists(st.integers(0, 23), min_size=1, max_size=3),
    prefetch=st.integers(2, 8),
    room=st.sampled_from([1, 40, 200, PLENTY]),
    credit=st.integers(1, 5),
)
def test_every_rank_gets_its_elements_in_order_whatever_happens(data, size, lengths, prefetch, room, credit):
    feed = Feed(size, lambda p: lengths[p % len(lengths)], prefetch=prefetch, max_bytes=room, credit=credit).start()
    for action in data.draw(Actions.drawn(size)):
        Actions.do(feed, *action)
    feed.run_epochs(3)
    for epoch in range(3):
        elements = lengths[epoch % len(lengths)]
        for rank in feed.ranks:
            assert rank.ends[epoch] == elements // size
            assert positions(rank, epoch) == list(range(elements // size))
        trained = sorted(n for r in feed.ranks for p, n in r.got.items() if p.epoch == epoch)
        assert trained == [epoch * PASS + k for k in range(elements - elements % size)]
        _, count, _ = feed.window.statistics()[epoch]
        assert dataclasses.astuple(count) == (elements, elements // size, elements % size, True)
    step_bytes = size * ELEMENT_BYTES
    assert feed.most_bytes <= max(room, 3 * step_bytes)


@settings(max_examples=150)
@given(
    data=st.data(),
    size=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 11), min_size=1, max_size=3),
    steps=st.integers(1, 7),
    room=st.sampled_from([1, 100, PLENTY]),
    through=st.booleans(),
)
def test_joined_passes_lose_no_element_at_their_ends(data, size, lengths, steps, room, through):
    """With steps_per_epoch: what is left of a pass makes a step together with the next pass's first elements."""
    feed = Feed(
        size, lambda p: lengths[p % len(lengths)], max_bytes=room, steps_per_epoch=steps, through_epochs=through
    ).start()
    for action in data.draw(Actions.drawn(size)):
        Actions.do(feed, *action)
    feed.run_epochs(4)
    by_place = {(p, r.number): n for r in feed.ranks for p, n in r.got.items() if p.epoch < 4}
    stream = [by_place[Position(e, s), r] for e in range(4) for s in range(steps) for r in range(size)]
    passes = (p * PASS + k for p in range(4 * steps * size) for k in range(lengths[p % len(lengths)]))
    assert stream == [next(passes) for _ in stream]
    assert all(rank.ends[epoch] == steps for rank in feed.ranks for epoch in range(4))
    assert all(count.dropped == 0 for _, count, _ in feed.window.statistics())


def test_a_step_is_handed_out_only_when_it_is_complete():
    feed = Feed(3, length=3).start()
    feed.pump_one()  # seeks
    for _ in range(2):
        feed.pump_one()
        assert feed.all_receive() == 0
    feed.pump_one()
    assert feed.all_receive() == 3


def test_nothing_is_produced_before_it_is_asked_for():
    feed = Feed(2, length=10)
    assert not feed.pump_all()
    feed.ranks[0].read(Position(0, 0))
    assert feed.pump_all()


def test_a_pass_without_elements_is_an_epoch_without_steps():
    feed = Feed(2, length=0).start().run_epochs(3)
    assert [rank.ends for rank in feed.ranks] == [{0: 0, 1: 0, 2: 0}] * 2


def test_a_stream_of_epochs_from_an_empty_dataset_is_a_failure_that_says_so():
    feed = Feed(2, length=0, steps_per_epoch=5).start().settle()
    for rank in feed.ranks:
        assert rank.failure.kind is FailureKind.PRODUCER
        assert "the dataset is empty: it can't fill an epoch of 5 steps" in rank.failure.message


def test_a_reader_through_epochs_goes_on_after_each_end():
    feed = Feed(2, length=4, through_epochs=True).start()
    rank = feed.ranks[0]
    feed.run_until(lambda rank: len(rank.got) >= 7, next_epoch=lambda rank: pytest.fail("stopped at an end"))
    assert rank.ends == {0: 2, 1: 2, 2: 2}


def test_a_reader_of_one_epoch_gets_nothing_after_its_end():
    feed = Feed(1, length=2).start()
    rank = feed.ranks[0].drain()
    assert (len(rank.got), rank.ends) == (2, {0: 2})
    assert not rank.receive()


def test_asking_past_an_epochs_end_brings_its_end_again():
    feed = Feed(1, length=2).start()
    rank = feed.ranks[0].drain()
    rank.read(Position(0, 2))
    rank.ends.clear()
    rank.drain()
    assert rank.ends == {0: 2}


# ---- Flow ----


def test_a_rank_far_ahead_does_not_wait_for_the_others_nor_for_acknowledgements():
    """As with steps_per_execution=16 or feeder.shuffle(16): 16 steps are pulled before any is trained."""
    feed = Feed(3, length=300, prefetch=2, credit=2).start()
    ahead = feed.ranks[0]
    while len(ahead.got) < 16:
        moved = feed.pump_all() or ahead.receive() or ahead.pull()
        assert moved or feed.pump_all(), feed.window.waiting_for(0)
    feed.run_epochs(1)


@pytest.mark.parametrize("room", [1, PLENTY])
def test_without_any_acknowledgement_all_epochs_are_delivered(room):
    feed = Feed(2, length=50, prefetch=2, max_bytes=room, credit=2).start().run_epochs(3)
    assert all(rank.acknowledged == Position(0, 0) for rank in feed.ranks)


@given(prefetch=st.integers(2, 10), size=st.integers(1, 4))
def test_the_prefetch_says_how_many_steps_are_kept_ready_ahead(prefetch, size):
    feed = Feed(size, length=1000, prefetch=prefetch).start()
    feed.pump_all()
    assert feed.window.furthest == Position(0, prefetch)
    for received in (1, 2, 3):
        assert feed.ranks[0].receive()
        feed.pump_all()
        assert feed.window.furthest == Position(0, received + prefetch)


def test_credit_bounds_what_is_sent_and_not_yet_pulled():
    feed = Feed(1, length=100, prefetch=50, credit=3).start().settle()
    rank = feed.ranks[0]
    assert len(rank.items) == 3
    rank.pull()
    feed.settle()
    assert len(rank.items) == 3


def test_credit_in_bytes_bounds_what_is_sent_but_for_one_element():
    feed = Feed(1, length=100, prefetch=50)
    rank = feed.ranks[0]
    for credit, sent in ((3 * ELEMENT_BYTES, 3), (1, 1)):
        rank.read(Position(0, 0))
        feed.window.read(0, rank.readers, Position(0, 0), False, 50, credit)
        feed.settle()
        assert len(rank.items) == sent


def test_a_buffer_too_small_for_two_steps_has_room_for_them_and_warns_once():
    feed = Feed(2, length=40, prefetch=8, max_bytes=5, credit=1).start()
    feed.run_epochs(2)
    assert feed.most_bytes <= 3 * 2 * ELEMENT_BYTES
    assert len(feed.warnings) == 1
    assert "max_buffer_bytes=5 holds less than two steps of 16 bytes" in feed.warnings[0]


def test_memory_is_bounded_by_max_buffer_bytes_while_a_rank_is_slow():
    feed = Feed(2, length=1000, prefetch=500, max_bytes=20 * 16).start()
    feed.ranks[0].drain()
    assert feed.most_bytes <= 20 * 16
    assert feed.warnings == []
    assert len(feed.ranks[0].got) >= 19
    assert "max_buffer_bytes=320" in feed.window.waiting_for(0)
    assert "rank 1, which was sent steps before epoch 0, step 0" in feed.window.waiting_for(0)


@settings(max_examples=50)
@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=7),
    room=st.sampled_from([1, 2_000, 5_000]),
    size=st.integers(1, 3),
)
def test_memory_is_bounded_for_elements_of_any_size(sizes, room, size):
    def make(number):
        # Its first eight bytes tell which element it is.
        return spec_lib.encode_element(
            (tf.constant(number, tf.int64), tf.zeros([500 * sizes[number % len(sizes)]], tf.int8))
        )

    feed = Feed(size, length=40, prefetch=100, max_bytes=room, make=make, credit=100).start().run_epochs(2)
    largest = size * make(sizes.index(max(sizes))).size
    assert feed.most_bytes <= max(room, 2 * largest) + largest


def test_a_step_that_left_memory_is_regained_by_going_back():
    feed = Feed(2, length=60, prefetch=2, max_bytes=4 * 16).start()
    feed.run_until(lambda rank: len(rank.got) >= 20)
    rank = feed.ranks[1]
    rank.got.clear()
    rank.read(Position(0, 0))
    feed.run_epochs(1)
    assert positions(rank) == list(range(30))
    assert feed.pump.produced.count((0, 0)) == 2


@pytest.mark.parametrize("position", [Position(0, 2), Position(1, 2), Position(2, 0)])
def test_a_step_behind_an_epochs_end_that_left_memory_is_regained_too(position):
    """Who asks for an end that is known gets it, and then asks for nothing more."""
    feed = Feed(2, length=100, max_bytes=2 * 16, through_epochs=True, steps_per_epoch=2).start()
    feed.run_until(lambda rank: len(rank.ends) >= 5)
    rank = feed.ranks[1]
    rank.got.clear()
    rank.read(position)
    feed.run_until(lambda rank: len(rank.ends) >= 6)
    first = max(position, Position(position.epoch + position.step // 2, 0))
    assert sorted(rank.got) == [Position(e, s) for e in range(first.epoch, 6) for s in range(2)]


def test_an_end_whose_next_epoch_left_memory_costs_no_production_for_who_wants_the_end_only():
    feed = Feed(2, length=8, max_bytes=2 * 16).start().run_epochs(5)
    produced = len(feed.pump.produced)
    feed.ranks[1].read(Position(1, 4))
    feed.settle()
    assert feed.ranks[1].items.pop() == EpochEnd(feed.ranks[1].readers, 1, 4)
    assert len(feed.pump.produced) == produced


def test_what_all_ranks_have_trained_leaves_memory():
    feed = Feed(2, length=40, prefetch=2).start()
    feed.run_until(lambda rank: len(rank.got) >= 10)
    assert held(feed.window)[0] >= 10 * 16
    feed.ranks[0].acknowledge(Position(0, 10))
    assert held(feed.window)[0] >= 10 * 16
    feed.ranks[1].acknowledge(Position(0, 8))
    assert held(feed.window)[1] == feed.window.furthest.step - 8


def test_a_rank_that_reads_again_from_memory_costs_no_production():
    feed = Feed(2, length=40).start()
    feed.run_until(lambda rank: len(rank.got) >= 5)
    produced = len(feed.pump.produced)
    feed.ranks[0].read(Position(0, 2))
    for _ in range(3):
        feed.ranks[0].receive()
    assert feed.ranks[0].next == Position(0, 5)
    assert len(feed.pump.produced) == produced


def test_a_reconnected_rank_goes_on_without_a_gap_or_a_repeat():
    feed = Feed(2, length=40, credit=3).start().settle()
    rank = feed.ranks[0]
    rank.pull()
    assert len(rank.items) == 2
    rank.reconnect()
    feed.run_epochs(1)
    assert positions(rank) == list(range(20))


# ---- Producing ahead ----


def test_the_next_epoch_is_begun_while_ranks_still_train():
    feed = Feed(2, length=10, prefetch=8).start().run_epochs(1)
    assert feed.window.furthest.epoch == 1


def test_without_a_fit_at_most_two_steps_of_the_next_epoch_are_produced_ahead():
    feed = Feed(2, length=20, prefetch=8).start().run_epochs(1)
    feed.pump_all()
    assert feed.window.furthest == Position(1, 2)


def test_in_a_fit_the_next_epoch_is_produced_ahead_as_far_as_any():
    feed = Feed(2, length=20, prefetch=8)
    feed.bind_all(1, Position(0, 0), last_epoch=3)
    feed.start().run_epochs(1)
    feed.pump_all()
    assert feed.window.furthest == Position(1, 8)


def test_nothing_is_produced_ahead_beyond_the_last_epoch_of_a_fit():
    feed = Feed(2, length=20, prefetch=8)
    feed.bind_all(1, Position(0, 0), last_epoch=2)
    feed.start().run_epochs(2)
    feed.pump_all()
    assert feed.window.furthest == Position(2, 0)
    assert (2, 0) not in feed.pump.produced


def test_what_is_asked_for_beyond_the_last_epoch_is_produced_all_the_same():
    """`fit` may run longer than it said; a rank that waits is served."""
    feed = Feed(2, length=20, prefetch=8)
    feed.bind_all(1, Position(0, 0), last_epoch=1)
    feed.start().run_epochs(3)


def test_a_read_after_the_fit_produces_ahead_as_without_one():
    feed = Feed(2, length=20, prefetch=8)
    feed.bind_all(1, Position(0, 0), last_epoch=1)
    feed.start().run_epochs(1)
    feed.last_epoch = NO_LAST_EPOCH
    feed.run_epochs(2)
    feed.pump_all()
    assert feed.window.furthest == Position(2, 2)


def test_no_more_than_one_epoch_is_produced_ahead():
    feed = Feed(1, length=1, prefetch=8)
    feed.bind_all(1, Position(0, 0), last_epoch=100)
    feed.start()
    feed.pump_all()
    assert feed.window.furthest <= Position(2, 0)


# ---- bind ----


def test_a_fit_goes_on_at_its_position():
    feed = Feed(2, length=20)
    assert feed.bind_all(1, Position(0, 4)) == (Segment(), Position(0, 4))
    feed.start(Position(0, 4)).run_epochs(1)
    assert [positions(rank) for rank in feed.ranks] == [list(range(4, 10))] * 2


def test_a_fit_of_given_steps_joins_the_passes_from_its_first_element_on():
    feed = Feed(2, length=7)
    assert feed.bind_all(1, Position(0, 0), steps_per_epoch=5) == (Segment(0, 0, 0, 5), Position(0, 0))
    feed.start().run_epochs(2)
    assert [positions(rank, 1) for rank in feed.ranks] == [[0, 1, 2, 3, 4]] * 2


def test_a_fit_after_one_that_broke_off_begins_an_epoch_of_its_own_where_training_stood():
    feed = Feed(2, length=20).start()
    feed.run_until(lambda rank: len(rank.got) >= 5)
    for rank in feed.ranks:
        rank.acknowledge(Position(0, 5))
    segment, start = feed.bind_all(1, Position(0, 5), steps_per_epoch=4)
    assert (segment, start) == (Segment(1, 0, 10, 4), Position(1, 0))
    feed.start(start).run_until(lambda rank: len(rank.ends) >= 2)
    assert feed.ranks[0].got[Position(1, 0)] == 10
    assert [feed.ranks[1].got[Position(2, s)] for s in range(4)] == [19, PASS + 1, PASS + 3, PASS + 5]
    _, count, _ = feed.window.statistics()[0]
    assert dataclasses.astuple(count) == (10, 5, 0, True)


def test_a_fit_without_steps_after_one_with_them_goes_on_at_the_next_element():
    feed = Feed(2, length=20)
    feed.bind_all(1, Position(0, 0), steps_per_epoch=4)
    feed.start().run_epochs(1)
    segment, start = feed.bind_all(2, Position(1, 0))
    assert (segment, start) == (Segment(1, 0, 8, None), Position(1, 0))
    feed.start(start).run_until(lambda rank: len(rank.ends) >= 3)
    assert [feed.ranks[0].ends[epoch] for epoch in range(3)] == [4, 6, 10]


def test_a_segment_begins_in_the_pass_that_holds_its_element():
    """Where earlier passes are over, their lengths are known and counted off."""
    feed = Feed(2, length=6)
    feed.bind_all(1, Position(0, 0), steps_per_epoch=4)
    feed.start().run_epochs(1)
    segment, _ = feed.bind_all(2, Position(1, 0))
    assert segment == Segment(1, 1, 2, None)


def test_the_feeders_own_steps_hold_again_after_a_fit_with_others():
    feed = Feed(2, length=100, steps_per_epoch=3)
    assert feed.bind_all(1, Position(0, 0)) == (Segment(steps_per_epoch=3), Position(0, 0))
    feed.start().run_epochs(1)
    assert feed.bind_all(2, Position(1, 0), steps_per_epoch=5)[0] == Segment(1, 0, 6, 5)
    feed.start(Position(1, 0)).run_until(lambda rank: len(rank.ends) >= 2)
    assert feed.bind_all(3, Position(2, 0))[0] == Segment(2, 0, 16, 3)


def test_a_slow_rank_still_gets_its_steps_of_the_segment_before():
    feed = Feed(2, length=20).start()
    fast, slow = feed.ranks
    while len(fast.got) < 5:
        feed.pump_all()
        fast.receive()
        fast.pull()
    segment, start = feed.window.bind(0, 1, Position(0, 5), 4)
    feed.segments.append(segment)
    fast.read(start)
    while len(fast.got) < 8:
        assert feed.pump_all() or fast.receive() or fast.pull()
    while len(slow.got) < 5:
        assert slow.receive()
        slow.pull()
    assert feed.window.bind(1, 1, Position(0, 5), 4) == (segment, start)
    slow.read(start)
    feed.run_until(lambda rank: 2 in rank.ends)


@pytest.mark.parametrize(
    ("position", "steps", "message"),
    [
        (Position(0, 3), None, "rank 1 begins its fit at epoch 0, step 3 .*another rank at epoch 0, step 4"),
        (Position(1, 0), None, "rank 1 begins its fit at epoch 1, step 0"),
        (Position(0, 4), 7, "with steps_per_epoch=7, but another rank at .* with steps_per_epoch=None"),
    ],
)
def test_ranks_that_begin_a_fit_otherwise_get_an_error_that_says_both(position, steps, message):
    feed = Feed(2, length=20)
    feed.window.bind(0, 1, Position(0, 4), None)
    with pytest.raises(BindError, match=message):
        feed.window.bind(1, 1, position, steps)


def test_a_rank_that_binds_again_after_a_break_is_told_the_same():
    feed = Feed(2, length=20)
    first = feed.bind_all(1, Position(0, 4), steps_per_epoch=3)
    assert feed.window.bind(0, 1, Position(0, 4), 3) == first


def test_a_rank_that_comes_with_another_segment_than_the_first_is_refused():
    feed = Feed(2, length=20, attend=False)
    feed.ranks[0].attend(Segment(0, 0, 0, 4))
    with pytest.raises(
        BindError, match=r"rank 1 goes on from .*steps_per_epoch=5.*but another rank from .*steps_per_epoch=4"
    ):
        feed.ranks[1].attend(Segment(0, 0, 0, 5))


def test_ranks_tell_a_restarted_producer_where_their_epochs_lie():
    feed = Feed(2, length=20, attend=False)
    feed.segments = [Segment(3, 1, 6, 4)]
    for rank in feed.ranks:
        rank.acknowledged = Position(4, 2)
        rank.attend(feed.segments[0])
    assert feed.window.segment == feed.segments[0]
    feed.start(Position(4, 2)).run_until(lambda rank: len(rank.ends) >= 2)
    assert feed.ranks[0].got[Position(4, 2)] == PASS + 6 + (4 + 2) * 2


def test_a_restarted_producer_begins_at_the_smallest_position_asked_for():
    feed = Feed(2, length=20, attend=False)
    for rank, step in zip(feed.ranks, (7, 4), strict=True):
        rank.attend()
        rank.read(Position(2, step))
    feed.run_until(lambda rank: 2 in rank.ends)
    assert feed.pump.produced[0] == (2, 8)


def test_a_read_before_the_segment_whose_step_left_memory_does_not_end_the_pump():
    """A rank's connection broke while a step of the epoch before was on its way to it."""
    feed = Feed(2, length=20, max_bytes=1, credit=1, prefetch=2).start()
    feed.run_until(lambda rank: len(rank.got) >= 5)
    segment, start = feed.window.bind(0, 1, Position(0, 5), 4)
    feed.segments.append(segment)
    feed.ranks[0].read(start)
    feed.pump_all()
    feed.ranks[1].read(Position(0, 4))
    feed.settle()
    assert feed.ranks[1].next == Position(0, 5) or feed.ranks[1].failure is not None


# ---- Failures ----


@settings(max_examples=60)
@given(size=st.integers(1, 4), bad=st.integers(0, 30), lead=st.integers(0, 10))
def test_a_failure_comes_to_all_ranks_at_the_first_step_that_can_not_be_delivered(size, bad, lead):
    feed = Feed(size, length=100, fails_at=(0, bad)).start()
    for _ in range(lead):
        feed.pump_all()
        feed.ranks[0].receive()
        feed.ranks[0].pull()
    feed.run_until(lambda rank: rank.failure is not None)
    for rank in feed.ranks:
        while rank.pull():
            pass
        assert positions(rank) == list(range(bad // size))
        assert rank.failure == Failure(FailureKind.PRODUCER, f"element {bad} is bad", Position(0, bad // size))


def test_a_failure_in_the_next_epoch_does_not_touch_this_one():
    feed = Feed(2, length=10, fails_at=(1, 0)).start().run_epochs(1)
    assert all(rank.failure is None for rank in feed.ranks)
    feed.run_until(lambda rank: rank.failure is not None)
    assert feed.ranks[0].failure.position == Position(1, 0)


def test_a_failure_is_final():
    feed = Feed(1, length=10, fails_at=(0, 3)).start()
    rank = feed.ranks[0].drain()
    rank.failure = None
    rank.read(Position(0, 3))
    feed.settle()
    assert rank.failure is not None
    assert feed.window.waiting_for(0) == "nothing: element 3 is bad"


def test_a_rank_that_knows_of_the_failure_gets_nothing_more():
    feed = Feed(1, length=10, fails_at=(0, 0)).start()
    rank = feed.ranks[0].drain()
    assert rank.failure is not None
    assert not rank.receive()


def test_a_failure_of_work_that_is_no_longer_wanted_is_forgotten():
    feed = Feed(1, length=10).start(Position(0, 5))
    feed.pump_one()
    stale = feed.window.wait_for_work()
    feed.ranks[0].read(Position(0, 0))
    feed.window.fail(stale.generation, "too late")
    feed.window.put(stale.generation, encoded(77))
    feed.window.end_pass(stale.generation, 0, 10)
    feed.run_epochs(1)
    assert positions(feed.ranks[0]) == list(range(10))


def test_a_pipeline_that_can_not_be_built_is_told_to_every_rank_at_once():
    feed = Feed(2, length=10)
    feed.window.abandon("no such file")
    for rank in feed.ranks:
        assert rank.receive()
        assert (rank.failure.kind, rank.failure.message) == (FailureKind.PRODUCER, "no such file")


def test_ranks_that_never_come_are_named():
    feed = Feed(4, length=10, attend=False, start_timeout=60.0)
    for number in (0, 2):
        feed.ranks[number].attend().read(Position(0, 0))
    feed.clock.now += 59.0
    feed.pump_all()
    assert not feed.ranks[0].receive()
    assert feed.window.waiting_for(0) == "ranks 1, 3 to use this feed"
    feed.clock.now += 2.0
    for number in (0, 2):
        assert feed.ranks[number].receive()
        failure = feed.ranks[number].failure
        assert failure.kind is FailureKind.RANKS
        assert "ranks 1, 3 of 4 did not come within 60 s (present: ranks 0, 2)" in failure.message


def test_nothing_is_delivered_before_all_ranks_have_come():
    feed = Feed(2, length=10, attend=False)
    feed.ranks[0].attend().read(Position(0, 0))
    feed.pump_all()
    assert not feed.ranks[0].receive()
    assert feed.completed == 0
    feed.ranks[1].attend().read(Position(0, 0))
    assert feed.completed == 1
    feed.run_epochs(1)


def test_a_rank_whose_connection_does_not_come_back_is_named_with_its_position():
    feed = Feed(2, length=100, rank_timeout=30.0).start()
    feed.run_until(lambda rank: len(rank.got) >= 5)
    feed.window.disconnected(1)
    feed.clock.now += 29.0
    feed.settle()
    assert feed.ranks[0].failure is None
    feed.clock.now += 2.0
    feed.ranks[0].receive()
    while feed.ranks[0].failure is None:
        assert feed.ranks[0].receive()
    assert feed.ranks[0].failure.kind is FailureKind.RANKS
    assert "rank 1 is gone: its connection broke 30 s ago at epoch 0, step 5" in feed.ranks[0].failure.message


def test_a_rank_that_comes_back_in_time_is_not_gone():
    feed = Feed(2, length=100, rank_timeout=30.0).start().settle()
    feed.window.disconnected(1)
    feed.clock.now += 29.0
    feed.settle()
    feed.ranks[1].reconnect()
    feed.clock.now += 100.0
    feed.run_epochs(1)


def test_a_rank_that_has_left_is_not_gone():
    feed = Feed(2, length=10, rank_timeout=30.0).start().run_epochs(1)
    feed.window.leave(1, "")
    feed.window.disconnected(1)
    feed.clock.now += 100.0
    feed.ranks[0].read(Position(1, 0), left=feed.ranks[0].pulled).drain()
    assert feed.ranks[0].ends == {0: 5, 1: 5}


def test_a_rank_that_leaves_with_an_error_ends_the_feed_for_the_others():
    feed = Feed(2, length=10).start()
    feed.window.leave(1, "KeyboardInterrupt")
    feed.ranks[0].receive()
    assert "rank 1 left with an error: KeyboardInterrupt" in feed.ranks[0].failure.message


def broken_off(**options):
    """Rank 0 has left epoch 0 at step 2 for epoch 1, and rank 1 goes on in epoch 0, as far as it gets."""
    feed = Feed(2, length=100, prefetch=2, cut_grace=10.0, **options).start()
    early, late = feed.ranks
    while len(early.got) < 2:
        feed.pump_all()
        early.receive()
        early.pull()
    early.read(Position(1, 0), left=early.pulled)
    late.drain()
    return feed, early, late


def test_ranks_in_different_epochs_are_both_named():
    feed, early, late = broken_off()
    assert late.failure is None
    feed.window.progress(1, late.readers, late.pulled, late.acknowledged, {}, waiting=True)
    late.receive()
    feed.clock.now += 11.0
    late.receive()  # the wait in which the time is up
    assert late.receive()
    assert late.failure.kind is FailureKind.RANKS
    assert "rank 0 left epoch 0 at step 2 and went on to epoch 1, step 0" in late.failure.message
    assert f"but rank 1 still asks for {late.next}" in late.failure.message
    assert early.receive()
    assert early.failure.message == late.failure.message


def test_ranks_that_all_break_off_go_on_together():
    feed, _, late = broken_off()
    feed.clock.now += 9.0
    late.read(Position(1, 0), left=late.pulled)
    feed.clock.now += 20.0
    feed.run_until(lambda rank: 1 in rank.ends)
    assert all(rank.failure is None for rank in feed.ranks)


def test_a_rank_behind_one_that_broke_off_gets_the_steps_that_were_produced():
    _, early, late = broken_off()
    assert len(late.got) >= len([p for p in early.got if p.epoch == 0])


# ---- Life and news ----


def test_the_pump_ends_when_all_ranks_have_left():
    feed = Feed(2, length=10).start().settle()
    feed.window.leave(0, "")
    with pytest.raises(WouldBlock):
        feed.window.wait_for_work()
    feed.window.leave(1, "")
    assert feed.window.wait_for_work() is None


def test_the_pump_ends_when_it_is_told_to():
    feed = Feed(2, length=10).start()
    feed.window.stop()
    assert feed.window.wait_for_work() is None


def test_an_interrupted_wait_returns_nothing():
    assert Feed(1, length=10).start().window.wait_for_item(0, lambda: True) is None


def test_statistics_say_what_was_made_dropped_and_trained():
    feed = Feed(2, length=7).start()
    feed.run_until(lambda rank: len(rank.got) >= 2)
    feed.ranks[0].acknowledge(Position(0, 2))
    feed.ranks[1].acknowledge(Position(0, 1))
    feed.pump_all()
    epoch, count, trained = feed.window.statistics()[0]
    assert (epoch, dataclasses.astuple(count), trained) == (0, (7, 3, 1, True), {0: 2, 1: 1})


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (7, "epoch 0 drops 1 element of 7: no complete step for 3 ranks"),
        (8, "epoch 0 drops 2 elements of 8: no complete step"),
        (2, "epoch 0 drops 2 elements of 2, all that there are: no complete step"),
    ],
)
def test_what_is_dropped_is_said_once(length, said):
    feed = Feed(3, length=length).start().run_epochs(3)
    assert [warning[: len(said)] for warning in feed.warnings] == [said]


def test_nothing_is_said_where_nothing_is_dropped():
    assert Feed(3, length=6).start().run_epochs(2).warnings == []


def test_each_epochs_counts_are_reported_when_its_end_is_produced():
    ended = []
    feed = Feed(2, length=7, epoch_ended=lambda epoch, count: ended.append((epoch, *dataclasses.astuple(count))))
    feed.start().run_epochs(2)
    assert ended[:2] == [(0, 7, 3, 1, True), (1, 7, 3, 1, True)]


def test_counts_of_a_producer_before_this_one_are_kept():
    feed = Feed(2, length=7, counts={0: EpochCount(9, 4, 1, True)}, attend=False)
    for rank in feed.ranks:
        rank.acknowledged = Position(1, 0)
        rank.attend()
    feed.start(Position(1, 0)).run_until(lambda rank: 1 in rank.ends)
    counts = [dataclasses.astuple(count) for _, count, _ in feed.window.statistics()]
    assert counts[:2] == [(9, 4, 1, True), (7, 3, 1, True)]


@pytest.mark.parametrize(("length", "dropped"), [(6, 0), (7, 1)])
@pytest.mark.parametrize("start", [1, 3])
def test_an_epoch_that_this_producer_has_only_ended_has_all_its_elements(start, length, dropped):
    feed = Feed(2, length=length, attend=False)
    for rank in feed.ranks:
        rank.acknowledged = Position(0, start)
        rank.attend()
    feed.start(Position(0, start)).run_until(lambda rank: 0 in rank.ends)
    assert dataclasses.astuple(feed.window.statistics()[0][1]) == (length, 3, dropped, True)


def test_an_epoch_under_way_is_not_complete():
    feed = Feed(2, length=100, prefetch=2).start().settle()
    _, count, _ = feed.window.statistics()[0]
    assert not count.complete
    assert count.elements == 2 * count.steps


def test_a_wait_for_the_pipeline_says_which_element_and_how_long():
    feed = Feed(2, length=10).start()
    feed.pump_one()
    feed.pump_one()
    assert isinstance(feed.window.wait_for_work(), Produce)
    feed.clock.now += 42.0
    assert feed.window.waiting_for(0) == "the pipeline, at work on epoch 0, step 0, element 2 of 2 for 42 s"


def test_a_wait_for_a_rank_says_that_it_has_to_pull():
    feed = Feed(1, length=100, credit=1).start().settle()
    assert feed.window.waiting_for(0) == "this rank to pull what it was sent"


# ---- With threads ----


@pytest.fixture
def real_waits(monkeypatch):
    """Real waits, whose polls come too late to help: only a notification can end them in time."""
    monkeypatch.setattr(Waits, "real", True)
    for module in (reference, native):
        monkeypatch.setattr(module, "_POLL_SECONDS", 1000.0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("room", [1, 100, PLENTY])
def test_threads_are_woken_whenever_there_is_something_for_them(real_waits, room):
    size, length, epochs = 3, 200, 3
    window = new_window(size, prefetch=3, max_bytes=room, log=lambda text: None)
    pump = Pump(window, lambda pass_: length)
    got = [[] for _ in range(size)]
    failures = []

    def consume(rank):
        try:
            window.attend(rank, Position(0, 0), None)
            for epoch in range(epochs):
                window.read(rank, epoch, Position(epoch, 0), False, 1 + rank, PLENTY)
                while isinstance(item := window.wait_for_item(rank, lambda: False), Delivery):
                    got[rank].append(number_of(item.element))
                    pulled = Position(epoch, item.position.step + 1)
                    acknowledged = pulled if rank else Position(0, 0)
                    window.progress(rank, epoch, pulled, acknowledged, {}, waiting=True)
                assert item == EpochEnd(epoch, epoch, length // size)
            window.leave(rank, "")
        except BaseException as error:
            failures.append(error)
            window.stop()

    def produce():
        while pump.work():
            pass

    threads = [threading.Thread(target=consume, args=(r,), name=f"rank-{r}", daemon=True) for r in range(size)]
    threads.append(threading.Thread(target=produce, name="pump", daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert [thread.name for thread in threads if thread.is_alive()] == []
    assert failures == []
    for rank in range(size):
        assert got[rank] == [e * PASS + s * size + rank for e in range(epochs) for s in range(length // size)]


@pytest.mark.timeout(30)
def test_wake_lets_a_waiting_rank_look_at_its_condition(real_waits):
    window = new_window(2, prefetch=2, max_bytes=PLENTY)
    window.attend(0, Position(0, 0), None)
    over = threading.Event()
    looked = threading.Event()

    def interrupted():
        looked.set()
        return over.is_set()

    waiting = threading.Thread(target=window.wait_for_item, args=(0, interrupted), name="rank-0", daemon=True)
    waiting.start()
    assert looked.wait(10.0)
    over.set()
    window.wake(0)
    waiting.join(10.0)
    assert not waiting.is_alive()


@pytest.mark.timeout(30)
def test_who_waits_for_the_ranks_to_leave_has_heard_of_each(real_waits):
    left = []
    window = new_window(2, prefetch=2, max_bytes=PLENTY, rank_left=lambda rank, trained: left.append(rank))
    seen = []

    def wait():
        window.wait_until_drained()
        seen.extend(left)

    waiting = threading.Thread(target=wait, name="leave", daemon=True)
    waiting.start()
    for rank in range(2):
        window.attend(rank, START, None)
    for rank in (1, 0):
        assert waiting.is_alive()
        window.leave(rank, "")
    waiting.join(10.0)
    assert seen == [1, 0]


def test_a_restarted_producer_waits_for_no_rank_that_has_left_before():
    told = {}
    before = Feed(2, length=10, rank_left=told.__setitem__).start()
    before.window.progress(1, 1, Position(0, 0), Position(0, 5), {0: 5})
    before.window.leave(1, "")
    assert told == {1: {0: 5}}
    feed = Feed(2, length=10, attend=False, left=told)
    feed.ranks[0].attend().read(Position(0, 0))
    while feed.pump_all() or feed.ranks[0].receive() or feed.ranks[0].pull():
        pass
    assert positions(feed.ranks[0]) == list(range(5))
    assert feed.window.statistics()[0][2] == {0: 0, 1: 5}
    feed.window.leave(0, "")
    assert feed.window.wait_for_work() is None


# ---- What is ahead of the ranks ----


def ahead_of(feed, position):
    elements = feed.window.untrained(position)
    return elements and [number_of(element) for element in elements]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_ahead_of_a_position_is_all_up_to_the_pump_and_what_an_epoch_dropped(size):
    feed = Feed(size, length=7, prefetch=100).start().settle()
    pump = (feed.pump.pass_, feed.pump.element)
    assert pump > (0, 7 // size * size)
    expected = [place[0] * PASS + place[1] for place in feed.pump.produced]
    for step in range(7 // size + 1):
        assert ahead_of(feed, Position(0, step)) == expected[step * size :]
    if feed.window.furthest.epoch:
        assert ahead_of(feed, Position(1, 0)) == expected[7:]


def test_what_has_left_memory_is_not_ahead_of_a_position():
    feed = Feed(1, length=100, prefetch=2, max_bytes=4 * ELEMENT_BYTES).start()
    feed.run_until(lambda rank: len(rank.got) >= 20)
    assert ahead_of(feed, Position(0, 0)) is None
    assert ahead_of(feed, feed.ranks[0].pulled) is not None
    assert ahead_of(feed, Position(0, 99)) is None
    feed.start()
    # The window goes back, and the pump does not know yet.
    assert ahead_of(feed, START) is None


def test_what_an_epoch_dropped_is_kept_until_it_is_trained():
    feed = Feed(2, length=5, prefetch=100).start()
    feed.run_epochs(1)
    assert held(feed.window)[2] == [0]
    for rank in feed.ranks:
        rank.acknowledge(Position(1, 0))
    feed.run_epochs(2)
    assert held(feed.window)[2] == [1]


def test_a_pump_that_is_wanted_goes_where_it_must_first():
    feed = Feed(1, length=10)
    feed.start()
    assert isinstance(feed.window.wait_for_work(lambda: True), Seek)
    assert isinstance(feed.window.wait_for_work(lambda: True), Pause)
    assert feed.window.untrained(START) == []
    feed.settle()
    feed.ranks[0].read(START)
    assert isinstance(feed.window.wait_for_work(lambda: True), Pause)
