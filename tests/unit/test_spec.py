"""Elements travel as bytes: every structure, dtype and shape comes back as it was, wrong bytes are a ValueError."""

from __future__ import annotations

import collections
import math
import pickle

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kerasfeed import feeder
from kerasfeed import spec as spec_lib
from kerasfeed.spec import ALIGNMENT, Component, ElementReader, EncodedElement, UnsupportedStructureError

Pair = collections.namedtuple("Pair", "image label")
Pair.__module__ = "somewhere.else"
Data = tf.data.Dataset


@pytest.fixture(autouse=True)
def _no_pickle(monkeypatch):
    """Nothing is ever unpickled, whatever the structure."""

    def refuse(*_, **__):
        raise AssertionError("unpickled")

    for name in ("loads", "load", "Unpickler", "_loads", "_load"):
        monkeypatch.setattr(pickle, name, refuse)


# ---- There and back ----


def travel(element, reader, limit):
    """Returns an element as the other side's dataset yields it, sent in pieces of at most `limit` bytes."""
    encoded = spec_lib.encode_element(element)
    pieces = list(encoded.chunks(limit))
    block = spec_lib.aligned_buffer(encoded.size)
    data = b"".join(pieces)
    assert len(data) == encoded.size
    block[:] = np.frombuffer(data, np.uint8)
    return reader.decode(encoded.components, block)


def received(dataset, limit=1 << 20):
    """Returns the dataset as a rank would have it."""
    reader = ElementReader(spec_lib.decode_spec(spec_lib.encode_spec(dataset.element_spec)))
    out = Data.from_generator(
        lambda: (travel(element, reader, limit) for element in dataset), output_signature=reader.signature
    )
    return out.map(reader.rebuild) if reader.rebuild is not None else out


def bits(tensor):
    """Returns what can be compared of a tensor: its strings, or its bytes (NaN is not equal to itself)."""
    if tensor.dtype == tf.string:
        return np.asarray(tensor.numpy(), object).tolist()
    return np.asarray(tensor.numpy()).tobytes()


def assert_same_elements(sent, got):
    sent, got = list(sent), list(got)
    assert len(sent) == len(got)
    for a, b in zip(sent, got, strict=True):
        tf.nest.assert_same_structure(a, b, expand_composites=True, check_types=False)
        for x, y in zip(spec_lib.flatten(a), spec_lib.flatten(b), strict=True):
            assert (x.dtype, x.shape, bits(x)) == (y.dtype, y.shape, bits(y))


def varying():
    return Data.range(4).map(lambda i: (tf.fill([i, 2], 1.5), tf.ragged.range(tf.range(i))))


def unknown_rank():
    values = [np.zeros((2,)), np.ones((3, 3)), np.float64(4)]
    return Data.from_generator(lambda: iter(values), output_signature=tf.TensorSpec(None, tf.float64))


RAGGED = tf.ragged.constant([[1, 2], [], [3]])
UNIFORM = tf.RaggedTensor.from_uniform_row_length(tf.RaggedTensor.from_row_splits([1, 2, 3], [0, 1, 3]), 2)
SPARSE = tf.sparse.from_dense([[0, 1], [2, 0]])
DATASETS = {
    "scalars": lambda: Data.range(3),
    "tuple": lambda: Data.from_tensors((1, 2.0, ("x", True))),
    "tuple of one": lambda: Data.from_tensors(([1, 2],)),
    "dict": lambda: Data.from_tensors({"b": 1, "a": {"c": [1, 2]}}),
    "dict with int keys": lambda: Data.from_tensors({2: 1, 10: "x", 1: [1.5]}),
    "ordered dict": lambda: Data.from_tensors(collections.OrderedDict(b=1, a=2.0)),
    "namedtuple": lambda: Data.from_tensors(Pair([1.0], label={"y": 2})),
    "nested": lambda: Data.from_tensors(({"a": (1, Pair(2, (3, {}))), "b": ()}, [4, 5])),
    "strings": lambda: Data.from_tensor_slices([b"a", b"", b"\x00xyz\x00", "größe ☃".encode(), b"\xff\xfe"]),
    "strings in many dimensions": lambda: Data.from_tensors(
        [[["a", "bb"], ["", "é"]], [["\0", "x\0"], ["", "z" * 999]]]
    ),
    "no strings": lambda: Data.from_tensors((tf.constant([], tf.string), tf.zeros((2, 0), tf.string), 1)),
    "ragged": lambda: Data.from_tensors((RAGGED, 3)),
    "ragged of int32 splits": lambda: Data.from_tensors(RAGGED.with_row_splits_dtype(tf.int32)),
    "ragged of rank 2": lambda: Data.from_tensors(tf.ragged.constant([[[1], [2, 3]], [], [[]]])),
    "ragged with inner shape": lambda: Data.from_tensors(tf.ragged.constant([[[1, 2]], []], ragged_rank=1)),
    "ragged strings": lambda: Data.from_tensors(tf.ragged.constant([["a", "bc"], []])),
    "ragged with uniform rows": lambda: Data.from_tensors(UNIFORM),
    "ragged batches": lambda: Data.range(1, 5).map(tf.range).ragged_batch(2),
    "sparse": lambda: Data.from_tensors({"s": SPARSE, "l": 1}),
    "sparse, empty": lambda: Data.from_tensors(tf.sparse.from_dense([[0, 0]])),
    "sparse batches": lambda: Data.from_tensors(SPARSE).repeat(3).batch(2),
    "none": lambda: Data.from_tensors((1, None, {"a": None, "b": 2})),
    "zero size": lambda: Data.from_tensors((tf.zeros((0, 3)), 7, tf.zeros((2, 0), tf.int8), tf.zeros([0]))),
    "only zero size": lambda: Data.from_tensors(tf.zeros((0,))).repeat(2),
    "odd sizes": lambda: Data.from_tensors((tf.range(63), tf.cast(tf.range(65), tf.uint8), "x" * 61, 1.0)),
    "varying shapes": varying,
    "unknown rank": unknown_rank,
    "special numbers": lambda: Data.from_tensors([math.nan, -math.nan, math.inf, -0.0, 5e-324]),
    "no element": lambda: Data.range(0).map(lambda i: (i, "x")),
}


