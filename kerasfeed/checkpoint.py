"""The position of a feed as a part of a `tf.train.Checkpoint`: its bytes go into the checkpoint as a string."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from kerasfeed.state import FeedState

if TYPE_CHECKING:
    from kerasfeed.session import Session


class FeedCheckpoint(tf.train.experimental.PythonState):
    """What `DataFeeder.checkpoint` returns.

    Args:
        session: The feed on this rank.
    """

    def __init__(self, session: Session):
        self._session = session

    def serialize(self) -> bytes:
        """TensorFlow asks for what is to be saved."""
        cursor = self._session.cursor
        return self._session.state(cursor.acknowledged if cursor.bound else cursor.pulled).to_bytes()

    def deserialize(self, string_value: bytes) -> None:
        """TensorFlow gives back what was saved."""
        self._session.restore(FeedState.from_bytes(string_value))
