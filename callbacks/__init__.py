"""Keras callbacks that handle a feed's life: what `model.fit` needs besides the dataset."""

from kerasfeed.callbacks.backup import BackupAndRestore
from kerasfeed.callbacks.feed import FeedCallback

__all__ = ["BackupAndRestore", "FeedCallback"]
