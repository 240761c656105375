"""What the digest of an element costs, beside copying the element.

    make bench-digests

Measures, for elements of one component, of images with labels, and of four components alike, from 0 to 40 MB: the
digest and a copy into memory that is there already. Elements lie in a ring of memory, so that each fell out of the
caches before its turn comes again; for comparison, the digest of one that is still in them. The exit code is 1 if a
median is over 5 us and over 5 % of copying as well.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from kerasfeed.producer.digest import Digester
from kerasfeed.spec import Component, EncodedElement

MAX_SECONDS = 5e-6
MAX_SHARE = 0.05
KINDS = ("one component", "image and labels", "four alike")
SIZES = (0, 2_000, 32 << 10, 64_000, 200_000, 500_000, 1 << 20, 2_000_000, 3_000_000, 5_000_000, 9_600_000, 40_000_000)
LABEL_BYTES = 512
RING_BYTES = 192 << 20
CACHE_BYTES = 64 << 20
MAX_ELEMENTS = 300


def components(kind: str, size: int) -> list[int]:
    """Returns the lengths of the components of an element of this size."""
    if kind == "one component":
        return [size]
    if kind == "four alike":
        return [size // 4] * 4
    labels = min(LABEL_BYTES, size // 4)
    return [size - labels, labels]


def elements(memory: memoryview, lengths: list[int]) -> list[EncodedElement]:
    """Returns as many elements as lie side by side in the memory, up to `MAX_ELEMENTS`, spread over all of it."""
    places: list[Component] = []
    offset = 0
    for length in lengths:
        places.append(Component((length,), offset, length))
        offset = -(-(offset + length) // 64) * 64
    count = min(MAX_ELEMENTS, len(memory) // max(offset, 1))
    step = len(memory) // count // 64 * 64
    size = places[-1].offset + lengths[-1]
    return [
        EncodedElement(
            tuple(Component(place.shape, place.offset, place.length) for place in places),
            tuple(memory[at + place.offset : at + place.offset + place.length] for place in places),
            size,
        )
        for at in range(0, step * count, step)
    ]


def median(call: Callable[[EncodedElement], object], elements: list[EncodedElement]) -> float:
    """Returns how long the call takes with an element, in seconds."""
    times = []
    for element in elements:
        began = time.perf_counter()
        call(element)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures what the digest of an element costs.")
    parser.add_argument("--rounds", type=int, default=7, help="times that each is measured (default: 7)")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1. Received: {args.rounds}")

    # Pages of the usual size, as those of tensors: what lies far apart costs more with them.
    ring = mmap.mmap(-1, RING_BYTES)
    ring.madvise(mmap.MADV_NOHUGEPAGE)
    memory = memoryview(ring)
    np.frombuffer(ring, np.uint64)[:] = np.arange(RING_BYTES // 8)
    other = np.ones(CACHE_BYTES // 8)
    target = memoryview(bytearray(max(SIZES)))
    digest = Digester(b"spec").digest

    def copy(element: EncodedElement) -> None:
        for place, buffer in zip(element.components, element.buffers, strict=True):
            target[place.offset : place.offset + place.length] = buffer

    cases = {(kind, size): elements(memory, components(kind, size)) for kind in KINDS for size in SIZES}
    medians: dict[tuple[str, int], list[tuple[float, float, float]]] = {case: [] for case in cases}
    # All in turn, so that what else the machine does for a while falls on one round of many sizes.
    for _ in range(args.rounds):
        for case, ring_of in cases.items():
            other.sum()
            cost = median(digest, ring_of)
            other.sum()
            copied = median(copy, ring_of)
            medians[case].append((cost, copied, median(digest, ring_of[:1] * MAX_ELEMENTS)))

    problems = []
    print(f"Medians of {args.rounds} rounds, in microseconds:")
    for (kind, size), rounds in medians.items():
        if size == SIZES[0]:
            print(f"  {kind:>18} {'digest':>8} {'copy':>8} {'share':>8} {'digest in cache':>16}")
        cost, copied, cached = (statistics.median(times) for times in zip(*rounds, strict=True))
        print(f"  {size:18} {1e6 * cost:8.1f} {1e6 * copied:8.1f} {cost / copied:8.1%} {1e6 * cached:16.1f}")
        if cost > max(MAX_SECONDS, MAX_SHARE * copied):
            problems.append(
                f"{kind}, {size} bytes: expected at most {1e6 * MAX_SECONDS:.0f} us or {MAX_SHARE:.0%} of copying. "
                f"Received: {1e6 * cost:.1f} us, {cost / copied:.1%}"
            )
    for problem in problems:
        print(f"digest_cost.py: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
