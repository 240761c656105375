"""The user's dataset in the producer: seeding keeps its meaning, and any element can be walked to."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import random
import re

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.python.eager import context

from kerasfeed.producer.graph import Traits, serialize_dataset
from kerasfeed.producer.pipeline import EndOfPass, Pipeline, takes_context

Data = tf.data.Dataset
LENGTH = 6


def pipeline(source, size=2, seed=7, **options):
    spec = options.pop("source_spec", None)
    return Pipeline(source, spec, size, seed, **{"log": lambda text: None, **options})


def value(encoded):
    """Returns the bytes of an element: what must be the same when it is produced again."""
    return tuple(bytes(buffer) for buffer in encoded.buffers)


def a_pass(pipe):
    """Returns the elements of a pass, to its end."""
    elements = []
    while True:
        try:
            elements.append(value(pipe.next()))
        except EndOfPass:
            return elements


@functools.cache
def straight_walk(name, passes=4):
    """Returns the elements of the first passes, without any seek."""
    pipe = pipeline(PIPELINES[name])
    return [a_pass(pipe) for _ in range(passes)]


def walk_from(pipe, pass_, element, count, joined=False):
    """Returns `count` elements from (pass, element) on, over the ends of passes."""
    pipe.seek(pass_, element, joined, lambda *_: None)
    got = []
    while len(got) < count:
        with contextlib.suppress(EndOfPass):
            got.append(value(pipe.next()))
    return got


def numbers():
    return Data.range(LENGTH)


def uniform(_=None):
    return tf.random.uniform([])


def python_random():
    def generate():
        for _ in range(LENGTH):
            yield random.random()

    return Data.from_generator(generate, output_signature=tf.TensorSpec([], tf.float64))


def numpy_random():
    def generate():
        for _ in range(LENGTH):
            yield np.random.uniform()

    return Data.from_generator(generate, output_signature=tf.TensorSpec([], tf.float64))


def variable_counts():
    count = tf.Variable(0, dtype=tf.int64)
    return numbers().map(lambda i: (i, count.assign_add(1)))


def tensorflow_generator():
    generator = tf.random.Generator.from_seed(1)
    return numbers().map(lambda _: generator.uniform([]))


# Every one of these can be replayed.
PIPELINES = {
    "plain": numbers,
    "shuffle": lambda: numbers().shuffle(10),
    "small shuffle": lambda: numbers().shuffle(2),
    "shuffle with a seed": lambda: numbers().shuffle(10, seed=3),
    "shuffle once": lambda: numbers().shuffle(10, reshuffle_each_iteration=False),
    "two shuffles": lambda: numbers().shuffle(10).batch(2).shuffle(3),
    "shuffle, repeat(2)": lambda: numbers().shuffle(10).repeat(2),
    "shuffle, cache": lambda: numbers().shuffle(10).cache(),
    "cache, shuffle": lambda: numbers().cache().shuffle(10),
    "tf.random in map": lambda: numbers().map(uniform),
    "tf.random and shuffle": lambda: numbers().map(uniform).shuffle(10),
    "tf.random and repeat(2)": lambda: numbers().map(uniform).repeat(2),
    "tf.random in filter": lambda: numbers().filter(lambda _: uniform() < 0.7),
    "tf.random in flat_map": lambda: Data.range(2).flat_map(lambda _: Data.range(3).map(uniform)),
    "Dataset.random": lambda: Data.random(rerandomize_each_iteration=True).take(LENGTH),
    "interleave of shuffles": lambda: Data.range(3).interleave(lambda i: Data.range(2 * i, 2 * i + 2).shuffle(2)),
    "sampled": lambda: Data.sample_from_datasets([Data.range(3), Data.range(10, 13)], [0.5, 0.5], seed=None),
    "python's random": python_random,
    "numpy's random": numpy_random,
    "a variable": variable_counts,
    "a generator of TensorFlow": tensorflow_generator,
}
RANDOM_IN_MAP = ["tf.random in map", "tf.random and repeat(2)", "tf.random in flat_map"]
SHUFFLED = ["shuffle", "small shuffle", "shuffle with a seed", "two shuffles", "tf.random and shuffle"]


# ---- Seeds ----


@pytest.mark.parametrize("name", RANDOM_IN_MAP)
def test_random_ops_draw_other_numbers_in_each_pass(name):
    passes = straight_walk(name)
    everything = [number for one in passes for number in one]
    assert len(set(everything)) == len(everything)


@pytest.mark.parametrize("name", SHUFFLED)
def test_a_shuffle_has_another_order_in_each_pass(name):
    passes = straight_walk(name, passes=4)
    assert len({tuple(one) for one in passes}) > 1


@pytest.mark.parametrize("name", PIPELINES)
def test_the_same_seed_gives_the_same_elements(name):
    wanted = straight_walk(name)
    pipe = pipeline(PIPELINES[name])
    tf.random.uniform([])  # what else draws TensorFlow's numbers in this process does not matter
    assert [a_pass(pipe) for _ in range(4)] == wanted


@pytest.mark.parametrize("name", ["shuffle", "tf.random in map", "python's random", "numpy's random"])
def test_another_seed_gives_other_elements(name):
    assert a_pass(pipeline(PIPELINES[name], seed=8)) != straight_walk(name)[0]


def test_a_dataset_with_random_ops_is_built_for_each_pass_and_others_once():
    for build, expected in ((PIPELINES["tf.random in map"], 3), (PIPELINES["shuffle"], 1)):
        calls = []
        pipe = pipeline(lambda build=build, calls=calls: calls.append(1) or build())
        for _ in range(3):
            a_pass(pipe)
        assert len(calls) == expected


# ---- Any element can be walked to ----


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize(("pass_", "element"), [(0, 0), (0, 3), (1, 0), (2, 2), (3, 1)])
def test_a_fresh_pipeline_stands_at_any_element(name, pass_, element):
    passes = straight_walk(name)
    element = min(element, len(passes[pass_]))
    rest = list(itertools.chain(passes[pass_][element:], *passes[pass_ + 1 :]))
    # The producers before this one have told how long the passes were: one of unknown length may have been endless.
    lengths = {number: len(elements) for number, elements in enumerate(passes)}
    assert walk_from(pipeline(PIPELINES[name], lengths=lengths), pass_, element, len(rest)) == rest


places = st.tuples(st.integers(0, 3), st.integers(0, LENGTH), st.integers(0, 4))


@settings(max_examples=60)
@given(name=st.sampled_from(sorted(PIPELINES)), seeks=st.lists(places, min_size=1, max_size=3))
def test_a_pipeline_goes_to_and_fro_and_always_yields_the_same(name, seeks):
    """Ranks go back, break off an epoch for the next one, and begin others in their middle."""
    passes = straight_walk(name)
    pipe = pipeline(PIPELINES[name], lengths=dict(enumerate(map(len, passes))))
    for pass_, element, count in seeks:
        element = min(element, len(passes[pass_]))
        wanted = list(itertools.chain(passes[pass_][element:], *passes[pass_ + 1 :]))[:count]
        assert walk_from(pipe, pass_, element, len(wanted)) == wanted


@pytest.mark.parametrize("name", ["plain", "shuffle", "tf.random in map"])
def test_the_pass_after_one_that_was_left_is_the_same_as_after_a_whole_one(name):
    pipe = pipeline(PIPELINES[name])
    pipe.next()
    assert walk_from(pipe, 1, 0, LENGTH) == straight_walk(name)[1]


@pytest.mark.parametrize("name", ["shuffle, repeat(2)", "shuffle, cache", "a variable"])
def test_the_pass_after_one_that_was_left_is_the_same_also_where_passes_depend_on_each_other(name):
    """A loop that breaks off: the next epoch must not depend on how far the producer had come."""
    pipe = pipeline(PIPELINES[name])
    pipe.next()
    assert walk_from(pipe, 1, 0, 4) == straight_walk(name)[1][:4]


def test_leaving_a_pass_that_may_be_endless_and_keeps_state_is_said_to_be_unrepeatable():
    """Where it would have ended can't be known, and the next pass begins where this one left its state."""
    said = []
    pipe = pipeline(PIPELINES["python's random"], log=said.append)
    pipe.next()
    walk_from(pipe, 1, 0, 4)
    assert len(said) == 1
    assert re.search("pass 0 was left before its end.*assert_cardinality", said[0])


