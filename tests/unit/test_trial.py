"""What `kerasfeed.check` makes of a graph and of two tries: functions of their arguments, without a process."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from kerasfeed.producer import graph as graphs
from kerasfeed.producer import trial
from kerasfeed.replay_check import Outcome, compare

Data = tf.data.Dataset


def word_of(dataset, deterministic=False):
    graph = graph_pb2.GraphDef.FromString(graphs.graph_of(dataset))
    return graphs.read_graph(graph, graphs.Traits.of(dataset), int(dataset.cardinality()), deterministic)


def numbers():
    return Data.range(8)


def uniform(_=None):
    return tf.random.uniform([])


def in_a_function_of_its_own(_):
    return tf.function(uniform)()


def unordered(dataset):
    options = tf.data.Options()
    options.deterministic = False
    return dataset.with_options(options)


def through_python(i):
    return tf.numpy_function(lambda i: i, [i], tf.int64)


RACING = {
    "in a parallel map": lambda: numbers().map(uniform, num_parallel_calls=4),
    "in a parallel map of unknown width": lambda: numbers().map(uniform, num_parallel_calls=tf.data.AUTOTUNE),
    "in a function that the map calls": lambda: numbers().map(in_a_function_of_its_own, num_parallel_calls=4),
    "in a branch": lambda: numbers().map(
        lambda i: tf.cond(i > 3, uniform, lambda: tf.constant(0.0)), num_parallel_calls=2
    ),
    "in a parallel interleave": lambda: numbers().interleave(
        lambda i: Data.range(2).map(uniform), cycle_length=2, num_parallel_calls=2
    ),
    "inside an interleave": lambda: numbers().interleave(lambda i: Data.range(2).map(uniform, num_parallel_calls=2)),
    "of images": lambda: numbers().map(
        lambda i: tf.image.random_flip_left_right(tf.zeros([2, 2, 1])), num_parallel_calls=2
    ),
}
ORDERLY = {
    "nothing random": lambda: numbers().shuffle(8).map(lambda i: i + 1, num_parallel_calls=4),
    "a map that is not parallel": lambda: numbers().map(uniform),
    "one call at a time": lambda: numbers().map(uniform, num_parallel_calls=1),
    "stateless random ops": lambda: numbers().map(
        lambda i: tf.random.stateless_uniform([], [i, 0]), num_parallel_calls=4
    ),
    "random before the parallel map": lambda: numbers().map(uniform).map(lambda x: x + 1, num_parallel_calls=4),
    "nothing to put out of order": lambda: unordered(numbers().map(uniform)),
}
UNORDERED = {
    "as the map says": lambda: numbers().map(lambda i: i, num_parallel_calls=2, deterministic=False),
    "as the options say": lambda: unordered(numbers().map(lambda i: i, num_parallel_calls=2)),
    "in an interleave": lambda: numbers().interleave(
        lambda i: Data.range(2), cycle_length=2, num_parallel_calls=2, deterministic=False
    ),
}


@pytest.mark.parametrize("name", RACING)
def test_random_ops_that_race_are_named_unless_op_determinism_orders_them(name):
    (obstacle,) = word_of(RACING[name]()).obstacles
    assert "random ops (Random" in obstacle or "random ops (Stateful" in obstacle
    assert "deterministic=True" in obstacle
    assert word_of(RACING[name](), deterministic=True).obstacles == ()


@pytest.mark.parametrize("name", ORDERLY)
def test_nothing_is_said_of_random_ops_in_order(name):
    assert word_of(ORDERLY[name]()).obstacles == ()


@pytest.mark.parametrize("name", UNORDERED)
def test_order_that_was_given_up_is_named(name):
    (obstacle,) = word_of(UNORDERED[name]()).obstacles
    assert "deterministic=False" in obstacle
    assert word_of(UNORDERED[name](), deterministic=True).obstacles == ()


def test_an_order_that_the_map_keeps_for_itself_is_none_that_was_given_up():
    kept = unordered(numbers().map(lambda i: i, num_parallel_calls=2, deterministic=True))
    assert word_of(kept).obstacles == ()


@pytest.mark.parametrize(
    ("dataset", "suspect"),
    [
        (lambda: numbers().map(through_python), "Python code"),
        (lambda: Data.from_generator(lambda: range(3), output_signature=tf.TensorSpec([], tf.int64)), "from_generator"),
        (lambda: numbers().map(lambda _: tf.timestamp()), "the time"),
    ],
)
def test_suspects_are_named_each_by_its_kind(dataset, suspect):
    found = word_of(dataset()).suspects
    assert len(found) == 1
    assert suspect in found[0]


def test_notes_tell_of_caches_endless_walks_and_random_numbers_that_repeat():
    notes = " ".join(word_of(numbers().map(uniform).cache()).notes)
    assert "draws the same numbers in every epoch" in notes
    assert "all before it are produced again" in notes
    assert "/tmp/some/cache" in " ".join(word_of(numbers().cache("/tmp/some/cache")).notes)
    assert "no known cardinality" in " ".join(word_of(numbers().repeat(2).filter(lambda i: i > 2)).notes)
    for jumps in (numbers().shuffle(8), numbers().map(uniform).repeat(2)):
        assert word_of(jumps).notes == ()


def outcome(*passes, spec="[]", fingerprint="ab", **more):
    word = dataclasses.asdict(graphs.GraphWord(may_keep_state=more.pop("may_keep_state", False)))
    return Outcome(word, spec, fingerprint, {n: list(digests) for n, digests in enumerate(passes)}, **more)


def test_two_tries_that_are_alike_say_that_the_pipeline_can_be_replayed():
    report = compare(outcome("abc", "def"), outcome("abc", "def"), 3)
    assert report
    assert report.compared == (3, 3)
    assert str(report).startswith("This pipeline can be replayed: 3 + 3 elements of 2 passes")


@pytest.mark.parametrize(
    ("second", "element", "text"),
    [
        (outcome("abc", "deX"), (1, 2), "element 2 of pass 1 was another one"),
        (outcome("Xbc", "deX"), (0, 0), "element 0 of pass 0 was another one"),
        (outcome("abc", "de"), (1, 2), "pass 1 had 3 elements, and 2 when"),
        (outcome("abcd", "def"), (0, 3), "pass 0 had 3 elements, and 4 when"),
        (outcome("abc", "d", failed_in=1, failure="boom"), (1, 1), "element 1 of pass 1 raised .*\nboom"),
        (Outcome(failure="its process died"), None, "tried again, its process died"),
        (outcome("abc", "def", spec="[1]"), None, "another element_spec"),
        (outcome("abc", "def", fingerprint="cd"), None, "another graph"),
    ],
)
def test_the_first_difference_is_told(second, element, text):
    report = compare(outcome("abc", "def"), second, 9)
    assert not report
    assert report.element == element
    assert re.search(text, str(report))


def test_a_difference_behind_a_pass_that_was_cut_off_may_be_the_cuts():
    first, second = outcome("abc", "def", may_keep_state=True), outcome("abc", "dXf", may_keep_state=True)
    assert "the cut of the trial" in " ".join(compare(first, second, 3).obstacles)
    assert "the cut of the trial" not in " ".join(compare(first, second, 4).obstacles)


def test_an_iterator_that_can_not_be_saved_is_no_obstacle():
    report = compare(outcome("a", unsaved="PyFunc is stateful."), outcome("a"), 9)
    assert report
    assert not report.serializable
    assert "can't be saved: PyFunc is stateful." in str(report)


def test_saving_says_why_not(tmp_path):
    assert trial._why_not_saved(numbers().shuffle(4), str(tmp_path)) == ""
    assert trial._why_not_saved(numbers().map(through_python), str(tmp_path)) == "PyFunc is stateful."
    assert list(tmp_path.iterdir()) == []


def test_an_iterator_that_is_too_large_to_try_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "_MAX_SAVED_BYTES", 1 << 16)
    # Random bytes: an iterator is saved compressed.
    large = Data.from_tensor_slices(np.random.default_rng(0).integers(0, 256, [4, 1 << 18], np.uint8)).shuffle(4)
    reason = trial._why_not_saved(large, str(tmp_path))
    assert "File too large" in reason
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "afterwards").write_bytes(bytes(1 << 17))
