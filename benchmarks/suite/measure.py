"""The first and the third table: blocks of ways that are measured in turn, one run each, again and again.

A block has one number of ranks and one element, and rank processes of its own. All of its ways are opened first, in the
same rank processes; a way that is not being measured is full and waits. Then each way is run once, and all of that is
repeated: what else the machine does for a while falls on one run of each. At its end the processes end as they are:
tf.data service alone takes a minute to close its iterators.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.suite import elements, floors, producers, rank, ways
from benchmarks.suite.processes import HorovodProcesses, Processes, Worker, ask_all, cpu_seconds

_QUEUE_LENGTH = 4  # elements
_FEWEST = 4  # elements that are timed
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
_HOROVOD_MAIN = "benchmarks.suite.rank"
# Whoever refills its buffers would take time from the way that is measured next.
_QUIET_SHARE = 0.1  # of one core, of all processes of a block together
_QUIET_LOOK_SECONDS = 0.03
_QUIET_SECONDS = 3.0  # and no longer


@dataclasses.dataclass
class Cell:
    """One way, with one element and one number of ranks: what each run has taken.

    Times are in seconds, per element and rank.

    Attributes:
        way: Key of the way.
        element: Name of the element.
        ranks: How many ranks there were.
        bytes: Size of an element.
        count: Elements per rank in a run.
        seconds: Time of each run.
        producer_cpu: CPU time of the producer in each run.
        ranks_cpu: CPU time of all ranks in each run.
        unavailable: Why there are no runs.
    """

    way: str
    element: str
    ranks: int
    bytes: int
    count: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)
    producer_cpu: list[float] = dataclasses.field(default_factory=list)
    ranks_cpu: list[float] = dataclasses.field(default_factory=list)
    unavailable: str = ""


@dataclasses.dataclass(frozen=True)
class Pace:
    """How long and how often.

    Attributes:
        seconds: Of a run, about.
        repetitions: Runs of each cell.
    """

    seconds: float
    repetitions: int


class _Runner:
    """A way that is open in its ranks."""

    def __init__(self, cell: Cell, workers: list[Worker], pids: list[int], awake: Callable[[], Any]):
        self.cell = cell
        self._workers = workers
        self._pids = pids
        self._awake = awake
        self._ready = ways.WAYS[cell.way].ready

    def _run(self, warm_up: int, count: int) -> tuple[float, float, float]:
        ranks = [worker.pid for worker in self._workers]
        with self._awake():
            ask_all(self._workers, "run", self.cell.way, warm_up)
            before = cpu_seconds(self._pids), cpu_seconds(ranks)
            times = ask_all(self._workers, "run", self.cell.way, count)
            after = cpu_seconds(self._pids), cpu_seconds(ranks)
        seconds = max(ended for _, ended in times) - min(began for began, _ in times)
        shared = count * self.cell.ranks
        return seconds / count, (after[0] - before[0]) / shared, (after[1] - before[1]) / shared

    def settle(self, seconds: float, count: int | None) -> None:
        """Finds how many elements a run of about that time has."""
        if count is not None:
            self.cell.count = count
            return
        count = self._ready
        while (took := self._run(1, count)[0]) * count < 0.4 * seconds:
            count = round(count * min(8.0, 0.6 * seconds / (took * count)))
        self.cell.count = max(_FEWEST, round(seconds / took))

    @property
    def pids(self) -> set[int]:
        """The processes of its ranks and producers."""
        return {*self._pids, *(worker.pid for worker in self._workers)}

    def run(self) -> None:
        """Runs once."""
        warm_up = max(self._ready, self.cell.count // 8)
        seconds, producer, ranks = self._run(warm_up, self.cell.count)
        self.cell.seconds.append(seconds)
        self.cell.producer_cpu.append(producer)
        self.cell.ranks_cpu.append(ranks)


class _FloorRunner:
    def __init__(self, cell: Cell, program: pathlib.Path, seconds: float):
        self.cell = cell
        self._program = program
        self._seconds = seconds

    def run(self) -> None:
        cell = self.cell
        measured = floors.measure(self._program, cell.way, cell.bytes, cell.ranks, self._seconds)
        cell.seconds.append(measured["seconds"])
        cell.producer_cpu.append(measured["producer_cpu"])
        cell.ranks_cpu.append(measured["ranks_cpu"])


def say(text: str) -> None:
    """Says how far it is."""
    print(text, file=sys.stderr, flush=True)


class Ranks:
    """Ranks, and what feeds them, for one block.

    Args:
        size: How many.
        name: The element of the block.
        keys: The ways that there will be.
        program: What measures the floors.
    """

    def __init__(self, size: int, name: str, keys: list[str], program: pathlib.Path):
        began = time.monotonic()
        self._size = size
        self._program = program
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._keys = keys
        self._queues = [context.Queue(_QUEUE_LENGTH) for _ in range(size)]
        places = [(r, size, queue) for r, queue in enumerate(self._queues)]
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            token = f"benchmark-{time.time_ns():x}-{size}"
            env = {**_ENVIRONMENT, "KERASFEED_TOKEN": token}
            self._ranks = stack.enter_context(Processes("rank", rank.main, places, **env)).workers
            self._service = stack.enter_context(
                Processes("service", producers.service_main, [()], **_ENVIRONMENT)
            ).workers
            self._horovod: HorovodProcesses | None = None
            if any(ways.WAYS[key].horovod for key in keys):
                self._horovod = stack.enter_context(HorovodProcesses(_HOROVOD_MAIN, size))
            self._address = ask_all(self._service, "address")[0]
            ask_all(self._ranks, "ready")
            self._started = time.monotonic() - began
            self._stack = stack.pop_all()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def measure(self, pace: Pace, count: int | None = None) -> list[Cell]:
        """Measures the block. `count`: elements per rank in a run, instead of what the time says."""
        began = time.monotonic()
        element = elements.named(self._name)
        cells = [Cell(key, self._name, self._size, element.bytes) for key in self._keys]
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kerasfeed-bench-"))
            runners = []
            for cell in cells:
                runner = self._open(cell, folder, pace, stack)
                if isinstance(runner, str):
                    cell.unavailable = runner
                    continue
                if isinstance(runner, _Runner):
                    runner.settle(pace.seconds, count)
                runners.append(runner)
            opened = time.monotonic()
            for _ in range(pace.repetitions):
                for runner in runners:
                    _wait_until_quiet({pid for each in runners if isinstance(each, _Runner) for pid in each.pids})
                    runner.run()
            phases = {"start": self._started, "open": opened - began, "measure": time.monotonic() - opened}
            took = ", ".join(f"{seconds:.0f} s to {phase}" for phase, seconds in phases.items())
            say(f"{self._name}, {self._size} ranks: {took}")
        return cells

    def _open(self, cell: Cell, folder: str, pace: Pace, stack: contextlib.ExitStack) -> _Runner | _FloorRunner | str:
        way = ways.WAYS[cell.way]
        if way.open is None:
            return _FloorRunner(cell, self._program, pace.seconds)
        workers, pids, awake = self._ranks, [], _always
        if way.horovod:
            assert self._horovod is not None
            workers, awake = self._horovod.workers, self._horovod.awake
        if cell.way in (*ways.SERVICE_READY, *ways.SERVICE_COORDINATED):
            pids = [worker.pid for worker in self._service]
        if cell.way == "queue":
            arguments = [(cell.element, self._queues)]
            filling = Processes("queue producer", producers.queue_main, arguments, **_ENVIRONMENT)
            pids = [worker.pid for worker in stack.enter_context(filling).workers]
        with awake():
            answers = ask_all(workers, "open", cell.way, cell.element, folder, self._address)
        for answer in answers:
            if isinstance(answer, ways.NotAvailable):
                return str(answer)
            pids = [*pids, *answer]
        return _Runner(cell, workers, pids, awake)


def _wait_until_quiet(pids: set[int]) -> None:
    end = time.monotonic() + _QUIET_SECONDS
    while time.monotonic() < end:
        before = cpu_seconds(pids)
        time.sleep(_QUIET_LOOK_SECONDS)
        if cpu_seconds(pids) - before < _QUIET_SHARE * _QUIET_LOOK_SECONDS:
            return


@contextlib.contextmanager
def _always() -> Iterator[None]:
    yield