def test_going_back_within_a_pass_is_not_disturbed_by_what_the_iterator_that_is_left_still_does():
    """tf.data pulls ahead in a thread of its own, which must not draw from the random state of the next iterator."""
    wanted = straight_walk("python's random")[0]
    for pulled in range(40):
        pipe = pipeline(python_random)
        for _ in range(1 + pulled % LENGTH):
            pipe.next()
        assert walk_from(pipe, 0, 0, LENGTH) == wanted


@given(name=st.sampled_from(["plain", "shuffle", "tf.random in map"]), element=st.integers(0, 3 * LENGTH))
@settings(max_examples=25)
def test_in_a_joined_stream_elements_are_counted_on_through_the_passes(name, element):
    stream = list(itertools.chain(*straight_walk(name)))
    assert walk_from(pipeline(PIPELINES[name]), 0, element, 5, joined=True) == stream[element : element + 5]


def test_ends_of_passes_that_are_met_on_the_way_are_told():
    ended = []
    pipeline(numbers).seek(0, 2 * LENGTH + 1, True, lambda *end: ended.append(end))
    assert ended == [(0, LENGTH), (1, LENGTH)]


def test_it_says_where_it_stands():
    pipe = pipeline(numbers)
    assert pipe.standing == (0, 0)
    pipe.next()
    assert pipe.standing == (0, 1)
    pipe.seek(2, 3, False, lambda *_: None)
    assert pipe.standing == (2, 3)
    a_pass(pipe)
    assert pipe.standing == (3, 0)


