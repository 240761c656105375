"""What Keras's callbacks remember, as bytes and back: counters, best values and weights, and the history of `fit`.

It is each rank's own, as are the logs that it comes from; but for the trainable ones of the best weights, which are the
same on all ranks, and large: only the rank that writes packs those.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# [class name, {attribute: value}] of each callback, in the order of the callbacks.
Memory = list[tuple[str, dict[str, Any]]]
Arrays = dict[str, Any]

_BEST = "best_weights"
# Attributes of Keras's callbacks that decide what they do next, by class name (keras/src/callbacks/).
_ATTRIBUTES = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch", _BEST),
    "History": ("epoch", "history"),
    "ModelCheckpoint": ("best", "epochs_since_last_save", "_batches_seen_since_last_saving", "_last_batch_seen"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
}


def _attributes(callback: Any) -> list[str]:
    """Returns by what a callback remembers; one that is derived from Keras's does so as that one."""
    names = (name for kind in type(callback).__mro__ for name in _ATTRIBUTES.get(kind.__name__, ()))
    return [name for name in dict.fromkeys(names) if hasattr(callback, name)]


def memory_of(callbacks: Sequence[Any]) -> Memory:
    """Returns what callbacks remember; those that remember nothing are left out."""
    found = [(callback, _attributes(callback)) for callback in callbacks]
    return [(type(c).__name__, {a: getattr(c, a) for a in attributes}) for c, attributes in found if attributes]


def remember(callbacks: Sequence[Any], memory: Memory) -> None:
    """Gives the callbacks the memory that `memory_of` took, those of each class in their order."""
    left = list(memory)
    for callback in callbacks:
        at = next((at for at, (name, _) in enumerate(left) if name == type(callback).__name__), None)
        if at is not None:
            for attribute, value in left.pop(at)[1].items():
                setattr(callback, attribute, value)


def has_stopped(callbacks: Sequence[Any]) -> bool:
    """Whether an `EarlyStopping` has ended the training."""
    return any(getattr(callback, "stopped_epoch", 0) for callback in callbacks)


def may_stop(callbacks: Sequence[Any]) -> bool:
    """Whether there is an `EarlyStopping`."""
    return any(hasattr(callback, "stopped_epoch") for callback in callbacks)


# ---- As bytes ----


def pack(memory: Memory) -> bytes:
    """Returns a memory as JSON, in which the best weights are only counted; see `best_weights`."""
    counted = [
        (name, {a: len(v) if a == _BEST and v is not None else _encode(v) for a, v in values.items()})
        for name, values in memory
    ]
    return json.dumps(counted).encode()


def unpack(data: bytes, best: Mapping[str, Any]) -> Memory:
    """Returns the memory that `pack` took.

    Args:
        data: What `pack` returned.
        best: What `best_weights` returned, the trainable ones and the others.
    """
    memory: Memory = [
        (name, {a: v if a == _BEST else _decode(v) for a, v in values.items()}) for name, values in json.loads(data)
    ]
    for key, values in _holders(memory):
        weights = [best.get(f"{key}/{index}") for index in range(values[_BEST])]
        # One that holds something else than the model's weights, or only on this rank, has to begin anew.
        values[_BEST] = None if any(weight is None for weight in weights) else weights
    return memory


def best_weights(memory: Memory, model: Any, trainable: bool) -> Arrays:
    """Returns the best weights that callbacks hold, by name: the trainable ones, or each rank's own."""
    known = {id(variable) for variable in model.trainable_variables}
    return {
        f"{key}/{index}": weight
        for key, values in _holders(memory)
        for index, (variable, weight) in enumerate(zip(model.weights, values[_BEST], strict=False))
        if (id(variable) in known) == trainable
    }


def _holders(memory: Memory) -> Iterator[tuple[str, dict[str, Any]]]:
    """The entries that have best weights, with names that are the same on ranks with different callbacks."""
    count: dict[str, int] = {}
    for name, values in memory:
        count[name] = count.get(name, -1) + 1
        if values.get(_BEST) is not None:
            yield f"{name}-{count[name]}", values


def _encode(value: Any) -> Any:
    """Returns a value of a log, or of what is made from logs, in JSON's types."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_encode(each) for each in value]
    if isinstance(value, dict):
        return {"dict": {str(name): _encode(each) for name, each in value.items()}}
    array = np.asarray(value)
    if array.dtype.hasobject:
        return None
    data = base64.b64encode(array.tobytes()).decode()
    return {"array": [tf.as_dtype(array.dtype).name, list(array.shape), data]}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {name: _decode(each) for name, each in value["dict"].items()}
    dtype, shape, data = value["array"]
    array = np.frombuffer(base64.b64decode(data), tf.as_dtype(dtype).as_numpy_dtype).reshape(shape)
    # A scalar of NumPy's where there was one.
    return array.copy()[()]
