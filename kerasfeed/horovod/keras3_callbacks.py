"""Horovod's callbacks for Keras 3: start from the same weights, average metrics, warm up and schedule learning rates.

What they do is what Horovod 0.28's do on Keras 2. Keras 3 keeps momentum as a number that is compiled into the step, so
that it can't be corrected for a changed learning rate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow import keras

_LOG = logging.getLogger("kerasfeed")


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives all ranks the root rank's variables after the first batch, those of the optimizer too.

    Also turns XLA off for models that were compiled with `jit_compile="auto"`: it can't hold Horovod's operations.

    Example:

    ```python
    model.fit(dataset, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    ```

    Args:
        root_rank: The rank that sends.
        device: Device of the broadcast.
        local_variables: Variables that each rank keeps to itself: one, or a list.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None):
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local: set[int] = set()
        if local_variables is None:
            local_variables = []
        for variable in local_variables if isinstance(local_variables, list | tuple) else [local_variables]:
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Each rank keeps this variable to itself."""
        if not isinstance(var, keras.Variable | tf.Variable):
            raise ValueError(f"local_variables: expected variables. Received: {var!r}")
        self._local.add(id(_value(var)))

    def set_model(self, model: Any) -> None:
        """Called by Keras before it compiles the step."""
        super().set_model(model)
        if model.jit_compile and not getattr(model, "run_eagerly", False):
            _LOG.warning("the model is trained without XLA (jit_compile), which can't hold Horovod's operations")
            model.jit_compile = False
            model.train_function = None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.broadcast_done:
            return
        variables = [*self.model.variables, *self.model.optimizer.variables]
        # Keras may list a variable twice, and seeds of generators among the model's: each rank keeps its own seeds.
        unique = {id(_value(v)): _value(v) for v in variables if not _is_seed(v)}
        with tf.device(self.device):
            hvd.broadcast_variables(
                [v for key, v in unique.items() if key not in self._local], root_rank=self.root_rank
            )
        self.broadcast_done = True


def _value(variable: Any) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _is_seed(variable: Any) -> bool:
    return "seed_generator" in getattr(variable, "path", "")


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages an epoch's metrics over the ranks, in place: callbacks that come later in the list see the averages.

    Example:

    ```python
    callbacks = [hvd.callbacks.MetricAverageCallback(), keras.callbacks.ReduceLROnPlateau()]
    ```

    Args:
        device: Device of the reduction.
    """

    def __init__(self, device: str = ""):
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        for metric in sorted(logs):
            value = tf.constant(logs[metric], tf.float32)
            logs[metric] = float(hvd.allreduce(value, name=f"metric.{metric}", device_dense=self.device))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier` in the epochs from `start_epoch` to `end_epoch`.

    Example:

    ```python
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=lambda epoch: 0.1 ** (epoch // 30))
    ```

    Args:
        initial_lr: The learning rate that is multiplied.
        multiplier: A number, which stands for `multiplier ** (epoch - start_epoch)`, or a function of the epoch.
        start_epoch: The first epoch in which it is set.
        end_epoch: The first epoch in which it is not set any more. `None`: it always is.
        staircase: Whether it is set once in an epoch. Else before each batch, and the function's epoch is
            `epoch + batch / steps_per_epoch`.
        momentum_correction: As in Horovod; Keras 3 can't do it, and a warning says so where it would.
        steps_per_epoch: Batches in an epoch. `None`: what Keras knows.

    Raises:
        ValueError: `initial_lr` is `None`, or the batches in an epoch are wanted and not known.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        if initial_lr is None:
            raise ValueError(f"{type(self).__name__}: initial_lr must be a number. Received: None")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self._batches = 0  # of this epoch: with steps_per_execution Keras does not number them one by one
        self.multiplier: Callable[[float], float]
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            self.multiplier = lambda epoch: multiplier ** (epoch - start_epoch)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            steps = (self.params or {}).get("steps")
            if not steps:
                raise ValueError(
                    f"{type(self).__name__}: expected steps_per_epoch, as Keras does not know how many batches an "
                    "epoch has. Received: None"
                )
            self.steps_per_epoch = steps
        momentum = getattr(self.model.optimizer, "momentum", 0)
        if self.momentum_correction and isinstance(momentum, int | float) and momentum:
            _LOG.warning(
                "%s: momentum stays %g while the learning rate changes: Keras 3 compiles it into the step "
                "(momentum_correction=False does without this warning)",
                type(self).__name__,
                momentum,
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.current_epoch = epoch
        self._batches = 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        first, self._batches = self._batches, batch + 1
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set(self.current_epoch + batch / self.steps_per_epoch)
        elif not first:
            self._set(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = self._learning_rate()

    def _set(self, epoch: float) -> None:
        self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)

    def _learning_rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr`, batch by batch.

    From "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv:1706.02677, section 2.2.

    Example:

    ```python
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.1 * hvd.size(), warmup_epochs=5)
    ```

    Args:
        initial_lr: The learning rate after the warm-up.
        warmup_epochs: How many epochs it takes.
        momentum_correction: As in `LearningRateScheduleCallback`.
        steps_per_epoch: Batches in an epoch. `None`: what Keras knows.
        verbose: 1: rank 0 says when it is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        def multiplier(epoch: float) -> float:
            # So that the epoch's last batch has the round number.
            assert self.steps_per_epoch is not None
            epoch += 1.0 / self.steps_per_epoch
            size: int = hvd.size()
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and hvd.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._learning_rate():g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's `ModelCheckpoint` of the best model only, whose `filepath` is set later: by Horovod's Spark estimators.

    Args:
        monitor: The metric.
        verbose: Verbosity.
        save_weights_only: Whether only weights are saved.
        mode: `"auto"`, `"min"` or `"max"`.
        save_freq: `"epoch"`, or a number of batches.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ):
        super().__init__(
            filepath="best.weights.h5" if save_weights_only else "best.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None