def test_a_pass_that_has_become_shorter_is_an_error_that_names_the_element():
    lengths = iter([5, 2, 2])

    def shrinking():
        return Data.from_generator(lambda: iter(range(next(lengths))), output_signature=tf.TensorSpec([], tf.int32))

    pipe = pipeline(shrinking)
    for _ in range(5):
        pipe.next()
    with pytest.raises(
        RuntimeError, match="can't be replayed: pass 0 now has 2 elements, but element 4 of it was produced"
    ):
        pipe.seek(0, 4, False, lambda *_: None)


# ---- Lengths ----


def test_a_pass_ends_and_the_next_one_begins():
    pipe = pipeline(numbers)
    for pass_ in range(3):
        for _ in range(LENGTH):
            pipe.next()
        with pytest.raises(EndOfPass) as end:
            pipe.next()
        assert (end.value.pass_, end.value.elements) == (pass_, LENGTH)


def test_an_empty_dataset_ends_each_pass_at_once():
    pipe = pipeline(lambda: Data.range(0))
    for pass_ in range(3):
        with pytest.raises(EndOfPass) as end:
            pipe.next()
        assert (end.value.pass_, end.value.elements) == (pass_, 0)


@pytest.mark.timeout(30)
def test_a_joined_stream_of_an_empty_dataset_is_an_error_not_a_loop():
    with pytest.raises(RuntimeError, match="the dataset is empty"):
        pipeline(lambda: Data.range(0)).seek(0, 3, True, lambda *_: None)


def test_an_endless_dataset_has_one_pass():
    pipe = pipeline(lambda: numbers().repeat())
    assert pipe.cardinality == tf.data.INFINITE_CARDINALITY
    for _ in range(5 * LENGTH):
        pipe.next()
    assert pipe.standing == (0, 5 * LENGTH)
    again = pipeline(lambda: numbers().shuffle(10).repeat())
    walked = [value(again.next()) for _ in range(20)]
    assert walk_from(again, 0, 13, 7) == walked[13:]


def test_the_cardinality_is_that_of_the_dataset():
    assert pipeline(numbers).cardinality == LENGTH
    assert pipeline(PIPELINES["tf.random in filter"]).cardinality == tf.data.UNKNOWN_CARDINALITY


def test_a_dataset_that_yields_more_than_it_says_is_an_error():
    """Ranks that trust the cardinality would leave the rest."""

    def liar():
        dataset = numbers()
        dataset.cardinality = lambda: tf.constant(4, tf.int64)
        return dataset

    pipe = pipeline(liar)
    for _ in range(4):
        pipe.next()
    with pytest.raises(
        RuntimeError, match=r"says that it has 4 elements .* but it yields more. Correct its assert_cardinality"
    ):
        pipe.next()


@pytest.mark.parametrize("claimed", [LENGTH - 2, LENGTH + 2])
def test_a_wrong_assert_cardinality_is_an_error(claimed):
    pipe = pipeline(lambda: numbers().apply(tf.data.experimental.assert_cardinality(claimed)))
    with pytest.raises((RuntimeError, tf.errors.OpError), match=r"cardinality|elements"):
        a_pass(pipe)


# ---- dataset_fn ----


def test_dataset_fn_gets_the_input_context_of_one_pipeline_for_all_ranks():
    seen = []
    pipeline(lambda ctx: seen.append(ctx) or numbers(), size=3)
    assert isinstance(seen[0], tf.distribute.InputContext)
    assert (seen[0].num_input_pipelines, seen[0].input_pipeline_id, seen[0].num_replicas_in_sync) == (1, 0, 3)
    assert seen[0].get_per_replica_batch_size(30) == 10


