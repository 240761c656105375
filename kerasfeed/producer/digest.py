"""What was produced, in 8 bytes an element: elements flow in, what they were when they were produced before flows out.

The pump asks a `Digester` for each element's digest and notes it in the `Journal`, which outlives the producer. A
producer that has gone back is held to what the journal says.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import itertools
import mmap
import os
import sys
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    # It needs TensorFlow, which this module does not.
    from kerasfeed.spec import EncodedElement

# A digest may cost 5 us, or 5 % of copying the element, which takes 45 us for 1 MiB. Of elements that fell out of the
# caches it was measured (`make bench-digests`): 1 us, 0.2 us for each component and 1 us more for one that is sampled;
# 2.5 us for 32 KiB in a row; and for each block, however short, 0.1 us to get there. 128 bytes come at once.
_WHOLE_BYTES = 32 << 10
_WHOLE_COMPONENT_BYTES = 4 << 10
_BLOCK_BYTES = 128
_BYTES_PER_BLOCK = 64 << 10
_BLOCK = np.dtype(("V", _BLOCK_BYTES))


class Digester:
    """Makes the digests of a dataset's elements: XXH3 of 64 bits over shapes, lengths and bytes.

    It costs less than 5 us, or less than 5 % of copying the element, if there are a handful of components. An element
    of up to 32 KiB counts whole, and of a larger one each component of up to 4 KiB. The other components count by
    blocks of 128 bytes, which lie evenly from the first byte to the last: 14 blocks if there is one component, 6 to 10
    in all if there are more, but at least two of each. From 2.5 MB on (0.5 MB more for each further component) there is
    another one for each 64 KiB: half of these for the components alike, half by their size. A component that its share
    covers counts whole.

    Blocks can miss what changes between them only. In a single component one comes each 15 KB of 200 KB, each 79 KB of
    9.6 MB (so that an image of 224 x 224 x 3 bytes in a batch of 64 has one at least), and each 200 KB at most; with
    labels beside it, each 340 KB at most; of three or more large ones, below some 4 MB, there may be only the first
    and the last. What changes over that length is seen, a change of a few bytes at one place only once in 120 times, or
    620 of 9.6 MB. Randomness that is not replayed changes nearly every byte of an element,
    or of a row of it; to find single rows, labels or pixels in large elements takes `full`.

    Digests of large elements differ between `full` and not: compare like with like.

    Args:
        spec: The dataset's element spec, as `spec.encode_spec` wrote it: dtypes and structure, which don't change.
        full: Whether every byte counts, however large the element.
    """

    def __init__(self, spec: bytes, full: bool = False):
        self._seed = xxhash.xxh3_64_intdigest(spec)
        self._whole_bytes = sys.maxsize if full else _WHOLE_BYTES

    def digest(self, element: EncodedElement) -> int:
        """Returns the digest of an element, without copying it.

        Raises:
            BufferError: A component's memory is not contiguous, which `spec.encode_element` rules out.
        """
        # Shapes and lengths go first: then it is clear from which component each of the bytes behind them is.
        frame: list[int] = []
        for component in element.components:
            frame.append(len(component.shape))
            frame += component.shape
            frame.append(component.length)
        hasher = xxhash.xxh3_64(array.array("q", frame), self._seed)
        if element.size <= self._whole_bytes:
            for buffer in element.buffers:
                hasher.update(buffer)
        else:
            hasher.update(_sampled(element))
        return hasher.intdigest()


def _sampled(element: EncodedElement) -> bytes:
    """Returns the bytes that count of a large element."""
    parts: list[bytes | memoryview] = []
    large = []
    for buffer in element.buffers:
        if len(buffer) > _WHOLE_COMPONENT_BYTES:
            large.append(buffer)
        else:
            parts.append(buffer)
    # The more components, the less time is left for blocks. The number of gaps is odd: in a batch of 2^n rows, whose
    # first bytes may all be alike, each block then falls on another place of its row.
    components = len(element.buffers)
    few = max(1, max(8, 17 - 3 * components) // max(1, len(large)) // 2 * 2 - 1)
    more = element.size // _BYTES_PER_BLOCK - 30 - 7 * components
    for buffer in large:
        gaps = few
        if more > 0:
            gaps += (more // len(large) + more * len(buffer) // element.size) // 4 * 2
            if (gaps + 1) * _BLOCK_BYTES >= len(buffer):
                parts.append(buffer)
                continue
        last = len(buffer) - _BLOCK_BYTES
        step = last // gaps
        # NumPy takes any number of blocks in one call, which costs as much as half a dozen slices.
        if gaps > 3:
            parts.append(np.ndarray(gaps, _BLOCK, buffer, 0, step).tobytes())
        else:
            parts.append(buffer[:_BLOCK_BYTES])
            if gaps == 3:
                parts += buffer[step : step + _BLOCK_BYTES], buffer[2 * step : 2 * step + _BLOCK_BYTES]
        parts.append(buffer[last:])
    return b"".join(parts)


# The journal's file: a few numbers, the first digests of all, then the runs, then the digests, each region where a page
# begins whatever its size. Numbers are 8 bytes at multiples of 8, so that a single store writes each: a killed producer
# leaves no half of one. What is never touched of the file takes no memory.
_FIRST_AT = (4 << 10) // 8
FIRST_KEPT = 100
_RUNS_AT = (64 << 10) // 8
_DIGESTS_AT = (4 << 20) // 8
_FIRST_RUN, _END_RUN, _TAIL, _FLOOR, _LOST = range(5)
_RUN_WORDS = 5
_COUNT, _END = 3, 4
_MAX_RUNS = 1 << 16


@dataclasses.dataclass(slots=True, eq=False)
class _Run:
    """Consecutive elements of a pass whose digests lie one behind the other: what the file says, at hand.

    Attributes:
        at: The number in the file with which it begins.
        pass_: The pass.
        first: The first element of it.
        position: How many digests had ever been noted before the first one.
        count: Elements.
        end: Elements of the whole pass, if its end was met in this run; else -1.
    """

    at: int
    pass_: int
    first: int
    position: int
    count: int
    end: int


class Journal:
    """Which elements were produced, by (pass, element), with their digests, in memory that outlives the producer.

    Digests lie in a ring in the order in which they were noted; when it is full, the oldest are forgotten and no
    longer checked. A table of runs says whose they are. Each write first stores what is new, then, by one store of 8
    bytes, that it counts: a `kill -9` at any moment leaves what was noted before it.

    One producer's pump writes; the supervisor only makes the file, hands it to each producer, reads `first` of it, and
    closes it.

    Args:
        fd: A file from `Journal.create`. It stays the caller's, who may close it at once.
    """

    CAPACITY = (64 << 20) // 8

    def __init__(self, fd: int):
        self._memory = mmap.mmap(fd, 0)
        self._bytes = memoryview(self._memory)
        self._words = self._bytes.cast("q")
        self._first = self._bytes[8 * _FIRST_AT : 8 * (_FIRST_AT + FIRST_KEPT)].cast("Q")
        self._digests = self._bytes[8 * _DIGESTS_AT :].cast("Q")
        self._capacity = len(self._digests)
        self._tail, self._floor = self._words[_TAIL], self._words[_FLOOR]
        # The newest pass of which something was forgotten for want of room. An untouched file says 0: there is none.
        self._lost = self._words[_LOST] - 1
        self._runs: collections.deque[_Run] = collections.deque()
        self._passes: dict[int, list[_Run]] = {}
        for number in range(self._words[_FIRST_RUN], self._words[_END_RUN]):
            at = _RUNS_AT + number % _MAX_RUNS * _RUN_WORDS
            self._keep(_Run(at, *self._words[at : at + _RUN_WORDS]))
        self._head = self._runs[-1].position + self._runs[-1].count if self._runs else self._tail
        self._drop_forgotten()

    @staticmethod
    def create(name: str, capacity: int = CAPACITY) -> int:
        """Returns the descriptor of a file for an empty journal of `capacity` digests of 8 bytes."""
        fd = os.memfd_create(f"kerasfeed-journal-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, 8 * (_DIGESTS_AT + capacity))
        return fd

    @staticmethod
    def first(fd: int) -> list[int]:
        """Returns the digests of the first elements of pass 0, `FIRST_KEPT` at most; they are never forgotten.

        For other processes, while the producer writes. It is safe without a lock: each of these words changes once,
        from 0 to a digest, by one store of 8 bytes, and is read by one load. So it is there whole or not yet, and in
        whatever order stores become visible here, all before the first 0 are what was noted. (A digest that is 0 itself
        only cuts the list short.)
        """
        size = 8 * (_FIRST_AT + FIRST_KEPT)
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as memory, memoryview(memory) as view, view.cast("Q") as words:
            return list(itertools.takewhile(bool, words[_FIRST_AT:].tolist()))

    def note(self, pass_: int, element: int, digest: int) -> int | None:
        """This element was produced. Returns the digest that it had when it was produced before, if that is known."""
        if pass_ == 0 and element < FIRST_KEPT and not self._first[element]:
            self._first[element] = digest
        runs = self._passes.get(pass_, ())
        for run in runs:
            at = element - run.first
            if 0 <= at < run.count:
                position = run.position + at
                return self._digests[position % self._capacity] if position >= self._tail else None
        if self._is_forgotten(pass_) or (
            # To note again what was forgotten would push out what comes next: nothing would ever be checked.
            pass_ <= self._lost and element < max(run.first + run.count for run in runs)
        ):
            return None
        if self._head - self._tail == self._capacity:
            self._forget_oldest_digest()
        current = self._runs[-1] if self._runs else None
        if current is None or current.pass_ != pass_ or element != current.first + current.count:
            current = self._begin_run(pass_, element)
        self._digests[self._head % self._capacity] = digest
        current.count += 1
        self._words[current.at + _COUNT] = current.count
        self._head += 1
        return None

    def note_end(self, pass_: int, elements: int) -> int | None:
        """This pass ended after so many elements. Returns how many it had before, if that is known."""
        known = self.elements(pass_)
        if known is not None or self._is_forgotten(pass_):
            return known
        runs = self._passes.get(pass_)
        run = runs[-1] if runs else self._begin_run(pass_, elements)
        run.end = self._words[run.at + _END] = elements
        return None

    def elements(self, pass_: int) -> int | None:
        """How many elements this pass had when it ended, if that is known."""
        return next((run.end for run in self._passes.get(pass_, ()) if run.end >= 0), None)

    def forget_before(self, pass_: int) -> None:
        """Passes before this one will not be produced again: their room is free, and they are not noted any more."""
        if pass_ <= self._floor:
            return
        self._floor = self._words[_FLOOR] = pass_
        for known in [known for known in self._passes if known < pass_]:
            del self._passes[known]
        self._drop_forgotten()
        self._give_memory_back()

    def chain(self, pass_: int, element: int, first: int = 0) -> str:
        """Returns XXH3 of 128 bits over the digests of a pass's elements from `first` up to this one, in hex digits.

        It is empty if some of them are not known: forgotten, or never produced here. Costs some 0.02 ms per 100,000
        elements.
        """
        hasher = xxhash.xxh3_128()
        at = first
        for run in sorted(self._passes.get(pass_, ()), key=lambda run: run.first):
            count = min(run.first + run.count, element) - at
            if run.first > at or count <= 0:
                continue
            position = run.position + at - run.first
            if position < self._tail:
                return ""
            start = position % self._capacity
            hasher.update(self._digests[start : start + count])
            # What goes on at the ring's start.
            hasher.update(self._digests[: max(0, start + count - self._capacity)])
            at += count
        return hasher.hexdigest() if at == element else ""

    def close(self) -> None:
        """Lets go of the memory."""
        for view in (self._digests, self._first, self._words, self._bytes):
            view.release()
        self._memory.close()

    def _is_forgotten(self, pass_: int) -> bool:
        return pass_ < self._floor or (pass_ <= self._lost and pass_ not in self._passes)

    def _keep(self, run: _Run) -> None:
        self._runs.append(run)
        if run.pass_ >= self._floor:
            self._passes.setdefault(run.pass_, []).append(run)

    def _begin_run(self, pass_: int, first: int) -> _Run:
        number = self._words[_END_RUN]
        if number - self._words[_FIRST_RUN] == _MAX_RUNS:
            self._note_lost(self._runs[0].pass_)
            self._drop_oldest_run()
        at = _RUNS_AT + number % _MAX_RUNS * _RUN_WORDS
        run = _Run(at, pass_, first, self._head, 0, -1)
        for index, value in enumerate((pass_, first, self._head, 0, -1)):
            self._words[at + index] = value
        self._words[_END_RUN] = number + 1
        self._keep(run)
        return run

    def _note_lost(self, pass_: int) -> None:
        if pass_ > self._lost:
            self._lost = pass_
            self._words[_LOST] = pass_ + 1

    def _forget_oldest_digest(self) -> None:
        for run in self._runs:
            if run.position > self._tail:
                break
            self._note_lost(run.pass_)
        self._tail += 1
        self._words[_TAIL] = self._tail
        self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        # A run of no elements stands for the place of its pass's end: that is forgotten with the digest behind it.
        while self._runs and (
            self._runs[0].pass_ < self._floor or self._runs[0].position + max(self._runs[0].count, 1) <= self._tail
        ):
            self._drop_oldest_run()

    def _drop_oldest_run(self) -> None:
        run = self._runs.popleft()
        self._tail = self._words[_TAIL] = max(self._tail, run.position + run.count)
        self._words[_FIRST_RUN] += 1
        runs = self._passes.get(run.pass_)
        if runs is not None:
            runs.remove(run)
            if not runs:
                del self._passes[run.pass_]

    def _give_memory_back(self) -> None:
        """Frees the pages of the ring that hold no digest."""
        start, stop = self._tail % self._capacity, self._head % self._capacity
        if start < stop:
            free = [(0, start), (stop, self._capacity)]
        elif self._head > self._tail:
            free = [(stop, start)]
        else:
            free = [(0, self._capacity)]
        page = mmap.PAGESIZE
        for low, high in free:
            low_byte = -(-8 * (_DIGESTS_AT + low) // page) * page
            high_byte = 8 * (_DIGESTS_AT + high) // page * page
            # Where the kernel can't, the pages stay: the ring will use them again.
            with contextlib.suppress(OSError):
                if low_byte < high_byte:
                    self._memory.madvise(mmap.MADV_REMOVE, low_byte, high_byte - low_byte)


_CAUSES = (
    "This pipeline can't be replayed. Usual causes: Python or NumPy randomness that the feed does not seed (a "
    "random.Random or numpy Generator of its own, os.urandom, threads that draw in turn); random ops in a parallel map "
    "or interleave without deterministic=True; files that changed; the time; a from_generator that keeps state; the "
    "order of a set, or of what a folder lists. What to do: DataFeeder(deterministic=True), stateless random ops "
    '(tf.random.stateless_*), or DataFeeder(verify="warn") to go on with data that may differ.'
)


def element_mismatch(pass_: int, element: int, was: int, now: int) -> str:
    """Returns what `ReplayMismatchError` says of an element that was produced again."""
    return (
        f"element {element} of pass {pass_} was produced again and is not what it was. Expected digest "
        f"{was:016x}, produced {now:016x}. {_CAUSES}"
    )


def end_mismatch(pass_: int, was: int, now: int) -> str:
    """Returns what `ReplayMismatchError` says of a pass that was produced again and has another length."""
    return (
        f"pass {pass_} was produced again and does not end where it did. Expected {was} elements, "
        f"produced {now}. {_CAUSES}"
    )


def chain_mismatch(pass_: int, first: int, element: int, was: str, now: str) -> str:
    """Returns what `ReplayMismatchError` says of a restored feed, whose `Journal.chain` is not that of the backup."""
    return (
        f"elements {first} to {element - 1} of pass {pass_}, which were trained before the backup, were produced "
        f"again, and one of them at least is not what it was. Expected {was}, produced {now}. {_CAUSES}"
    )
