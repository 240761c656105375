"""The quiet check: whether the pipeline of a feed that runs can be replayed, found out in its first epoch.

The callbacks that save positions have it begun. A thread of the producer's rank waits until training is well under way,
has one process of the lowest priority build the pipeline again and read its first elements, and compares their digests
with those that the producer has noted. What comes of it is a line in the log; training hears nothing of it.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import tempfile
import threading
import time

from kerasfeed.options import FeedOptions
from kerasfeed.producer.launch import TrialOptions
from kerasfeed.producer.supervisor import Supervisor
from kerasfeed.replay_check import Outcome, Try, compare

_LOG = logging.getLogger("kerasfeed")
# A job that is over by then is not worth a second process.
_DELAY_SECONDS = 30.0
_TRIAL_SECONDS = 300.0
_POLL_SECONDS = 1.0
_STOP_SECONDS = 5.0
# Less elements than these say little; the producer will soon have more.
_FEW = 10
# Feeds wait for each other: one process at a time is enough for a rank.
_turn = threading.Lock()


class QuietCheck:
    """Tries one feed's pipeline. It ends by itself, or with the producer, or by `stop`, whatever comes first.

    Args:
        supervisor: Keeps the producer, which began with the first element of all.
        spec: The element spec that the ranks know, as `spec.encode_spec` wrote it, in text.
        fingerprint: The fingerprint of the producer's graph.
    """

    def __init__(self, supervisor: Supervisor, spec: str, fingerprint: str):
        self._supervisor = supervisor
        self._producer = supervisor.pid
        self._known = Outcome(spec=spec, fingerprint=fingerprint)
        self._options = FeedOptions(**supervisor.launch.options)
        self._stopping = threading.Event()
        self._trying = threading.Lock()
        self._try: Try | None = None
        self._thread = threading.Thread(target=self._run, name=f"kerasfeed-check-{self._options.name}", daemon=True)

    def start(self) -> None:
        """Begins, in a thread of its own."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self._say_untried(str(error))

    def stop(self) -> None:
        """Ends the process, if it is there, and waits for the thread."""
        self._stopping.set()
        with self._trying:
            if self._try is not None:
                self._try.kill()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_STOP_SECONDS)

    # ---- The thread ----

    def _run(self) -> None:
        try:
            self._check()
        except Exception as error:  # whatever it is, training goes on
            self._say_untried(f"{type(error).__name__}: {error}")

    def _check(self) -> None:
        if self._stopping.wait(_DELAY_SECONDS):
            return
        while not _turn.acquire(timeout=_POLL_SECONDS):
            if not self._of_use():
                return
        try:
            while self._of_use():
                # In this order: a pass whose end is known has noted all of it.
                length = self._supervisor.pass_lengths.get("0")
                noted = [f"{digest:016x}" for digest in self._supervisor.first_digests()]
                if len(noted) >= _FEW or length is not None:
                    self._tell(noted, length, self._outcome(len(noted) + (length == len(noted))))
                    return
                self._stopping.wait(_POLL_SECONDS)
        finally:
            _turn.release()

    def _of_use(self) -> bool:
        # A producer that was started again replays in earnest, which says more.
        return not self._stopping.is_set() and self._supervisor.pid == self._producer

    def _outcome(self, elements: int) -> Outcome:
        """Produces so many elements again."""
        launch = self._supervisor.launch
        options = TrialOptions(
            elements=elements,
            epochs=1,
            deterministic=self._options.deterministic,
            full=self._options.verify == "full",
            read_caches=True,
        )
        launch = dataclasses.replace(launch, options=dataclasses.asdict(options), token=b"")
        until = time.monotonic() + _TRIAL_SECONDS
        scratch = tempfile.mkdtemp(prefix="kerasfeed-check-")
        try:
            with Try(launch.seed, scratch, quietly=True) as process:
                with self._trying:
                    if self._stopping.is_set():
                        return Outcome()
                    self._try = process
                try:
                    return process.run(launch, lambda: self._of_use() and time.monotonic() < until)
                finally:
                    with self._trying:
                        self._try = None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _tell(self, noted: list[str], length: int | None, again: Outcome) -> None:
        """Says what came of it.

        Args:
            noted: Digests of the first elements.
            length: How many elements the pass has, if its end was met.
            again: What became of the elements when they were produced again.
        """
        if not self._of_use():
            return
        found, whole = again.passes.get(0, []), again.read == 1 and not again.failure
        if not whole:
            noted = noted[: len(found)]
        first = dataclasses.replace(self._known, graph=again.graph, passes={0: noted})
        # That it failed is no proof: it may have been in the way of the pipeline that runs, or that one in its.
        report = compare(first, dataclasses.replace(again, failure="", failed_in=None), len(found))
        if not report:
            obstacles = "".join(f"\n  - {obstacle}" for obstacle in report.obstacles)
            _LOG.warning(
                "feed %r: this pipeline can't be relied on to be replayed (its first %d elements were compared), so "
                "that training that stops can't be relied on to be resumed exactly:%s\nWhat to do: "
                "kerasfeed.check(dataset_fn) says more. DataFeeder(deterministic=True) or stateless random ops "
                '(tf.random.stateless_*) help against races; DataFeeder(verify="warn") goes on with data that may '
                "differ; DataFeeder(check_replay=False) leaves this check out",
                self._options.name,
                len(found),
                obstacles,
            )
        elif whole or found:
            _LOG.info(
                "feed %r: this pipeline can be replayed, as far as was tried: its first %d elements came again as they "
                "were%s",
                self._options.name,
                len(found),
                "" if whole else f". More could not be tried: {again.failure}",
            )
        else:
            self._say_untried(again.failure)

    def _say_untried(self, why: str) -> None:
        _LOG.info("feed %r: it could not be tried whether this pipeline can be replayed: %s", self._options.name, why)
