"""Where a rank's iterators start, and what counts as trained: nothing skipped, nothing twice, whoever peeks."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kerasfeed.cursor import Cursor
from kerasfeed.errors import FeedClosedError
from kerasfeed.schedule import Position


def pull(cursor, ticket, steps):
    """The iterator gets this many steps more; returns their positions."""
    got = []
    for _ in range(steps):
        got.append(cursor.pulled)
        cursor.note_step(ticket, cursor.pulled)
    return got


def steps(epoch, first, last):
    return [Position(epoch, step) for step in range(first, last)]


START = Position(0, 0)


def bound(position=START, through_epochs=False, epoch_steps=None):
    cursor = Cursor("train")
    cursor.epoch_steps = epoch_steps
    cursor.bind(position, through_epochs)
    return cursor


# ---- Free: without a callback ----


def test_without_a_callback_each_iterator_is_the_next_epoch():
    cursor = Cursor("train")
    for epoch in range(3):
        ticket = cursor.open()
        assert ticket.start == Position(epoch, 0)
        assert pull(cursor, ticket, 4) == steps(epoch, 0, 4)
        cursor.note_end(ticket, epoch)


def test_an_iterator_that_broke_off_is_followed_by_the_next_epoch():
    cursor = Cursor("train")
    pull(cursor, cursor.open(), 2)
    assert cursor.open().start == Position(1, 0)


def test_an_iterator_that_has_not_got_a_step_costs_no_epoch():
    cursor = Cursor("train")
    for _ in range(3):
        assert cursor.open().start == Position(0, 0)


def test_an_epoch_of_known_length_is_over_with_its_last_step():
    """Whether an iterator also pulls the end, or stops at the last step: the next one is the next epoch, no further."""
    for pulls_end in (True, False):
        cursor = Cursor("train")
        cursor.epoch_steps = 3
        ticket = cursor.open()
        pull(cursor, ticket, 3)
        if pulls_end:
            cursor.note_end(ticket, 0)
        assert cursor.open().start == Position(1, 0)


def test_an_epoch_without_steps_is_an_epoch():
    cursor = Cursor("train")
    for epoch in range(3):
        ticket = cursor.open()
        assert ticket.start == Position(epoch, 0)
        cursor.note_end(ticket, epoch)
    assert cursor.acknowledged == Position(3, 0)


def test_without_a_callback_a_step_is_trained_when_the_next_is_pulled():
    cursor = Cursor("train")
    ticket = cursor.open()
    pull(cursor, ticket, 1)
    assert (cursor.acknowledged, cursor.trained) == (Position(0, 0), {})
    pull(cursor, ticket, 1)
    assert (cursor.acknowledged, cursor.trained) == (Position(0, 1), {0: 1})
    cursor.note_end(ticket, 0)
    assert (cursor.acknowledged, cursor.trained) == (Position(1, 0), {0: 2})


def test_what_an_iterator_that_broke_off_pulled_counts_as_trained_when_the_next_one_pulls():
    cursor = Cursor("train")
    pull(cursor, cursor.open(), 3)
    cursor.open()
    assert (cursor.acknowledged, cursor.trained) == (Position(1, 0), {0: 3})


# ---- One iterator at a time ----


@pytest.mark.parametrize(
    "make", [lambda: Cursor("train"), bound, lambda: bound(through_epochs=True)], ids=["free", "bound", "through"]
)
def test_an_iterator_whose_place_was_taken_says_so_when_it_pulls(make):
    cursor = make()
    earlier = cursor.open()
    pull(cursor, earlier, 1)
    later = cursor.open()
    for attempt in (
        lambda: cursor.check(earlier),
        lambda: cursor.note_step(earlier, Position(0, 1)),
        lambda: cursor.note_end(earlier, 0),
    ):
        with pytest.raises(
            FeedClosedError, match="feed 'train': an iterator that started at epoch 0, step 0 pulls again"
        ):
            attempt()
    cursor.check(later)
    pull(cursor, later, 1)


# ---- Bound: during a fit with FeedCallback ----


def test_a_fit_begins_where_it_is_bound():
    assert bound(Position(3, 7)).open().start == Position(3, 7)


def test_a_peek_costs_no_step():
    cursor = bound()
    pull(cursor, cursor.open(), 2)
    ticket = cursor.open()
    assert ticket.start == Position(0, 0)
    assert pull(cursor, ticket, 3) == steps(0, 0, 3)
    assert cursor.untrained == 3


def test_an_epoch_begins_at_the_first_step_that_is_not_trained():
    cursor = bound()
    pull(cursor, cursor.open(), 5)
    cursor.acknowledge(3)
    cursor.begin_epoch()
    assert cursor.open().start == Position(0, 3)
    assert cursor.untrained == 0


def test_steps_pulled_ahead_are_pulled_again_and_trained_once():
    cursor = bound()
    ticket = cursor.open()
    pull(cursor, ticket, 5)
    cursor.acknowledge(3)
    cursor.begin_epoch()
    assert pull(cursor, cursor.open(), 3) == steps(0, 3, 6)
    assert cursor.acknowledge(3) == 0
    assert (cursor.acknowledged, cursor.trained) == (Position(0, 6), {0: 6})


def test_the_end_of_an_epoch_moves_the_cursor_to_the_next():
    cursor = bound()
    ticket = cursor.open()
    pull(cursor, ticket, 4)
    cursor.note_end(ticket, 0)
    assert cursor.open().start == Position(1, 0)
    assert cursor.acknowledged == Position(0, 0)
    assert cursor.untrained == 4


def test_a_repeated_feed_goes_on_epoch_after_epoch():
    """feeder.repeat() makes a new iterator at each end, while steps before it are still being trained."""
    cursor = bound()
    for epoch in range(3):
        ticket = cursor.open()
        assert pull(cursor, ticket, 3) == steps(epoch, 0, 3)
        cursor.note_end(ticket, epoch)
        if epoch:
            cursor.acknowledge(3)
    assert cursor.acknowledge(3) == 0
    assert (cursor.acknowledged, cursor.trained) == (Position(3, 0), {0: 3, 1: 3, 2: 3})


def test_keras_that_stops_at_the_last_step_of_a_known_epoch_goes_on_with_the_next():
    """Keras 2 does not pull the end of an epoch whose length it knows."""
    cursor = bound(epoch_steps=3)
    for epoch in range(3):
        cursor.begin_epoch()
        ticket = cursor.open()
        assert pull(cursor, ticket, 3) == steps(epoch, 0, 3)
        assert cursor.acknowledge(3) == 0
    assert cursor.acknowledged == Position(3, 0)


def test_an_epoch_begun_in_its_middle_may_have_another_length():
    cursor = bound(Position(2, 0), epoch_steps=3)
    cursor.irregular_epoch = 2
    ticket = cursor.open()
    assert pull(cursor, ticket, 5) == steps(2, 0, 5)
    cursor.note_end(ticket, 2)
    assert [cursor.steps_in(epoch) for epoch in (1, 2, 3)] == [3, None, 3]


def test_early_stopping_in_an_epoch_leaves_the_rest_to_the_next_fit():
    cursor = bound()
    pull(cursor, cursor.open(), 6)
    cursor.acknowledge(4)
    cursor.unbind()
    cursor.bind(cursor.acknowledged, through_epochs=False)
    assert pull(cursor, cursor.open(), 2) == steps(0, 4, 6)


def test_after_a_fit_that_stopped_early_a_loop_takes_the_next_epoch():
    cursor = bound()
    pull(cursor, cursor.open(), 6)
    cursor.acknowledge(4)
    cursor.unbind()
    assert cursor.open().start == Position(1, 0)
    assert cursor.trained == {0: 4}


def test_one_iterator_over_all_epochs_goes_on_across_their_ends():
    cursor = bound(Position(1, 0), through_epochs=True, epoch_steps=2)
    ticket = cursor.open()
    assert (ticket.start, ticket.through_epochs) == (Position(1, 0), True)
    for epoch in (1, 2, 3):
        cursor.begin_epoch()
        for position in steps(epoch, 0, 2):
            cursor.note_step(ticket, position)
        cursor.note_end(ticket, epoch)
        assert cursor.pulled == Position(epoch + 1, 0)
    assert cursor.acknowledge(5) == 0
    assert (cursor.acknowledged, cursor.trained) == (Position(3, 1), {1: 2, 2: 2, 3: 1})


def test_one_iterator_over_all_epochs_is_not_moved_by_an_epoch_that_begins():
    cursor = bound(through_epochs=True)
    ticket = cursor.open()
    pull(cursor, ticket, 5)
    cursor.acknowledge(2)
    cursor.begin_epoch()
    assert pull(cursor, ticket, 1) == steps(0, 5, 6)
    assert cursor.untrained == 4


def test_an_iterator_of_an_earlier_epoch_does_not_move_the_cursor_back():
    cursor = bound(epoch_steps=2)
    ticket = cursor.open()
    pull(cursor, ticket, 2)
    cursor.note_end(ticket, 0)
    assert cursor.pulled == Position(1, 0)


# ---- Counting ----


def test_what_was_never_pulled_is_not_acknowledged():
    cursor = bound()
    pull(cursor, cursor.open(), 3)
    assert cursor.acknowledge(5) == 2
    assert (cursor.acknowledged, cursor.trained, cursor.untrained) == (Position(0, 3), {0: 3}, 0)


def test_nothing_pulled_means_nothing_acknowledged():
    cursor = bound(Position(2, 5))
    assert cursor.acknowledge(3) == 3
    assert (cursor.acknowledged, cursor.trained) == (Position(2, 5), {})


def test_an_acknowledgement_counts_for_the_epoch_of_its_step():
    """Several steps may be acknowledged at once, across an epoch's end."""
    cursor = bound(through_epochs=True)
    ticket = cursor.open()
    for position in [*steps(0, 0, 2), *steps(1, 0, 2)]:
        cursor.note_step(ticket, position)
    assert cursor.acknowledge(3) == 0
    assert (cursor.acknowledged, cursor.trained) == (Position(1, 1), {0: 2, 1: 1})


