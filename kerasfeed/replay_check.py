"""`check`: whether a pipeline can be replayed, found out before anyone needs it.

A `dataset_fn` goes to two processes that are as a producer is; digests of what it yields come back, and are compared
here. The caller's process builds nothing and is not seeded. `quiet_check.py` does the same for a feed that runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from kerasfeed.errors import ProducerError
from kerasfeed.feeder import prepare
from kerasfeed.options import MAX_SEED
from kerasfeed.producer.launch import QUIETLY, SCRATCH_VARIABLE, Launch, TrialOptions
from kerasfeed.producer.supervisor import environment, how_it_ended

_TICK_MS = 100


@dataclasses.dataclass(frozen=True)
class ReplayReport:
    """What `kerasfeed.check` found. It is true where the pipeline can be replayed, and prints as text.

    Attributes:
        replayable: Whether the pipeline yields the same again, as far as was tried and as its graph says.
        element: (pass, index) of the first element that was another one, was missing or raised when it was produced
            again; `None` if all came again as they were.
        obstacles: What stands in the way, in words; empty if nothing does.
        serializable: Whether an iterator over it can be saved with `tf.train.Checkpoint`. Replaying does not need it.
        unsaved: Why it can't be saved; empty if it can.
        notes: What to know besides: the conditions under which it can be replayed, and what coming back costs.
        compared: Elements that were compared, by pass.
    """

    replayable: bool
    element: tuple[int, int] | None
    obstacles: tuple[str, ...]
    serializable: bool
    unsaved: str
    notes: tuple[str, ...]
    compared: tuple[int, ...]

    def __bool__(self) -> bool:
        return self.replayable

    def __str__(self) -> str:
        passes = f"{len(self.compared)} passes" if len(self.compared) > 1 else "one pass"
        tried = f"{' + '.join(map(str, self.compared))} elements of {passes}"
        if self.replayable:
            lines = [f"This pipeline can be replayed: {tried} came again as they were."]
        else:
            lines = [f"This pipeline can't be relied on to be replayed ({tried} were compared):"]
            lines += [f"  - {obstacle}" for obstacle in self.obstacles]
        if self.serializable:
            lines.append("Its iterators can be saved.")
        else:
            lines.append(f"Its iterators can't be saved: {self.unsaved}")
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(lines)


def check(
    dataset_fn: Callable[..., tf.data.Dataset] | tf.data.Dataset,
    *,
    size: int = 1,
    seed: int = 0,
    elements: int = 1000,
    epochs: int = 2,
    deterministic: bool = False,
) -> ReplayReport:
    """Tries whether a pipeline can be replayed, and says what stands in the way if it can't.

    A feed gets back to where a backup stood, or where a producer was killed, by producing its elements again. So this
    builds the pipeline twice under one seed, in two processes as a producer is, and compares digests of what comes out.
    The second starts in the middle of the second pass, as a restored feed does, and goes back to the first pass at the
    end. What the graph says is told, too: a race between threads does not show in every trial.

    Example:

    ```python
    report = kerasfeed.check(dataset_fn)
    print(report)
    assert report, "training could not be resumed exactly"
    ```

    Args:
        dataset_fn: What `DataFeeder` is given. It runs in child processes only. Files of `cache(filename)` are written
            elsewhere meanwhile.
        size: Number of ranks: `num_replicas_in_sync` of the input context. Default 1.
        seed: Seed of both tries, from 0 to 2**31 - 1. Default 0.
        elements: How many elements of each pass are compared; a longer pass is cut off there. Default 1000.
        epochs: How many passes are compared. Default 2.
        deterministic: Whether both run with op determinism, as `DataFeeder(deterministic=True)` has it. Default
            `False`.

    Returns:
        A `ReplayReport`.

    Raises:
        TypeError: `dataset_fn` is neither a function nor a dataset or can't be sent to a process, or an argument has
            the wrong type.
        ValueError: An argument is out of range.
        ProducerError: The pipeline raised when it was built or read for the first time (the message holds the
            traceback), or its process died.
    """
    for name, value, low, high in (
        ("size", size, 1, None),
        ("seed", seed, 0, MAX_SEED),
        ("elements", elements, 1, None),
        ("epochs", epochs, 1, None),
    ):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"check: {name} must be an int. Received: {value!r}")
        if value < low or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ValueError(f"check: {name} must be {bounds}. Received: {value}")
    if not isinstance(deterministic, bool):
        raise TypeError(f"check: deterministic must be True or False. Received: {deterministic!r}")
    source = prepare(dataset_fn, "check: dataset_fn")()
    options = TrialOptions(elements=elements, epochs=epochs, deterministic=deterministic, full=True)

    def launch(restarted: bool, **more: Any) -> Launch:
        return Launch(
            options=dataclasses.asdict(dataclasses.replace(options, **more)),
            size=size,
            seed=seed,
            restarted=restarted,
            **source.for_launch(),
        )

    scratch = tempfile.mkdtemp(prefix="kerasfeed-check-")
    try:
        with contextlib.ExitStack() as children:
            # Both at once: most of their time goes into importing TensorFlow.
            tries = [children.enter_context(Try(seed, scratch)) for _ in range(2)]
            first = tries[0].run(launch(restarted=False, save=True))
            first.raise_failure()
            pass_ = min(1, epochs - 1)
            middle = [pass_, len(first.passes[pass_]) // 2]
            second = tries[1].run(launch(restarted=True, start=middle))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return compare(first, second, elements)


@dataclasses.dataclass
class Outcome:
    """What became of a try.

    Attributes:
        graph: The fields of `producer.graph.GraphWord`.
        spec: The element spec as text.
        fingerprint: The fingerprint of the graph.
        passes: Digests of the elements of each pass, as far as it was read.
        failed_in: The pass in which it raised, or `None`.
        failure: What was raised, with its traceback, or how the process died; empty if all went well.
        unsaved: Why its iterator can't be saved; empty if it can.
        read: How many passes were read, to the end or until they raised.
    """

    graph: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    spec: str = ""
    fingerprint: str = ""
    passes: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    failed_in: int | None = None
    failure: str = ""
    unsaved: str = ""
    read: int = 0

    def hear(self, news: Mapping[str, Any]) -> None:
        """Takes a line of the process's report."""
        if "graph" in news:
            self.graph, self.spec, self.fingerprint = news["graph"], news["spec"], news["fingerprint"]
        elif "element" in news:
            self.passes.setdefault(news["element"], []).append(news["digest"])
        elif "read" in news:
            self.read += 1
            self.passes.setdefault(news["read"], [])
            if "raised" in news:
                self.failed_in, self.failure = news["read"], news["raised"]
        elif "raised" in news:
            self.failure = f"dataset_fn raised before the first element:\n{news['raised']}"
        elif "unsaved" in news:
            self.unsaved = news["unsaved"]

    def raise_failure(self) -> None:
        """Raises `ProducerError` if this try came to no end."""
        if self.failed_in is not None:
            where = f"element {len(self.passes[self.failed_in])} of pass {self.failed_in}"
            raise ProducerError(f"check: {where} raised:\n{self.failure}")
        if self.failure:
            raise ProducerError(f"check: {self.failure}")


