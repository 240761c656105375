"""Runs a training script as a job of several processes, hears its reports, and sees to it that nothing of it is left.

Each job carries a variable of its own in its environment, by which its processes are found in /proc, whoever their
parent and whatever their session is. Scripts report by lines of JSON (see scripts/reporting.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

SCRIPTS = pathlib.Path(__file__).resolve().parent / "scripts"
ROOT = SCRIPTS.parents[2]
BIN = pathlib.Path(sys.executable).parent
LAUNCHER = pathlib.Path(__file__).resolve().with_name("launcher.py")
MARK = "KERASFEED_TEST_JOB"
FOLDER = "KERASFEED_TEST_FOLDER"
_JOB_SECONDS = 150.0
_GONE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_REPORT = re.compile(r"@report (\{.*\})\s*$")
_INHERITED = re.compile(r"^(HOROVOD_|OMPI_|PMI_|KERASFEED_|PYTEST_)")
_SHARED_MEMORY = pathlib.Path("/dev/shm")

T = TypeVar("T")


def wait_until(condition: Callable[[], T], seconds: float, what: str | Callable[[], str]) -> T:
    """Returns the first true value of `condition()`; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"after {seconds:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(_POLL_SECONDS)
    return value


def processes_of(mark: str) -> dict[int, str]:
    """Returns the processes whose environment holds the mark, zombies not counted: id -> command line."""
    found = {}
    needle = f"{MARK}={mark}".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            environment = pathlib.Path("/proc", entry, "environ").read_bytes()
            if needle in environment.split(b"\0"):
                command = pathlib.Path("/proc", entry, "cmdline").read_bytes()
                found[int(entry)] = command.replace(b"\0", b" ").decode(errors="replace").strip()[-200:]
        except OSError:
            continue  # It is gone, or not ours.
    return found


def shared_memory() -> set[str]:
    """Returns the names of what lies in /dev/shm, but for the semaphores of Python's own that each `horovodrun` has."""
    names = os.listdir(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else []
    return {name for name in names if not name.startswith("sem.mp-")}


def job_environment(mark: str, folder: pathlib.Path, extra: dict[str, str]) -> dict[str, str]:
    """Returns a clean environment for a job, with this environment's programs first in the path."""
    env = {name: value for name, value in os.environ.items() if not _INHERITED.match(name)}
    env.update(
        PATH=f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        TF_CPP_MIN_LOG_LEVEL="3",
        CUDA_VISIBLE_DEVICES="-1",
        PYTHONFAULTHANDLER="1",
    )
    env.update({MARK: mark, FOLDER: str(folder)})
    env.update(extra)
    return env


class Job:
    """One running job.

    Args:
        commands: The command lines to start; with `horovodrun` it is one.
        folder: Where output goes, and where ranks meet by files.
        env: Variables beside the usual ones, one dictionary per command.
    """

    def __init__(self, commands: list[list[str]], folder: pathlib.Path, env: list[dict[str, str]] | None = None):
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self._shared_before = shared_memory()
        self._logs = [folder / f"output-{index}" for index in range(len(commands))]
        self._starts: list[subprocess.Popen[bytes]] = []
        self.seconds = 0.0
        self._began = time.monotonic()
        for index, (command, log) in enumerate(zip(commands, self._logs, strict=True)):
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    env=job_environment(self.mark, folder, env[index] if env else {}),
                    start_new_session=True,
                    # A test run that a shell put into the background ignores SIGINT, and hands that on.
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                )
            self._starts.append(process)

    @classmethod
    def horovod(
        cls,
        script: str,
        ranks: int,
        folder: pathlib.Path,
        arguments: Iterable[str] = (),
        env: dict[str, str] | None = None,
        plain: bool = False,
    ) -> Job:
        """Starts `horovodrun --gloo -np ranks python script`; if not `plain`, by what `launcher.py` makes of it."""
        launcher = [str(BIN / "horovodrun")] if plain else [str(BIN / "python"), str(LAUNCHER)]
        run = [*launcher, "--gloo", "-np", str(ranks), str(BIN / "python"), str(SCRIPTS / script)]
        return cls([[*run, *arguments]], folder, [env or {}])

    @property
    def pid(self) -> int:
        """The process id of `horovodrun`."""
        return self._starts[0].pid

    @property
    def output(self) -> str:
        """What all processes of the job have printed so far."""
        return "".join(log.read_text(errors="replace") for log in self._logs)

    def reports(self, check: str, rank: int | None = None) -> list[dict[str, Any]]:
        """Returns the reports of this name so far, ordered by rank and then by time."""
        found = []
        for line in self.output.splitlines():
            match = _REPORT.search(line)
            if match:
                value = json.loads(match[1])
                if value["check"] == check and rank in (None, value["rank"]):
                    found.append(value)
        return sorted(found, key=lambda value: value["rank"])

    def by_rank(self, check: str, ranks: int) -> list[dict[str, Any]]:
        """Returns the one report of this name that each rank has made."""
        found = self.reports(check)
        assert [value["rank"] for value in found] == list(range(ranks)), (
            f"reports named {check!r} came from ranks {[value['rank'] for value in found]} of {ranks}\n{self.output}"
        )
        return found

    def wait_for(self, check: str, count: int, seconds: float = 90.0) -> list[dict[str, Any]]:
        """Waits until `count` reports of this name have come, while the job runs."""

        def come() -> list[dict[str, Any]]:
            found = self.reports(check)
            assert len(found) >= count or self._running(), f"the job ended before it reported {check}\n{self.output}"
            return found if len(found) >= count else []

        return wait_until(come, seconds, lambda: f"no {count} reports of {check}\n{self.output}")

    def _running(self) -> bool:
        return any(process.poll() is None for process in self._starts)

    def wait(self, seconds: float = _JOB_SECONDS) -> list[int]:
        """Waits for the job's end, and until nothing of it is left; returns the exit codes."""
        try:
            wait_until(lambda: not self._running(), seconds, lambda: f"the job has not ended\n{self.output}")
            self.seconds = time.monotonic() - self._began
            wait_until(
                lambda: not processes_of(self.mark),
                _GONE_SECONDS,
                lambda: f"the job has ended, but these are left: {processes_of(self.mark)}\n{self.output}",
            )
            wait_until(
                lambda: shared_memory() <= self._shared_before,
                _GONE_SECONDS,
                lambda: f"the job has ended, but these are left: {shared_memory() - self._shared_before} in /dev/shm",
            )
        finally:
            self.end()
        return [process.returncode for process in self._starts]

    def succeed(self, seconds: float = _JOB_SECONDS) -> Job:
        """Waits for the job's end and checks that all went well."""
        codes = self.wait(seconds)
        assert not any(codes), f"exit codes {codes}\n{self.output}"
        return self

    def fail(self, seconds: float = _JOB_SECONDS) -> Job:
        """Waits for the job's end and checks that its exit code says that something went wrong."""
        codes = self.wait(seconds)
        assert all(codes), f"exit codes {codes}\n{self.output}"
        return self

    def end(self) -> None:
        """Kills what is left of the job, by id."""
        for _ in range(20):
            left = processes_of(self.mark)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._starts:
                process.poll()
            if not left:
                return
            time.sleep(_POLL_SECONDS)