def test_an_epoch_that_turns_out_to_be_over_is_skipped():
    cursor = bound()
    pull(cursor, cursor.open(), 3)
    cursor.acknowledge(3)
    cursor.begin_epoch()
    cursor.skip_end(0)
    assert cursor.open().start == cursor.acknowledged == Position(1, 0)


def test_the_end_of_another_epoch_skips_nothing():
    cursor = bound(Position(2, 1))
    cursor.skip_end(1)
    assert (cursor.acknowledged, cursor.open().start) == (Position(2, 1), Position(2, 1))


def test_a_fit_never_takes_back_an_acknowledgement():
    cursor = bound(Position(4, 0))
    cursor.unbind()
    cursor.bind(Position(2, 0), through_epochs=False)
    assert cursor.acknowledged == Position(4, 0)


def test_an_iterator_rebuilt_within_an_epoch_goes_on_at_what_is_trained_at_least():
    """Trained steps are not pulled again, and what is acknowledged never passes what was pulled."""
    cursor = bound()
    pull(cursor, cursor.open(), 4)
    cursor.acknowledge(3)
    ticket = cursor.open()
    assert cursor.acknowledged <= cursor.pulled
    pull(cursor, ticket, 3)
    cursor.acknowledge(3)
    assert cursor.trained[0] == cursor.acknowledged.step


