"""Which way leads back, when the pump saves the pipeline's iterator, and that it brings the pipeline back."""

from __future__ import annotations

import threading
from concurrent import futures

import pytest
import tensorflow as tf

from kerasfeed.producer.pipeline import EndOfPass, Pipeline
from kerasfeed.producer.way_back import WayBack
from kerasfeed.producer.waypoint import Waypoint
from kerasfeed.schedule import Position
from kerasfeed.spec import encode_element

Data = tf.data.Dataset


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Pump:
    """Walks through elements, and makes the waypoints that are wanted."""

    def __init__(self, way_back, clock, cost=0.0):
        self.way_back, self.clock, self.cost = way_back, clock, cost
        self.taken = []

    def walk(self, pass_, elements, seconds_each=1.0):
        for element in elements:
            self.clock.now += seconds_each
            if self.way_back.due((pass_, element)):
                self.way_back.take((pass_, element), lambda place=(pass_, element): self._save(place))

    def _save(self, place):
        self.clock.now += self.cost
        self.taken.append(place)
        return Waypoint(place, place, repr(place).encode())


def make(resume="auto", unfit="", unfaithful="", unsteady="", max_bytes=1000, cost=0.0):
    clock, said = Clock(), []
    way_back = WayBack(resume, max_bytes, unfit, unfaithful, unsteady, said.append, clock)
    return way_back, Pump(way_back, clock, cost), said


def best(way_back, pass_, element):
    found = way_back.find((pass_, element), Position(pass_, element))
    return found and (found.place[1], found.iterator)


def test_nothing_is_saved_before_somebody_asks():
    way_back, pump, said = make()
    pump.walk(0, range(1, 100))
    assert (pump.taken, said, best(way_back, 0, 99)) == ([], [], None)


def test_an_iterator_is_saved_where_a_state_will_be_asked_for():
    way_back, pump, said = make()
    way_back.plan((0, 5), 10)
    pump.walk(0, range(6, 40))
    assert pump.taken == [(0, 15), (0, 25), (0, 35)]
    assert best(way_back, 0, 24) == (15, b"(0, 15)")
    assert best(way_back, 0, 25) == (25, b"(0, 25)")
    assert best(way_back, 0, 14) is None
    assert best(way_back, 1, 99) is None
    assert "snapshot" in said[0]


def test_only_what_a_later_question_can_use_is_kept():
    way_back, pump, _ = make()
    way_back.plan((0, 0), 10)
    pump.walk(0, range(1, 200))
    assert pump.taken == [(0, 10), (0, 20), (0, 30), (0, 40)]
    way_back.plan((0, 30), 10)
    assert best(way_back, 0, 25) is None
    assert best(way_back, 0, 30) == (30, b"(0, 30)")
    pump.walk(1, range(1, 200))
    assert pump.taken[4:] == [(1, 10), (1, 20)]


def test_saving_takes_a_twentieth_of_the_time_at_most():
    way_back, pump, _ = make(cost=2.0)
    way_back.plan((0, 0), 1)
    for element in range(1, 200):
        pump.walk(0, [element])
        way_back.plan((0, element), 1)
    assert len(pump.taken) * 2.0 <= 0.05 * pump.clock.now + 2.0
    assert len(pump.taken) >= 4


