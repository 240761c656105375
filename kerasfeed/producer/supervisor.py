"""The rank's side of the producer process: starts it, passes its output on, restarts it when it dies, ends it.

One thread owns the child from its start to its end, restarts included; two more per child pass on its output. The
supervisor never talks to the child over the network: news comes over a pipe, life hangs on another.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from kerasfeed.errors import ProducerError
from kerasfeed.producer.digest import Journal
from kerasfeed.producer.launch import SCRATCH_VARIABLE, Launch, Progress

_LOG = logging.getLogger("kerasfeed")
_MAX_DEATHS = 3
_RESTART_SECONDS = 0.2
_PORT_SECONDS = 120.0
_KEPT_LINES = 20
_EXIT_SECONDS = 60.0
_FAILED_EXIT_SECONDS = 5.0
_EXIT_NOTICE_SECONDS = 10.0
_HIDDEN_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# A producer is no rank: with a launcher's variables it could join the job by mistake.
_LAUNCHER_PREFIXES = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_")


_alive: set[Supervisor] = set()


def end_all_producers(failed: bool) -> None:
    """Ends the producers of this process, at its exit, when other ranks have left them; sooner if the script failed."""
    for supervisor in [s for s in list(_alive) if s.owner == os.getpid()]:
        supervisor.end(_FAILED_EXIT_SECONDS if failed else _EXIT_SECONDS)


def environment(seed: int) -> dict[str, str]:
    """Returns the environment of a producer: this process's, without what would make it a rank, with a hash seed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_PREFIXES) and k != "KERASFEED_TOKEN"}
    env.update(dict.fromkeys(_HIDDEN_DEVICES, "-1"))
    env["PYTHONHASHSEED"] = str(seed)
    env["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    env["PYTHONSAFEPATH"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    env["KERASFEED_PRODUCER"] = "1"
    return env


class Supervisor:
    """Keeps one feed's producer alive.

    Args:
        launch: What the producer is told; descriptors and port are filled in here.
        published: Called with (host, port) whenever a producer listens, from the supervisor's thread.
        gave_up: Called with a message when there will be no producer any more, from the supervisor's thread.
    """

    def __init__(self, launch: Launch, published: Callable[[str, int], None], gave_up: Callable[[str], None]):
        self._launch = launch
        self._name = launch.options["name"]
        self._published = published
        self._gave_up = gave_up
        self.owner = os.getpid()
        self._news = threading.Condition()
        self._port: int | None = None
        self._failure: str | None = None
        self._complete = False
        self._build_failed = False
        self._statistics: bytes | None = None
        self._counts = {count[0]: count for count in launch.counts}
        self._pass_lengths = dict(launch.pass_lengths)
        self._left: dict[str, dict[str, int]] = {}
        self._stopping = False
        self._child: subprocess.Popen[bytes] | None = None
        self._journal_fd: int | None = None
        self._deaths: list[str] = []
        self._come = ((-1, -1), (-1, -1))
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._thread = threading.Thread(target=self._run, name=f"kerasfeed-supervisor-{self._name}", daemon=True)

    def start(self) -> None:
        """Starts the producer and waits until it listens.

        Raises:
            ProducerError: It does not come to listen.
        """
        _alive.add(self)
        self._thread.start()
        deadline = time.monotonic() + _PORT_SECONDS
        try:
            with self._news:
                while self._port is None and self._failure is None:
                    if not self._news.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                        self._failure = (
                            f"the producer of feed {self._name!r} does not listen after {_PORT_SECONDS:.0f} s"
                        )
                failure = self._failure if self._port is None else None
        except BaseException:
            self.stop()
            raise
        if failure is not None:
            self.stop()
            raise ProducerError(failure)

    @property
    def failure(self) -> str | None:
        """Why there is no producer any more, if it was given up."""
        return self._failure

    @property
    def pid(self) -> int | None:
        """The producer's process id, or `None` if none runs."""
        child = self._child
        return child.pid if child is not None and child.returncode is None else None

    @property
    def build_failed(self) -> bool:
        """Whether the producer lives only to say that its pipeline can't be built."""
        return self._build_failed

    @property
    def statistics(self) -> bytes | None:
        """The last `Status` message of a producer that ended in peace."""
        return self._statistics

    @property
    def counts(self) -> list[list[int]]:
        """What is known of the epochs that were produced: (epoch, elements, steps, dropped)."""
        return list(self._counts.values())

    @property
    def pass_lengths(self) -> dict[str, int]:
        """Elements of the passes over the dataset that ended, by their number as text."""
        return dict(self._pass_lengths)

    @property
    def launch(self) -> Launch:
        """What the first producer was told, but for descriptors and port."""
        return self._launch

    def first_digests(self) -> list[int]:
        """Returns the digests of the first elements of pass 0, as far as they were produced; none if all is over."""
        with self._news:
            return Journal.first(self._journal_fd) if self._journal_fd is not None else []

    @property
    def complete(self) -> bool:
        """Whether all ranks have come to the producer."""
        return self._complete

    def wait(self, timeout: float) -> bool:
        """Waits for the producer to end by itself, as it does when all ranks have left. Returns whether it did."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Ends the producer now, and all that it started."""
        if os.getpid() != self.owner:
            return
        with self._news:
            self._stopping = True
            child = self._child
        if child is not None:
            _close_quietly(child.stdin)
            self._thread.join(2.0)
            if self._thread.is_alive():
                _kill_group(child.pid)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    def end(self, limit: float = _EXIT_SECONDS) -> None:
        """Waits, for `limit` seconds at most, until all ranks that came have left, then ends the producer."""
        began = time.monotonic()
        while self._complete and not self.wait(min(limit, _EXIT_NOTICE_SECONDS)):
            waited = time.monotonic() - began
            if waited >= limit:
                _LOG.warning("feed %r: ended after %.0f s, although other ranks still use it", self._name, waited)
                break
            _LOG.warning("feed %r: waits for the other ranks to leave it (%.0f s)", self._name, waited)
        self.stop()

    # ---- The supervisor's thread ----

    def _run(self) -> None:
        try:
            with contextlib.ExitStack() as owned:
                self._run_children(owned)
        except Exception as error:
            message = f"the producer of feed {self._name!r} can't be started: {error}"
            self._give_up(message)
            self._gave_up(message)
        finally:
            _alive.discard(self)

    def _run_children(self, owned: contextlib.ExitStack) -> None:
        """Runs one child after the other, with what outlives each of them."""
        progress_fd = os.memfd_create(f"kerasfeed-progress-{self._name}", os.MFD_CLOEXEC)
        owned.callback(os.close, progress_fd)
        os.ftruncate(progress_fd, Progress.SIZE)
        progress = Progress(progress_fd)
        owned.callback(progress.close)
        progress.clear()
        journal_fd = self._journal_fd = Journal.create(self._name)
        owned.callback(self._close_journal, journal_fd)
        scratch = tempfile.mkdtemp(prefix="kerasfeed-")
        owned.callback(shutil.rmtree, scratch, ignore_errors=True)
        while self._run_child(progress_fd, journal_fd, scratch):
            self._note_death(progress)
            if self._failure is not None:
                self._gave_up(self._failure)
                return
            time.sleep(_RESTART_SECONDS)

    def _close_journal(self, journal_fd: int) -> None:
        with self._news:
            self._journal_fd = None
            os.close(journal_fd)

    def _run_child(self, progress_fd: int, journal_fd: int, scratch: str) -> bool:
        """Runs one child to its end. Returns whether another one is wanted."""
        control_read, control_write = os.pipe()
        try:
            with self._news:
                if self._stopping:
                    os.close(control_read)
                    return False
                child = self._child = subprocess.Popen(
                    [sys.executable, "-m", "kerasfeed.producer"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(control_write, progress_fd, journal_fd),
                    env={**environment(self._launch.seed), SCRATCH_VARIABLE: scratch},
                    start_new_session=True,
                    bufsize=0,
                )
        finally:
            os.close(control_write)
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        relays = [
            threading.Thread(target=self._relay, args=(pipe, out), name=f"kerasfeed-{label}-{self._name}", daemon=True)
            for pipe, out, label in ((child.stdout, "stdout", "out"), (child.stderr, "stderr", "err"))
        ]
        for relay in relays:
            relay.start()
        launch = dataclasses.replace(
            self._launch,
            port=self._port or self._launch.port,
            parent=os.getpid(),
            control_fd=control_write,
            progress_fd=progress_fd,
            journal_fd=journal_fd,
            restarted=bool(self._deaths),
            counts=self.counts,
            pass_lengths=self.pass_lengths,
            left=self._left,
        )
        # It may die, or be stopped, before it has read: what follows finds out.
        with contextlib.suppress(BrokenPipeError, ValueError):
            launch.write_to(child.stdin)
        try:
            self._follow(control_read, child.pid)
            # Reap only after the group is killed: until then the id can't be anyone else's.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        finally:
            _kill_group(child.pid)
            child.wait()
            _close_quietly(child.stdin)
            for relay in relays:
                relay.join(5.0)
        with self._news:
            # User code may end the process with any exit code: in peace it ends only with its last statistics.
            in_peace = child.returncode == 0 and self._statistics is not None
            if self._stopping or self._failure is not None or in_peace:
                return False
        self._deaths.append(how_it_ended(child.returncode))
        return True

    def _follow(self, control: int, pid: int) -> None:
        """Hears the child's news until the child is dead; the pipe may outlive it, in processes that it forked."""
        pidfd = os.pidfd_open(pid)
        pending, dead, ended = b"", False, False
        try:
            os.set_blocking(control, False)
            news = select.poll()
            news.register(control, select.POLLIN)
            news.register(pidfd, select.POLLIN)
            while not dead:
                dead = any(fd == pidfd for fd, _ in news.poll())
                if ended:
                    continue
                try:
                    while piece := os.read(control, 1 << 16):
                        *lines, pending = (pending + piece).split(b"\n")
                        for line in lines:
                            self._hear(json.loads(line))
                    # Its end of the pipe is closed: only its death is left to wait for.
                    news.unregister(control)
                    ended = True
                except BlockingIOError:
                    pass
        finally:
            os.close(control)
            os.close(pidfd)

    def _hear(self, news: dict[str, Any]) -> None:
        if "port" in news:
            self._published(self._launch.host, news["port"])
            with self._news:
                self._port = news["port"]
                self._news.notify_all()
        elif "refused" in news:
            if self._deaths and not self._launch.port:
                # Somebody took the port of the dead producer meanwhile: any other will do.
                self._port = None
                return
            message = f"the producer of feed {self._name!r} {news['refused']}"
            self._give_up(message)
            self._gave_up(message)
        elif "left" in news:
            self._left[str(news["left"])] = news["trained"]
        elif "pass_length" in news:
            pass_, elements = news["pass_length"]
            self._pass_lengths[str(pass_)] = elements
        elif "epoch" in news:
            self._counts[news["epoch"][0]] = news["epoch"]
        elif "complete" in news:
            self._complete = True
        elif "failed" in news:
            self._build_failed = True
            self._gave_up(f"feed {self._name!r}: {news['failed']}")
        elif "statistics" in news:
            self._statistics = bytes.fromhex(news["statistics"])

    def _note_death(self, progress: Progress) -> None:
        # A producer that only repeats what one before it produced gets somewhere too, if the ranks do.
        come, furthest = progress.read(), progress.produced
        if any(now > before for now, before in zip(come, self._come, strict=True)):
            self._come = come
            del self._deaths[:-1]
        how = self._deaths[-1]
        where = f"after element {furthest[1]} of pass {furthest[0]}" if furthest[0] >= 0 else "before the first element"
        if len(self._deaths) >= _MAX_DEATHS:
            lines = "".join(f"\n  {line}" for line in self._last_lines)
            self._give_up(
                f"the producer of feed {self._name!r} died {_MAX_DEATHS} times {where} ({', '.join(self._deaths)})"
                f"{', and is given up. Its last output:' + lines if lines else ', and is given up.'}"
            )
        else:
            _LOG.warning("the producer of feed %r died %s (%s); it is restarted", self._name, where, how)

    def _give_up(self, message: str) -> None:
        with self._news:
            if self._failure is None:
                self._failure = message
            self._news.notify_all()

    def _relay(self, pipe: IO[bytes], stream: str) -> None:
        """Passes the child's output on, line by line, marked as the producer's."""
        pending = b""
        with pipe:
            while True:
                piece = os.read(pipe.fileno(), 1 << 16)
                *lines, pending = (pending + piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")).split(b"\n")
                if not piece and pending:
                    lines.append(pending)
                for line in lines:
                    text = line.decode(errors="replace")
                    if stream == "stderr":
                        self._last_lines.append(text)
                    # If the rank's own output is gone, the child must not stall over it.
                    with contextlib.suppress(OSError, ValueError, AttributeError):
                        print(f"[producer {self._name}] {text}", file=getattr(sys, stream), flush=True)
                if not piece:
                    return


def how_it_ended(code: int) -> str:
    """Returns what an exit code says, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}" + (", perhaps for lack of memory" if name == "SIGKILL" else "")


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _close_quietly(pipe: Any) -> None:
    with contextlib.suppress(OSError):
        pipe.close()