class Maker:
    def method(self, ctx):
        return numbers()

    def __call__(self):
        return numbers()


@pytest.mark.parametrize(
    ("function", "wants"),
    [
        (lambda: None, False),
        (lambda ctx: None, True),
        (lambda anything: None, True),
        (lambda ctx=None: None, True),
        (lambda context=None, shuffle=True: None, True),
        (lambda shuffle=True: None, False),
        (lambda ctx, shuffle=True: None, True),
        (lambda *, shuffle=True: None, False),
        (lambda *args: None, False),
        (functools.partial(lambda ctx, files: None, files=[]), True),
        (functools.partial(lambda files, ctx: None, []), True),
        (functools.partial(lambda files: None, []), False),
        (Maker().method, True),
        (Maker(), False),
    ],
)
def test_dataset_fn_takes_the_input_context_or_nothing(function, wants):
    assert takes_context(function) is wants


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda ctx, files: None, "ctx, files"),
        (lambda ctx, *, files: None, "ctx, files"),
        (lambda a, b, c: None, "a, b, c"),
    ],
)
def test_a_function_that_needs_more_is_refused_with_what_it_needs(function, names):
    with pytest.raises(TypeError, match=rf"must take one argument .* or none. Received: .*required arguments {names}$"):
        takes_context(function)


def test_a_function_that_needs_something_else_by_name_is_refused_when_it_is_called():
    with pytest.raises(TypeError, match="files"):
        pipeline(lambda *, files: numbers())


@pytest.mark.parametrize("result", [None, [1, 2], np.zeros(3), (numbers, 1)])
def test_what_is_no_dataset_is_refused_by_type(result):
    with pytest.raises(TypeError, match=f"dataset_fn must return a tf.data.Dataset. Received: {type(result).__name__}"):
        pipeline(lambda: result)


def test_what_dataset_fn_raises_is_not_hidden():
    def broken():
        raise FileNotFoundError("no such file: digits")

    with pytest.raises(FileNotFoundError, match="no such file: digits"):
        pipeline(broken)


# ---- A dataset instead of a function ----


def test_the_graph_of_a_dataset_travels():
    dataset = numbers().map(lambda i: {"x": i * 2, "s": tf.strings.as_string(i)}).batch(4, drop_remainder=False)
    pipe = pipeline(serialize_dataset(dataset), source_spec=dataset.element_spec)
    assert [len(a_pass(pipe)) for _ in range(2)] == [2, 2]
    pipe = pipeline(serialize_dataset(dataset), source_spec=dataset.element_spec)
    first = next(iter(dataset))
    assert np.frombuffer(pipe.next().buffers[1], np.int64).tolist() == first["x"].numpy().tolist()


def travelled_shuffle(seed):
    """Returns graph and spec of a shuffle that was built under a global seed, or none; the dataset itself is gone."""
    before = context.global_seed()
    context.set_global_seed(seed)
    try:
        dataset = Data.range(50).shuffle(50)
    finally:
        context.context()._seed = before
    return serialize_dataset(dataset), dataset.element_spec


@pytest.mark.parametrize("seed", [5, None], ids=["seeded by the script", "unseeded"])
def test_the_graph_of_a_shuffle_is_shuffled_anew_in_each_pass_and_can_be_replayed(seed):
    graph, spec = travelled_shuffle(seed)
    gc.collect()
    pipe = pipeline(graph, source_spec=spec)
    passes = [a_pass(pipe) for _ in range(3)]
    assert len({tuple(one) for one in passes}) == 3
    assert walk_from(pipeline(graph, source_spec=spec), 2, 10, 5) == passes[2][10:15]
    assert walk_from(pipe, 0, 0, 50) == passes[0]


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (python_random, r"calls Python code \(py_function, numpy_function or from_generator\)"),
        (lambda: numbers().map(lambda i: tf.py_function(lambda x: x, [i], tf.int64)), "calls Python code"),
        (lambda: numbers().map(lambda i: tf.numpy_function(lambda x: x, [i], tf.int64)), "calls Python code"),
        (
            lambda: Data.range(2).flat_map(
                lambda _: numbers().map(lambda i: tf.py_function(lambda x: x, [i], tf.int64))
            ),
            "calls Python code",
        ),
        (variable_counts, r"captures a resource of this process \(a tf.Variable"),
        (lambda: with_variable(lambda v: numbers().map(lambda i: v + i)), "captures a resource|can't travel"),
        (tensorflow_generator, "captures a resource"),
        (lambda: with_table(), "captures a resource|can't travel"),
    ],
    ids=[
        "generator",
        "py_function",
        "numpy_function",
        "py_function inside",
        "assigned variable",
        "read variable",
        "rng",
        "table",
    ],
)
def test_a_dataset_that_can_not_travel_is_refused_with_the_reason_and_the_way_out(build, what):
    dataset = build()
    with pytest.raises(ValueError, match=r"this tf.data.Dataset can't travel to the producer") as raised:
        serialize_dataset(dataset)
    assert "DataFeeder(lambda: dataset_code())" in str(raised.value)
    with pytest.raises(ValueError, match=what):
        serialize_dataset(dataset)