@pytest.mark.parametrize("name", DATASETS)
def test_elements_of_every_structure_come_back_as_they_were(name):
    dataset = DATASETS[name]()
    assert_same_elements(dataset, received(dataset))


@pytest.mark.parametrize("name", DATASETS)
def test_element_specs_of_every_structure_come_back_as_they_were(name):
    spec = DATASETS[name]().element_spec
    decoded = spec_lib.decode_spec(spec_lib.encode_spec(spec))
    tf.nest.assert_same_structure(spec, decoded, check_types=False)
    assert tf.nest.flatten(spec) == tf.nest.flatten(decoded)
    assert spec_lib.encode_spec(decoded) == spec_lib.encode_spec(spec)


@pytest.mark.parametrize("name", DATASETS)
def test_the_op_answers_the_cardinality_of_any_structure(name):
    reader = ElementReader(DATASETS[name]().element_spec)
    inner = Data.from_generator(lambda: iter(()), output_signature=reader.signature)
    inner = inner.map(reader.rebuild) if reader.rebuild is not None else inner
    for steps, answer in ((5, 5), (None, tf.data.INFINITE_CARDINALITY)):
        dataset = feeder._with_cardinality(inner, steps)
        assert int(tf.data.experimental.cardinality(dataset)) == answer
        assert tf.nest.flatten(dataset.element_spec) == tf.nest.flatten(inner.element_spec)
        assert list(dataset) == [], "it ends when its generator does"


def test_a_namedtuple_comes_back_with_its_name_and_fields():
    decoded = spec_lib.decode_spec(spec_lib.encode_spec(DATASETS["namedtuple"]().element_spec))
    assert (type(decoded).__name__, decoded._fields) == ("Pair", ("image", "label"))
    assert decoded.label == {"y": tf.TensorSpec([], tf.int32)}


def test_the_names_and_the_int_keys_of_a_dict_come_back():
    decoded = spec_lib.decode_spec(spec_lib.encode_spec(DATASETS["dict with int keys"]().element_spec))
    assert list(decoded) == list(DATASETS["dict with int keys"]().element_spec)
    assert {type(key) for key in decoded} == {int}


DTYPES = """
    float16 float32 float64 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64 complex128
    qint8 quint8 qint16 quint16 qint32 int4 uint4
""".split()  # noqa: SIM905 - one a line would be a page
FLOAT8 = ["float8_e5m2", "float8_e4m3fn"]
# Of later versions of TensorFlow: not tried.
LATER = {"float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz", "int2", "uint2", "float4_e2m1fn"}


def tensor_of(name):
    """Returns a tensor of a dtype, with as different values as it has."""
    dtype = tf.dtypes.as_dtype(name)
    if name.startswith("float8"):
        return tf.constant(np.array([[0, 1], [60, 200]], np.uint8).view(dtype.as_numpy_dtype), dtype)
    if dtype.is_quantized:
        return tf.quantization.quantize(tf.constant([[1.0, 2.0], [0.0, 4.0]]), 0.0, 4.0, dtype).output
    if dtype.is_complex:
        return tf.constant([[1 + 2j, -3j], [0, 7]], dtype)
    values = [[0, 1], [1, 0]] if dtype.is_bool else [[0, 1], [3, 7]]
    return tf.cast(tf.constant(values), dtype)