# ---- Any order of events ----


def test_behind_the_last_step_of_an_epoch_begins_the_next_one():
    cursor = Cursor("train")
    assert cursor.settle(Position(2, 7)) == (2, 7)
    cursor.epoch_steps, cursor.irregular_epoch = 7, 3
    assert [cursor.settle(Position(*p)) for p in [(2, 7), (2, 6), (3, 7), (4, 0)]] == [(3, 0), (2, 6), (3, 7), (4, 0)]


def test_the_next_start_is_where_an_iterator_will_start():
    cursor = Cursor("train")
    for pulled, start in ((0, (0, 0)), (3, (0, 0)), (0, (1, 0))):
        assert cursor.next_start == start
        ticket = cursor.open()
        assert ticket.start == start
        pull(cursor, ticket, pulled)
    cursor.restore(Position(4, 2))
    assert cursor.next_start == (4, 2)
    cursor.bind(Position(4, 2), through_epochs=True)
    pull(cursor, cursor.open(), 2)
    assert cursor.next_start == (4, 4)


class BoundCursor(RuleBasedStateMachine):
    """A fit on a bound cursor, against a model: the set of trained steps is a prefix of the stream, with no step twice.

    Iterators are made, peek, pull ahead and are thrown away at any time.
    """

    length = 0
    known = False

    @initialize(length=st.integers(1, 5), known=st.booleans(), epoch=st.integers(0, 3), data=st.data())
    def begin_fit(self, length, known, epoch, data):
        self.length, self.known = length, known
        start = Position(epoch, data.draw(st.integers(0, length - 1)))
        self.cursor = Cursor("train")
        self.cursor.epoch_steps = length if known else None
        self.cursor.bind(start, through_epochs=False)
        self.ticket = None
        self.ended = False
        self.begun = self.trained_to = self.expected = start
        self.history: list[Position] = []
        self.queue: list[Position] = []

    def following(self, position):
        return Position(position.epoch, position.step + 1)

    def normal(self, position):
        """The same place, named as the next epoch's start where the epoch is over."""
        return Position(position.epoch + 1, 0) if position.step == self.length else position

    @rule()
    def open_iterator(self):
        self.ticket = self.cursor.open()
        if not self.ended:
            self.begun = max(self.begun, self.trained_to)
            self.queue = [p for p in self.queue if p < self.begun]
            self.expected = self.begun
        self.ended = False
        # Where only the producer knows the length, an epoch that is over may be asked for once more: it ends at once.
        assert self.normal(self.ticket.start) == self.normal(self.expected)
        self.expected = self.ticket.start

    @precondition(lambda self: self.ticket is not None and not self.ended)
    @rule(count=st.integers(1, 3))
    def pull_steps(self, count):
        for _ in range(count):
            if self.expected.step == self.length:
                return
            self.cursor.note_step(self.ticket, self.expected)
            self.queue.append(self.expected)
            self.expected = self.following(self.expected)
            if self.known and self.expected.step == self.length:
                self.over()
                return

    @precondition(lambda self: self.ticket is not None and not self.ended and self.expected.step == self.length)
    @rule()
    def pull_end(self):
        self.cursor.note_end(self.ticket, self.expected.epoch)
        self.over()

    def over(self):
        self.expected = self.begun = Position(self.expected.epoch + 1, 0)
        self.ended = True

    @rule(count=st.integers(0, 4))
    def train(self, count):
        excess = self.cursor.acknowledge(count)
        assert excess == max(0, count - len(self.queue))
        for _ in range(count - excess):
            position = self.queue.pop(0)
            assert position == self.normal(self.trained_to), "a step was skipped or trained twice"
            self.trained_to = self.following(position)
            self.history.append(position)

    @rule()
    def begin_epoch(self):
        self.cursor.begin_epoch()
        self.begun = self.cursor.acknowledged
        self.ticket, self.ended = None, False
        assert self.normal(self.begun) == self.normal(self.trained_to)
        self.expected = self.begun

    @invariant()
    def nothing_is_acknowledged_that_was_not_pulled(self):
        if self.length:
            assert self.cursor.acknowledged <= self.cursor.pulled

    @invariant()
    def acknowledged_is_what_was_trained(self):
        if self.length:
            assert self.normal(self.cursor.acknowledged) == self.normal(self.trained_to)
            assert sum(self.cursor.trained.values()) == len(self.history) == len(set(self.history))
            assert self.cursor.untrained == len(self.queue)


