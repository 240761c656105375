"""kerasfeed: one `tf.data` pipeline feeds every rank of a Keras job, each element to one rank, once.

`DataFeeder` is a dataset for `model.fit`; `kerasfeed.callbacks.FeedCallback` ties its epochs to those of Keras.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kerasfeed.errors import (
    FeedClosedError,
    FeedError,
    FeedInterrupted,
    ProducerError,
    RankError,
    ReplayMismatchError,
    StateError,
)

if TYPE_CHECKING:
    from kerasfeed import callbacks
    from kerasfeed.feeder import DataFeeder
    from kerasfeed.replay_check import ReplayReport, check
    from kerasfeed.session import EpochStatistics
    from kerasfeed.state import FeedState
    from kerasfeed.topology import Topology

__version__ = "0.1.0"

__all__ = [
    "DataFeeder",
    "EpochStatistics",
    "FeedClosedError",
    "FeedError",
    "FeedInterrupted",
    "FeedState",
    "ProducerError",
    "RankError",
    "ReplayMismatchError",
    "ReplayReport",
    "StateError",
    "Topology",
    "callbacks",
    "check",
]

# Imported at first use: Keras by those who use the callbacks, TensorFlow by a producer only when it listens.
_HOMES = {
    "DataFeeder": "kerasfeed.feeder",
    "EpochStatistics": "kerasfeed.session",
    "FeedState": "kerasfeed.state",
    "ReplayReport": "kerasfeed.replay_check",
    "Topology": "kerasfeed.topology",
    "check": "kerasfeed.replay_check",
}


def __getattr__(name: str) -> object:
    if name == "callbacks":
        return importlib.import_module("kerasfeed.callbacks")
    if name in _HOMES:
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