@pytest.mark.parametrize("name", DTYPES)
def test_every_numeric_dtype_comes_back_bit_by_bit(name):
    tensor = tensor_of(name)
    dataset = Data.from_tensors((tensor,))
    assert dataset.element_spec[0].dtype.name == name
    assert_same_elements(dataset, received(dataset))


@pytest.mark.parametrize("name", FLOAT8)
def test_every_float8_dtype_comes_back_bit_by_bit(name):
    tensor = tensor_of(name)
    assert (tensor.dtype.name, bits(tensor)) == (name, bytes([0, 1, 60, 200]))
    dataset = Data.from_tensors((tensor,))
    assert_same_elements(dataset, received(dataset))


def test_no_dtype_that_a_feed_can_carry_is_forgotten_here():
    known = {tf.dtypes.as_dtype(number).name for number in range(1, 60) if is_dtype(number)}
    assert known - {"string", "resource", "variant"} <= {*DTYPES, *FLOAT8, *LATER}


def is_dtype(number):
    try:
        return not tf.dtypes.as_dtype(number).name.endswith("_ref")
    except TypeError:
        return False


# ---- Pieces ----


def block_of(encoded):
    """Returns an element's block, made in the plainest way."""
    block = bytearray(encoded.size)
    for component, buffer in zip(encoded.components, encoded.buffers, strict=True):
        block[component.offset : component.offset + component.length] = buffer
    return bytes(block)


def element_of(lengths):
    """Returns an element whose components have these sizes in bytes; no two bytes near each other are the same."""
    return tuple(tf.cast((tf.range(n) + 7 * i) % 251 + 1, tf.uint8) for i, n in enumerate(lengths))


@given(lengths=st.lists(st.integers(0, 200), max_size=6), limit=st.integers(1, 300))
def test_pieces_of_any_size_join_to_the_block(lengths, limit):
    encoded = spec_lib.encode_element(element_of(lengths))
    pieces = [bytes(piece) for piece in encoded.chunks(limit)]
    assert b"".join(pieces) == block_of(encoded)


@given(lengths=st.lists(st.integers(0, 200), max_size=6), limit=st.integers(1, 300))
def test_no_piece_is_larger_than_the_limit_or_empty_without_need(lengths, limit):
    encoded = spec_lib.encode_element(element_of(lengths))
    sizes = [len(piece) for piece in encoded.chunks(limit)]
    assert max(sizes) <= limit
    assert 0 not in sizes or (sizes, encoded.size) == ([0], 0)


@settings(max_examples=30)
@given(name=st.sampled_from([n for n in sorted(DATASETS) if n != "no element"]), limit=st.integers(1, 150))
def test_elements_come_back_from_pieces_of_any_size(name, limit):
    dataset = DATASETS[name]()
    reader = ElementReader(spec_lib.decode_spec(spec_lib.encode_spec(dataset.element_spec)))
    for element in dataset:
        got = travel(element, reader, limit)
        for x, y in zip(spec_lib.flatten(element), tf.nest.flatten(got), strict=True):
            # A generator-backed dataset drops None; the reader keeps it in its place.
            assert bits(x) == (y.tolist() if x.dtype == tf.string else y.tobytes())


@pytest.mark.parametrize("limit", [1, 7, 1 << 20])
def test_an_element_of_no_bytes_is_one_empty_piece(limit):
    for element in ((), tf.zeros([0]), (None, tf.zeros([3, 0]))):
        assert list(spec_lib.encode_element(element).chunks(limit)) == [b""]


# ---- Memory ----


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6))
def test_every_component_starts_at_an_aligned_byte(lengths):
    encoded = spec_lib.encode_element(element_of(lengths))
    assert [c.length for c in encoded.components] == lengths
    assert all(c.offset % ALIGNMENT == 0 for c in encoded.components)
    ends = [c.offset + c.length for c in encoded.components]
    assert all(end <= c.offset < end + ALIGNMENT for end, c in zip(ends, encoded.components[1:], strict=False))
    assert encoded.size == ends[-1]


@given(st.integers(0, 10_000))
def test_received_memory_is_aligned(size):
    block = spec_lib.aligned_buffer(size)
    assert (block.dtype, block.shape) == (np.uint8, (size,))
    assert block.ctypes.data % ALIGNMENT == 0 or size == 0


