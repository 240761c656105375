"""Elements and their structure <-> flat buffers, without pickle: what the producer writes and a rank reads.

The structure travels once, as JSON whose leaves are TensorFlow's own `StructuredValue` messages. An element travels as
one block of bytes, in which each component tensor starts at a multiple of 64 bytes, so that TensorFlow can use the
received memory in place.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import struct_pb2
from tensorflow.python.data.util import structure
from tensorflow.python.saved_model import nested_structure_coder

ALIGNMENT = 64
_LENGTH = np.dtype("<u8")
_PACKED_HEAD = struct.Struct("<Q")


class UnsupportedStructureError(TypeError):
    """The dataset yields something that can't be handed to another process."""


def encode_spec(spec: Any) -> bytes:
    """Returns `dataset.element_spec` as bytes.

    Raises:
        UnsupportedStructureError: The structure holds datasets, optionals or classes that can't travel.
    """
    return json.dumps(_encode_structure(spec)).encode()


def decode_spec(data: bytes) -> Any:
    """Returns the element spec that `encode_spec` wrote. A namedtuple comes back as one of the same name and fields."""
    return _decode_structure(json.loads(data))


def _encode_structure(spec: Any) -> Any:
    if isinstance(spec, structure.NoneTensorSpec):
        return {"none": True}
    if isinstance(spec, tf.TypeSpec):
        if isinstance(spec, (tf.data.DatasetSpec, tf.OptionalSpec, tf.TensorArraySpec)):
            raise UnsupportedStructureError(
                f"the elements hold a {type(spec).__name__}: a feed carries tensors, RaggedTensors and SparseTensors. "
                "Flatten it in dataset_fn (for example with flat_map, or batch instead of window)."
            )
        if isinstance(spec, tf.TensorSpec) and spec.dtype in (tf.variant, tf.resource):
            raise UnsupportedStructureError(
                f"the elements hold a tensor of dtype {spec.dtype.name}, which means nothing in another process."
            )
        try:
            return {
                "spec": base64.b64encode(nested_structure_coder.encode_structure(spec).SerializeToString()).decode()
            }
        except nested_structure_coder.NotEncodableError as error:
            raise UnsupportedStructureError(f"the elements hold a {type(spec).__name__}: {error}") from error
    if isinstance(spec, tuple) and hasattr(spec, "_fields"):
        fields = list(spec._fields)
        return {"namedtuple": type(spec).__name__, "fields": fields, "items": [_encode_structure(s) for s in spec]}
    if isinstance(spec, (tuple, list)):
        return {type(spec).__name__: [_encode_structure(s) for s in spec]}
    if isinstance(spec, collections.abc.Mapping):
        for key in spec:
            if not isinstance(key, (str, int)):
                raise UnsupportedStructureError(f"a dict's keys must be str or int. Received: {key!r}")
        return {"dict": [[key, _encode_structure(value)] for key, value in spec.items()]}
    raise UnsupportedStructureError(
        f"the elements hold a {type(spec).__name__}: a feed carries tuples, namedtuples and dicts of tensors, "
        "RaggedTensors and SparseTensors."
    )


def _decode_structure(data: Any) -> Any:
    if "none" in data:
        return structure.NoneTensorSpec()
    if "spec" in data:
        proto = struct_pb2.StructuredValue.FromString(base64.b64decode(data["spec"]))
        return nested_structure_coder.decode_proto(proto)
    if "namedtuple" in data:
        namedtuple: Any = collections.namedtuple(data["namedtuple"], data["fields"])  # type: ignore[misc]
        return namedtuple(*(_decode_structure(item) for item in data["items"]))
    if "dict" in data:
        return {key: _decode_structure(value) for key, value in data["dict"]}
    if "tuple" in data:
        return tuple(_decode_structure(item) for item in data["tuple"])
    if "list" in data:
        return [_decode_structure(item) for item in data["list"]]
    raise ValueError(f"not an element spec: {data!r}")


def flatten(element: Any) -> list[tf.Tensor]:
    """Returns the component tensors of an element, those of composite tensors too. `None` has none."""
    return [part for part in tf.nest.flatten(element, expand_composites=True) if part is not None]


