"""The native engine makes the digests of the Python one, and keeps the very same journal: a feed may change engines."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kerasfeed
from kerasfeed.producer import digest as digest_lib
from kerasfeed.producer.digest import Digester, Journal
from kerasfeed.spec import Component, EncodedElement

pytestmark = pytest.mark.once

SOURCES = ("xxh3.cc", "digest.cc", "journal.cc", "digest_c_api.cc")
PATHS = {"portable": 0, "sse2": 1, "avx2": 2}
WORD, SIGNED, COUNT, POINTER = ctypes.c_uint64, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p
NUMBER = ctypes.c_int
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "digest_error": (ctypes.c_char_p, []),
    "xxh3_has": (NUMBER, [NUMBER]),
    "xxh3_new": (POINTER, [WORD, NUMBER]),
    "xxh3_delete": (None, [POINTER]),
    "xxh3_update": (None, [POINTER, POINTER, COUNT]),
    "xxh3_digest": (WORD, [POINTER]),
    "xxh3_of": (WORD, [POINTER, COUNT, WORD]),
    "digester_new": (POINTER, [ctypes.c_char_p, COUNT, NUMBER]),
    "digester_delete": (None, [POINTER]),
    "digester_digest": (NUMBER, [POINTER, SIGNED, *[POINTER] * 4, SIGNED, POINTER]),
    "journal_open": (POINTER, [NUMBER, SIGNED]),
    "journal_close": (None, [POINTER]),
    "journal_note": (NUMBER, [POINTER, SIGNED, SIGNED, WORD, POINTER]),
    "journal_find": (NUMBER, [POINTER, SIGNED, SIGNED, POINTER]),
    "journal_note_end": (NUMBER, [POINTER, SIGNED, SIGNED, POINTER]),
    "journal_elements": (NUMBER, [POINTER, SIGNED, POINTER]),
    "journal_forget_before": (NUMBER, [POINTER, SIGNED]),
}


class Library:
    """The functions of digest_c_api.h, without their prefix."""

    def __init__(self, path: Path):
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(library, f"kerasfeed_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    core = Path(kerasfeed.__file__).parent / "native" / "core"
    path = tmp_path_factory.mktemp("native") / "digest.so"
    command = [compiler, "-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(path)]
    subprocess.run([*command, *(str(core / source) for source in SOURCES)], check=True)
    return Library(path)


# ---- XXH3 ----


@contextlib.contextmanager
def hasher(library: Library, seed: int, path: int) -> Iterator[int]:
    handle = library.xxh3_new(seed, path)
    assert handle, library.digest_error()
    try:
        yield handle
    finally:
        library.xxh3_delete(handle)


def random_bytes(size: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("path", PATHS)
def test_xxh3_of_every_length_with_random_seeds_in_random_pieces(library: Library, path: str) -> None:
    if not library.xxh3_has(PATHS[path]):
        pytest.skip(f"this machine has no {path}")
    data = random_bytes(300_000)
    generator = random.Random(5)
    for size in [*range(2049), *(generator.randrange(len(data)) for _ in range(50)), len(data)]:
        start = generator.randrange(len(data) - size + 1)
        seed = generator.getrandbits(64) if size % 5 else 0
        at = data.ctypes.data + start
        with hasher(library, seed, PATHS[path]) as handle:
            most = generator.choice([16, 129, 1500, 1 << 20])
            done = 0
            while done < size:
                piece = min(generator.randrange(most), size - done)
                library.xxh3_update(handle, at + done, piece)
                done += piece
            expected = xxhash.xxh3_64_intdigest(data[start : start + size], seed)
            assert library.xxh3_digest(handle) == expected, (size, seed)
            assert library.xxh3_of(at, size, seed) == expected, (size, seed)


def test_a_path_that_is_none_is_refused(library: Library) -> None:
    assert not library.xxh3_new(0, 7)
    assert library.digest_error() == b"this machine has no path 7"


# ---- Digests ----

# One memory for all components: it is what lies where that counts.
MEMORY = random_bytes(41 << 20)


def encoded(shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], start: int = 0) -> EncodedElement:
    places, buffers, offset = [], [], 0
    for shape, size in zip(shapes, sizes, strict=True):
        places.append(Component(shape, offset, size))
        at = (start + 7 * offset) % (len(MEMORY) - size + 1)
        buffers.append(memoryview(MEMORY[at : at + size]))
        offset = -(-(offset + size) // 64) * 64
    end = places[-1].offset + places[-1].length if places else 0
    return EncodedElement(tuple(places), tuple(buffers), end)


def native_digest(library: Library, element: EncodedElement, spec: bytes, full: bool) -> int:
    count = len(element.components)
    dims = [dim for component in element.components for dim in component.shape]
    addresses = [np.frombuffer(b, np.uint8).ctypes.data if len(b) else 0 for b in element.buffers]
    digest = WORD()
    digester = library.digester_new(spec, len(spec), full)
    try:
        failed = library.digester_digest(
            digester,
            count,
            (SIGNED * count)(*(len(component.shape) for component in element.components)),
            (SIGNED * len(dims))(*dims),
            (SIGNED * count)(*(component.length for component in element.components)),
            (POINTER * count)(*addresses),
            element.size,
            ctypes.byref(digest),
        )
    finally:
        library.digester_delete(digester)
    assert not failed, library.digest_error()
    return digest.value


WHOLE, WHOLE_COMPONENT = digest_lib._WHOLE_BYTES, digest_lib._WHOLE_COMPONENT_BYTES
PER_BLOCK = digest_lib._BYTES_PER_BLOCK
SIZES = st.one_of(
    st.integers(0, 300),
    st.integers(WHOLE_COMPONENT - 2, WHOLE_COMPONENT + 2),
    st.integers(WHOLE_COMPONENT, 5 * WHOLE_COMPONENT),
    st.integers(WHOLE - 70, WHOLE + 2),
    st.integers(0, 1 << 22),
    # Where there is one block more.
    st.builds(lambda parts, off: max(0, parts * PER_BLOCK + off), st.integers(0, 150), st.integers(-2, 2)),
)
SHAPES = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 1 << 62)), max_size=4).map(tuple)


@settings(max_examples=400)
@given(
    components=st.lists(st.tuples(SHAPES, SIZES), max_size=7),
    start=st.integers(0, len(MEMORY)),
    spec=st.binary(max_size=300),
    full=st.booleans(),
)
@example(components=[((), 40 << 20)], start=3, spec=b"", full=False)
@example(components=[((), 39_990_000), ((), 10_000)], start=3, spec=b"", full=False)
@example(components=[((), 39_990_000), ((), 4096), ((), 4097)], start=3, spec=b"", full=False)
@example(components=[((), 8 << 20)] * 5, start=3, spec=b"", full=False)
@example(components=[((3,), 5000)] * 40, start=3, spec=b"", full=False)
@example(components=[((3,), 4000)] * 40, start=3, spec=b"", full=False)
def test_digests_are_those_of_the_python_engine(
    library: Library, components: list[tuple[tuple[int, ...], int]], start: int, spec: bytes, full: bool
) -> None:
    element = encoded([shape for shape, _ in components], [size for _, size in components], start)
    assert native_digest(library, element, spec, full) == Digester(spec, full).digest(element)


def test_digests_agree_where_one_more_block_counts(library: Library) -> None:
    """Of one to six components alike, and of one that grows beside others, at each size where the blocks change."""
    spec = b"spec"
    digester = Digester(spec)
    for components in range(1, 7):
        for parts in range(30, 160):
            size = parts * PER_BLOCK // components
            for sizes in ([size] * components, [size, *[20_000] * (components - 1)], [size - 1] * components):
                element = encoded([(s,) for s in sizes], sizes)
                assert native_digest(library, element, spec, False) == digester.digest(element), sizes


# ---- The journal ----


class NativeJournal:
    """The native journal behind the Python one's interface."""

    def __init__(self, library: Library, fd: int):
        self._library = library
        self._journal = library.journal_open(fd, digest_lib._MAX_RUNS)
        assert self._journal, library.digest_error()

    def note(self, pass_: int, element: int, digest: int) -> int | None:
        return self._answer(WORD(), self._library.journal_note, pass_, element, digest)

    def find(self, pass_: int, element: int) -> int | None:
        return self._answer(WORD(), self._library.journal_find, pass_, element)

    def note_end(self, pass_: int, elements: int) -> int | None:
        return self._answer(SIGNED(), self._library.journal_note_end, pass_, elements)

    def elements(self, pass_: int) -> int | None:
        return self._answer(SIGNED(), self._library.journal_elements, pass_)

    def forget_before(self, pass_: int) -> None:
        assert self._library.journal_forget_before(self._journal, pass_) == 0

    def close(self) -> None:
        self._library.journal_close(self._journal)

    def _answer(self, known: Any, call: Any, *arguments: int) -> int | None:
        found = call(self._journal, *arguments, ctypes.byref(known))
        assert found in (0, 1), self._library.digest_error()
        return int(known.value) if found else None


