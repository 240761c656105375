"""Whether memory stays bounded: 100,000 elements of varied size, for two ranks.

    make bench-memory

The first 2,000 elements are tiny: what a process has resident after them is its fixed part. The next 200 have 4 MB, so
that all that is kept in reserve is full. Of the others most have 0.1 to 64 KB, and one in 500 has 2 to 4 MB. Prints for
the producer and each rank: the fixed part, the resident size after 10,000 elements and after 100,000, and the most that
was seen; and how much of it is shared memory, which counts in every process that has touched it.

The exit code is 1 if, by more than `--slack`,
- a process had more than its fixed part and the larger of `max_buffer_bytes` and two steps, or
- its own memory, or the producer's shared memory, has grown from 10,000 to 100,000. (Ranks touch what the producer has
  reserved little by little.)
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
import threading
import time
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks.suite.memory_rank import BUFFER_BYTES, EARLY, LARGE, LATE, MIB, RANKS, TINY, rank_main
from benchmarks.suite.processes import Processes, ask_all

SAMPLE_SECONDS = 0.05


class Resident(NamedTuple):
    """Resident memory of a process, in bytes: its own, and what is shared."""

    own: int
    shared: int

    @property
    def all(self) -> int:
        """Both."""
        return self.own + self.shared


def resident(pid: int) -> Resident:
    """Returns what a process has resident."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines() if line.startswith("Rss")}
    return Resident((kib["RssAnon"] + kib["RssFile"]) << 10, kib["RssShmem"] << 10)


class Watch:
    """The most resident memory that each of some processes is seen with."""

    def __init__(self, pids: dict[str, int]):
        self.most = dict.fromkeys(pids, 0)
        self._pids = pids
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch memory")
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            for name, pid in self._pids.items():
                self.most[name] = max(self.most[name], resident(pid).all)

    def end(self) -> None:
        """Ends watching."""
        self._done.set()
        self._thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks that memory does not grow with the number of elements.")
    parser.add_argument("--transport", default="auto", choices=["auto", "shm", "tcp", "grpc"])
    parser.add_argument("--slack", type=float, default=16.0, help="MiB that are no growth (default: 16)")
    args = parser.parse_args()
    slack = args.slack * MIB
    allowed = max(BUFFER_BYTES, 2 * RANKS * LARGE[1])
    env = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", "KERASFEED_TOKEN": f"memory-{time.time_ns():x}"}
    with tempfile.TemporaryDirectory(prefix="kerasfeed-bench-") as folder:
        arguments = [(rank, folder, args.transport) for rank in range(RANKS)]
        with Processes("rank", rank_main, arguments, **env) as ranks:
            producer = next(pid for pid in ask_all(ranks.workers, "start") if pid is not None)
            pids = {"producer": producer, **{worker.name: worker.pid for worker in ranks.workers}}

            def look() -> dict[str, Resident]:
                return {name: resident(pid) for name, pid in pids.items()}

            way = ask_all(ranks.workers, "pull", TINY // RANKS)[0]
            fixed = look()
            watch = Watch(pids)
            try:
                ask_all(ranks.workers, "pull", (EARLY - TINY) // RANKS)
                early = look()
                began = time.monotonic()
                ask_all(ranks.workers, "pull", (LATE - EARLY) // RANKS)
                seconds = time.monotonic() - began
                late = look()
            finally:
                watch.end()
            ask_all(ranks.workers, "close")
    print(f"{LATE:,} elements for {RANKS} ranks by {way}; the last {LATE - EARLY:,} took {seconds:.1f} s.")
    print("Resident, MiB, and how much of it is shared:")
    print(f"  {'':10} {'fixed':>14} {EARLY:>14,} {LATE:>14,} {'most':>8} {'allowed':>8}")
    problems = []
    for name in pids:
        bound = fixed[name].all + allowed + slack
        figures = "".join(
            f"{one.all / MIB:8.1f} {one.shared / MIB:6.1f}" for one in (fixed[name], early[name], late[name])
        )
        print(f"  {name:10} {figures} {watch.most[name] / MIB:8.1f} {bound / MIB:8.1f}")
        grown = {"own": late[name].own - early[name].own}
        if name == "producer":
            grown["shared"] = late[name].shared - early[name].shared
        for kind, growth in grown.items():
            if growth > slack:
                problems.append(
                    f"the {kind} memory of {name} has grown: expected at most {slack / MIB:.1f} MiB from {EARLY:,} to "
                    f"{LATE:,} elements. Received: {growth / MIB:.1f} MiB"
                )
        if watch.most[name] > bound:
            problems.append(
                f"{name} is too large: expected at most {bound / MIB:.1f} MiB. "
                f"Received: {watch.most[name] / MIB:.1f} MiB"
            )
    for problem in problems:
        print(f"memory_growth.py: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
