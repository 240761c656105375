"""The errors that a feed raises. Each message names the feed, what was expected, what came, and what to do."""

from __future__ import annotations


class FeedError(RuntimeError):
    """Base class of all errors that a feed raises while it runs."""


class ProducerError(FeedError):
    """The producer can't deliver: `dataset_fn` or its pipeline raised, or the process kept dying.

    The message holds the original traceback of the producer. All ranks raise it, at the same step.
    """


class ReplayMismatchError(ProducerError):
    """A pipeline does not yield again what it yielded: after a death or a restore, an element is not what it was.

    The message names the element and the usual causes.
    """


class StateError(FeedError):
    """A feed's state, or a backup, is damaged, or does not fit the feed or the model."""


class RankError(FeedError):
    """The ranks don't fit together: one is missing, has left, or iterates over another epoch than the others."""


class FeedClosedError(FeedError):
    """A dataset was iterated after its feed had been closed, or while a newer iterator took its place."""


class FeedInterrupted(FeedError):
    """A wait for data was given up because the user pressed Ctrl-C (`KeyboardInterrupt` follows)."""