def test_decoded_arrays_lie_aligned_in_the_received_memory():
    element = (tf.range(5), tf.constant(1.0, tf.float64), tf.ones([3, 3], tf.bfloat16))
    reader = ElementReader(Data.from_tensors(element).element_spec)
    encoded = spec_lib.encode_element(element)
    block = spec_lib.aligned_buffer(encoded.size)
    block[:] = np.frombuffer(block_of(encoded), np.uint8)
    for array, component in zip(reader.decode(encoded.components, block), encoded.components, strict=True):
        assert array.ctypes.data == block.ctypes.data + component.offset
        assert array.ctypes.data % ALIGNMENT == 0
        assert np.shares_memory(array, block)


@pytest.mark.parametrize("name", DTYPES)
def test_encoding_does_not_copy_numbers(name):
    tensor = tensor_of(name)
    encoded = spec_lib.encode_element((tensor, tensor))
    for buffer in encoded.buffers:
        assert np.frombuffer(buffer, np.uint8).ctypes.data == tensor._numpy().ctypes.data


def test_encoded_memory_outlives_the_tensor():
    encoded = spec_lib.encode_element(tf.range(100_000) + 0)
    tf.fill([100_000], -1)
    assert np.array_equal(np.frombuffer(encoded.buffers[0], np.int32), np.arange(100_000))


# ---- What can't travel ----


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (lambda: Data.range(6).window(2), "DatasetSpec"),
        (lambda: Data.range(6).map(lambda i: {"x": (i, Data.range(i))}), "DatasetSpec"),
        (lambda: Data.from_tensors(tf.experimental.Optional.from_value(1)), "OptionalSpec"),
        (lambda: Data.from_tensors(tf.TensorArray(tf.int32, 1).write(0, 1)), "TensorArraySpec"),
    ],
)
def test_a_structure_that_can_not_travel_is_refused_by_name(dataset, name):
    with pytest.raises(UnsupportedStructureError, match=f"the elements hold a {name}"):
        spec_lib.encode_spec(dataset().element_spec)


@pytest.mark.parametrize("dtype", [tf.variant, tf.resource])
def test_a_tensor_that_means_nothing_elsewhere_is_refused_by_name(dtype):
    with pytest.raises(UnsupportedStructureError, match=f"a tensor of dtype {dtype.name}"):
        spec_lib.encode_spec({"a": (tf.TensorSpec([], dtype),)})


def test_a_refusal_says_what_to_do_instead():
    with pytest.raises(UnsupportedStructureError, match="Flatten it in dataset_fn"):
        spec_lib.encode_spec(Data.range(6).window(2).element_spec)


def test_a_dict_with_other_keys_is_refused_with_the_key():
    with pytest.raises(UnsupportedStructureError, match=r"keys must be str or int. Received: \(1, 2\)"):
        spec_lib.encode_spec({(1, 2): tf.TensorSpec([], tf.int32)})


def test_an_unknown_class_is_refused_by_name():
    with pytest.raises(UnsupportedStructureError, match="the elements hold a object"):
        spec_lib.encode_spec((object(),))


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"{}", b'{"set": []}', b'{"tuple": [{}]}', b'{"spec": "A"}'])
def test_bytes_that_are_no_spec_are_a_value_error(data):
    with pytest.raises(ValueError):  # noqa: PT011 - some of it is said by json
        spec_lib.decode_spec(data)


# ---- Wrong bytes ----

MIXED = (tf.range(6), tf.constant([["a", "bc"], ["", "d" * 40]]), tf.constant(2.5, tf.float64), tf.zeros([0, 2]))
SPEC = (
    tf.TensorSpec(None, tf.int32),
    tf.TensorSpec(None, tf.string),
    tf.TensorSpec(None, tf.float64),
    tf.TensorSpec(None, tf.float32),
)
READER = ElementReader(SPEC)


def decode(components, data, margin=0):
    """Decodes from a block that lies in the midst of other memory; what is there must not be read."""
    memory = spec_lib.aligned_buffer(len(data) + 2 * margin)
    memory[:] = 0xEE
    block = memory[margin : margin + len(data)]
    block[:] = np.frombuffer(data, np.uint8)
    return READER.decode(components, block), block


def change(components, index, **fields):
    changed = list(components)
    old = changed[index]
    changed[index] = Component(**{"shape": old.shape, "offset": old.offset, "length": old.length, **fields})
    return changed


ENCODED = spec_lib.encode_element(MIXED)
BLOCK = block_of(ENCODED)