def compare(first: Outcome, second: Outcome, elements: int) -> ReplayReport:
    """Returns what two tries say together.

    Args:
        first: The one that read the passes in order, without a failure.
        second: The one that began inside one.
        elements: Where passes were cut off.
    """
    obstacles = list(first.graph.get("obstacles", ()))
    if first.spec != second.spec and second.spec:
        obstacles.append("dataset_fn builds datasets with another element_spec each time")
    elif first.fingerprint != second.fingerprint and second.fingerprint:
        obstacles.append(
            "dataset_fn builds another graph each time, under the same seed: a state or a backup of the one is refused "
            "by the other"
        )
    element, seen = _first_difference(first, second)
    if seen:
        obstacles.append(seen)
        suspects = list(first.graph.get("suspects", ()))
        if suspects:
            obstacles += [f"a possible cause: {suspect}" for suspect in suspects]
        elif not first.graph.get("obstacles"):
            obstacles.append(
                "its graph does not explain it: perhaps dataset_fn itself draws numbers that the feed does not seed, "
                "looks at the time, or keeps state; or the files changed"
            )
        cut = element is not None and element[0] > 0 and len(first.passes[element[0] - 1]) == elements
        if element is not None and cut and first.graph.get("may_keep_state"):
            obstacles.append(
                f"or the cut of the trial: pass {element[0] - 1} was left after {elements} elements, when its threads "
                f"may have been ahead. Check with elements as many as a pass has to be sure"
            )
    return ReplayReport(
        replayable=not obstacles,
        element=element,
        obstacles=tuple(obstacles),
        serializable=not first.unsaved,
        unsaved=first.unsaved,
        notes=tuple(first.graph.get("notes", ())),
        compared=tuple(len(first.passes[pass_]) for pass_ in sorted(first.passes)),
    )


