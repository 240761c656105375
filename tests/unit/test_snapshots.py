"""When the pump saves the pipeline's iterator, which one answers, and that it brings the pipeline back."""

from __future__ import annotations

import pytest
import tensorflow as tf

from kerasfeed.producer.pipeline import EndOfPass, Pipeline
from kerasfeed.producer.snapshots import Snapshots

Data = tf.data.Dataset


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Pump:
    """Walks through elements, and lets the snapshots take what they want."""

    def __init__(self, snapshots, clock, cost=0.0):
        self.snapshots, self.clock, self.cost = snapshots, clock, cost
        self.taken = []

    def walk(self, pass_, elements, seconds_each=1.0):
        for element in elements:
            self.clock.now += seconds_each
            if self.snapshots.due((pass_, element)):
                self.snapshots.take((pass_, element), lambda place=(pass_, element): self._save(place))

    def _save(self, place):
        self.clock.now += self.cost
        self.taken.append(place)
        return repr(place).encode()


def make(unfit="", max_bytes=1000, cost=0.0):
    clock, said = Clock(), []
    snapshots = Snapshots(max_bytes, unfit, said.append, clock)
    return snapshots, Pump(snapshots, clock, cost), said


def test_nothing_is_saved_before_somebody_asks():
    snapshots, pump, said = make()
    pump.walk(0, range(1, 100))
    assert (pump.taken, said, snapshots.best(0, 99)) == ([], [], None)


def test_an_iterator_is_saved_where_a_state_will_be_asked_for():
    snapshots, pump, said = make()
    snapshots.plan((0, 5), 10)
    pump.walk(0, range(6, 40))
    assert pump.taken == [(0, 15), (0, 25), (0, 35)]
    assert snapshots.best(0, 24) == (15, b"(0, 15)")
    assert snapshots.best(0, 25) == (25, b"(0, 25)")
    assert snapshots.best(0, 14) is None
    assert snapshots.best(1, 99) is None
    assert "snapshot" in said[0]


def test_only_what_a_later_question_can_use_is_kept():
    snapshots, pump, _ = make()
    snapshots.plan((0, 0), 10)
    pump.walk(0, range(1, 200))
    assert pump.taken == [(0, 10), (0, 20), (0, 30), (0, 40)]
    snapshots.plan((0, 30), 10)
    assert snapshots.best(0, 25) is None
    assert snapshots.best(0, 30) == (30, b"(0, 30)")
    pump.walk(1, range(1, 200))
    assert pump.taken[4:] == [(1, 10), (1, 20)]


def test_saving_takes_a_twentieth_of_the_time_at_most():
    snapshots, pump, _ = make(cost=2.0)
    snapshots.plan((0, 0), 1)
    for element in range(1, 200):
        pump.walk(0, [element])
        snapshots.plan((0, element), 1)
    assert len(pump.taken) * 2.0 <= 0.05 * pump.clock.now + 2.0
    assert len(pump.taken) >= 4


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"unfit": "it holds a variable"}, "it holds a variable"), ({"max_bytes": 3}, "max_state_bytes=3")],
)
def test_what_must_not_or_cannot_be_kept_is_replayed_and_that_is_said(options, reason):
    snapshots, pump, said = make(**options)
    snapshots.plan((0, 0), 10)
    pump.walk(0, range(1, 100))
    assert snapshots.best(0, 99) is None
    assert len(pump.taken) <= 1
    assert "replay" in said[-1]
    assert reason in said[-1]


def test_an_iterator_that_cannot_be_saved_is_replayed_and_that_is_said():
    snapshots, pump, said = make()

    def fail(place):
        raise tf.errors.FailedPreconditionError(None, None, "PyFunc is stateful")

    pump._save = fail
    snapshots.plan((0, 0), 10)
    pump.walk(0, range(1, 100))
    assert "PyFunc is stateful" in said[-1]
    assert len(said) == 2


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
    data = saved.save()
    assert saved.unfit_for_snapshots == ""
    restored = make_pipeline(SAVABLE[name])
    restored.offer(place, data)
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
    pipeline.offer((0, 5), damage(data))
    pipeline.seek(0, 5, False, lambda *end: None)
    assert rest_of_pass(pipeline) == expected
    assert "replayed instead" in said[-1]
