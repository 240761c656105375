"""Shows that a training that is killed again and again ends as one that never was: with the same bits.

    make resume-check

Trains resume_training.py on two Horovod ranks three times, with the same seed:

  undisturbed      nothing happens
  producer killed  `kill -9` of the producer at random moments, also while it starts; its supervisor restarts it
  job killed       `kill -9` of all processes of the job at random moments; then the same command again

and compares the SHA-256 of all variables at the end of each rank (weights, BatchNorm statistics, optimizer, Dropout's
generators) and of the stream of images that each rank trained, bytes and order. The exit code is 0 only if they are
equal in all three.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator

from resume_settings import BATCH, EPOCHS, PREFETCH, RANKS, SAVE_FREQ, STEPS

TRAINING = pathlib.Path(__file__).resolve().with_name("resume_training.py")
BIN = pathlib.Path(sys.executable).parent
MARK = "KERASFEED_RESUME_CHECK"
TOTAL = EPOCHS * STEPS
# Steps that ranks can train from what they were sent before the producer died: from then on a new one is at work.
BUFFERED = 2 * PREFETCH + 2
SILENCE_SECONDS = 180.0
GONE_SECONDS = 15.0
POLL_SECONDS = 0.01


class Failure(Exception):
    """The check has failed; the message says how."""


# --- a job ------------------------------------------------------------------------------------------------------------


class Job:
    """One `horovodrun` of the training, and all that belongs to it.

    Each job has a mark of its own in its environment, by which its processes are found, whoever their parent is.
    """

    def __init__(self, folder: pathlib.Path, seed: int):
        self._mark = uuid.uuid4().hex
        self._records = folder / "trained-0"
        self._log = folder / "output"
        self._heard, self._heard_of = time.monotonic(), self.line_count()
        command = ["horovodrun", "--gloo", "-np", str(RANKS), sys.executable, str(TRAINING), str(folder), str(seed)]
        env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", MARK: self._mark}
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**env, "PYTHONFAULTHANDLER": "1"},
                start_new_session=True,
            )

    def line_count(self) -> int:
        """Steps that rank 0 has written down, those that were trained again counted again."""
        return self._records.read_bytes().count(b"\n") if self._records.exists() else 0

    def step(self) -> int:
        """The step that rank 0 trained last, from 0; -1 before the first."""
        lines = self._records.read_bytes().splitlines() if self._records.exists() else []
        return int(lines[-1].split()[0]) if lines else -1

    def processes(self, also: str = "") -> list[int]:
        """Returns the ids of the job's processes (with this variable in their environment, too)."""
        needles = {f"{MARK}={self._mark}".encode(), *([also.encode()] if also else [])}
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if needles <= set((entry / "environ").read_bytes().split(b"\0")):
                        found.append(int(entry.name))
        return found

    def producer(self) -> int | None:
        """Returns the process id of the producer, if one runs or starts."""
        return min(self.processes("KERASFEED_PRODUCER=1"), default=None)

    def running(self) -> bool:
        """Whether the job has not ended. Fails if it ended badly, or says nothing for too long."""
        code = self._process.poll()
        if code:
            raise Failure(f"the job has failed with exit code {code}:\n{self.tail()}")
        if code is None and self.line_count() != self._heard_of:
            self._heard, self._heard_of = time.monotonic(), self.line_count()
        if code is None and time.monotonic() - self._heard > SILENCE_SECONDS:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)  # each prints where its threads stand
            time.sleep(3.0)
            raise Failure(f"the job has trained no step for {SILENCE_SECONDS:.0f} s:\n{self.tail(400)}")
        return code is None

    def ended(self) -> None:
        """Waits for the job's end, and until nothing of it is left."""
        while self.running():
            time.sleep(POLL_SECONDS)
        deadline = time.monotonic() + GONE_SECONDS
        while left := self.processes():
            if time.monotonic() > deadline:
                raise Failure(f"the job has ended, but its processes {left} are left")
            time.sleep(POLL_SECONDS)

    def kill(self) -> int:
        """Kills all processes of the job, in no particular order; returns how many."""
        killed = set()
        while left := self.processes():
            killed.update(left)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
            time.sleep(POLL_SECONDS)
        self._process.wait()
        return len(killed)

    def tail(self, lines: int = 60) -> str:
        """Returns the last lines that the job has printed."""
        return "\n".join(f"    {line}" for line in self._log.read_text(errors="replace").splitlines()[-lines:])


