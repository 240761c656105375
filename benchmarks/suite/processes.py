"""The processes that are measured: started, asked one question at a time, ended; and the CPU time of each.

A process answers `(True, answer)`, or `(False, what went wrong)`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing import connection
from typing import Any

from benchmarks.suite import ways

_ANSWER_SECONDS = 180.0
_END_SECONDS = 20.0
_HOROVODRUN = (
    # `horovodrun`, but for its question whether Horovod was built with Gloo, for which it imports TensorFlow.
    "from horovod.runner import launch\nlaunch.gloo_built = lambda verbose=False: True\nlaunch.run_commandline()"
)


def cpu_seconds(pids: Iterable[int]) -> float:
    """Returns the CPU time that all threads of these processes have used so far, to the nanosecond."""
    # clock_getcpuclockid(3), of which Python knows the thread's only: the clock of a process, CPUCLOCK_SCHED.
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


_CORES = os.sched_getaffinity(0)


def run_on_one_core(rank: int) -> None:
    """Lets this process run on one core, the same for the same rank."""
    _run_on({sorted(_CORES)[rank % len(_CORES)]})


def run_on_all_cores() -> None:
    """Lets this process run on all cores that it had when it began."""
    _run_on(_CORES)


def _run_on(cores: set[int]) -> None:
    # Threads that are started later inherit it.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def serve(connection_: connection.Connection, commands: dict[str, Callable[..., Any]]) -> None:
    """Answers questions until the other side is gone."""
    while True:
        try:
            name, args = connection_.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, commands[name](*args))
        except ways.NotAvailable as error:
            answer = (True, error)
        except BaseException:
            answer = (False, traceback.format_exc())
        connection_.send(answer)


class Worker:
    """A process that answers questions."""

    def __init__(self, name: str, connection_: connection.Connection, pid: int):
        self.name = name
        self.connection = connection_
        self.pid = pid

    def ask(self, command: str, *args: Any) -> None:
        """Asks; `answer` returns the answer."""
        self.connection.send((command, args))

    def answer(self) -> Any:
        """Returns the answer to the last question."""
        if not self.connection.poll(_ANSWER_SECONDS):
            raise RuntimeError(f"{self.name}: no answer for {_ANSWER_SECONDS:g} s")
        try:
            good, value = self.connection.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} has died") from None
        if not good:
            raise RuntimeError(f"{self.name}:\n{value}")
        return value


def ask_all(workers: list[Worker], command: str, *args: Any) -> list[Any]:
    """Asks all at once and returns their answers."""
    for worker in workers:
        worker.ask(command, *args)
    return [worker.answer() for worker in workers]


def _run(main: Callable[..., None], *args: Any) -> None:
    """Runs in the new process, which ends at once if its parent is gone, whatever it waits for."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="watch parent", daemon=True).start()
    main(*args)


class Processes:
    """Starts processes of one kind, each of which runs `main(connection, *arguments)`; ends them when it is left."""

    def __init__(self, name: str, main: Callable[..., None], arguments: list[tuple[Any, ...]], **env: str):
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self.workers = []
        with _environment(env):
            for index, args in enumerate(arguments):
                mine, other = context.Pipe()
                process = context.Process(target=_run, args=(main, other, *args), name=f"{name} {index}")
                process.start()
                other.close()
                self._processes.append(process)
                self.workers.append(Worker(f"{name} {index}", mine, process.pid or 0))

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self.workers:
            worker.connection.close()
        for process in self._processes:
            process.join(_END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


class HorovodProcesses:
    """Ranks under `horovodrun`, which run `main(connection, rank, size)`; they stand still except when `awake`.

    Horovod's own thread wakes up every millisecond in each rank: that would be part of every other measurement.
    """

    def __init__(self, main: str, size: int):
        self.workers: list[Worker] = []
        self._alarm: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="kerasfeed-bench-")
        self._log = open(os.path.join(self._folder.name, "log"), "w+")  # noqa: SIM115
        address = os.path.join(self._folder.name, "socket")
        self._listener = connection.Listener(address)
        command = [sys.executable, "-c", _HOROVODRUN, "--gloo", "-np", str(size), sys.executable, "-m", main, address]
        # Ranks that stood still for a while must not take each other for dead.
        env = {**os.environ, "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600", "HOROVOD_STALL_CHECK_DISABLE": "1"}
        self._job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=env, start_new_session=True
        )
        try:
            self._meet(size)
        except BaseException:
            self.__exit__()
            raise

    def _meet(self, size: int) -> None:
        deadline = time.monotonic() + _ANSWER_SECONDS
        workers: dict[int, Worker] = {}
        while len(workers) < size:
            # A Listener has no time-out.
            socket = self._listener._listener._socket  # type: ignore[attr-defined]
            socket.settimeout(1.0)
            try:
                accepted = self._listener.accept()
            except TimeoutError:
                if self._job.poll() is not None or time.monotonic() > deadline:
                    self._log.seek(0)
                    raise RuntimeError(f"horovodrun did not start {size} ranks:\n{self._log.read()[-2000:]}") from None
                continue
            rank, pid = accepted.recv()
            workers[rank] = Worker(f"Horovod rank {rank}", accepted, pid)
        self.workers = [workers[rank] for rank in range(size)]
        # Wakes them up when this process is gone, however it ended: they then see that, and end.
        wake = ["sh", "-c", 'read line; kill -CONT "$@"', "sh", *(str(worker.pid) for worker in self.workers)]
        self._alarm = subprocess.Popen(wake, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, number)

    @contextlib.contextmanager
    def awake(self) -> Any:
        """Lets the ranks run."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def __enter__(self) -> HorovodProcesses:
        return self

    def __exit__(self, *exception: object) -> None:
        self._signal(signal.SIGCONT)
        for worker in self.workers:
            worker.connection.close()
        try:
            self._job.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            for worker in self.workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
            self._job.kill()
            self._job.wait()
        if self._alarm is not None:
            self._alarm.communicate()
        self._listener.close()
        self._log.close()
        self._folder.cleanup()


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Any:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
