"""The native engine's TensorFlow ops, in this process: `make test-ops` runs this under AddressSanitizer, too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tensorflow as tf

from kerasfeed.native import engine as engines


@pytest.fixture(scope="module")
def ops():
    engine = engines.load()
    assert engine is not None
    return engine.ops


def test_the_sanitizer_is_there_if_it_was_asked_for():
    loaded = Path("/proc/self/maps").read_text()
    assert ("libasan" in loaded) == ("address" in os.environ.get("KERASFEED_SANITIZE", ""))


def test_the_library_has_its_ops(ops):
    assert callable(ops.kerasfeed_dataset)
    assert callable(ops.kerasfeed_pump)


def test_a_pump_that_there_is_not_is_an_error(ops):
    iterator = iter(tf.data.Dataset.range(3))
    with pytest.raises(tf.errors.OpError):
        ops.kerasfeed_pump(
            iterator=iterator._iterator_resource, pump=999, in_pass=0, element=0, limit=1, wakes=0, tolerance=0
        )
    assert int(next(iterator)) == 0  # nothing was pulled


def test_a_feed_that_there_is_not_is_an_error(ops):
    variant = ops.kerasfeed_dataset(feed=999, direct=False, output_types=[tf.int64], output_shapes=[[]])
    dataset = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.int64))
    with pytest.raises(tf.errors.OpError):
        next(iter(dataset))
