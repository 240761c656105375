"""`FeedCallback`: ties a feed to a `fit`. Its hooks are thin; what they mean is the session's and the cursor's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow import keras

from kerasfeed.callbacks.backup import BackupAndRestore
from kerasfeed.callbacks.keras_loop import KerasLoop
from kerasfeed.feeder import DataFeeder, derives_from_feeder, feeders_of
from kerasfeed.session import Session

_LOG = logging.getLogger("kerasfeed")
_ABSENT = object()


class FeedCallback(keras.callbacks.Callback):
    """Starts a feed for `model.fit`, ties its epochs to those of Keras, and ends it when training ends.

    With it, what counts as trained is what `fit` trained, not what was pulled: a `fit` that stops inside an epoch and
    one that follows it miss nothing and repeat nothing. All ranks use it, in their list of callbacks.

    Example:

    ```python
    feeder = kerasfeed.DataFeeder(dataset_fn)
    model.fit(feeder, epochs=10, callbacks=[kerasfeed.callbacks.FeedCallback(feeder)])
    ```

    Args:
        feeder: The `DataFeeder` that `fit` trains from, itself or through `.map(...)` and the like.
        producer: Rank that starts the producer, if the feeder left it open. Default `None`: as the feeder has it.
        prefetch: Steps to keep ready ahead of the ranks, if the feeder left it open. Default `None`: as the feeder has
            it.
        keep: Whether the producer goes on after this `fit`, ready for the next one. Default `False`: it is ended, and
            started again when it is needed.

    Raises:
        TypeError: `feeder` is no `DataFeeder`.
        ValueError: The feeder was given another value for `producer` or `prefetch`.
        RuntimeError: `producer` or `prefetch` comes after the feed has started.
    """

    def __init__(
        self, feeder: DataFeeder, *, producer: int | None = None, prefetch: int | None = None, keep: bool = False
    ):
        super().__init__()
        if not isinstance(feeder, DataFeeder):
            raise TypeError(f"FeedCallback: feeder must be a kerasfeed.DataFeeder. Received: {type(feeder).__name__}")
        self._feeder = feeder
        self._session: Session = feeder.session
        self._session.configure(producer=producer, prefetch=prefetch)
        self._keep = keep
        self._loop: KerasLoop | None = None
        self._training = False
        self._batches = 0
        self._excess = 0
        self._warned = False
        self._over: Any = None
        self._wrapped: dict[str, Any] = {}
        self._fit = 0
        self._ending = threading.RLock()

    # ---- Training ----

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts the feed and settles where this `fit` begins."""
        # A fit that raised may not be over yet, as long as somebody holds its exception.
        self._abandon(self._fit, "its fit ended with an exception")
        self._fit += 1
        loop = self._loop = KerasLoop.find(self.model, "fit")
        if loop is None:
            _LOG.warning(
                "feed %r: this version of Keras is not known: with steps_per_epoch in fit, or where epochs vary, "
                "give steps_per_epoch to the DataFeeder instead",
                self._feeder.name,
            )
        else:
            # A call that is refused leaves the feed as it was.
            self._check(loop)
        try:
            self._begin(loop)
        except BaseException as error:
            self._training = True
            self._abandon(self._fit, f"fit could not begin: {error}")
            raise

    def _begin(self, loop: KerasLoop | None) -> None:
        steps, through_epochs, epochs = None, False, None
        if loop is not None:
            through_epochs, epochs = loop.keeps_iterator, loop.epochs
            for other in loop.callbacks:
                if isinstance(other, BackupAndRestore):
                    resumed = other.begin(self.model)
                    epochs = epochs if resumed is None else loop.last_epoch - resumed
            steps = loop.steps_per_epoch
            self._over = loop.when_over(self._abandon_in_background, self._fit)
            # A validation feeder that starts only when it is needed lets the whole job wait for it.
            for feeder in feeders_of(loop.validation_data):
                feeder.session.start()
        self._session.bind(steps, through_epochs, epochs)
        self._training = True
        self._translate_errors("train_function", loop)
        self._guard("make_test_function", "evaluate")
        self._guard("make_predict_function", "predict")

    def _check(self, loop: KerasLoop) -> None:
        name, own = self._feeder.name, self._session.options.steps_per_epoch
        if loop.bare_callback:
            raise ValueError(
                f"FeedCallback of feed {name!r} must be given in a list: fit(callbacks=[...]). "
                "Keras calls a bare callback from a thread pool, out of step with training"
            )
        if not derives_from_feeder(loop.dataset, self._feeder):
            raise ValueError(
                f"FeedCallback of feed {name!r}: fit does not train from it. Give the callback the feeder that "
                "fit gets, and a validation feeder none"
            )
        if loop.steps_per_epoch is not None and own is not None and own != loop.steps_per_epoch:
            raise ValueError(
                f"feed {name!r} was built with steps_per_epoch={own}, but fit got steps_per_epoch="
                f"{loop.steps_per_epoch}. Give it to one of them only"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Sets the cursor, and corrects what Keras believes about the length of this epoch."""
        start = self._session.begin_epoch()
        self._batches = self._excess = 0
        loop = self._loop
        if loop is None:
            return
        whole = self._session.cursor.steps_in(start.epoch)
        start = start._replace(step=start.step - loop.steps_passed_over)
        if loop.keeps_iterator:
            loop.shorten_epoch(start.step)
            # Keras 3 would take the end of a pass for the end of the kept iterator.
            loop.forget_passes()
        elif loop.dataset is self._feeder and whole is not None:
            loop.set_steps(whole - start.step)
        else:
            # Keras would end this epoch where the last one ended, or where a whole one ends.
            loop.set_steps(None if whole is None or start.step else loop.steps_at_begin)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts what was trained. Keras's own batch numbers can't be trusted: they count steps not run, too."""
        steps = self._loop.steps_per_call if self._loop is not None else 1
        self._batches += steps
        self._excess += self._session.acknowledge(steps)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compares batches trained with steps pulled."""
        left = self._session.end_epoch(stopped=bool(self.model.stop_training))
        tolerance = self._loop.steps_per_call if self._loop is not None else 1
        if (left >= tolerance or self._excess >= tolerance) and not self._warned:
            self._warned = True
            _LOG.warning(
                "feed %r: epoch %d trained %d batches from %d steps: the dataset that fit got is not the feeder's "
                "elements one by one and in order (filter, unbatch, shuffle and the like), so that a stop inside an "
                "epoch can't be resumed exactly. Do that in dataset_fn, where the producer does it once for all ranks",
                self._feeder.name,
                epoch,
                self._batches,
                self._batches - self._excess + left,
            )

    def on_train_end(self, logs: Any = None) -> None:
        """Ends the feed, or leaves it to the next `fit`."""
        for other in self._loop.callbacks if self._loop is not None else ():
            if isinstance(other, BackupAndRestore):
                other.note_feeds()
        with self._ending:
            self._finish("")

    def _abandon(self, fit: int, error: str) -> None:
        """Ends the feed of a `fit` that came to no `on_train_end`, unless that is done."""
        with self._ending:
            if self._training and fit == self._fit:
                self._finish(error)

    def _abandon_in_background(self, fit: int) -> None:
        # Called by whoever collects the garbage, which may be any thread, with any lock held.
        thread = threading.Thread(
            target=self._abandon, args=(fit, "its fit ended with an exception"), name="kerasfeed-abandon", daemon=True
        )
        thread.start()

    def _finish(self, error: str) -> None:
        self._training = False
        self._loop = None
        if self._over is not None:
            self._over.detach()
            self._over = None
        for name in list(self._wrapped):
            self._restore(name)
        self._session.report()
        self._session.unbind()
        if error or not self._keep:
            self._session.close(error)

    # ---- Evaluation and prediction ----

    def on_test_begin(self, logs: Any = None) -> None:
        """Lets errors of the feed through as they are."""
        loop = KerasLoop.find(self.model, "evaluate")
        runner = loop.test_runner if loop is not None else None
        if loop is not None and runner is not None and hasattr(runner, "_function"):
            # Keras 2 has taken the function from the model before it calls this hook.
            runner._function = _translating(runner._function, feeders_of(loop.dataset), self._clean_up)
        else:
            self._translate_errors("test_function", loop)

    def on_test_end(self, logs: Any = None) -> None:
        """Undoes what `on_test_begin` did."""
        self._restore("test_function")

    def on_predict_begin(self, logs: Any = None) -> None:
        """Lets errors of the feed through as they are."""
        self._translate_errors("predict_function", KerasLoop.find(self.model, "predict"))

    def on_predict_end(self, logs: Any = None) -> None:
        """Undoes what `on_predict_begin` did."""
        self._restore("predict_function")

    def _guard(self, maker: str, call: str) -> None:
        """Refuses to evaluate or predict on the feeder that is being trained from, whoever calls it inside `fit`."""
        make = getattr(self.model, maker, None)
        if make is None:
            return

        def guarded(*args: Any, **kwargs: Any) -> Any:
            loop = KerasLoop.find(self.model, call)
            if loop is not None and derives_from_feeder(loop.dataset, self._feeder):
                raise ValueError(
                    f"{call} inside fit on feed {self._feeder.name!r}, from which fit trains, would take elements from "
                    "training. Build a second DataFeeder for it"
                )
            return make(*args, **kwargs)

        self._wrapped[maker] = self.model.__dict__.get(maker, _ABSENT)
        setattr(self.model, maker, guarded)

    # ---- Errors ----

    def _translate_errors(self, name: str, loop: KerasLoop | None) -> None:
        """Wraps the model's compiled function, through which a feed's error comes as TensorFlow's `UnknownError`."""
        function = getattr(self.model, name, None)
        if function is None:
            return
        feeders = feeders_of(loop.dataset) if loop is not None else [self._feeder]
        self._restore(name)
        self._wrapped[name] = self.model.__dict__.get(name, _ABSENT)
        setattr(self.model, name, _translating(function, feeders, self._clean_up))

    def _clean_up(self) -> None:
        self._abandon(self._fit, "its fit ended with an error of a feed")

    def _restore(self, name: str) -> None:
        if name in self._wrapped:
            value = self._wrapped.pop(name)
            if value is _ABSENT:
                delattr(self.model, name)
            else:
                setattr(self.model, name, value)


def _translating(
    function: Callable[[Any], Any], feeders: list[DataFeeder], clean_up: Callable[[], None]
) -> Callable[[Any], Any]:
    def translating(iterator: Any) -> Any:
        try:
            return function(iterator)
        except tf.errors.OutOfRangeError:
            raise
        except tf.errors.OpError:
            for feeder in feeders:
                failure = feeder.session.failure
                if failure is not None:
                    clean_up()
                    raise type(failure)(str(failure)) from None
            raise

    return translating