@pytest.mark.parametrize(
    ("options", "way", "reason"),
    [
        ({}, "a snapshot", ""),
        ({"unsteady": "a parallel map"}, "the elements that it is ahead", "a parallel map"),
        ({"unsteady": "a parallel map", "unfaithful": "it draws"}, "the elements that it is ahead", "a parallel map"),
        ({"unsteady": "a parallel map", "unfit": "it holds a variable"}, "by replay", "it holds a variable"),
        ({"unfaithful": "it draws"}, "by replay", "it draws"),
        ({"unfit": "it holds a variable"}, "by replay", "it holds a variable"),
        ({"resume": "snapshot", "unsteady": "a parallel map"}, "a snapshot", ""),
        ({"resume": "snapshot", "unfaithful": "it draws"}, "by replay", "it draws"),
        ({"resume": "window"}, "the elements that it is ahead", "resume='window'"),
        ({"resume": "window", "unfaithful": "it draws"}, "the elements that it is ahead", "resume='window'"),
        ({"resume": "window", "unfit": "it holds a variable"}, "by replay", "it holds a variable"),
        ({"resume": "replay", "unsteady": "a parallel map"}, "by replay", "resume='replay'"),
    ],
)
def test_the_way_is_chosen_and_said_once_with_its_reason(options, way, reason):
    way_back, _, said = make(**options)
    way_back.plan((0, 0), 10)
    way_back.plan((0, 10), 10)
    assert len(said) == 1
    assert way in said[0]
    assert reason in said[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"unfit": "it holds a variable"}, "it holds a variable"), ({"max_bytes": 3}, "max_state_bytes=3")],
)
def test_what_must_not_or_cannot_be_kept_is_replayed_and_that_is_said(options, reason):
    way_back, pump, said = make(**options)
    way_back.plan((0, 0), 10)
    pump.walk(0, range(1, 100))
    assert best(way_back, 0, 99) is None
    assert len(pump.taken) <= 1
    assert "replay" in said[-1]
    assert reason in said[-1]


def cannot_be_saved(place):
    raise tf.errors.FailedPreconditionError(None, None, "PyFunc is stateful")


def test_an_iterator_that_cannot_be_saved_is_replayed_and_that_is_said():
    way_back, pump, said = make()
    pump._save = cannot_be_saved
    way_back.plan((0, 0), 10)
    pump.walk(0, range(1, 100))
    assert "PyFunc is stateful" in said[-1]
    assert len(said) == 2


class Pumping:
    """A pump in a thread of its own, which answers as often as it is wanted."""

    def __init__(self, way_back, make):
        self._way_back, self._make = way_back, make
        self._woken, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._run)
        self.asked = []

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self._over = True
        self.wake()
        self._thread.join()

    def wake(self):
        self._woken.set()

    def _run(self):
        while not self._over:
            self._woken.wait()
            self._woken.clear()
            if self._way_back.wanted():
                self._way_back.answer(self._answer)

    def _answer(self, position):
        self.asked.append(position)
        return self._make(position)


KEPT = tuple(encode_element(tf.constant([i, i])) for i in range(3))


def ahead(position):
    place = (position.epoch, position.step)
    return Waypoint(place, (place[0], place[1] + 3), b"iterator", KEPT)


def test_a_pump_that_is_ahead_stops_and_adds_what_it_is_ahead():
    way_back, _, _ = make(resume="window")
    with Pumping(way_back, ahead) as pumping:
        for step in (4, 6):
            found = way_back.find((0, step), Position(0, step), pumping.wake, lambda: False)
            assert found == ahead(Position(0, step))
    assert pumping.asked == [Position(0, 4), Position(0, 6)]


def test_ranks_that_ask_at_once_are_answered_one_after_the_other():
    way_back, _, _ = make(resume="window")
    with Pumping(way_back, ahead) as pumping, futures.ThreadPoolExecutor(8) as ranks:

        def ask(step):
            return way_back.find((0, step), Position(0, step), pumping.wake, lambda: False)

        assert [found.place for found in ranks.map(ask, range(40))] == [(0, step) for step in range(40)]


def test_an_iterator_that_was_saved_at_that_place_needs_no_elements():
    way_back, pump, _ = make(resume="window")
    way_back.plan((0, 0), 10)
    pump.walk(0, range(1, 12))
    with Pumping(way_back, ahead) as pumping:
        assert way_back.find((0, 10), Position(0, 10), pumping.wake, lambda: False).iterator == b"(0, 10)"
    assert pumping.asked == []


