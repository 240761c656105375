"""Digests tell elements apart; the journal knows what was produced, wherever its writer goes back to or dies."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

import kerasfeed
from kerasfeed.producer import digest as digest_lib
from kerasfeed.producer.digest import FIRST_KEPT, Digester, Journal
from kerasfeed.spec import Component, EncodedElement, encode_element

pytestmark = pytest.mark.once

LARGE = 3 << 20


def digest_of(element: Any, spec: bytes = b"spec", full: bool = False) -> int:
    return Digester(spec, full).digest(encode_element(element))


def encoded(*components: tuple[tuple[int, ...], bytes | bytearray]) -> EncodedElement:
    places, offset = [], 0
    for shape, data in components:
        places.append(Component(shape, offset, len(data)))
        offset = -(-(offset + len(data)) // 64) * 64
    end = places[-1].offset + places[-1].length if places else 0
    return EncodedElement(tuple(places), tuple(memoryview(data) for _, data in components), end)


# ---- Digests ----


def test_digest_is_the_same_each_time_and_in_each_process() -> None:
    element = encoded(((2, 3), bytes(range(24))), ((), b"label"))
    assert Digester(b"spec").digest(element) == Digester(b"spec").digest(element)
    # Backups carry what is made of digests: another version must not make others.
    assert Digester(b"spec").digest(element) == 4823403604120583947
    code = (
        "import sys, types; from kerasfeed.producer.digest import Digester; "
        "c = [types.SimpleNamespace(shape=(2, 3), length=24), types.SimpleNamespace(shape=(), length=5)]; "
        "e = types.SimpleNamespace(components=c, buffers=(bytes(range(24)), b'label'), size=69); "
        "print(Digester(b'spec').digest(e), 'tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(Digester(b"spec").digest(element)), "False"]


def test_each_flipped_byte_of_a_small_element_changes_the_digest() -> None:
    parts = [bytearray(os.urandom(size)) for size in (700, 1, 0, 300)]
    element = encoded(*(((len(part),), part) for part in parts))
    digester = Digester(b"spec")
    seen = {digester.digest(element)}
    for part in parts:
        for index in range(len(part)):
            part[index] ^= 1 << index % 8
            seen.add(digester.digest(element))
            part[index] ^= 1 << index % 8
    assert len(seen) == 1 + 1001
    assert digester.digest(element) in seen


@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=5), data=st.data())
def test_a_byte_that_moves_to_the_neighbour_is_found(sizes: list[int], data: st.DataObject) -> None:
    whole = data.draw(st.binary(min_size=sum(sizes), max_size=sum(sizes)))

    def digest(sizes: list[int]) -> int:
        ends = np.cumsum(sizes).tolist()
        return Digester(b"").digest(encoded(*(((), whole[e - s : e]) for s, e in zip(sizes, ends, strict=True))))

    if sizes[0]:
        assert digest([sizes[0] - 1, 1, *sizes[1:]]) != digest(sizes)
    for index in range(len(sizes) - 1):
        if sizes[index]:
            moved = list(sizes)
            moved[index] -= 1
            moved[index + 1] += 1
            assert digest(moved) != digest(sizes)


def test_shapes_count() -> None:
    values = tf.range(6, dtype=tf.int32)
    shapes = [(6,), (2, 3), (3, 2), (1, 6), (6, 1), (1, 1, 6)]
    assert len({digest_of(tf.reshape(values, shape)) for shape in shapes}) == len(shapes)
    # Without any byte: only the shape tells them apart.
    assert len({digest_of(tf.zeros(shape)) for shape in [(0,), (0, 3), (3, 0), (0, 0)]}) == 4
    assert digest_of((tf.zeros((0, 3)), tf.zeros((0,)))) != digest_of((tf.zeros((0,)), tf.zeros((0, 3))))


def test_shapes_swapped_between_components_are_found() -> None:
    data = bytes(24)
    assert Digester(b"").digest(encoded(((2, 3), data), ((3, 2), data))) != Digester(b"").digest(
        encoded(((3, 2), data), ((2, 3), data))
    )
    # The same numbers in a row: (2), 24 | (24, 3), 24 and the like must not read alike.
    frames = [
        encoded(((2, 24), data), ((), data)),
        encoded(((2,), data), ((24,), data)),
        encoded(((), data), ((2, 24), data)),
    ]
    assert len({Digester(b"").digest(frame) for frame in frames}) == 3


def test_swapped_components_are_found() -> None:
    one, two = tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])
    assert digest_of((one, two)) != digest_of((two, one))
    large = tf.zeros(LARGE, tf.uint8)
    assert digest_of((large, large + 1)) != digest_of((large + 1, large))


def test_empty_elements_have_digests_of_their_own() -> None:
    empty = encoded(((0,), b""))
    found = [
        Digester(b"").digest(e) for e in (encoded(), empty, encoded(((0,), b""), ((0,), b"")), encoded(((1,), b"\0")))
    ]
    assert len(set(found)) == 4


def test_strings_count_with_their_bounds() -> None:
    strings = [["ab", "c"], ["a", "bc"], ["abc", ""], ["", "abc"], ["abc"], ["ab", "d"]]
    assert len({digest_of(tf.constant(values)) for values in strings}) == len(strings)


def test_composite_tensors_count() -> None:
    ragged = tf.ragged.constant([[1, 2], [3]])
    assert digest_of(ragged) == digest_of(tf.ragged.constant([[1, 2], [3]]))
    assert digest_of(ragged) != digest_of(tf.ragged.constant([[1], [2, 3]]))


def test_spec_counts() -> None:
    assert digest_of(tf.zeros(4), b"float32") != digest_of(tf.zeros(4), b"int32")


def test_memory_that_is_not_contiguous_is_refused() -> None:
    for size in (100, LARGE):
        strided = memoryview(bytes(2 * size))[::2]
        element = EncodedElement((Component((size,), 0, size),), (strided,), size)
        with pytest.raises(BufferError):
            Digester(b"").digest(element)


def sampled_bytes(sizes: tuple[int, ...], digester: Digester) -> list[np.ndarray[Any, np.dtype[np.bool_]]]:
    """Which bytes of each component the digest looks at, found by setting fewer and fewer of them."""
    parts = [bytearray(size) for size in sizes]
    element = encoded(*(((size,), part) for size, part in zip(sizes, parts, strict=True)))
    unchanged = digester.digest(element)
    seen = []
    for part in parts:
        mask = np.zeros(len(part), bool)

        def look(low: int, high: int, part: bytearray = part, mask: np.ndarray[Any, Any] = mask) -> None:
            part[low:high] = b"\1" * (high - low)
            found = digester.digest(element) != unchanged
            part[low:high] = bytes(high - low)
            if found and high - low == 1:
                mask[low] = True
            elif found:
                look(low, (low + high) // 2)
                look((low + high) // 2, high)

        for low in range(0, len(part), 1 << 16):
            look(low, min(low + (1 << 16), len(part)))
        seen.append(mask)
    return seen


@pytest.mark.parametrize(
    ("sizes", "gaps"),
    [
        ((40_000,), [13]),
        ((600_000,), [13]),
        ((600_000, 50), [9, 0]),
        ((300_000, 50, 100_000), [3, 0, 3]),
        ((20_000,) * 5, [1] * 5),
        # Whole parts of 64 KiB: 45; without 37 there are 8 more.
        ((3_000_000,), [21]),
        # 53, without 51: half a block each.
        ((1_200_000, 1_200_000, 1_100_000), [1, 1, 1]),
        # 91, without 51: 40 more, half of them alike.
        ((4_500_000, 1_496_000, 4_000), [27, 17, 0]),
    ],
)
def test_of_a_large_element_even_blocks_count(sizes: tuple[int, ...], gaps: list[int]) -> None:
    for size, mask, expected in zip(sizes, sampled_bytes(sizes, Digester(b"")), gaps, strict=True):
        if not expected:
            assert mask.all()
            continue
        edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int))).reshape(-1, 2)
        assert (edges[:, 1] - edges[:, 0] == 128).all()
        assert edges[0, 0] == 0
        assert edges[-1, 1] == size
        steps = np.diff(edges[:, 0])
        assert len(steps) == expected
        assert steps.max() - steps.min() <= len(steps)


def zeros(sizes: Iterable[int]) -> EncodedElement:
    return encoded(*(((size,), bytes(size)) for size in sizes))


@given(sizes=st.lists(st.one_of(st.integers(0, 9000), st.integers(0, 1 << 22)), min_size=1, max_size=8))
@example(sizes=[40 << 20])
@example(sizes=[8 << 20] * 5)
@example(sizes=[40 << 20, 5000])
def test_no_more_is_read_than_there_is_time_for(sizes: list[int]) -> None:
    element = zeros(sizes)
    read = len(digest_lib._sampled(element))
    small = sum(size for size in sizes if size <= 4096)
    large = [size for size in sizes if size > 4096]
    # What the time for a digest allows: 14 blocks, fewer if there are more components; a block for each 64 KiB, less
    # what the components cost; two for each component.
    few = max(8, 17 - 3 * len(sizes))
    more = max(0, element.size // (64 << 10) - 30 - 7 * len(sizes))
    assert read <= small + 128 * (max(few, 2 * len(large)) + more)
    assert read >= small + 128 * 2 * len(large)


def test_many_small_components_count_whole() -> None:
    sizes = (4000,) * 20
    assert len(digest_lib._sampled(zeros(sizes))) == 80_000


def test_a_component_that_its_share_covers_counts_whole() -> None:
    # 610 whole parts of 64 KiB, without 44, half of them for both alike: 140 blocks of 128 bytes are more than 10 KB.
    assert len(digest_lib._sampled(zeros((39_990_000, 10_000)))) == 10_000 + 128 * (3 + 424 + 1)


@pytest.mark.parametrize(
    ("sizes", "length"),
    [
        ((200_000,), 15_400),
        ((2_550_000,), 200_000),
        ((9_600_000,), 79_400),
        ((3_010_000, 512), 340_000),
    ],
)
def test_a_change_of_the_gaps_length_is_found_wherever_it_is(sizes: tuple[int, ...], length: int) -> None:
    data = bytearray(sizes[0])
    element = encoded(((sizes[0],), data), *(((size,), bytes(size)) for size in sizes[1:]))
    digester = Digester(b"")
    unchanged = digester.digest(element)
    changed = b"\1" * length
    for at in range(0, sizes[0] - length, 997):
        data[at : at + length] = changed
        assert digester.digest(element) != unchanged, at
        data[at : at + length] = bytes(length)


@pytest.mark.parametrize(("size", "times"), [(200_000, 120), (9_600_000, 620)])
def test_a_change_of_one_byte_is_found_once_in_so_many_times(size: int, times: int) -> None:
    data = bytearray(size)
    # A byte that is read counts, whatever it is.
    read = len(digest_lib._sampled(encoded(((size,), data))))
    assert size / read == pytest.approx(times, rel=0.1)


def test_one_changed_image_of_a_batch_is_found() -> None:
    image = 224 * 224 * 3
    for batch in (2, 16, 64):
        data = bytearray(batch * image)
        digester, element = Digester(b""), encoded(((batch, 224, 224, 3), data))
        unchanged = digester.digest(element)
        found = 0
        for at in range(0, len(data), image):
            data[at : at + image] = b"\1" * image
            found += digester.digest(element) != unchanged
            data[at : at + image] = bytes(image)
        # With 16 of them blocks lie further apart than an image is long, if only from 2.0 to 2.5 MB.
        assert found >= (14 if batch == 16 else batch)


def test_full_finds_what_sampling_misses() -> None:
    data = bytearray(LARGE)
    element = encoded(((LARGE,), data))
    sampled, full = Digester(b"").digest(element), Digester(b"", full=True).digest(element)
    data[128] = 1
    assert Digester(b"").digest(element) == sampled
    assert Digester(b"", full=True).digest(element) != full


@pytest.mark.parametrize("size", [4 << 10, 32 << 10])
def test_up_to_32_kib_every_byte_counts(size: int) -> None:
    data = bytearray(size)
    element = encoded(((size,), data))
    assert Digester(b"").digest(element) == Digester(b"", full=True).digest(element)
    seen = {Digester(b"").digest(element)}
    for at in range(0, size, 97):
        data[at] = 1
        seen.add(Digester(b"").digest(element))
        data[at] = 0
    assert len(seen) == 1 + -(-size // 97)
    larger = zeros(((32 << 10) + 1,))
    assert Digester(b"").digest(larger) != Digester(b"", full=True).digest(larger)


def test_digests_of_large_elements_are_the_same_in_each_version() -> None:
    # Backups carry what is made of them. Where these change, so must `Verifier`'s kind.
    data = np.arange(3_000_000, dtype="<u4").tobytes()
    for sizes, expected in (
        ((200_000,), 3837291827505337859),
        ((200_000, 500), 263993850361174560),
        ((50_000, 60_000, 500, 70_000), 5609725539901572291),
        ((9_600_000, 5000), 8467533198211609013),
    ):
        element = encoded(*(((size,), data[:size]) for size in sizes))
        assert Digester(b"spec").digest(element) == expected


# ---- The journal against what a dict knows ----


@contextlib.contextmanager
def journal_file(capacity: int = 4096) -> Iterator[int]:
    fd = Journal.create("test", capacity)
    try:
        yield fd
    finally:
        os.close(fd)


class Model:
    """What a journal with room for all should know."""

    def __init__(self) -> None:
        self.digests: dict[tuple[int, int], int] = {}
        self.ends: dict[int, int] = {}
        self.floor = 0
        # A small journal that forgot a pass's end takes the next one for it.
        self.all_ends: set[tuple[int, int | None]] = {(pass_, None) for pass_ in range(1000)}

    def note(self, pass_: int, element: int, digest: int) -> int | None:
        known = self.digests.get((pass_, element))
        if known is None and pass_ >= self.floor:
            self.digests[pass_, element] = digest
        return known

    def note_end(self, pass_: int, elements: int) -> int | None:
        known = self.ends.get(pass_)
        self.all_ends.add((pass_, elements))
        if known is None and pass_ >= self.floor:
            self.ends[pass_] = elements
        return known

    def forget_before(self, pass_: int) -> None:
        self.floor = max(self.floor, pass_)
        self.digests = {key: value for key, value in self.digests.items() if key[0] >= pass_}
        self.ends = {key: value for key, value in self.ends.items() if key >= pass_}

    def chain(self, pass_: int, element: int) -> str:
        digests = [self.digests.get((pass_, index)) for index in range(element)]
        if None in digests:
            return ""
        return xxhash.xxh3_128(struct.pack(f"={element}Q", *digests)).hexdigest()


PASSES = 4
PLACES = st.tuples(st.integers(0, PASSES - 1), st.integers(0, 30))
STEPS = st.one_of(
    st.tuples(st.just("produce"), st.integers(1, 20)),
    st.tuples(st.just("end")),
    st.tuples(st.just("go"), PLACES),
    st.tuples(st.just("forget"), st.integers(0, PASSES)),
    st.tuples(st.just("die")),
)


def play(steps: list[tuple[Any, ...]], fd: int, model: Model, silent: bool = False) -> Iterator[Journal]:
    """Does these steps with a journal and with the model, compares what they say, and yields the journal after each.

    With `silent` the journal may not know what the model knows.
    """
    numbers = iter(range(1, 1 << 30))
    journal = Journal(fd)
    pass_, element = 0, 0
    for step in steps:
        match step:
            case ("produce", count):
                for _ in range(count):
                    digest = next(numbers) << 40 | 1 << 63
                    found, known = journal.note(pass_, element, digest), model.note(pass_, element, digest)
                    assert found == known or (silent and found is None)
                    element += 1
            case ("end",):
                found = journal.note_end(pass_, element)
                assert (pass_, found) in model.all_ends
                assert model.note_end(pass_, element) == found or silent
                pass_, element = pass_ + 1, 0
            case ("go", place):
                pass_, element = place
            case ("forget", before):
                journal.forget_before(before)
                model.forget_before(before)
            case ("die",):
                # What dies does not close.
                journal = Journal(fd)
        yield journal


def check_all(journal: Journal, model: Model) -> None:
    for pass_ in range(PASSES + 1):
        assert journal.elements(pass_) == model.ends.get(pass_)
        for element in range(0, 60, 7):
            assert journal.chain(pass_, element) == model.chain(pass_, element), (pass_, element)


@given(steps=st.lists(STEPS, max_size=60))
@example(steps=[("go", (1, 5)), ("produce", 3), ("go", (1, 0)), ("produce", 12), ("die",), ("end",)])
@example(
    steps=[("produce", 4), ("end",), ("produce", 4), ("go", (0, 2)), ("end",), ("die",), ("go", (0, 0)), ("produce", 9)]
)
def test_journal_knows_what_a_dict_knows(steps: list[tuple[Any, ...]]) -> None:
    model = Model()
    with journal_file() as fd:
        for journal in play(steps, fd, model):
            check_all(journal, model)
        journal = Journal(fd)
        check_all(journal, model)
        for key, digest in model.digests.items():
            assert journal.note(*key, 0) == digest


@given(
    steps=st.lists(STEPS, max_size=60),
    capacity=st.integers(1, 50),
    runs=st.sampled_from([2, 3, 5, 1 << 16]),
)
def test_small_journal_is_right_or_silent(steps: list[tuple[Any, ...]], capacity: int, runs: int) -> None:
    model = Model()
    with journal_file(capacity) as fd, pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest_lib, "_MAX_RUNS", runs)
        for journal in play(steps, fd, model, silent=True):
            for pass_ in range(PASSES + 1):
                assert (pass_, journal.elements(pass_)) in model.all_ends
                for element in range(0, 60, 7):
                    assert journal.chain(pass_, element) in (model.chain(pass_, element), "")


# ---- Single behaviours of the journal ----


def produce(journal: Journal, pass_: int, elements: range, mark: int = 0) -> list[int | None]:
    return [journal.note(pass_, element, value(pass_, element) ^ mark) for element in elements]


def value(pass_: int, element: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("qq", pass_, element))


def test_untouched_file_is_an_empty_journal() -> None:
    with journal_file() as fd:
        journal = Journal(fd)
        assert journal.elements(0) is None
        assert journal.chain(0, 1) == ""
        assert journal.chain(0, 0) == xxhash.xxh3_128_hexdigest(b"")
        journal.close()
        # Its size is what it may become, not what it takes.
        assert os.fstat(fd).st_blocks * 512 < 1 << 20


def test_default_journal_is_of_64_mib() -> None:
    fd = Journal.create("test")
    try:
        assert os.fstat(fd).st_size == (64 << 20) + (4 << 20)
        assert os.fstat(fd).st_blocks == 0
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_going_back_keeps_what_is_known_of_later_elements() -> None:
    with journal_file() as fd:
        journal = Journal(fd)
        for pass_ in range(3):
            assert produce(journal, pass_, range(10)) == [None] * 10
            assert journal.note_end(pass_, 10) is None
        # Different data comes again: the journal answers with what was first, each time.
        for _ in range(2):
            assert produce(journal, 1, range(4, 10), mark=1) == [value(1, e) for e in range(4, 10)]
            assert journal.note_end(1, 11) == 10
        assert produce(journal, 2, range(10)) == [value(2, e) for e in range(10)]


def test_digest_of_zero_is_a_digest() -> None:
    with journal_file() as fd:
        journal = Journal(fd)
        assert journal.note(0, 0, 0) is None
        assert journal.note(0, 0, 5) == 0
        assert journal.note_end(1, 0) is None
        assert journal.note_end(1, 3) == 0


def test_largest_digest_fits() -> None:
    with journal_file() as fd:
        journal = Journal(fd)
        journal.note(0, 0, (1 << 64) - 1)
        assert Journal(fd).note(0, 0, 0) == (1 << 64) - 1


def test_the_first_digests_are_there_for_others_and_are_never_forgotten() -> None:
    with journal_file() as fd:
        journal = Journal(fd)
        assert Journal.first(fd) == []
        # A producer that sets out inside the pass leaves a gap, until it has been to its start.
        produce(journal, 0, range(3, 6))
        produce(journal, 1, range(5))
        assert Journal.first(fd) == []
        produce(journal, 0, range(3))
        assert Journal.first(fd) == [value(0, e) for e in range(6)]
        journal.note(0, 2, 5)
        produce(journal, 0, range(6, 2 * FIRST_KEPT))
        journal.forget_before(7)
        again = Journal(fd)
        again.note(0, 2, 5)
        assert Journal.first(fd) == [value(0, e) for e in range(FIRST_KEPT)]


def test_restored_producer_meets_the_chain_of_the_backup() -> None:
    with journal_file() as before, journal_file() as after:
        old = Journal(before)
        for pass_ in range(3):
            produce(old, pass_, range(20))
        backup = old.chain(2, 13)
        assert len(backup) == 32
        # In a new job what is skipped is noted.
        new = Journal(after)
        produce(new, 2, range(13))
        assert new.chain(2, 13) == backup
        produce(new, 2, range(13, 25))
        assert new.chain(2, 13) == backup
        assert new.chain(2, 12) != backup
        assert new.chain(2, 26) == ""


def test_chain_finds_one_changed_or_swapped_element() -> None:
    digests = [value(0, element) for element in range(10)]
    changed = [[*digests[:4], digests[4] ^ 1, *digests[5:]], [*digests[:4], digests[5], digests[4], *digests[6:]]]
    chains = set()
    for order in (digests, *changed):
        with journal_file() as fd:
            journal = Journal(fd)
            for element, digest in enumerate(order):
                journal.note(0, element, digest)
            chains.add(journal.chain(0, 10))
    assert len(chains) == 3


def test_producer_that_restarts_before_its_snapshot_completes_the_chain() -> None:
    with journal_file() as fd:
        journal = Journal(fd)
        produce(journal, 3, range(8, 12))
        assert journal.chain(3, 10) == ""
        journal = Journal(fd)
        assert produce(journal, 3, range(15)) == [None] * 8 + [value(3, e) for e in range(8, 12)] + [None] * 3
        with journal_file() as other:
            straight = Journal(other)
            produce(straight, 3, range(15))
            assert [journal.chain(3, e) for e in range(16)] == [straight.chain(3, e) for e in range(16)]


def test_full_journal_forgets_the_oldest_only() -> None:
    with journal_file(100) as fd:
        journal = Journal(fd)
        produce(journal, 0, range(250))
        for reader in (journal, Journal(fd)):
            assert produce(reader, 0, range(250), mark=1) == [None] * 150 + [value(0, e) for e in range(150, 250)]
            assert reader.chain(0, 250) == ""
        # What was forgotten is not noted again: that would push out what comes next, and nothing would be checked.
        assert produce(journal, 0, range(250), mark=1)[150:] == [value(0, e) for e in range(150, 250)]
        assert produce(journal, 0, range(250, 260)) == [None] * 10
        assert produce(journal, 0, range(260)) == [None] * 160 + [value(0, e) for e in range(160, 260)]


def test_full_journal_forgets_whole_passes() -> None:
    with journal_file(100) as fd:
        journal = Journal(fd)
        for pass_ in range(8):
            produce(journal, pass_, range(30))
            journal.note_end(pass_, 30)
        for reader in (journal, Journal(fd)):
            assert [reader.elements(pass_) for pass_ in range(8)] == [None] * 4 + [30] * 4
            for pass_ in range(4):
                assert produce(reader, pass_, range(30)) == [None] * 30
                assert reader.note_end(pass_, 30) is None
            assert produce(reader, 4, range(30)) == [None] * 20 + [value(4, e) for e in range(20, 30)]
            assert [bool(reader.chain(pass_, 30)) for pass_ in range(8)] == [False] * 5 + [True] * 3


def test_chain_goes_round_the_end_of_the_ring() -> None:
    with journal_file(100) as small, journal_file() as large:
        for fd in (small, large):
            produce(Journal(fd), 0, range(70))
            produce(Journal(fd), 1, range(90))
        assert Journal(small).chain(1, 90) == Journal(large).chain(1, 90) != ""
        assert Journal(small).chain(0, 70) == ""


def test_table_of_runs_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_lib, "_MAX_RUNS", 8)
    with journal_file() as fd:
        journal = Journal(fd)
        for pass_ in range(30):
            produce(journal, pass_, range(pass_ % 3))
            assert journal.note_end(pass_, pass_ % 3) is None
        for reader in (journal, Journal(fd)):
            assert [reader.elements(pass_) for pass_ in range(30)] == [None] * 22 + [p % 3 for p in range(22, 30)]
            for pass_ in range(30):
                found = produce(reader, pass_, range(pass_ % 3), mark=1)
                assert found == [value(pass_, e) if pass_ >= 22 else None for e in range(pass_ % 3)]


def test_forgotten_passes_are_not_noted_again() -> None:
    with journal_file() as fd:
        journal = Journal(fd)
        for pass_ in range(3):
            produce(journal, pass_, range(10))
            journal.note_end(pass_, 10)
        journal.forget_before(2)
        journal.forget_before(1)
        for reader in (journal, Journal(fd)):
            assert produce(reader, 1, range(10)) == [None] * 10
            assert produce(reader, 1, range(10)) == [None] * 10
            assert reader.note_end(1, 10) is None
            assert reader.elements(1) is None
            assert produce(reader, 2, range(10)) == [value(2, e) for e in range(10)]
            assert reader.elements(2) == 10


def test_forgetting_makes_room_and_gives_memory_back() -> None:
    capacity = 1 << 16
    with journal_file(capacity) as fd:
        journal = Journal(fd)
        empty = os.fstat(fd).st_blocks * 512
        for pass_ in range(20):
            produce(journal, pass_, range(20_000))
            journal.forget_before(pass_)
            assert os.fstat(fd).st_blocks * 512 <= empty + 2 * 8 * 20_000 + 8 * mmap.PAGESIZE
            # Nothing that is still known went with it.
            assert journal.chain(pass_, 20_000) != ""
            assert produce(journal, pass_, range(0, 20_000, 999)) == [value(pass_, e) for e in range(0, 20_000, 999)]
        journal.forget_before(20)
        assert os.fstat(fd).st_blocks * 512 <= empty + 2 * mmap.PAGESIZE


def test_forgetting_works_where_memory_cannot_be_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_REMOVE", 12345)
    with journal_file() as fd:
        journal = Journal(fd)
        produce(journal, 0, range(2000))
        produce(journal, 1, range(1000))
        journal.forget_before(1)
        assert produce(journal, 1, range(1000)) == [value(1, e) for e in range(1000)]


def test_journal_needs_its_descriptor_only_to_open() -> None:
    fd = Journal.create("test")
    journal = Journal(fd)
    os.close(fd)
    produce(journal, 0, range(10))
    assert produce(journal, 0, range(10)) == [value(0, e) for e in range(10)]
    journal.close()


# ---- Killed writers ----


class Killed(BaseException):
    """Stands for the end of the process."""


def killed_after(opcodes: int, work: Callable[[], None]) -> bool:
    """Runs `work` until the journal's code has executed so many bytecodes. Returns whether it came to its end."""
    left = opcodes

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != digest_lib.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except Killed:
        return False
    finally:
        sys.settrace(before)
    return True