def without_composites(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset of the component tensors of a dataset's elements; itself if no tensor is a composite one."""
    if all(
        isinstance(leaf, (tf.TensorSpec, structure.NoneTensorSpec)) for leaf in tf.nest.flatten(dataset.element_spec)
    ):
        return dataset
    return dataset.map(lambda *element: tuple(flatten(element)))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclasses.dataclass(frozen=True)
class Component:
    """Where one component tensor lies in an element's block of bytes."""

    shape: tuple[int, ...]
    offset: int
    length: int


@dataclasses.dataclass(frozen=True)
class EncodedElement:
    """An element as bytes: the place of each component, and the memory of each, not yet joined."""

    components: tuple[Component, ...]
    buffers: tuple[memoryview, ...]
    size: int

    def chunks(self, limit: int) -> Iterator[bytes]:
        """Yields the whole block, gaps filled with zeros, in pieces of at most `limit` bytes; at least one piece."""
        current = bytearray()
        for part in self._parts():
            taken = 0
            while len(part) - taken + len(current) >= limit:
                piece = limit - len(current)
                if current:
                    yield bytes(current) + part[taken : taken + piece]
                    current = bytearray()
                else:
                    yield bytes(part[taken : taken + piece])
                taken += piece
            current += part[taken:]
        if current or not self.size:
            yield bytes(current)

    def _parts(self) -> Iterator[bytes | memoryview]:
        at = 0
        for component, buffer in zip(self.components, self.buffers, strict=True):
            yield bytes(component.offset - at)
            yield buffer
            at = component.offset + component.length


def _encode_strings(values: np.ndarray[Any, Any]) -> tuple[memoryview, int]:
    flat = [value if isinstance(value, bytes) else str(value).encode() for value in values.reshape(-1).tolist()]
    lengths = np.array([len(value) for value in flat], _LENGTH)
    data = lengths.tobytes() + b"".join(flat)
    return memoryview(data), len(data)


def encode_element(element: Any) -> EncodedElement:
    """Returns an element of eager tensors as bytes, without copying numeric tensors: the result keeps their memory."""
    components: list[Component] = []
    buffers: list[memoryview] = []
    offset = 0
    for tensor in flatten(element):
        if tensor.dtype == tf.string:
            values = np.asarray(tensor.numpy(), dtype=object)
            buffer, length = _encode_strings(values)
        else:
            # _numpy() shares the tensor's memory and keeps it alive; the public numpy() would copy it.
            values = np.ascontiguousarray(tensor._numpy())
            buffer = values.reshape(-1).view(np.uint8).data if values.size else memoryview(b"")
            length = values.nbytes
        components.append(Component(tuple(tensor.shape), offset, length))
        buffers.append(buffer)
        offset = _aligned(offset + length)
    end = components[-1].offset + components[-1].length if components else 0
    return EncodedElement(tuple(components), tuple(buffers), end)


def pack_elements(elements: Sequence[EncodedElement]) -> bytes:
    """Returns elements as one block of bytes; `unpack_elements` is the inverse."""
    sizes = [[element.size, [[c.shape, c.offset, c.length] for c in element.components]] for element in elements]
    head = json.dumps(sizes).encode()
    blocks = (block for element in elements for block in element.chunks(sys.maxsize))
    return b"".join([_PACKED_HEAD.pack(len(head)), head, *blocks])


def unpack_elements(data: bytes) -> Iterator[EncodedElement]:
    """Yields the elements that `pack_elements` was given, whose memory is `data`.

    Raises:
        ValueError, struct.error: It did not return this.
    """
    (length,) = _PACKED_HEAD.unpack_from(data)
    at = _PACKED_HEAD.size + length
    view = memoryview(data)
    for size, parts in json.loads(data[_PACKED_HEAD.size : at]):
        if at + size > len(data):
            raise ValueError(f"an element of {size} bytes does not fit into the {len(data) - at} that are left")
        block = view[at : at + size]
        components = tuple(Component(tuple(shape), offset, length) for shape, offset, length in parts)
        buffers = tuple(block[c.offset : c.offset + c.length] for c in components)
        yield EncodedElement(components, buffers, size)
        at += size


def aligned_buffer(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns fresh memory for an element of `size` bytes, aligned so that TensorFlow needs no copy of it."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


class ElementReader:
    """Turns received blocks of bytes into what a generator-backed dataset yields.

    Args:
        spec: The element spec of the producer's dataset.
    """

    def __init__(self, spec: Any):
        self._spec = spec
        self._components = tf.nest.flatten(spec, expand_composites=True)
        leaves = tf.nest.flatten(spec)
        self._plain = all(isinstance(leaf, tf.TensorSpec) for leaf in leaves)

    @property
    def signature(self) -> Any:
        """What the generator yields: the structure itself, or the flat components of composite tensors."""
        return self._spec if self._plain else tuple(self._components)

    @property
    def rebuild(self) -> Callable[..., Any] | None:
        """A function for `Dataset.map` that makes the element from its flat components, or `None` if it is one."""
        if self._plain:
            return None
        return lambda *parts: tf.nest.pack_sequence_as(self._spec, parts, expand_composites=True)

    def decode(self, components: Sequence[Component], block: np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
        """Returns the element as NumPy arrays that lie in `block` (strings are copied).

        Raises:
            ValueError: The components don't fit the spec or the block.
        """
        if len(components) != len(self._components):
            raise ValueError(f"expected {len(self._components)} component tensors, received {len(components)}")
        arrays = [_decode_component(c, s, block) for c, s in zip(components, self._components, strict=True)]
        return self._pack(arrays)

    def _pack(self, parts: list[Any]) -> Any:
        return tf.nest.pack_sequence_as(self._spec, parts) if self._plain else tuple(parts)


def _decode_component(
    component: Component, spec: tf.TensorSpec, block: np.ndarray[Any, np.dtype[np.uint8]]
) -> np.ndarray[Any, Any]:
    if min(component.offset, component.length, *component.shape, 0) < 0:
        raise ValueError(f"a component has a negative size: {component}")
    if component.offset + component.length > block.size:
        raise ValueError(f"a component ends at byte {component.offset + component.length} of {block.size}")
    data = block[component.offset : component.offset + component.length]
    count = 1
    for size in component.shape:
        count *= size
    if spec.dtype == tf.string:
        head = count * _LENGTH.itemsize
        if component.length < head:
            raise ValueError(f"{count} strings need {head} bytes for their lengths, received {component.length}")
        at, raw = head, data.tobytes()
        values = np.empty(count, object)
        for index, length in enumerate(np.frombuffer(raw, _LENGTH, count).tolist()):
            values[index] = raw[at : at + length]
            at += length
        if at != component.length:
            raise ValueError(f"{count} strings need {at} bytes, received {component.length}")
        return values.reshape(component.shape)
    dtype = np.dtype(spec.dtype.as_numpy_dtype)
    if count * dtype.itemsize != component.length:
        raise ValueError(
            f"shape {component.shape} of {spec.dtype.name} needs {count * dtype.itemsize} bytes, "
            f"received {component.length}"
        )
    if not count:
        return np.empty(component.shape, dtype)
    return data.view(dtype).reshape(component.shape)