@pytest.mark.parametrize(
    ("make_waypoint", "max_bytes", "reason"),
    [
        (lambda position: None, 1000, "max_buffer_bytes"),
        (ahead, 31, "32 bytes (max_state_bytes=31)"),
        (cannot_be_saved, 1000, "PyFunc is stateful"),
    ],
)
def test_without_a_window_the_pipeline_is_replayed_and_that_is_said(make_waypoint, max_bytes, reason):
    way_back, _, said = make(resume="window", max_bytes=max_bytes)
    with Pumping(way_back, make_waypoint) as pumping:
        for _ in range(2):
            assert way_back.find((0, 4), Position(0, 4), pumping.wake, lambda: False) is None
    assert len(said) == 1
    assert reason in said[0]


def test_nobody_waits_for_a_pump_that_has_ended_or_for_a_rank_that_is_gone():
    way_back, _, _ = make(resume="window")
    assert way_back.find((0, 4), Position(0, 4), lambda: None, lambda: True) is None
    assert not way_back.wanted()
    assert way_back.find((0, 4), Position(0, 4), way_back.close, lambda: False) is None


def test_an_answer_that_comes_too_late_is_not_given_to_the_rank_that_asks_next():
    way_back, _, _ = make(resume="window")
    gone, came_next = threading.Event(), threading.Event()

    def slow_for_the_first(position):
        if position.step == 4:
            gone.set()
            assert came_next.wait(10)
        return ahead(position)

    with Pumping(way_back, slow_for_the_first) as pumping, futures.ThreadPoolExecutor(1) as ranks:
        first = ranks.submit(way_back.find, (0, 4), Position(0, 4), pumping.wake, gone.is_set)
        assert first.result(10) is None

        def wake():
            came_next.set()
            pumping.wake()

        assert way_back.find((1, 6), Position(1, 6), wake, lambda: False) == ahead(Position(1, 6))


# ---- The pipeline ----

SAVABLE = {
    "shuffle": lambda: Data.range(30).shuffle(30),
    "two shuffles": lambda: Data.range(60).shuffle(20).map(lambda i: i + 1, 2).shuffle(9).batch(2).prefetch(3),
    "interleave": lambda: Data.range(5).shuffle(5).interleave(lambda i: Data.range(i * 6, i * 6 + 6), cycle_length=3),
    "repeat": lambda: Data.range(10).shuffle(10).repeat(3),
    "stateless": lambda: Data.random(seed=3).take(30).map(lambda s: tf.random.stateless_uniform([], [s, s])),
}


def make_pipeline(dataset_fn):
    return Pipeline(dataset_fn, None, 1, 7, log=lambda text: None)


def rest_of_pass(pipeline):
    values = []
    while True:
        try:
            values.append(b"".join(bytes(b) for b in pipeline.next().buffers))
        except EndOfPass:
            return values


@pytest.mark.parametrize("name", SAVABLE)
@pytest.mark.parametrize("place", [(0, 7), (2, 1)])
def test_a_restored_iterator_goes_on_as_it_would_have_in_later_passes_too(name, place):
    pass_, element = place
    undisturbed = make_pipeline(SAVABLE[name])
    expected = [rest_of_pass(undisturbed) for _ in range(4)]
    saved = make_pipeline(SAVABLE[name])
    saved.seek(pass_, element, False, lambda *end: None)
    data = Waypoint(place, place, saved.save())
    assert saved.unfit_for_snapshots == ""
    restored = make_pipeline(SAVABLE[name])
    restored.offer(data)
    restored.seek(pass_, element + 2, False, lambda *end: None)
    assert rest_of_pass(restored) == expected[pass_][element + 2 :]
    for later in range(pass_ + 1, 4):
        assert rest_of_pass(restored) == expected[later]
    # What lies before it is replayed.
    restored.seek(pass_, 0, False, lambda *end: None)
    assert rest_of_pass(restored) == expected[pass_]