def snapshot(journal: Journal) -> tuple[Any, ...]:
    passes = range(5)
    noted = tuple(
        (pass_, run.first + at, journal._digests[(run.position + at) % journal._capacity])
        for pass_ in passes
        for run in journal._passes.get(pass_, [])
        for at in range(run.count)
        if run.position + at >= journal._tail
    )
    return tuple(sorted(noted)), tuple(journal.elements(pass_) for pass_ in passes)


def scripts() -> dict[str, tuple[int, int, Callable[[Journal], None], Callable[[Journal], None]]]:
    """Per case: capacity, runs in the table, what was done before, and what gets killed."""

    def nothing(journal: Journal) -> None:
        pass

    def three_passes(journal: Journal) -> None:
        for pass_ in range(3):
            produce(journal, pass_, range(3))
            journal.note_end(pass_, 3)

    return {
        "first note": (100, 8, nothing, lambda j: produce(j, 0, range(1)) and None),
        "next note": (100, 8, three_passes, lambda j: produce(j, 2, range(3, 4)) and None),
        "next pass": (100, 8, three_passes, lambda j: produce(j, 3, range(1)) and None),
        "end": (100, 8, three_passes, lambda j: j.note_end(3, 0) and None),
        "full ring": (9, 8, three_passes, lambda j: produce(j, 3, range(1)) and None),
        "full table": (100, 3, three_passes, lambda j: produce(j, 3, range(1)) and None),
        "full of both": (9, 3, three_passes, lambda j: produce(j, 3, range(1)) and None),
        "ring of one": (1, 3, three_passes, lambda j: produce(j, 3, range(1)) and None),
        "forget": (100, 8, three_passes, lambda j: j.forget_before(2)),
        "forget all": (100, 8, three_passes, lambda j: j.forget_before(7)),
    }


