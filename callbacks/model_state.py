"""What a Keras model has learnt and what its ranks own, as bytes and back: variables and generators.

No pickle, and none of Keras's file formats: each of those leaves out something that exact resuming needs (the state of
random generators, the optimizer, or metrics). Variables are matched by their order, as names count upwards within a
process.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasfeed.errors import StateError

_LENGTH = struct.Struct("<Q")
SHARED = ("weights", "optimizer")
OWN = ("statistics", "generators", "metrics")


class ModelState:
    """The variables of a compiled model, in groups.

    `weights` and `optimizer` are the same on all ranks; `statistics` (of BatchNormalization and the like), `generators`
    (of Dropout and the like) and `metrics` are each rank's own.

    Args:
        model: A compiled model that is built.
    """

    def __init__(self, model: Any):
        self._model = model

    def variables(self, group: str) -> list[Any]:
        """Returns the variables of a group, in the order in which the model holds them."""
        model = self._model
        if group == "weights":
            return list(model.trainable_variables)
        if group == "optimizer":
            found = [*_listed(model.optimizer.variables), *_unlisted(model.optimizer)]
            return list({id(variable): variable for variable in found}.values())
        if group == "metrics":
            return [variable for metric in model.metrics for variable in metric.variables]
        # Keras 3 holds the states of its generators among the model's variables, Keras 2 keeps them in the layers.
        trainable = {id(variable) for variable in model.trainable_variables}
        others = [v for v in _listed(model.variables) if id(v) not in trainable]
        generators = [v for v in others if "seed_generator_state" in getattr(v, "path", "")]
        if group == "statistics":
            known = {id(v) for v in generators}
            return [v for v in others if id(v) not in known]
        return generators + [generator.state for generator in self._layer_generators()]

    def _layer_generators(self) -> list[tf.random.Generator]:
        found = []
        for layer in self._layers():
            generator = getattr(getattr(layer, "_random_generator", None), "_generator", None)
            if isinstance(generator, tf.random.Generator):
                found.append(generator)
        return found

    def unsaved_generators(self) -> list[str]:
        """Returns the names of layers whose random state nothing can bring back: those of Keras 2 by default."""
        return [
            layer.name
            for layer in self._layers()
            if getattr(layer, "_random_generator", None) is not None
            and hasattr(layer._random_generator, "_rng_type")
            and not isinstance(getattr(layer._random_generator, "_generator", None), tf.random.Generator)
        ]

    def _layers(self) -> Iterable[Any]:
        flatten = getattr(self._model, "_flatten_layers", None)
        return flatten() if flatten is not None else ()

    def build(self, element_spec: Any) -> None:
        """Lets the model and its optimizer make their variables, if they have not.

        Raises:
            StateError: The model can't be built from what it is fed.
        """
        model = self._model
        if not model.built:
            inputs = element_spec[0] if isinstance(element_spec, tuple) else element_spec
            try:
                model.build(tf.nest.map_structure(lambda spec: spec.shape, inputs))
            except Exception as error:
                raise StateError(
                    f"the model can't be built from its inputs ({inputs}) to restore a backup: {error}. "
                    "Build it before fit"
                ) from error
        optimizer = model.optimizer
        # Keras 2 has optimizers of an older kind, too.
        make = getattr(optimizer, "build", None) or getattr(optimizer, "_create_all_weights", None)
        if not getattr(optimizer, "built", False) and make is not None:
            with tf.init_scope():
                make(list(model.trainable_variables))

    def pack(self, groups: Sequence[str], beside: Mapping[str, Mapping[str, Any]] | None = None) -> bytes:
        """Returns the values of these groups.

        Args:
            groups: The groups to pack.
            beside: Arrays by name that are packed with them, in groups of their own; see `arrays`.
        """
        index, data = [], []
        for group, name, value in self._found(groups, beside or {}):
            index.append([group, name, tf.as_dtype(value.dtype).name, list(value.shape)])
            data.append(value.tobytes())
        text = json.dumps(index).encode()
        return b"".join([_LENGTH.pack(len(text)), text, *data])

    def _found(
        self, groups: Sequence[str], beside: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[tuple[str, str, np.ndarray[Any, Any]]]:
        # One by one: those on a device are copied.
        for group in groups:
            for variable in self.variables(group):
                yield group, _name_of(variable), np.asarray(variable.numpy())
        for group, named in beside.items():
            for name, array in named.items():
                yield group, name, np.asarray(array)

    def unpack(self, data: bytes, groups: Sequence[str], add: bool = False) -> None:
        """Gives the variables of these groups the values that `pack` took. All are compared before one is changed.

        Args:
            data: What `pack` returned, perhaps with other groups.
            groups: The groups to bring back.
            add: Whether the values are added to what is there.

        Raises:
            StateError: They are another model's.
        """
        values = list(_values(data))
        pairs = []
        for group in groups:
            variables = self.variables(group)
            saved = [(name, value) for kind, name, value in values if kind == group]
            if len(variables) != len(saved):
                raise StateError(
                    f"the backup is another model's: expected {len(variables)} variables of {group}, it has "
                    f"{len(saved)}. Build and compile the same model, or use another backup_dir"
                )
            for variable, (name, value) in zip(variables, saved, strict=True):
                if tuple(variable.shape) != value.shape or tf.as_dtype(variable.dtype) != tf.as_dtype(value.dtype):
                    raise StateError(
                        f"the backup is another model's: the model's {_name_of(variable)} has shape "
                        f"{tuple(variable.shape)} and type {tf.as_dtype(variable.dtype).name}, the backup's {name} has "
                        f"{value.shape} and {tf.as_dtype(value.dtype).name}"
                    )
                pairs.append((variable, value))
        for variable, value in pairs:
            variable.assign(variable.numpy() + value if add else value)


def arrays(data: bytes, group: str) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the arrays of a group that `ModelState.pack` was given, by name."""
    return {name: value.copy() for kind, name, value in _values(data) if kind == group}


def count(data: bytes, group: str) -> int:
    """Returns how many arrays of a group `ModelState.pack` wrote."""
    return sum(kind == group for kind, _, _ in _values(data))


def _values(data: bytes) -> Iterator[tuple[str, str, np.ndarray[Any, Any]]]:
    """What `ModelState.pack` wrote: groups, names, and arrays that lie in `data`."""
    at = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    for group, name, dtype, shape in json.loads(data[_LENGTH.size : at]):
        kind = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
        count = math.prod(shape)
        yield group, name, np.frombuffer(data, kind, count, at).reshape(shape)
        at += count * kind.itemsize


def _listed(variables: Any) -> list[Any]:
    return list(variables() if callable(variables) else variables)


def _unlisted(optimizer: Any) -> list[tf.Variable]:
    """Returns what Keras 2 does not count among an optimizer's variables: learning rate and the like, loss scale."""
    found: list[Any] = []
    while optimizer is not None:
        found += [getattr(optimizer, "_learning_rate", None), *getattr(optimizer, "_hyper", {}).values()]
        scale = getattr(optimizer, "_loss_scale", None)
        found += [getattr(scale, "current_loss_scale", None), getattr(scale, "counter", None)]
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return [value for value in found if isinstance(value, tf.Variable)]


def _name_of(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)
