"""Round robin over real ranks: which element reaches which rank in which step, and how the script ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from horovod_job import Job

pytestmark = pytest.mark.horovod

ELEMENTS = 23
RANKS = (pytest.param(1, marks=pytest.mark.once("keras2")), 2, pytest.param(3, marks=pytest.mark.once("keras2")))


class Streams:
    """The jobs of scripts/stream.py, each run at first use."""

    def __init__(self, start_job: Callable[..., Job]):
        self._start_job = start_job
        self._jobs: dict[int, Job] = {}

    def __getitem__(self, ranks: int) -> Job:
        if ranks not in self._jobs:
            self._jobs[ranks] = self._start_job("stream.py", ranks, plain=True)
            # A script that ends with live iterators ends with exit code 0.
            self._jobs[ranks].succeed()
        return self._jobs[ranks]


@pytest.fixture(scope="module")
def streams(start_job: Callable[..., Job]) -> Streams:
    return Streams(start_job)


def of_rank(rank: int, ranks: int) -> list[int]:
    return [step * ranks + rank for step in range(ELEMENTS // ranks)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("epoch", [0, 1])
def test_rank_r_gets_element_sN_plus_r_in_step_s(streams: Streams, ranks: int, epoch: int) -> None:
    reports = streams[ranks].by_rank(f"ordered.{epoch}", ranks)
    assert [report["elements"] for report in reports] == [of_rank(rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", RANKS)
def test_chosen_rank_runs_the_producer(streams: Streams, ranks: int) -> None:
    reports = streams[ranks].by_rank("producer", ranks)
    assert [report["pid"] is not None for report in reports] == [False] * (ranks - 1) + [True]


@pytest.mark.parametrize("ranks", RANKS)
def test_dropped_elements_are_counted(streams: Streams, ranks: int) -> None:
    (report,) = streams[ranks].reports("statistics")
    assert report["rank"] == ranks - 1
    steps = ELEMENTS // ranks
    expected = {
        "elements": ELEMENTS,
        "steps": steps,
        "dropped": ELEMENTS % ranks,
        "complete": True,
        "trained": {str(rank): steps for rank in range(ranks)},
    }
    assert report["epochs"][:2] == [{"epoch": epoch, **expected} for epoch in range(2)]


@pytest.mark.parametrize("ranks", RANKS)
def test_shuffled_elements_come_in_the_producers_order(streams: Streams, ranks: int) -> None:
    orders = []
    for epoch in range(2):
        reports = streams[ranks].by_rank(f"shuffled.{epoch}", ranks)
        for rank, report in enumerate(reports):
            assert [index for index, _ in report["elements"]] == of_rank(rank, ranks)
        values = dict(pair for report in reports for pair in report["elements"])
        orders.append([values[index] for index in sorted(values)])
        assert len(set(orders[-1])) == ELEMENTS - ELEMENTS % ranks
    assert orders[0] != orders[1]


@pytest.mark.once("keras2")
def test_order_does_not_depend_on_the_number_of_ranks(streams: Streams) -> None:
    for epoch in range(2):
        orders = [
            dict(pair for report in streams[ranks].by_rank(f"shuffled.{epoch}", ranks) for pair in report["elements"])
            for ranks in (1, 2, 3)
        ]
        for order in orders[1:]:
            assert order.items() <= orders[0].items()


@pytest.mark.parametrize("ranks", RANKS)
def test_two_feeds_at_once_with_producers_on_different_ranks(streams: Streams, ranks: int) -> None:
    reports = streams[ranks].by_rank("pairs", ranks)
    assert [r["elements"] for r in reports] == [[[e, e] for e in of_rank(rank, ranks)] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", RANKS)
def test_script_that_ends_with_live_iterators_exits(streams: Streams, ranks: int) -> None:
    # That it exits with code 0 and leaves nothing was checked when it ended.
    reports = streams[ranks].by_rank("alive", ranks)
    assert [report["element"] for report in reports] == list(range(ranks))