KEPT = []


def with_variable(build):
    variable = tf.Variable(3, dtype=tf.int64)
    KEPT.append(variable)
    return build(variable)


def with_table():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
    KEPT.append(table)
    return numbers().map(table.lookup)


# ---- What is known about replaying ----


def warnings_of(build):
    warnings = []
    pipeline(build, log=warnings.append)
    return warnings


def test_a_pipeline_that_can_be_replayed_gets_no_warning():
    for name in PIPELINES:
        assert warnings_of(PIPELINES[name]) == [], name


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: numbers().map(uniform).cache(), r"in-memory cache\(\)"),
        (lambda: numbers().cache().map(uniform), r"in-memory cache\(\)"),
        (lambda: with_variable(lambda v: numbers().map(lambda i: tf.cast(v, tf.float32) + uniform())), "a variable"),
        (lambda: numbers().shuffle(9, reshuffle_each_iteration=False).map(uniform), "reshuffle_each_iteration=False"),
    ],
)
def test_random_ops_in_a_pipeline_that_can_not_be_built_anew_are_warned_of(build, reason):
    warnings = warnings_of(build)
    assert len(warnings) == 1
    assert re.search(f"RandomUniform, .* the same numbers in every epoch: .* because .*{reason}", warnings[0]), warnings


def test_a_cached_pipeline_with_random_ops_still_means_what_it_meant():
    """What was cached is the same in every pass, as without the feed."""
    pipe = pipeline(lambda: numbers().map(uniform).cache())
    first = a_pass(pipe)
    assert len(set(first)) == LENGTH
    assert a_pass(pipe) == first


def test_random_ops_are_found_in_functions_of_functions():
    def inner(_):
        return Data.range(3).map(lambda i: tf.image.random_flip_left_right(tf.zeros([2, 2, 1])))

    assert Traits.of(Data.range(2).flat_map(inner)).random_ops
    assert not Traits.of(numbers().map(lambda i: tf.random.stateless_uniform([], [1, i]))).random_ops


def test_only_shuffles_are_walked_by_one_element():
    for name, cheap in {
        "plain": True,
        "shuffle": True,
        "two shuffles": True,
        "shuffle, repeat(2)": False,
        "shuffle, cache": False,
        "python's random": False,
        "a variable": False,
    }.items():
        assert Traits.of(PIPELINES[name]()).cheap_walk is cheap, name


# ---- cache(filename) after a kill ----


def cached_in(path):
    return lambda: numbers().cache(str(path))


@pytest.fixture(params=["cache", "ca[c]he*"])
def locked(request, tmp_path):
    """The name of a cache file whose lock a producer left when it was killed."""
    name = tmp_path / request.param
    lock = tmp_path / f"{request.param}_0.lockfile"
    lock.write_text("a dead process")
    return name, lock


def test_a_lock_that_a_dead_producer_left_is_removed_and_said(locked):
    name, lock = locked
    said = []
    pipe = pipeline(cached_in(name), restarted=True, log=said.append)
    assert not lock.exists()
    assert said == [f"removing the lock that a dead producer left: {lock}"]
    assert len(a_pass(pipe)) == LENGTH


def test_the_lock_of_another_job_is_left_alone(locked):
    name, lock = locked
    pipe = pipeline(cached_in(name))
    assert lock.exists()
    with pytest.raises(tf.errors.OpError, match="concurrent"):
        pipe.next()


def test_locks_of_other_files_are_left_alone(tmp_path):
    other = tmp_path / "cache2_0.lockfile"
    other.write_text("someone else")
    pipeline(cached_in(tmp_path / "cache"), restarted=True)
    assert other.exists()


def test_a_cache_file_fills_in_the_first_pass_and_serves_the_next(tmp_path):
    pipe = pipeline(cached_in(tmp_path / "cache"))
    assert a_pass(pipe) == a_pass(pipe) == straight_walk("plain")[0]
