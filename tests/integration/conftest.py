"""Settings and fixtures of the integration tests: feeders that are closed, and proof that nothing outlives a test."""

from __future__ import annotations

import os
import uuid

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
# Whatever a test starts inherits this mark, so that it is found even after its parent is gone.
os.environ["KERASFEED_TEST_RUN"] = uuid.uuid4().hex

import gc
import threading
from collections.abc import Callable, Iterator

import helpers
import psutil
import pytest

import kerasfeed
from kerasfeed import session as session_lib

_SPARE_FDS = 12


def _threads() -> set[str]:
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("kerasfeed")}
    return names - {"kerasfeed-interrupt"}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Ends the feeds of a test, and asserts that no process, thread or file descriptor of theirs is left."""
    gc.collect()
    sessions = set(session_lib._open_sessions)
    processes, threads, fds = helpers.processes_of_this_run(), _threads(), psutil.Process().num_fds()
    yield
    gc.collect()
    helpers.end_sessions([session for session in session_lib._open_sessions if session not in sessions])
    helpers.wait_until(
        lambda: not helpers.processes_of_this_run() - processes,
        what=lambda: f"processes to end: {helpers.describe(helpers.processes_of_this_run() - processes)}",
    )
    helpers.wait_until(lambda: _threads() <= threads, what=lambda: f"threads to end: {_threads() - threads}")
    helpers.wait_until(
        lambda: gc.collect() >= 0 and psutil.Process().num_fds() <= fds + _SPARE_FDS,
        what=lambda: f"descriptors to be closed: {psutil.Process().num_fds()} now, {fds} before",
    )


@pytest.fixture
def make_feeder() -> Iterator[Callable[..., kerasfeed.DataFeeder]]:
    """Returns `DataFeeder`, but what it builds is kept until the test is over."""
    built = []

    def make(dataset: object, **options: object) -> kerasfeed.DataFeeder:
        built.append(kerasfeed.DataFeeder(dataset, **options))
        return built[-1]

    yield make
    helpers.end_sessions([feeder.session for feeder in built])


@pytest.fixture
def make_ranks(make_feeder, monkeypatch, tmp_path) -> Callable[..., list[kerasfeed.DataFeeder]]:
    """Returns a function that builds one feed's feeders of all ranks; one thread each is to consume them."""
    monkeypatch.setenv("KERASFEED_TOKEN", "the token of the integration tests")

    def make(size: int, dataset: object, per_rank: list[dict] | None = None, **options: object):
        name = options.get("name", "train")
        ordinal = session_lib._ordinals.get(name, 0)
        feeders = []
        for rank in range(size):
            # Each process counts its feeders; the ranks of one feed have the same count.
            session_lib._ordinals[name] = ordinal
            topology = kerasfeed.Topology(rank, size, meeting_dir=str(tmp_path / "meeting"))
            own = per_rank[rank] if per_rank else {}
            feeders.append(make_feeder(dataset, topology=topology, **{**options, **own}))
        return feeders

    return make
