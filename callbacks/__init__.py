"""Keras callbacks that handle a feed's life: what `model.fit` needs besides the dataset."""

from kerasfeed.callbacks.backup import BackupAndRestore
from kerasfeed.callbacks.checkpoint import ModelCheckpoint, restore_feeds
from kerasfeed.callbacks.feed import FeedCallback

__all__ = ["BackupAndRestore", "FeedCallback", "ModelCheckpoint", "restore_feeds"]
