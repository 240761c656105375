"""What Keras does not tell its callbacks: how `fit` and `evaluate` iterate, read from the call's own frame.

`params["steps"]` does not say whether `steps_per_epoch` was given, and the length that Keras remembers of one epoch
is wrong for the second one where epochs differ. Both live in an object that the running `fit` holds in a local
variable: `data_handler` in Keras 2, `epoch_iterator` in Keras 3. This is the only module that knows their insides;
where they are not as expected, `find` returns `None` and the caller goes without.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from typing import Any


class KerasLoop:
    """One running `fit`, `evaluate` or `predict`. Holds what Keras iterates with only weakly.

    Attributes:
        dataset: The dataset that Keras iterates.
        steps_per_epoch: What the call was given as `steps_per_epoch` (or `steps`), or `None`.
        steps_at_begin: How many steps Keras believes an epoch has, or `None`, as the call begins.
        keeps_iterator: Whether Keras keeps one iterator over all epochs.
        epochs: Epochs that `fit` will still run at most; 1 for the others.
        last_epoch: The Keras epoch at which `fit` ends.
        test_runner: What Keras 2 calls the test function through, in `evaluate`.
        validation_data: What `fit` was given to validate with.
        bare_callback: Whether Keras calls batch hooks from a thread pool, as Keras 3 does for a callback that was not
            given in a list.
    """

    def __init__(self, handler: Any, local_variables: dict[str, Any]):
        self._handler = weakref.ref(handler)
        self._keras3 = hasattr(handler, "_num_batches")
        if self._keras3:
            self.dataset = handler._distributed_dataset
            self.steps_per_epoch = handler.steps_per_epoch
            self.keeps_iterator = self.steps_per_epoch not in (None, handler._num_batches)
        else:
            self.dataset = handler._dataset
            self.steps_per_epoch = handler._steps_per_epoch
            self.keeps_iterator = not handler._adapter.should_recreate_iterator()
        initial_epoch = local_variables.get("initial_epoch") or 0
        self.last_epoch = local_variables.get("epochs", 1)
        self.epochs = max(0, self.last_epoch - initial_epoch)
        self.steps_at_begin = handler._num_batches if self._keras3 else handler._inferred_steps
        callbacks = local_variables.get("callbacks")
        # Keras makes this list for the call, and only the call holds it; what it iterates with may be in a cycle.
        self._held_by_call = weakref.ref(callbacks if callbacks is not None else handler)
        self.bare_callback = bool(getattr(callbacks, "_async_train", False))
        self.test_runner = local_variables.get("test_function_runner")
        self.validation_data = local_variables.get("validation_data")
        self._progress_bar = getattr(callbacks, "_progbar", None)

    @classmethod
    def find(cls, model: Any, name: str) -> KerasLoop | None:
        """Returns the innermost running call of `model.<name>`, or `None` where it can't be read."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == name:
                found = frame.f_locals
                handler = found.get("data_handler", found.get("epoch_iterator"))
                if found.get("self") is model and handler is not None:
                    try:
                        return cls(handler, found)
                    except AttributeError:
                        return None
            frame = frame.f_back  # type: ignore[assignment]
        return None

    def when_over(self, call: Any, *args: Any) -> weakref.finalize[Any, Any]:
        """Has `call(*args)` called once the running call is over, however it ends."""
        finalizer = weakref.finalize(self._held_by_call(), call, *args)
        finalizer.atexit = False
        return finalizer

    def same_call(self, other: KerasLoop | None) -> bool:
        """Whether both are of the same running call."""
        return other is not None and self._held_by_call() is other._held_by_call()

    def surround(self, first: Any, last: Any) -> bool:
        """Has two callbacks called before and after all others, from their next hook on. Returns whether it worked."""
        container: Any = self._held_by_call()
        if not hasattr(container, "callbacks"):
            return False
        # A new list: the present one may be under way.
        container.callbacks = [first, *container.callbacks, last]
        return True

    def build(self, model: Any) -> None:
        """Lets Keras build the model and make the variables of its metrics, which it else does in the first batch."""
        handler = self._handler()
        trace = getattr(model.train_function, "get_concrete_function", None)
        # A model that can't be traced like this has all that later; what is wrong with it fit will say.
        with contextlib.suppress(Exception):
            if self._keras3:
                model._symbolic_build(data_batch=self.dataset.element_spec)
            elif handler is not None and trace is not None:
                trace(iter(handler._dataset))

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks of the call, if it still runs."""
        return list(getattr(self._held_by_call(), "callbacks", ()))

    @property
    def steps_passed_over(self) -> int:
        """With how many steps of the epoch that begins now Keras counts although they are not run (Keras 2)."""
        return int(getattr(self._handler(), "_initial_step", 0))

    def shorten_epoch(self, steps: int) -> None:
        """Lets Keras 3, where it keeps one iterator, run so many steps less in the epoch that begins now."""
        handler = self._handler()
        if handler is not None and self._keras3 and self.steps_per_epoch is not None:
            handler.steps_per_epoch = self.steps_per_epoch - steps

    @property
    def steps_per_call(self) -> int:
        """How many steps the last call of `train_function` ran at most (`steps_per_execution`)."""
        handler = self._handler()
        if handler is None:
            return 1
        if not self._keras3:
            return int(handler.step_increment) + 1
        steps = int(handler.steps_per_execution)
        if self.keeps_iterator or not handler._num_batches:
            return steps
        # Keras 3 counts the last call of an epoch as a whole one.
        return max(0, min(steps, int(handler._num_batches) - int(handler._steps_seen) + steps))

    def set_steps(self, steps: int | None) -> None:
        """Sets how many steps Keras takes from the iterator in this epoch; `None`: until it ends."""
        handler = self._handler()
        if handler is not None:
            setattr(handler, "_num_batches" if self._keras3 else "_inferred_steps", steps)
        if self._progress_bar is not None and steps is not None:
            self._progress_bar.target = steps

    def forget_passes(self) -> None:
        """Lets a kept iterator run on when as many steps were taken as the dataset has."""
        handler = self._handler()
        if handler is not None and self._keras3:
            handler._num_batches = None
