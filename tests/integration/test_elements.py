"""Whatever structure a dataset's elements have, a rank gets them as the dataset makes them."""

from __future__ import annotations

import collections

import numpy as np
import psutil
import pytest
import tensorflow as tf
from helpers import by_value, wait_until

by_value(__name__)

_MIB = 1 << 20


def _all_dtypes(i):
    names = "float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 complex64 complex128"
    values = {name: tf.cast(tf.constant([[-3, 0, 1], [2, 100, 7]]), name) for name in names.split()}
    values["bool"] = tf.constant([True, False, True])
    values["string"] = tf.constant([[b"", b"\x00\xff", "h\u00e9".encode()], [b"a" * 1000, b"b", b"\n"]])
    return values


def _nested(i):
    point = collections.namedtuple("Point", ["x", "y"])
    x = tf.cast(i, tf.float32)
    first = {"a": (x, tf.fill([2, 3], x)), "b": {"c": tf.strings.as_string(i), "d": [tf.stack([i, i])]}}
    return first, point(x, {"z": i}), (i,), None


def _varying_shapes(i):
    # From nothing to a few megabytes, so that elements of one chunk and of several follow each other.
    n = tf.constant([0, 3, 1, 0, 600_000, 2, 0])[i]
    return tf.range(n), tf.zeros([n, 2]), tf.zeros([0, n], tf.string)


def _ragged_and_sparse(i):
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(4 * i), [i, 2 * i, 0, i])
    deeper = tf.RaggedTensor.from_row_splits(ragged, [0, 1, 4])
    words = tf.strings.as_string(ragged)
    sparse = tf.sparse.from_dense(tf.linalg.diag(tf.range(i)))
    return {"ragged": ragged, "deeper": deeper, "words": words, "sparse": sparse, "plain": i}


def _ragged_batch(i):
    return tf.RaggedTensor.from_row_lengths(tf.range(i + i // 2), [i, i // 2])


def _many_structures():
    """Elements that hold one thing of each kind."""

    def element(i):
        functions = (_all_dtypes, _nested, _varying_shapes, _ragged_and_sparse, _ragged_batch)
        return {function.__name__: function(i) for function in functions}

    return tf.data.Dataset.range(7).map(element)


def _only_zero_bytes():
    return tf.data.Dataset.range(4).map(lambda i: tf.zeros([0, 3]))


def _empty():
    return tf.data.Dataset.range(0).map(lambda i: {"x": tf.cast(i, tf.float32)})


def _assert_same(got, expected):
    tf.nest.assert_same_structure(got, expected, expand_composites=True)
    got_parts = tf.nest.flatten(got, expand_composites=True)
    for mine, theirs in zip(got_parts, tf.nest.flatten(expected, expand_composites=True), strict=True):
        if theirs is None:
            assert mine is None
            continue
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


@pytest.mark.parametrize(
    "dataset_fn", [_many_structures, _only_zero_bytes, _empty], ids=lambda function: function.__name__.strip("_")
)
def test_elements_arrive_as_the_dataset_makes_them(make_feeder, dataset_fn):
    expected = dataset_fn()
    feeder = make_feeder(dataset_fn)
    assert str(feeder.element_spec) == str(expected.element_spec)
    assert int(feeder.cardinality()) == int(expected.cardinality())
    for _ in range(2):
        got = list(feeder)
        assert len(got) == len(list(expected))
        for mine, theirs in zip(got, expected, strict=True):
            _assert_same(mine, theirs)
    # The compiled path: what a map over the feeder sees is what a map over the dataset sees.
    count = feeder.reduce(0, lambda n, *_: n + 1)
    assert int(count) == len(got)


def test_a_structure_that_cannot_travel_is_named(make_feeder):
    feeder = make_feeder(lambda: tf.data.Dataset.range(4).window(2))
    with pytest.raises(Exception, match="DatasetSpec"):
        list(feeder)


@pytest.mark.slow
@pytest.mark.once
def test_an_element_of_300_megabytes_arrives_whole_and_its_memory_is_given_back(make_feeder):
    size = 300 * _MIB

    def dataset_fn():
        def big(i):
            return tf.reshape(tf.bitcast(tf.range(size // 8, dtype=tf.int64) * (i + 1), tf.uint8), [-1])

        return tf.data.Dataset.range(2).map(big)

    feeder = make_feeder(dataset_fn, max_buffer_bytes=1)
    assert feeder.element_spec.dtype == tf.uint8
    producer, rank = psutil.Process(feeder.session.producer_pid), psutil.Process()
    producer_before, rank_before = producer.memory_info().rss, rank.memory_info().rss
    for _ in range(2):
        for number, element in enumerate(feeder):
            expected = (np.arange(size // 8, dtype=np.int64) * (number + 1)).view(np.uint8)
            assert np.array_equal(element.numpy(), expected)
            del expected
        del element
        # Two steps in the window, one on its way, and what TensorFlow's allocator keeps for the next ones.
        assert producer.memory_info().rss < producer_before + 6 * size
    wait_until(
        lambda: rank.memory_info().rss < rank_before + size // 2,
        what=lambda: f"{rank.memory_info().rss} bytes of the rank to become {rank_before}",
    )
