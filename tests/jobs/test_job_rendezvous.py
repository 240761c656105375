"""How the ranks of a job find the producer, what they say in the open, and what they say while they wait."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

import pytest
from horovod_job import Job

pytestmark = [pytest.mark.horovod, pytest.mark.once("keras2")]

RANKS = 2
ELEMENTS = [list(range(rank, 10, RANKS)) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def rendezvous(start_job: Callable[..., Job]) -> Job:
    return start_job("rendezvous.py", RANKS).succeed()


def test_launched_without_init_is_an_error_that_names_it(rendezvous: Job) -> None:
    for report in rendezvous.by_rank("uninitialised", RANKS):
        assert report["error"] == "RuntimeError"
        assert "hvd.init()" in report["message"]
        assert f"rank {report['rank']}" in report["message"]


@pytest.mark.parametrize("check", ["given token", "store"])
def test_ranks_find_the_producer_by_horovods_store(rendezvous: Job, check: str) -> None:
    assert [report["elements"] for report in rendezvous.by_rank(check, RANKS)] == ELEMENTS


def test_store_holds_an_address_and_a_serial_and_no_token(rendezvous: Job) -> None:
    reports = rendezvous.by_rank("stored", RANKS)
    assert len({report["token"] for report in reports}) == 1
    for report in reports:
        drawn = bytes.fromhex(report["token"])
        assert len(drawn) == 32
        for stored in report["stored"].values():
            value = json.loads(stored)
            assert sorted(value) == ["host", "port", "serial"]
            assert value["host"] == "127.0.0.1"
            assert value["serial"] not in drawn.hex()
            for token in (drawn, b"a token that was set for all ranks"):
                for secret in (token.hex(), base64.b64encode(token).decode(), token.decode("latin-1")):
                    assert secret not in stored


def test_producer_listens_on_loopback_only_where_all_ranks_share_a_host(rendezvous: Job) -> None:
    for report in rendezvous.by_rank("listens", RANKS):
        # The control plane, and the data socket of the native engine.
        assert {address.removeprefix("::ffff:") for address in report["addresses"]} == {"127.0.0.1"}


def test_without_a_store_the_ranks_meet_in_the_constructor(rendezvous: Job) -> None:
    for rank, report in enumerate(rendezvous.by_rank("broadcast", RANKS)):
        assert report["started"] == [True, True]
        assert report["elements"] == [ELEMENTS[rank]] * 2


def test_without_a_store_a_feed_starts_again(rendezvous: Job) -> None:
    for rank, report in enumerate(rendezvous.by_rank("broadcast again", RANKS)):
        assert report["elements"] == [ELEMENTS[rank]] * 2


@pytest.fixture(scope="module")
def waiting(start_job: Callable[..., Job]) -> Job:
    return start_job("waiting.py", RANKS).succeed()


@pytest.mark.parametrize(
    ("check", "waits_for"),
    [
        ("rank that comes late", "rank 1 to use this feed"),
        ("rank that trains slowly", "rank 1, which was sent"),
        ("pipeline that is slow", "the pipeline, at work on epoch 0, step 2, element 2 of 2"),
    ],
)
def test_wait_says_what_it_waits_for(waiting: Job, check: str, waits_for: str) -> None:
    (report,) = waiting.reports(check)
    assert report["messages"]
    for message in report["messages"]:
        assert f"feed '{check}': rank 0 has waited" in message
    assert waits_for in report["messages"][-1]