@contextlib.contextmanager
def journal_file(capacity: int = 4096) -> Iterator[int]:
    fd = Journal.create("test", capacity)
    try:
        yield fd
    finally:
        os.close(fd)


def words(fd: int) -> dict[int, bytes]:
    """Returns the whole file: its pages that are not of zeros only, by where they are."""
    found, at, size = {}, 0, os.fstat(fd).st_size
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # a hole up to the end
            break
        page = os.pread(fd, mmap.PAGESIZE, at)
        if any(page):
            found[at] = page
        at += len(page)
    return found


class Pair:
    """Two journals with a file each, one of either engine, that do the same and are to answer the same."""

    def __init__(self, library: Library, fds: tuple[int, int]):
        self._library = library
        self._fds = fds
        self._open()

    def _open(self) -> None:
        self.python, self.native = Journal(self._fds[0]), NativeJournal(self._library, self._fds[1])

    def close(self) -> None:
        self.python.close()
        self.native.close()

    def die(self) -> None:
        self.close()
        self._open()

    def change_engines(self) -> None:
        """Each goes on in the file of the other."""
        self.close()
        self._fds = self._fds[1], self._fds[0]
        self._open()

    def note(self, pass_: int, element: int, digest: int) -> None:
        known = self.python.note(pass_, element, digest)
        sought = self.native.find(pass_, element)
        assert self.native.note(pass_, element, digest) == known
        # What it finds is what was there before, of this element.
        assert sought == known

    def note_end(self, pass_: int, elements: int) -> None:
        assert self.native.note_end(pass_, elements) == self.python.note_end(pass_, elements)

    def forget_before(self, pass_: int) -> None:
        self.python.forget_before(pass_)
        self.native.forget_before(pass_)

    def check(self) -> None:
        assert words(self._fds[0]) == words(self._fds[1])
        # The whole of the one is readable to the other: chains, which only Python makes, come out alike.
        with contextlib.closing(Journal(self._fds[0])) as one, contextlib.closing(Journal(self._fds[1])) as other:
            for pass_ in range(PASSES + 2):
                assert self.native.elements(pass_) == self.python.elements(pass_) == other.elements(pass_)
                for element in range(0, 60, 7):
                    assert one.chain(pass_, element) == other.chain(pass_, element)
            assert Journal.first(self._fds[0]) == Journal.first(self._fds[1])
        assert words(self._fds[0]) == words(self._fds[1])