@pytest.mark.parametrize(
    ("dataset_fn", "reason"),
    [
        (lambda: Data.range(9).map(lambda i: tf.random.uniform([])), "RandomUniform"),
        (lambda: Data.range(9).shuffle(9).cache(), "cache"),
    ],
)
def test_state_that_no_iterator_holds_makes_a_pipeline_unfit(dataset_fn, reason):
    assert reason in make_pipeline(dataset_fn).unfit_for_snapshots


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: b"", lambda data: bytes(len(data))])
def test_a_snapshot_that_cannot_be_used_is_replaced_by_replay(damage):
    said = []
    saved = make_pipeline(SAVABLE["shuffle"])
    saved.seek(0, 5, False, lambda *end: None)
    data = saved.save()
    expected = rest_of_pass(saved)
    pipeline = Pipeline(SAVABLE["shuffle"], None, 1, 7, log=said.append)
    pipeline.offer(Waypoint((0, 5), (0, 5), damage(data)))
    pipeline.seek(0, 5, False, lambda *end: None)
    assert rest_of_pass(pipeline) == expected
    assert "replayed instead" in said[-1]


@pytest.mark.parametrize("name", SAVABLE)
@pytest.mark.parametrize(("place", "stop"), [((0, 4), (0, 7)), ((0, 25), (1, 3)), ((1, 4), (2, 0)), ((0, 26), (2, 2))])
@pytest.mark.parametrize("to", [0, 2])
def test_what_is_kept_comes_out_before_the_iterator_goes_on(name, place, stop, to):
    undisturbed = make_pipeline(SAVABLE[name])
    expected = [rest_of_pass(undisturbed) for _ in range(4)]
    saved, kept, lengths = make_pipeline(SAVABLE[name]), [], {}
    saved.seek(*place, False, lambda *end: None)
    while saved.standing < stop:
        try:
            kept.append(saved.next())
        except EndOfPass as end:
            lengths[end.pass_] = end.elements
    waypoint = Waypoint(place, stop, saved.save(), tuple(kept), lengths)
    assert waypoint.way == "window"
    again = Waypoint.from_parts(place[0], waypoint.to_parts())
    assert again == waypoint
    restored = make_pipeline(SAVABLE[name])
    restored.offer(again)
    ended = []
    # Further than what is kept of the pass goes, too: in a joined stream.
    restored.seek(place[0], place[1] + to, False, lambda *end: ended.append(end))
    assert restored.standing == (place[0], place[1] + to)
    assert rest_of_pass(restored) == expected[place[0]][place[1] + to :]
    for later in range(place[0] + 1, 4):
        assert rest_of_pass(restored) == expected[later]
    # It is still there for whoever has to go back, into a later pass, too.
    restored.seek(*stop, False, lambda *end: None)
    assert rest_of_pass(restored) == expected[stop[0]][stop[1] :]
    restored.seek(*place, False, lambda *end: None)
    assert rest_of_pass(restored) == expected[place[0]][place[1] :]


@pytest.mark.parametrize("name", SAVABLE)
@pytest.mark.parametrize(("place", "stop"), [((0, 4), (0, 9)), ((0, 25), (1, 3)), ((1, 24), (2, 0))])
@pytest.mark.parametrize("come_out", [0, 1, 2, 3])
def test_what_is_kept_and_has_not_come_out_yet_is_part_of_what_is_saved_next(name, place, stop, come_out):
    undisturbed = make_pipeline(SAVABLE[name])
    expected = [rest_of_pass(undisturbed) for _ in range(4)]
    saved, kept, lengths = make_pipeline(SAVABLE[name]), [], {}
    saved.seek(*place, False, lambda *end: None)
    while saved.standing < stop:
        try:
            kept.append(saved.next())
        except EndOfPass as end:
            lengths[end.pass_] = end.elements
    restored = make_pipeline(SAVABLE[name])
    restored.offer(saved.waypoint(place, kept, lengths))
    restored.seek(*place, False, lambda *end: None)
    for _ in range(come_out):
        try:
            restored.next()
        except EndOfPass:
            break
    now = restored.standing
    again = make_pipeline(SAVABLE[name])
    again.offer(Waypoint.from_parts(now[0], restored.waypoint(now).to_parts()))
    again.seek(*now, False, lambda *end: None)
    assert again.standing == now
    assert rest_of_pass(again) == expected[now[0]][now[1] :]
    for later in range(now[0] + 1, 4):
        assert rest_of_pass(again) == expected[later]