# --- what a run ends with ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run ends with: digests by what they are of, those of rank 0 first."""

    digests: dict[str, str]
    seconds: float
    repeated: int


def outcome_of(folder: pathlib.Path, seconds: float) -> Outcome:
    digests, repeated = {}, 0
    for rank in range(RANKS):
        final = json.loads((folder / f"final-{rank}.json").read_text())
        stream, again = stream_of(folder / f"trained-{rank}", rank)
        for name, digest in {**final["variables"], "stream": stream}.items():
            digests[f"rank {rank} {name}"] = digest
        repeated += again
    return Outcome(digests, seconds, repeated)


def stream_of(records: pathlib.Path, rank: int) -> tuple[str, int]:
    """Puts the stream that a rank trained together; returns its SHA-256 and how many steps were trained again.

    A step behind the last backup is trained again after a restart: on the same images, or the check has failed.
    """
    steps: dict[int, str] = {}
    again = 0
    for line in records.read_text().splitlines():
        number, trained = line.split(" ", 1)
        step = int(number)
        if step in steps:
            again += 1
            if steps[step] != trained:
                raise Failure(
                    f"rank {rank}, step {step}: trained again on other data:\n"
                    f"    before: {steps[step]}\n    again:  {trained}"
                )
        steps[step] = trained
    if sorted(steps) != list(range(TOTAL)):
        missing, added = sorted(set(range(TOTAL)) - set(steps)), sorted(set(steps) - set(range(TOTAL)))
        raise Failure(f"rank {rank}: expected steps 0 to {TOTAL - 1}. Missing: {missing}. Too many: {added}")
    stream = "".join(f"{step} {steps[step]}\n" for step in range(TOTAL))
    return hashlib.sha256(stream.encode()).hexdigest(), again


# --- the three runs ---------------------------------------------------------------------------------------------------


def undisturbed(folder: pathlib.Path, seed: int) -> None:
    Job(folder, seed).ended()


def producer_killed(folder: pathlib.Path, seed: int, kills: int) -> None:
    """Kills the producer at random moments: in training, or (one in four) when the next one has just been started.

    A feed gives a producer up after three deaths without progress: between two kills at the most there is none.
    """
    chance = random.Random(f"{seed} producer")
    moments = random_steps(chance, kills, apart=BUFFERED)
    job, began, last, early = Job(folder, seed), time.monotonic(), -1, False
    with killed_at_last(job):
        for number, moment in enumerate(moments):
            early = number > 0 and not early and chance.random() < 0.25
            # A producer takes some 1.5 s to start; then training goes on, at full speed.
            delay = chance.uniform(0.0, 1.5) if early else chance.uniform(0.0, 0.15)
            if not early:
                wait_for_step(job, max(moment, last + BUFFERED))
            time.sleep(delay)
            while (producer := job.producer()) is None:
                if not job.running():
                    raise Failure(f"the job ended before kill {number + 1} of {kills}:\n{job.tail()}")
                time.sleep(POLL_SECONDS)
            os.kill(producer, signal.SIGKILL)
            last = job.step()
            say_kill(number, kills, began, last, f"producer {producer}" + (", just restarted" if early else ""))
        job.ended()


def job_killed(folder: pathlib.Path, seed: int, restarts: int) -> None:
    """Kills the whole job at random moments and starts it again: in training, or (one in four) while it starts."""
    chance = random.Random(f"{seed} job")
    began = time.monotonic()
    for number, moment in enumerate(random_steps(chance, restarts)):
        job = Job(folder, seed)
        with killed_at_last(job):
            starting = chance.random() < 0.25
            if not starting:
                wait_for_step(job, moment, new=True)
            time.sleep(chance.uniform(0.0, 12.0) if starting else chance.uniform(0.0, 0.3))
            if not job.running():
                raise Failure(f"the job ended before kill {number + 1} of {restarts}")
            count, step = job.kill(), job.step()
            say_kill(number, restarts, began, step, f"{count} processes" + (", while it started" if starting else ""))
    job = Job(folder, seed)
    with killed_at_last(job):
        job.ended()