class FreeCursor(RuleBasedStateMachine):
    """Loops over a cursor without a callback: every iterator that got a step is an epoch of its own."""

    @initialize(length=st.integers(0, 4), known=st.booleans())
    def begin(self, length, known):
        self.length = length
        self.cursor = Cursor("train")
        self.cursor.epoch_steps = length if known and length else None
        self.epoch, self.step, self.over = 0, 0, False
        self.ticket = None
        self.pulled: dict[int, int] = {}

    @rule()
    def open_iterator(self):
        if self.over or self.step:
            self.epoch, self.step = self.epoch + 1, 0
        self.over = False
        self.ticket = self.cursor.open()
        assert self.ticket.start == self.cursor.pulled == Position(self.epoch, 0)
        assert self.cursor.acknowledged == Position(self.epoch, 0)
        assert self.cursor.trained == self.pulled

    @precondition(lambda self: self.ticket is not None and not self.over)
    @rule()
    def pull_one(self):
        if self.step < self.length:
            self.cursor.note_step(self.ticket, Position(self.epoch, self.step))
            self.step += 1
            self.pulled[self.epoch] = self.step
        else:
            self.cursor.note_end(self.ticket, self.epoch)
            self.over = True
            assert self.cursor.trained == self.pulled
            assert self.cursor.acknowledged == Position(self.epoch + 1, 0)

    @invariant()
    def nothing_is_acknowledged_that_was_not_pulled(self):
        if hasattr(self, "cursor"):
            assert self.cursor.acknowledged <= self.cursor.pulled
            assert self.cursor.untrained <= 1