@pytest.mark.parametrize("case", scripts())
def test_death_between_any_two_bytecodes_leaves_what_was_noted(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity, runs, prepare, work = scripts()[case]
    monkeypatch.setattr(digest_lib, "_MAX_RUNS", runs)
    with journal_file(capacity) as fd:
        journal = Journal(fd)
        prepare(journal)
        before = snapshot(journal)
        prepared = os.pread(fd, os.fstat(fd).st_size, 0)
        work(journal)
        after = snapshot(journal)
        assert before != after
    lost = [[entry for entry in b if entry not in a] for b, a in zip(before, after, strict=True)]
    opcodes = 0
    while True:
        with journal_file(capacity) as fd:
            os.pwrite(fd, prepared, 0)
            journal = Journal(fd)
            finished = killed_after(opcodes, lambda journal=journal: work(journal))  # type: ignore[misc]
            reopened = Journal(fd)
            found = snapshot(reopened)
            if finished:
                assert found == after
                break
            # Nothing that is neither before nor after, and nothing is gone but what was to be forgotten.
            for f, b, a, gone in zip(found, before, after, lost, strict=True):
                assert set(f) <= {*b, *a}, opcodes
                assert set(b) - set(f) <= {*gone}, opcodes
            # The next producer does it again, and goes on.
            work(reopened)
            assert snapshot(Journal(fd)) == after, opcodes
            produce(reopened, 8, range(5))
            assert Journal(fd).note(8, 4, 0) == value(8, 4)
        opcodes += 1
    assert opcodes > 20


def test_kill_9_leaves_a_prefix_that_is_right() -> None:
    generator = random.Random(7)
    deepest = 0
    for trial in range(60):
        with journal_file(5000) as fd, mmap.mmap(-1, 8) as shared:
            counted = memoryview(shared).cast("q")
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(BaseException):
                    journal = Journal(fd)
                    for index in range(1 << 30):
                        pass_, element = divmod(index, 700)
                        journal.note(pass_, element, index * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
                        if element == 699:
                            journal.note_end(pass_, 700)
                            if trial % 2:
                                journal.forget_before(pass_ - 4)
                        counted[0] = index + 1
                os._exit(1)
            while not counted[0]:
                pass
            time.sleep(generator.uniform(0, 0.02))
            os.kill(pid, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
            done = counted[0]
            counted.release()
            deepest = max(deepest, done)
            journal = Journal(fd)
            newest = (done - 1) // 700
            expected = range(max(0, done - 4999, (newest - 4) * 700 if trial % 2 else 0), done)
            for index in expected:
                assert journal.note(*divmod(index, 700), 0) == index * 0x9E3779B97F4A7C15 & (1 << 64) - 1
            ends = {p: journal.elements(p) for p in range(newest + 2)}
            assert all(end == 700 for p, end in ends.items() if expected[0] // 700 < p < newest)
            assert all(end is None for p, end in ends.items() if p * 700 + 699 > done)
            # At most the element that was being noted is there besides.
            assert journal.note(*divmod(done + 1, 700), 0) is None
    assert deepest > 5000


# ---- Messages ----


def test_mismatch_is_a_producer_error_that_can_be_caught() -> None:
    assert issubclass(kerasfeed.ReplayMismatchError, kerasfeed.ProducerError)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            digest_lib.element_mismatch(3, 41, 0xAB, 0xCD),
            ["element 41", "pass 3", "0" * 14 + "ab", "0" * 14 + "cd"],
        ),
        (digest_lib.end_mismatch(3, 100, 99), ["pass 3", "Expected 100 elements", "produced 99"]),
        (
            digest_lib.chain_mismatch(3, 7, 41, "ff00", "00ff"),
            ["elements 7 to 40", "pass 3", "ff00", "00ff", "backup"],
        ),
    ],
)
def test_messages_name_place_values_causes_and_cures(text: str, parts: list[str]) -> None:
    for part in [
        *parts,
        "NumPy",
        "files that changed",
        "deterministic=True",
        "stateless",
        'verify="warn"',
    ]:
        assert part in text
