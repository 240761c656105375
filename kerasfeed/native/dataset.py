"""A rank's steps as a dataset whose op reads them in C++ (`ops/dataset_op.cc`)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from kerasfeed.native.feed import Feed


class FeedDataset(dataset_ops.DatasetSource):
    """The steps of a feed, from where its owner says that an iterator begins.

    Args:
        ops: The engine's ops.
        feed: The feed.
        direct: Whether what is pulled is what the user gets: nothing in between pulls ahead.
        element_spec: A structure of `tf.TensorSpec`.
    """

    def __init__(self, ops: Any, feed: Feed, direct: bool, element_spec: Any):
        self._element_spec = element_spec
        components = tf.nest.flatten(element_spec)
        super().__init__(
            ops.kerasfeed_dataset(
                feed=feed.number,
                direct=direct,
                output_types=[spec.dtype for spec in components],
                output_shapes=[spec.shape for spec in components],
            )
        )

    @property
    def element_spec(self) -> Any:
        """The structure of the elements."""
        return self._element_spec
