"""What integration tests share: waiting, threads as ranks, scripts as processes, and a model that notes what it trains.

Functions of these modules travel to the producer by value (`by_value`), so that it need not import tests and Keras: a
`dataset_fn` is to use `tensorflow` and the standard library alone.
"""

from __future__ import annotations

import os

if "KERASFEED_PRODUCER" in os.environ:
    # A producer looks for source code in the modules of functions that came by value. Those of the tests, with all that
    # they import, would take longer than the rest of its start.
    raise ImportError("tests are no business of a producer")

import dataclasses
import faulthandler
import pathlib
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
import psutil
import tensorflow as tf
from tensorflow import keras

KERAS3 = hasattr(keras, "ops")
RUN_MARK = "KERASFEED_TEST_RUN"


def by_value(module_name: str) -> None:
    """Lets the functions of a module travel by value, as those of a user's script do."""
    cloudpickle.register_pickle_by_value(sys.modules[module_name])


by_value(__name__)


# ---- Waiting ----


def wait_until(
    condition: Callable[[], Any], timeout: float = 20.0, what: Callable[[], str] | str = "a condition"
) -> Any:
    """Returns the condition's value once it is true; fails with `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout:g} s in vain for {what() if callable(what) else what}")
        time.sleep(0.02)
    return value


@dataclasses.dataclass
class Outcome:
    """What became of a call in a thread."""

    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0

    def result(self) -> Any:
        """Returns the call's value, or raises what it raised."""
        if self.error is not None:
            raise self.error
        return self.value


def together(*calls: Callable[[], Any], timeout: float = 60.0) -> list[Outcome]:
    """Runs the calls in a thread each, and returns what became of them; fails with all stacks if one does not end."""
    outcomes = [Outcome() for _ in calls]

    def run(call: Callable[[], Any], outcome: Outcome) -> None:
        began = time.monotonic()
        try:
            outcome.value = call()
        except BaseException as error:
            outcome.error = error
        outcome.seconds = time.monotonic() - began

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in zip(calls, outcomes, strict=True)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hanging = [index for index, thread in enumerate(threads) if thread.is_alive()]
    if hanging:
        faulthandler.dump_traceback(all_threads=True)
        raise AssertionError(f"calls {hanging} of {len(calls)} are not over after {timeout:g} s")
    return outcomes


# ---- Processes ----


def processes_of_this_run() -> set[int]:
    """Returns the ids of all processes that this test run started, and that still are there, orphans included."""
    mark = os.environ[RUN_MARK]
    found = {child.pid for child in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(RUN_MARK) == mark:
                found.add(process.pid)
        except psutil.Error:
            pass
    return found


def describe(pids: Iterable[int]) -> str:
    """Returns what these processes run."""
    lines = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            lines.append(f"{pid} ({process.status()}): {' '.join(process.cmdline())[:200]}")
        except psutil.Error:
            lines.append(f"{pid}: gone meanwhile")
    return "; ".join(lines)


class Script:
    """A Python script that runs as a process and session of its own.

    Args:
        folder: Where the script is written, and its current folder.
        source: Its text.
        arguments: Its arguments.
        env: Variables to set.
    """

    def __init__(self, folder: pathlib.Path, source: str, *arguments: object, env: dict[str, str] | None = None):
        path = folder / "script.py"
        path.write_text(textwrap.dedent(source))
        self.output = folder / f"output-{'-'.join(map(str, arguments))[:40].replace('/', '_')}.txt"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(path), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                start_new_session=True,
                # A test run that a shell put into the background ignores SIGINT, and hands that on.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def text(self) -> str:
        """What it has printed so far, errors included."""
        return self.output.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 60.0) -> None:
        """Waits until it has printed this."""
        wait_until(
            lambda: text in self.text or self.process.poll() is not None, timeout, lambda: f"{text!r} in: {self.text}"
        )
        assert text in self.text, f"the script ended with {self.process.poll()} without {text!r}: {self.text}"

    def wait(self, timeout: float = 60.0) -> int:
        """Waits for its end; returns its exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the script is not over after {timeout:g} s: {self.text}") from None


def free_port() -> int:
    """Returns a port on which nobody listens, outside the range of outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def is_gone(pid: int) -> bool:
    """Whether this process has ended (a zombie has)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def end_sessions(sessions: Iterable[Any]) -> None:
    """Lets all these ranks leave their feeds, and waits until the producers have ended."""
    sessions = list(sessions)
    for session in sessions:
        session.close()
    for session in sessions:
        if session._supervisor is not None:
            session._supervisor.end()


# ---- Elements ----


def collect(dataset: Iterable[Any], got: list[int]) -> None:
    """Appends the first number of each element, so that those before an exception are there, too."""
    for value in dataset:
        got.append(int(tf.reshape(tf.nest.flatten(value)[0], [-1])[0]))


def numbers(dataset: Iterable[Any]) -> list[int]:
    """Returns all elements of a dataset of scalars."""
    return [int(value) for value in dataset]


def id_batches(count: int, rows: int = 2, **more: Any) -> Callable[[], tf.data.Dataset]:
    """Returns a `dataset_fn` whose element i is (x, y), `rows` times the number i and what a model is to make of it."""

    def dataset_fn() -> tf.data.Dataset:
        return tf.data.Dataset.range(count).map(
            lambda i: (tf.fill([rows, 1], tf.cast(i, tf.float32)), tf.zeros([rows, 1]))
        )

    return dataset_fn


def lines_of(path: pathlib.Path) -> list[str]:
    """Returns a file's lines; none if it is not there."""
    return path.read_text().splitlines() if path.exists() else []


