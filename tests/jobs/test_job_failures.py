"""Bad days on two ranks: each error is a clear message on every rank, at the same step, and nothing hangs or stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from horovod_job import Job, processes_of

pytestmark = pytest.mark.horovod

RANKS = 2
SECONDS = 45.0  # "within seconds", on a machine that may be busy; what would hang, hangs for longer


@pytest.fixture(scope="module")
def failures(start_job: Callable[..., Job]) -> Job:
    # The last error is caught by nobody.
    return start_job("failures.py", RANKS, "pipeline").fail(seconds=240)


@pytest.fixture(scope="module")
def deaths(start_job: Callable[..., Job]) -> Job:
    return start_job("failures.py", RANKS, "deaths").succeed()


def told_to_all(job: Job, check: str, error: str = "ProducerError") -> list[dict[str, Any]]:
    reports = job.by_rank(check, RANKS)
    for report in reports:
        assert error in report["kind"], report
    assert len({report["steps"] for report in reports}) == 1
    return reports


@pytest.mark.parametrize(
    ("check", "steps", "texts"),
    [
        ("missing file", 0, ["missing file", "/nowhere/missing.tfrecord", "NotFoundError", "Traceback"]),
        ("bad element", 18, ["bad element", "element 36", "record 36 is broken", "Traceback", "in check"]),
        ("raising", 0, ["raising", "dataset_fn", "LookupError: no such table: digits", "Traceback", "in raising"]),
    ],
)
def test_error_of_the_pipeline_is_told_to_every_rank_at_the_same_step(
    failures: Job, check: str, steps: int, texts: list[str]
) -> None:
    for report in told_to_all(failures, check):
        assert report["steps"] == steps
        assert report["seconds"] < SECONDS
        for text in texts:
            assert text in report["message"]


@pytest.mark.parametrize("check", ["missing file", "bad element", "raising"])
def test_error_of_the_pipeline_is_final(failures: Job, check: str) -> None:
    first = failures.by_rank(check, RANKS)
    for before, report in zip(first, told_to_all(failures, f"{check}, again"), strict=True):
        assert report["steps"] == before["steps"], "the second iterator got steps that the first one had"
        assert report["seconds"] < 10, "the error is known, but was not told at once"


def test_wrong_token_is_named_on_the_rank_that_has_it(failures: Job) -> None:
    _, report = failures.by_rank("wrong token", RANKS)
    assert "FeedError" in report["kind"]
    assert "KERASFEED_TOKEN" in report["message"]
    assert report["seconds"] < SECONDS


def test_wrong_token_of_one_rank_is_an_error_on_the_others_too(failures: Job) -> None:
    report, _ = failures.by_rank("wrong token", RANKS)
    assert "FeedError" in report["kind"]
    assert "rank 1" in report["message"]
    assert report["seconds"] < SECONDS


def test_rank_that_never_uses_the_feed_is_named(failures: Job) -> None:
    (report,) = failures.reports("absent rank")
    assert "RankError" in report["kind"]
    assert "rank 1 of 2 did not come within 5 s" in report["message"]
    assert report["seconds"] < SECONDS


def test_producer_rank_that_never_uses_the_feed_is_named(failures: Job) -> None:
    (report,) = failures.reports("absent producer")
    assert "RankError" in report["kind"]
    assert "rank 0 has not started the producer within 5 s" in report["message"]
    assert report["seconds"] < SECONDS


@pytest.mark.once("keras2")
def test_producer_that_is_killed_three_times_loses_nothing(deaths: Job) -> None:
    reports = deaths.by_rank("killed producer", RANKS)
    assert [report["kills"] for report in reports] == [3, 0]
    for rank, report in enumerate(reports):
        assert report["elements"] == list(range(rank, 400, RANKS))
    assert deaths.output.count("the producer of feed 'killed' died") == 3


@pytest.mark.once("keras2")
def test_producer_that_keeps_dying_is_given_up_on_every_rank(deaths: Job) -> None:
    for report in told_to_all(deaths, "dying producer"):
        assert "died 3 times" in report["message"]
        assert "SIGKILL" in report["message"]
        assert report["seconds"] < SECONDS


def test_error_in_fit_is_the_feeds_own_and_cleans_up(failures: Job) -> None:
    # Keras calls no hook after it. That nothing is left of the job was checked when it ended; until then the producer
    # lives for the ranks that are slower.
    for report in told_to_all(failures, "error in fit"):
        assert report["steps"] == 18
        assert report["error"] == "ProducerError"
        assert "a broken label" in report["message"]
    assert "kerasfeed.errors.ProducerError: feed 'fit'" in failures.output


@pytest.mark.once("keras2")
@pytest.mark.parametrize("victim", [0, 1])
def test_nothing_is_left_when_a_rank_is_killed(start_job: Callable[..., Job], victim: int) -> None:
    job = start_job("endless.py", RANKS)
    running = job.wait_for("running", RANKS)
    assert running[0]["producer"] in processes_of(job.mark)
    kill(running[victim]["pid"], job)
    job.fail(seconds=30)


@pytest.mark.once("keras2")
def test_interrupt_ends_all(start_job: Callable[..., Job]) -> None:
    job = start_job("endless.py", RANKS)
    job.wait_for("running", RANKS)
    kill(job.pid, job, signal.SIGINT)
    job.wait(seconds=30)


def kill(pid: int, job: Job, number: int = signal.SIGKILL) -> None:
    """Sends a signal to a process of this job."""
    assert pid in processes_of(job.mark)
    os.kill(pid, number)
