"""`kerasfeed.check` on real pipelines, in real processes: what can be replayed, what can't, and what raises."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import random

import helpers
import numpy as np
import pytest
import tensorflow as tf

import kerasfeed

# What is read from graphs is tested everywhere: tests/unit/test_trial.py.
pytestmark = pytest.mark.once

helpers.by_value(__name__)
Data = tf.data.Dataset
COUNT = 40


def plain(ctx):
    """The size is that of the job: what it yields depends on it."""
    noisy = Data.range(COUNT).shuffle(20).map(lambda i: tf.cast(i, tf.float32) + tf.random.uniform([]))
    return noisy.batch(ctx.num_replicas_in_sync)


def random_in_a_parallel_map():
    return Data.range(COUNT).map(lambda i: tf.random.uniform([]), num_parallel_calls=4)


def numpy_generator_of_its_own():
    rng = np.random.default_rng()

    def draw(i):
        return np.float32(rng.normal())

    def drawn(i):
        return tf.numpy_function(draw, [i], tf.float32)

    return Data.range(COUNT).map(drawn)


def generator_that_counts_its_builds():
    # A module's attribute: it is there again when dataset_fn is called anew in the same process.
    tf.kerasfeed_test_builds = builds = getattr(tf, "kerasfeed_test_builds", 0) + 1

    def generate():
        for i in range(COUNT):
            yield i + 100 * builds

    return Data.from_generator(generate, output_signature=tf.TensorSpec([], tf.int64))


def random_number_in_the_graph():
    first = int.from_bytes(os.urandom(4), "big")
    return Data.range(first, first + COUNT)


def unreadable():
    return tf.data.TFRecordDataset(["/nowhere/to-be-found.tfrecord"])


def raising():
    raise ValueError("no data today")


def dying():
    os.abort()


DATASETS = {
    plain: {"size": 4},
    random_in_a_parallel_map: {"deterministic": True, "elements": 10},
    numpy_generator_of_its_own: {},
    generator_that_counts_its_builds: {},
    random_number_in_the_graph: {"epochs": 1},
    unreadable: {},
    raising: {},
    dying: {},
}


@pytest.fixture(scope="module")
def reports():
    """Returns the reports of all datasets, or what was raised: made side by side, as each takes two processes."""

    def check(dataset_fn):
        try:
            return kerasfeed.check(dataset_fn, **DATASETS[dataset_fn])
        except Exception as error:
            return error

    numbers, states = random.getstate(), str(np.random.get_state())
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = dict(zip(DATASETS, pool.map(check, DATASETS), strict=True))
    assert (random.getstate(), str(np.random.get_state())) == (numbers, states), "the caller's process was seeded"
    return found


def test_shuffle_and_random_ops_can_be_replayed(reports):
    report = reports[plain]
    assert report, report
    assert (report.element, report.obstacles, report.notes) == (None, (), ())
    assert report.compared == (COUNT // 4, COUNT // 4)
    assert not report.serializable
    assert "RandomUniform is stateful" in report.unsaved
    assert "can be replayed" in str(report)


def test_with_op_determinism_random_ops_in_a_parallel_map_can_be_replayed_and_passes_are_cut_off(reports):
    report = reports[random_in_a_parallel_map]
    assert report, report
    assert report.compared == (10, 10)


def test_a_numpy_generator_that_the_feed_does_not_seed_is_caught(reports):
    report = reports[numpy_generator_of_its_own]
    assert not report
    assert report.element == (0, 0)
    assert "numpy_function" in str(report)
    assert "PyFunc is stateful" in report.unsaved


def test_state_that_outlives_a_build_is_caught(reports):
    """In a fresh process all is well: only a producer that goes back builds it a second time."""
    report = reports[generator_that_counts_its_builds]
    assert not report
    assert report.element == (0, 0)
    assert "from_generator" in " ".join(report.obstacles)
    assert "no known cardinality" in " ".join(report.notes)


def test_a_random_number_in_the_graph_is_caught(reports):
    report = reports[random_number_in_the_graph]
    assert not report
    assert report.element == (0, 0)
    assert "another graph each time" in report.obstacles[0]
    assert report.serializable, report.unsaved
    assert report.compared == (COUNT,)


@pytest.mark.parametrize(
    ("dataset_fn", "texts"),
    [
        (unreadable, ["element 0 of pass 0 raised", "/nowhere/to-be-found.tfrecord; No such file"]),
        (raising, ["dataset_fn raised before the first element", "ValueError: no data today", "in raising"]),
        (dying, ["died in pass 0", "SIGABRT"]),
    ],
)
def test_a_pipeline_that_fails_is_an_error_that_says_why(reports, dataset_fn, texts):
    error = reports[dataset_fn]
    assert isinstance(error, kerasfeed.ProducerError)
    for text in texts:
        assert text in str(error)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"size": 0}, ValueError, "check: size must be at least 1. Received: 0"),
        ({"seed": -1}, ValueError, "check: seed must be from 0 to 2147483647. Received: -1"),
        ({"elements": 0.5}, TypeError, "check: elements must be an int. Received: 0.5"),
        ({"epochs": True}, TypeError, "check: epochs must be an int. Received: True"),
        ({"deterministic": 1}, TypeError, "check: deterministic must be True or False. Received: 1"),
        ({"dataset_fn": 7}, TypeError, "check: dataset_fn must be a function"),
    ],
)
def test_arguments_are_checked_before_a_process_starts(arguments, error, text):
    with pytest.raises(error, match=text):
        kerasfeed.check(**{"dataset_fn": plain, **arguments})


def test_the_files_of_a_cache_are_written_elsewhere(tmp_path: pathlib.Path):
    cache = str(tmp_path / "cache")

    def dataset_fn():
        return Data.range(COUNT).shuffle(COUNT).cache(cache).map(lambda i: tf.cast(i, tf.float32))

    report = kerasfeed.check(dataset_fn)
    assert report, report
    assert report.serializable, report.unsaved
    assert cache in " ".join(report.notes)
    assert list(tmp_path.iterdir()) == []