BoundCursor.TestCase.settings = settings(max_examples=300, stateful_step_count=40)
FreeCursor.TestCase.settings = settings(max_examples=150, stateful_step_count=30)


class TestAFitNeitherSkipsNorDoublesAStep(BoundCursor.TestCase):
    pass


class TestLoopsTakeOneEpochEach(FreeCursor.TestCase):
    pass


# ---- Several steps at once ----

actions = st.lists(
    st.one_of(
        st.tuples(st.just("pull"), st.integers(0, 7)),
        st.tuples(st.just("acknowledge"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["open", "end", "bind", "bind through", "unbind", "begin epoch"]), st.just(0)),
    ),
    max_size=20,
)


@given(actions=actions, epoch_steps=st.sampled_from([None, 4, 7]))
def test_several_steps_at_once_count_as_one_by_one(actions, epoch_steps):
    """However iterators were opened before, and whatever was acknowledged in between."""
    at_once = Cursor("train")
    at_once.epoch_steps = epoch_steps
    one_by_one = copy.deepcopy(at_once)
    both = (at_once, one_by_one)
    tickets = [cursor.open() for cursor in both]
    at = tickets[0].start
    for action, number in actions:
        if action == "pull":
            # Steps of one epoch, none behind its last one.
            count = number if epoch_steps is None else max(0, min(number, epoch_steps - at.step))
            at_once.note_steps(tickets[0], at, count)
            for step in range(at.step, at.step + count):
                one_by_one.note_step(tickets[1], Position(at.epoch, step))
            at = Position(at.epoch, at.step + count)
        elif action == "end":
            for cursor, ticket in zip(both, tickets, strict=True):
                cursor.note_end(ticket, at.epoch)
            at = Position(at.epoch + 1, 0)
        elif action == "acknowledge":
            assert at_once.acknowledge(number) == one_by_one.acknowledge(number)
        elif action == "begin epoch":
            for cursor in both:
                cursor.begin_epoch()
        else:
            for cursor in both:
                if action.startswith("bind"):
                    cursor.bind(cursor.acknowledged, action == "bind through")
                elif action == "unbind":
                    cursor.unbind()
            tickets = [cursor.open() for cursor in both]
            at = tickets[0].start
        assert tickets[0] == tickets[1]
        assert vars(at_once) == vars(one_by_one)


def test_steps_of_an_iterator_that_lost_its_place_are_refused():
    cursor = Cursor("train")
    ticket = cursor.open()
    cursor.open()
    with pytest.raises(FeedClosedError):
        cursor.note_steps(ticket, START, 0)