def random_steps(chance: random.Random, count: int, apart: int = 0) -> list[int]:
    """Returns steps of the training, in order, so far from each other, and not at its very end."""
    free = int(0.85 * TOTAL) - apart * count
    if free < 1:
        raise Failure(f"{count} kills are too many for a training of {TOTAL} steps")
    return [step + apart * i for i, step in enumerate(sorted(chance.randrange(free) for _ in range(count)))]


def wait_for_step(job: Job, step: int, new: bool = False) -> None:
    """Waits until rank 0 trains this step (`new`: or, if it is behind it already, any step)."""
    count = job.line_count()
    while job.step() < step or (new and job.line_count() == count):
        if not job.running():
            raise Failure(f"the job ended at step {job.step()}, before a kill at step {step}:\n{job.tail()}")
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def killed_at_last(job: Job) -> Iterator[None]:
    try:
        yield
    finally:
        job.kill()


def say_kill(number: int, of: int, began: float, step: int, what: str) -> None:
    where = f"epoch {step // STEPS}, step {step % STEPS}" if step >= 0 else "before the first step"
    print(f"  kill {number + 1:2} of {of}: after {time.monotonic() - began:6.2f} s, {where:21} ({what})", flush=True)


# --- the check --------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills a training again and again, and compares how it ends.")
    parser.add_argument("--seed", type=int, help="chooses the moments and all else (default: a new one)")
    parser.add_argument("--kills", type=int, default=20, help="how often the producer is killed (default: 20)")
    parser.add_argument("--restarts", type=int, default=10, help="how often the job is killed (default: 10)")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(10**6)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("tensorflow", "keras", "horovod"))
    print(
        f"resume-check: {versions}, {RANKS} ranks, seed {seed}: {EPOCHS} epochs of {STEPS} steps, "
        f"{BATCH} images for each rank in a step, a backup every {SAVE_FREQ} steps",
        flush=True,
    )
    runs = {
        "undisturbed": lambda folder: undisturbed(folder, seed),
        "producer killed": lambda folder: producer_killed(folder, seed, args.kills),
        "job killed": lambda folder: job_killed(folder, seed, args.restarts),
    }
    base = pathlib.Path(tempfile.mkdtemp(prefix="kerasfeed-resume-check-"))
    outcomes: dict[str, Outcome] = {}
    try:
        for name, run in runs.items():
            print(f"{name}:", flush=True)
            folder = base / name.replace(" ", "-")
            folder.mkdir()
            began = time.monotonic()
            run(folder)
            outcomes[name] = outcome = outcome_of(folder, time.monotonic() - began)
            print(f"  {outcome.seconds:.0f} s, {outcome.repeated} steps trained again, summed over the ranks")
            for what, digest in outcome.digests.items():
                print(f"  {what:19} {digest}", flush=True)
    except Failure as failure:
        print(f"resume-check: FAILED with seed {seed}, in the run {name!r}: {failure}", file=sys.stderr)
        print(f"resume-check: what the runs wrote is in {base}", file=sys.stderr)
        return 1
    reference = outcomes["undisturbed"].digests
    differing = [
        f"  {what}: {name} ended with {digest}, undisturbed with {reference[what]}"
        for name, outcome in outcomes.items()
        for what, digest in outcome.digests.items()
        if digest != reference[what]
    ]
    if differing:
        print(f"resume-check: FAILED with seed {seed}:", *differing, sep="\n", file=sys.stderr)
        print(f"resume-check: what the runs wrote is in {base}", file=sys.stderr)
        return 1
    shutil.rmtree(base, ignore_errors=True)
    print(
        f"resume-check: passed with seed {seed}: {args.kills} kills of the producer and {args.restarts} of the job: "
        f"all {len(reference)} digests equal in the {len(outcomes)} runs, "
        f"{sum(outcome.seconds for outcome in outcomes.values()):.0f} s in all"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
