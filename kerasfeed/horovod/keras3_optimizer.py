"""Horovod's `DistributedOptimizer` for Keras 3: any optimizer, whose gradients are averaged over the ranks first.

It is an instance of a class made for it, derived from the optimizer's own and of the same name, so that it is saved and
loaded as what it wraps. Only `apply` differs, through which all gradients go.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow import keras


class _Aggregator:
    """Adds up the gradients of several passes in this rank.

    Not part of what Keras saves, as in Horovod: a checkpoint is exact after a multiple of `passes` only.
    """

    def __init__(self, passes: int, average: bool, sparse_as_dense: bool):
        self._passes = passes
        self._average = average
        self._sparse_as_dense = sparse_as_dense
        self._sums: list[tf.Variable | None] = []
        self._count: tf.Variable | None = None

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Adds a pass."""
        dense = [self._dense(gradient) for gradient in gradients]
        if self._count is None:
            with tf.init_scope():
                self._sums = [
                    None if gradient is None else tf.Variable(tf.zeros(variable.shape, gradient.dtype), trainable=False)
                    for gradient, variable in zip(dense, variables, strict=True)
                ]
                self._count = tf.Variable(0, trainable=False)
        if [total is None for total in self._sums] != [gradient is None for gradient in dense]:
            raise ValueError(
                "DistributedOptimizer: with backward_passes_per_step > 1 each pass must have gradients for the same "
                f"{sum(total is not None for total in self._sums)} of {len(self._sums)} variables. "
                f"Received: {sum(gradient is not None for gradient in dense)} of {len(dense)}"
            )
        for total, gradient in zip(self._sums, dense, strict=True):
            if total is not None:
                total.assign_add(gradient)
        self._count.assign_add(1)

    def is_complete(self) -> tf.Tensor:
        """Whether there are as many passes as are wanted."""
        return tf.equal(self._count, self._passes)

    def take(self) -> list[tf.Tensor | None]:
        """Returns the sums, or averages, and begins anew."""
        assert self._count is not None
        divisor = self._passes if self._average else 1
        taken = [None if total is None else tf.identity(total) / divisor for total in self._sums]
        with tf.control_dependencies([value for value in taken if value is not None]):
            for total in self._sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            self._count.assign(0)
        return taken

    def _dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self._sparse_as_dense:
            raise ValueError(
                "DistributedOptimizer: IndexedSlices (the gradients of an Embedding) need sparse_as_dense=True where "
                f"backward_passes_per_step is more than 1. Received: backward_passes_per_step={self._passes}"
            )
        return tf.convert_to_tensor(gradient)


