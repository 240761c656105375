"""Both engines hand every rank the same bytes in the same order, with the same ends of epochs, whatever happens."""

from __future__ import annotations

import os
import signal

import engine_scripts
import pytest
import tensorflow as tf
from engine_scripts import DTYPES, STEPS, Leaf, Pair, Phase, Plan, Recipe
from helpers import by_value, together
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kerasfeed.native import engine as engines
from kerasfeed.producer import parts

by_value(__name__)
pytestmark = pytest.mark.once
EXAMPLES = int(os.environ.get("KERASFEED_TEST_PLANS", "200"))


@pytest.fixture(scope="module")
def native():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERASFEED_ENGINE", "native")
        # How long it takes to end a producer.
        patch.setattr(parts, "_NEWS_SECONDS", 0.01)
        yield engines.load()


def structures():
    dtypes = st.sampled_from([*DTYPES, "string"])
    leaf = st.one_of(
        st.builds(Leaf, st.just("dense"), dtypes, st.integers(0, 3)),
        st.builds(Leaf, st.just("ragged"), st.sampled_from(["int32", "float32", "string"]), st.integers(1, 2)),
        st.builds(Leaf, st.just("sparse"), st.sampled_from(["int64", "float64", "string"]), st.just(1)),
        st.just(Leaf("none", "", 0)),
    )
    nested = st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3).map(tuple),
            st.builds(Pair, inner, inner),
        ),
        max_leaves=4,
    )
    # A dataset of nothing but None there is not.
    return st.one_of(nested, st.builds(Pair, st.builds(Leaf, st.just("dense"), dtypes, st.integers(0, 2)), nested))


@st.composite
def recipes(draw):
    structure = draw(structures())
    leaves = []
    engine_scripts.mapped(structure, leaves.append)
    if all(leaf.kind == "none" for leaf in leaves):
        structure = Pair(Leaf("dense", "float32", 2), structure)
    scale = st.sampled_from([0, 1, 1, 5, 40, 40, 2000, 30_000, 300_000])
    scales = tuple(draw(st.lists(scale, max_size=9)))
    steps = tuple(draw(st.lists(st.sampled_from(list(STEPS)), max_size=2, unique=True)))
    raises_at = draw(st.sampled_from([None] * 9 + [0, 3]))
    return Recipe(structure, scales, draw(st.integers(0, 1 << 20)), steps, raises_at)


@st.composite
def plans(draw):
    size = draw(st.integers(1, 3))

    def each(strategy):
        return st.tuples(*[strategy] * size)

    # Ranks that are apart need room, and must not be where they leave epochs at the same step.
    even = draw(st.booleans())

    def each_or_all(strategy):
        return strategy.map(lambda value: (value,) * size) if even else each(strategy)

    phases = st.builds(
        Phase,
        kind=st.sampled_from(["on", "back", "leave", "bind", "killed"]),
        back=st.integers(0, 5),
        pulls=st.integers(0, 9),
        lags=each(st.just(0) if even else st.integers(0, 2)),
        reconnects=each(st.sampled_from([-1, -1, 0, 1, 3])),
        trained=each_or_all(st.integers(0, 9)),
        through=st.booleans(),
        free=st.booleans(),
        steps_per_epoch=st.sampled_from([None, None, 1, 4]),
        epochs=st.integers(0, 2),
    )
    return Plan(
        recipe=draw(recipes()),
        size=size,
        transports=draw(each(st.sampled_from(["unix", "tcp"]))),
        keeps=draw(each(st.booleans())),
        max_kept_bytes=draw(st.sampled_from([0, 1 << 20, 1 << 28])),
        steps_per_epoch=draw(st.sampled_from([None, None, None, 1, 3, 7])),
        prefetch=draw(st.sampled_from([1, 2, 8])),
        max_bytes=draw(st.sampled_from([1, 10_000, 1 << 30] if even else [1 << 30])),
        credit_steps=draw(st.sampled_from([1, 2, 16])),
        credit_bytes=draw(st.sampled_from([1, 1000, 1 << 26])),
        direct=even and draw(st.booleans()),
        phases=tuple(draw(st.lists(phases, min_size=1, max_size=5))),
    )


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(plans())
def test_ranks_get_the_same_from_both_engines(native, plan):
    assert engine_scripts.run(native, plan) == engine_scripts.run(None, plan)


# ---- With real producers ----


def varied(count):
    """Returns a `dataset_fn` of elements of many kinds, of no bytes to a megabyte, in an order of their own."""

    def dataset_fn():
        def element(i):
            size = tf.cast(i % 7, tf.int32) * 40_000 * tf.cast(i % 5 == 0, tf.int32)
            return {
                "number": i,
                "values": (tf.random.stateless_uniform([size], [i, 1]), tf.cast(tf.range(i % 4), tf.bfloat16)),
                "text": tf.strings.as_string(tf.range(i % 3)),
                "ragged": tf.RaggedTensor.from_row_lengths(tf.range(i % 5), [i % 5, 0]),
            }

        return tf.data.Dataset.range(count).shuffle(9).map(element)

    return dataset_fn


def said(element):
    return [engine_scripts.described(part) for part in tf.nest.flatten(element, expand_composites=True)]


def with_each_engine(monkeypatch, make_ranks, consume, ranks, dataset_fn, transport="auto"):
    """Returns, of each engine, what `consume` returned for each rank."""
    got = []
    # The Python engine has one way only.
    for engine, way in (("native", transport), ("python", "auto")):
        monkeypatch.setenv("KERASFEED_ENGINE", engine)
        feeders = make_ranks(ranks, dataset_fn, transport=way, seed=1)
        outcomes = together(*(lambda feeder=feeder: consume(feeder) for feeder in feeders), timeout=120)
        got.append([outcome.result() for outcome in outcomes])
        assert {feeder.session.way == "gRPC" for feeder in feeders} == {engine == "python"}
        for feeder in feeders:
            feeder.close()
    return got


def kill_producer(feeder):
    pid = feeder.session.producer_pid
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("ranks", "transport"), [(3, "auto"), (2, "tcp")])
def test_epochs_that_are_left_and_producers_that_are_killed(monkeypatch, make_ranks, ranks, transport):
    def consume(feeder):
        got = []
        for epoch in range(4):
            for step, element in enumerate(feeder):
                got.append(said(element))
                if (epoch, step) in ((0, 3), (2, 1)):
                    kill_producer(feeder)
                if (epoch, step) == (1, 4):
                    break
            got.append("end")
        return got

    native, python = with_each_engine(monkeypatch, make_ranks, consume, ranks, varied(25), transport)
    assert native == python
    assert [len(got) for got in native] == [3 * (25 // ranks) + 5 + 4] * ranks


@pytest.mark.parametrize("steps_per_epoch", [None, 3])
def test_fits_that_begin_where_training_stood(monkeypatch, make_ranks, steps_per_epoch):
    """Steps that were pulled and not trained come again, from a producer that was killed meanwhile, too."""

    def consume(feeder):
        got, session = [], feeder.session
        for fit in range(4):
            got.append(tuple(session.bind(steps_per_epoch, steps_per_epoch is not None, 2)))
            session.begin_epoch()
            for step, element in enumerate(feeder):
                got.append(said(element))
                if step == 5:
                    break
            session.acknowledge(3 + fit % 2)
            session.end_epoch(stopped=True)
            session.unbind()
            if fit % 2:
                kill_producer(feeder)
        return got

    native, python = with_each_engine(monkeypatch, make_ranks, consume, 2, varied(40))
    assert native == python
    assert [len(got) for got in native] == [4 * (1 + 6)] * 2