PASSES = 4
DIGESTS = st.one_of(st.integers(0, (1 << 64) - 1), st.sampled_from([0, 1, (1 << 63), (1 << 64) - 1]))
STEPS = st.one_of(
    st.tuples(st.just("produce"), st.integers(1, 20)),
    st.tuples(st.just("note"), st.integers(0, PASSES), st.integers(0, 130), DIGESTS),
    st.tuples(st.just("end")),
    st.tuples(st.just("note_end"), st.integers(0, PASSES), st.integers(0, 60)),
    st.tuples(st.just("go"), st.integers(0, PASSES - 1), st.integers(0, 30)),
    st.tuples(st.just("forget"), st.integers(0, PASSES)),
    st.tuples(st.just("die")),
    st.tuples(st.just("change")),
)


@settings(max_examples=300)
@given(
    steps=st.lists(STEPS, max_size=60),
    capacity=st.one_of(st.just(4096), st.integers(1, 50)),
    runs=st.sampled_from([1, 2, 3, 5, 1 << 16]),
)
@example(steps=[("go", 0, 50), ("produce", 10), ("go", 0, 0), ("produce", 20), ("change",)], capacity=12, runs=5)
@example(steps=[("go", 1, 5), ("produce", 3), ("go", 1, 0), ("produce", 12), ("end",)], capacity=4096, runs=1 << 16)
def test_journals_answer_alike_and_write_the_same_file(
    library: Library, steps: list[tuple[Any, ...]], capacity: int, runs: int
) -> None:
    numbers = iter(range(1, 1 << 30))
    pass_, element = 0, 0
    with (
        journal_file(capacity) as one,
        journal_file(capacity) as other,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(digest_lib, "_MAX_RUNS", runs)
        with contextlib.closing(Pair(library, (one, other))) as pair:
            for step in steps:
                match step:
                    case ("produce", count):
                        for _ in range(count):
                            pair.note(pass_, element, next(numbers) << 40 | 1 << 63)
                            element += 1
                    case ("note", at_pass, at, digest):
                        pair.note(at_pass, at, digest)
                    case ("end",):
                        pair.note_end(pass_, element)
                        pass_, element = pass_ + 1, 0
                    case ("note_end", at_pass, elements):
                        pair.note_end(at_pass, elements)
                    case ("go", pass_, element):
                        pass
                    case ("forget", before):
                        pair.forget_before(before)
                    case ("die",):
                        pair.die()
                    case ("change",):
                        pair.check()
                        pair.change_engines()
            pair.check()


def test_long_passes_give_back_the_same_memory(library: Library) -> None:
    """With a ring of many pages that goes round several times, in full and with passes that are forgotten."""
    capacity = 5000
    generator = random.Random(11)
    with journal_file(capacity) as one, journal_file(capacity) as other:
        with contextlib.closing(Pair(library, (one, other))) as pair:
            for pass_ in range(8):
                length = generator.randrange(1, 4000)
                for element in range(length):
                    pair.note(pass_, element, generator.getrandbits(64))
                pair.note_end(pass_, length)
                if pass_ % 3:
                    pair.forget_before(pass_ - 1)
                pair.change_engines()
            pair.forget_before(7)
            pair.check()
            pair.forget_before(20)
            pair.check()
        assert abs(os.fstat(one).st_blocks - os.fstat(other).st_blocks) * 512 <= 64 << 10


def test_what_is_no_journal_is_refused(library: Library) -> None:
    fd = os.memfd_create("test")
    try:
        assert not library.journal_open(fd, digest_lib._MAX_RUNS)
        assert b"Received: 0" in library.digest_error()
    finally:
        os.close(fd)


def test_native_journal_has_room_for_as_many_runs(library: Library) -> None:
    """The table of runs goes round where the Python engine's does."""
    with journal_file() as one, journal_file() as other:
        with contextlib.closing(Pair(library, (one, other))) as pair:
            for pass_ in range(digest_lib._MAX_RUNS + 2):
                pair.note_end(pass_, 1)
        assert words(one) == words(other)