# ---- Models ----


class Recorder:
    """Notes numbers inside compiled functions, in order."""

    def __init__(self, capacity: int = 4096):
        self._ids = tf.Variable(tf.zeros([capacity], tf.int64), trainable=False)
        self._count = tf.Variable(0, trainable=False)

    def note(self, value: Any) -> None:
        """Adds a number. Nothing is noted where there is none, as at the end of an iterator."""
        with tf.control_dependencies([value]):
            self._ids.scatter_nd_update([[self._count]], [tf.cast(value, tf.int64)])
            self._count.assign_add(1)

    @property
    def count(self) -> int:
        """How many numbers were noted."""
        return int(self._count.numpy())

    def take(self) -> list[int]:
        """Returns what was noted, and forgets it."""
        count = self.count
        self._count.assign(0)
        return [int(value) for value in self._ids.numpy()[:count]]


class Recording(keras.Sequential):
    """A tiny model that notes the first number of each batch that it trains, evaluates or predicts."""

    def __init__(self) -> None:
        super().__init__([keras.layers.Input([1]), keras.layers.Dense(1)])
        self.notes = _Notes()

    def train_step(self, data: Any) -> Any:
        self.notes.trained.note(data[0][0, 0])
        return super().train_step(data)

    def test_step(self, data: Any) -> Any:
        self.notes.tested.note(data[0][0, 0])
        return super().test_step(data)

    def predict_step(self, data: Any) -> Any:
        x = data[0] if isinstance(data, tuple) else data
        self.notes.predicted.note(x[0, 0])
        return super().predict_step(data)


class _Notes:
    # Beside the model, which would track the variables as its own.
    def __init__(self) -> None:
        self.trained, self.tested, self.predicted = Recorder(), Recorder(), Recorder()


def make_model(**compile_options: Any) -> Recording:
    """Returns a compiled model that notes what it trains."""
    model = Recording()
    options = {"optimizer": keras.optimizers.SGD(1e-6), "loss": "mse", "jit_compile": False, **compile_options}
    model.compile(**options)
    return model


class StopAfter(keras.callbacks.Callback):
    """Stops `fit` after so many batches, inside an epoch."""

    def __init__(self, batches: int):
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            self.model.stop_training = True


class EpochIds(keras.callbacks.Callback):
    """Notes what a `Recording` model trained, epoch by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[list[int]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(self.model.notes.trained.take())