def _first_difference(first: Outcome, second: Outcome) -> tuple[tuple[int, int] | None, str]:
    """Returns where the second try was different, and in what; `None` and an empty text if it was not."""
    if second.failure and second.failed_in is None:
        return None, f"when it was tried again, {second.failure}"
    for pass_ in sorted(first.passes):
        was, now = first.passes[pass_], second.passes.get(pass_)
        if now is None:
            continue
        for index, (one, other) in enumerate(zip(was, now, strict=False)):
            if one != other:
                return (pass_, index), f"element {index} of pass {pass_} was another one when it was produced again"
        index = min(len(was), len(now))
        if second.failed_in == pass_:
            return (pass_, index), (
                f"element {index} of pass {pass_} raised when it was produced again:\n{second.failure}"
            )
        if len(was) != len(now):
            return (pass_, index), f"pass {pass_} had {len(was)} elements, and {len(now)} when it was produced again"
    return None, ""


class Try:
    """A process that tries a pipeline. It is there, with TensorFlow imported, before it is told which.

    Args:
        seed: The seed under which the pipeline will be built.
        scratch: Folder for temporary files.
        quietly: Whether it gives way to all other processes, and nobody sees its output.
    """

    def __init__(self, seed: int, scratch: str, quietly: bool = False):
        self._control, control_write = os.pipe()
        self._control_write = control_write
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "kerasfeed.producer.trial", *([QUIETLY] if quietly else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL if quietly else None,
                stderr=subprocess.DEVNULL if quietly else None,
                pass_fds=(control_write,),
                env={**environment(seed), SCRATCH_VARIABLE: scratch},
                start_new_session=True,
                bufsize=0,
            )
            self._pidfd = os.pidfd_open(self._child.pid)
        except BaseException:
            os.close(self._control)
            raise
        finally:
            os.close(control_write)

    def __enter__(self) -> Try:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        assert self._child.stdin is not None
        self._child.stdin.close()
        os.close(self._control)
        os.close(self._pidfd)

    def kill(self) -> None:
        """Ends the process, and with it a `run` in another thread."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def run(self, launch: Launch, wanted: Callable[[], bool] | None = None) -> Outcome:
        """Tries, and returns what became of it.

        Args:
            launch: What is tried, its `options` how. Parent and control pipe are filled in here.
            wanted: Asked again and again, if given, whether the outcome is still of use.
        """
        assert self._child.stdin is not None
        launch = dataclasses.replace(launch, parent=os.getpid(), control_fd=self._control_write)
        # It may die before it has read: what follows finds out.
        with contextlib.suppress(BrokenPipeError):
            launch.write_to(self._child.stdin)
        return self._follow(launch.options["epochs"], wanted)

    def _follow(self, epochs: int, wanted: Callable[[], bool] | None) -> Outcome:
        outcome, pending, ended, dead = Outcome(), b"", False, False
        os.set_blocking(self._control, False)
        news = select.poll()
        news.register(self._control, select.POLLIN)
        news.register(self._pidfd, select.POLLIN)
        while not dead:
            # Its death counts, not the end of the pipe alone, which processes that it forked may hold open.
            dead = any(fd == self._pidfd for fd, _ in news.poll(None if wanted is None else _TICK_MS))
            with contextlib.suppress(BlockingIOError):
                while not ended and (piece := os.read(self._control, 1 << 20)):
                    *lines, pending = (pending + piece).split(b"\n")
                    for line in map(json.loads, lines):
                        if "done" in line:
                            return outcome
                        outcome.hear(line)
                if not ended:
                    news.unregister(self._control)
                    ended = True
            if wanted is not None and not wanted():
                outcome.failure = "it took too long"
                return outcome
        how = how_it_ended(self._child.wait())
        if outcome.read == epochs:
            outcome.unsaved = f"the process that tried it died ({how})"
        else:
            outcome.failure = f"its process died in pass {outcome.read} ({how}); its output may say why"
        return outcome