def test_the_right_bytes_are_decoded():
    got, _ = decode(ENCODED.components, BLOCK, margin=ALIGNMENT)
    for x, y in zip(MIXED, got, strict=True):
        assert bits(x) == (y.tolist() if x.dtype == tf.string else y.tobytes())


@pytest.mark.parametrize(
    ("components", "data", "message"),
    [
        (ENCODED.components[:-1], BLOCK, "expected 4 component tensors, received 3"),
        ([*ENCODED.components, ENCODED.components[0]], BLOCK, "expected 4 component tensors, received 5"),
        ([], BLOCK, "expected 4 component tensors, received 0"),
        (ENCODED.components, BLOCK[:-1], "ends at byte"),
        (ENCODED.components, b"", "ends at byte 24 of 0"),
        (change(ENCODED.components, 0, length=20), BLOCK, "needs 24 bytes, received 20"),
        (change(ENCODED.components, 0, shape=(7,)), BLOCK, "needs 28 bytes, received 24"),
        (change(ENCODED.components, 2, shape=(2,)), BLOCK, "needs 16 bytes, received 8"),
        (change(ENCODED.components, 3, length=1), BLOCK, "ends at byte|needs 0 bytes, received 1"),
        (change(ENCODED.components, 1, shape=(200,)), BLOCK, "200 strings need 1600 bytes for their lengths"),
        (change(ENCODED.components, 0, offset=len(BLOCK)), BLOCK, "ends at byte"),
    ],
)
def test_what_does_not_fit_the_spec_or_the_block_is_a_value_error(components, data, message):
    with pytest.raises(ValueError, match=message):
        decode(components, data)


@pytest.mark.parametrize(
    ("index", "fields"),
    [
        (0, {"offset": -24}),
        (0, {"offset": -ALIGNMENT}),
        (0, {"shape": (-6,), "length": -24}),
        (0, {"shape": (-2, -3)}),
        (0, {"shape": (-1,), "length": -4}),
        (1, {"shape": (-1,)}),
        (1, {"shape": (-2, -2)}),
        (3, {"shape": (0, -1)}),
        (3, {"shape": (0, 2**62, 2**62)}),
    ],
)
def test_a_negative_or_absurd_size_is_a_value_error(index, fields):
    with pytest.raises(ValueError):  # noqa: PT011 - NumPy's own words will do
        decode(change(ENCODED.components, index, **fields), BLOCK, margin=256)


def test_strings_that_are_longer_than_their_component_are_a_value_error():
    """A string must not come back shorter than its length says."""
    at = ENCODED.components[1].offset
    data = BLOCK[:at] + (1 << 40).to_bytes(8, "little") + BLOCK[at + 8 :]
    with pytest.raises(ValueError):  # noqa: PT011 - any words will do
        decode(ENCODED.components, data)


def test_strings_that_do_not_fill_their_component_are_a_value_error():
    at = ENCODED.components[1].offset
    data = BLOCK[:at] + bytes(8) + BLOCK[at + 8 :]
    with pytest.raises(ValueError):  # noqa: PT011 - any words will do
        decode(ENCODED.components, data)


numbers = st.one_of(st.integers(-70, 200), st.sampled_from([2**31, 2**62, 2**63 - 1, -(2**63), -1, 0]))
mutations = st.fixed_dictionaries(
    {},
    optional={"shape": st.lists(numbers, max_size=4).map(tuple), "offset": numbers, "length": numbers},
)


@settings(max_examples=400)
@given(
    changes=st.lists(st.tuples(st.integers(0, 3), mutations), max_size=2),
    flips=st.lists(st.tuples(st.integers(0, len(BLOCK) - 1), st.integers(0, 255)), max_size=4),
    size=st.one_of(st.just(len(BLOCK)), st.integers(0, len(BLOCK))),
)
def test_random_damage_is_a_value_error_or_stays_inside_the_block(changes, flips, size):
    components = list(ENCODED.components)
    for index, fields in changes:
        components = change(components, index, **fields)
    data = bytearray(BLOCK)
    for at, value in flips:
        data[at] = value
    try:
        arrays, block = decode(components, bytes(data[:size]), margin=256)
    except ValueError:
        return
    first, last = block.ctypes.data, block.ctypes.data + block.size
    for array, component in zip(arrays, components, strict=True):
        assert array.shape == component.shape
        if array.dtype != object and array.size:
            assert first <= array.ctypes.data <= array.ctypes.data + array.nbytes <= last
        elif array.dtype == object:
            assert sum(map(len, array.reshape(-1).tolist())) <= block.size


def test_an_encoded_element_is_a_plain_value():
    assert isinstance(ENCODED, EncodedElement)
    assert all(isinstance(buffer, memoryview) for buffer in ENCODED.buffers)