class _Distributed:
    """What a distributed optimizer has beside its own class."""

    built: bool
    iterations: Any
    _reduce: Any
    _aggregator: _Aggregator | None

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Averages the gradients over the ranks, and applies them."""
        gradients = list(grads)
        if not gradients:
            return
        _refuse_conditions()
        if trainable_variables is None:
            if not self.built:
                raise ValueError(
                    "DistributedOptimizer: expected `trainable_variables` with the first gradients, or an optimizer "
                    "that is built. Received: neither"
                )
            variables = list(self._trainable_variables)  # type: ignore[attr-defined]
        else:
            variables = list(trainable_variables)
            if not self.built:
                with tf.init_scope():
                    self.build(variables)  # type: ignore[attr-defined]
                self.built = True
        if self._aggregator is None:
            self._apply_reduced(gradients, variables)
            return
        self._aggregator.add(gradients, variables)
        aggregator = self._aggregator

        def apply_all() -> None:
            self._apply_reduced(aggregator.take(), variables)

        def apply_none() -> None:
            self.iterations.assign_add(1)  # counts passes, as with Horovod

        if tf.executing_eagerly():
            (apply_all if aggregator.is_complete() else apply_none)()
        else:
            tf.cond(aggregator.is_complete(), lambda: _then(apply_all), lambda: _then(apply_none))

    def _apply_reduced(self, gradients: list[Any], variables: list[Any]) -> None:
        reduced = self._reduce(gradients, [variable.value for variable in variables])
        super().apply(reduced, variables)  # type: ignore[misc]


def _then(act: Any) -> tf.Tensor:
    act()
    return tf.constant(0)


def _refuse_conditions() -> None:
    """Ranks may take different branches of a condition: those who take the other one are waited for for ever."""
    graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
    if graph is not None and type(graph).__name__ == "CondBranchFuncGraph":
        raise ValueError(
            "DistributedOptimizer: expected gradients that every rank applies. Received: gradients within a condition, "
            "as from LossScaleOptimizer(DistributedOptimizer(...)), where a rank may skip a step that others take. "
            "Write DistributedOptimizer(LossScaleOptimizer(...)); with mixed_float16 Keras else wraps by itself"
        )


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns the optimizer as one that averages gradients over all ranks before it applies them.

    Clipping, weight decay, moving averages and Keras's own accumulation of gradients see the averages. The arguments
    are those of `horovod.tensorflow.keras.DistributedOptimizer`.

    Example:

    ```python
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size(), momentum=0.9)), loss)
    ```

    Args:
        optimizer: A Keras 3 optimizer. If it is built, its state is taken over.
        name: Prefix of the operations' names. Defaults to "Distributed" and the optimizer's class.
        device_dense: Device for dense tensors.
        device_sparse: Device for sparse tensors.
        compression: How gradients travel: `hvd.Compression.none` or `hvd.Compression.fp16`.
        sparse_as_dense: Whether gradients of embeddings travel as dense tensors.
        gradient_predivide_factor: Gradients are divided by it before they are added up, and by size / it after.
        op: `hvd.Average` or `hvd.Sum`.
        backward_passes_per_step: Passes whose gradients are added up in each rank before they are averaged and applied.
            `iterations` counts passes.
        average_aggregated_gradients: Whether the sum over passes is divided by their number.
        num_groups: An older name of `groups`.
        groups: Number of groups in which gradients are reduced, or lists of variables for them.
        process_set: The ranks that take part.
        scale_local_gradients: As in Horovod; there are no local variables here, so that it has no effect.

    Raises:
        ValueError: An argument is out of its range, or the optimizer is distributed already.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"DistributedOptimizer: expected a Keras 3 optimizer. Received: {optimizer!r}")
    if isinstance(optimizer, _Distributed) or isinstance(getattr(optimizer, "inner_optimizer", None), _Distributed):
        raise ValueError(
            "DistributedOptimizer: expected an optimizer that is not distributed yet. Received: one that is"
        )
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError(f"DistributedOptimizer: op must be hvd.Average or hvd.Sum. Received: {op!r}")
    if backward_passes_per_step < 1:
        raise ValueError(
            f"DistributedOptimizer: backward_passes_per_step must be at least 1. Received: {backward_passes_per_step}"
        )
    accumulates = getattr(getattr(optimizer, "inner_optimizer", optimizer), "gradient_accumulation_steps", None)
    if backward_passes_per_step > 1 and accumulates:
        raise ValueError(
            "DistributedOptimizer: gradients of several passes are added up by backward_passes_per_step or by Keras's "
            f"gradient_accumulation_steps, not by both. Received: {backward_passes_per_step} and {accumulates}"
        )
    if num_groups:
        warnings.warn("DistributedOptimizer: num_groups has been replaced by groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if isinstance(groups, list):
        groups = [[getattr(variable, "value", variable) for variable in group] for group in groups]
    elif groups is not None and groups < 1:
        raise ValueError(f"DistributedOptimizer: groups must be at least 1, or lists. Received: {groups}")

    own = optimizer.__class__
    # Of the same name and module: Keras saves it as what it wraps.
    made: Any = type(own.__name__, (_Distributed, own), {"__module__": own.__module__, "__doc__": own.__doc__})
    distributed = made.from_config(optimizer.get_config())
    distributed._reduce = hvd._make_allreduce_grads_fn(
        name or f"Distributed{own.__name__}",
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        groups,
        process_set=process_set,
    )
    distributed._aggregator = (
        _Aggregator(backward_passes_per_step, average_aggregated_gradients, sparse_as_dense)
        if backward_passes_per_step > 1
        else None
    )
    if optimizer.built:
        distributed.build(optimizer._trainable_variables)
        distributed.built = True
        for mine, its in zip(distributed.variables, optimizer.variables, strict=True):
            mine.assign(its)
    return distributed


def load_model(
    filepath: Any,
    custom_optimizers: list[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = hvd.Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Returns a saved model whose optimizer, with its state, is distributed.

    Example:

    ```python
    model = hvd.load_model("model.keras")
    ```

    Args:
        filepath: What `keras.models.load_model` takes.
        custom_optimizers: Optimizer classes that Keras does not know.
        custom_objects: Names and custom classes or functions.
        compression: How gradients travel.
        legacy_opts: Not on Keras 3, which has no such optimizers.

    Raises:
        ValueError: `legacy_opts` is true, or the model was not compiled.
    """
    if legacy_opts:
        raise ValueError(
            "load_model: legacy_opts must be False on Keras 3, which has no legacy optimizers. Received: True"
        )
    known = {optimizer.__name__: optimizer for optimizer in custom_optimizers or []}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is None:
        raise ValueError(f"load_model: expected a model that was compiled with an optimizer. Received: {filepath}")
    model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
