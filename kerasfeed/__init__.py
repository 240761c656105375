"""kerasfeed: one `tf.data` pipeline feeds every rank of a Keras job, each element to one rank, once.

`DataFeeder` is a dataset for `model.fit`; `kerasfeed.callbacks.FeedCallback` ties its epochs to those of Keras.
"""

from kerasfeed.errors import FeedClosedError, FeedError, FeedInterrupted, ProducerError, RankError
from kerasfeed.feeder import DataFeeder
from kerasfeed.session import EpochStatistics
from kerasfeed.topology import Topology

__version__ = "0.1.0"

__all__ = [
    "DataFeeder",
    "EpochStatistics",
    "FeedClosedError",
    "FeedError",
    "FeedInterrupted",
    "ProducerError",
    "RankError",
    "Topology",
    "callbacks",
]


def __getattr__(name: str) -> object:
    # Keras is imported only by those who use the callbacks.
    if name == "callbacks":
        import importlib

        return importlib.import_module("kerasfeed.callbacks")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
