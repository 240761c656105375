"""`model.fit` on two ranks with Horovod's own callbacks: what was trained, counted in the training step itself."""

from __future__ import annotations

import collections
from collections.abc import Callable

import pytest
from horovod_job import Job

pytestmark = pytest.mark.horovod

RANKS = 2
ELEMENTS = 41
STEPS = ELEMENTS // RANKS


@pytest.fixture(scope="module")
def training(start_job: Callable[..., Job]) -> Job:
    return start_job("training.py", RANKS).succeed()


def in_turn(epoch: list[list[int]]) -> list[int]:
    """Returns what all ranks have trained in one epoch, step by step."""
    assert len({len(of_rank) for of_rank in epoch}) == 1, f"ranks trained different numbers of steps: {epoch}"
    return [element for step in zip(*epoch, strict=True) for element in step]


@pytest.mark.parametrize(("fit", "epochs"), [(0, 3), (1, 2)])
def test_each_element_is_trained_once_per_epoch_over_all_ranks(training: Job, fit: int, epochs: int) -> None:
    reports = training.by_rank(f"fit.{fit}", RANKS)
    assert [len(report["epochs"]) for report in reports] == [epochs] * RANKS
    orders = []
    for epoch in zip(*(report["epochs"] for report in reports), strict=True):
        trained = in_turn(list(epoch))
        assert len(trained) == RANKS * STEPS
        assert max(collections.Counter(trained).values()) == 1
        orders.append(tuple(trained))
    assert len(set(orders)) == epochs, "every epoch has the same order"


@pytest.mark.parametrize("check", ["fit.0", "fit.1", "stopped.False", "stopped.True", "steps_per_epoch"])
def test_weights_are_equal_on_all_ranks_at_the_end(training: Job, check: str) -> None:
    reports = training.by_rank(check, RANKS)
    assert len({report["weights"] for report in reports}) == 1


@pytest.mark.parametrize(("fit", "epochs"), [(0, 3), (1, 2)])
def test_validation_feeder_is_evaluated_in_every_epoch(training: Job, fit: int, epochs: int) -> None:
    for report in training.by_rank(f"fit.{fit}", RANKS):
        assert report["validated"] == epochs


def test_epochs_are_counted_over_both_fits(training: Job) -> None:
    report, _ = training.by_rank("fit.statistics", RANKS)
    expected = {"elements": ELEMENTS, "steps": STEPS, "dropped": 1, "complete": True}
    complete = {**expected, "trained": {"0": STEPS, "1": STEPS}}
    assert report["epochs"][:5] == [{"epoch": epoch, **complete} for epoch in range(5)]


@pytest.mark.parametrize("keep", [False, True])
def test_next_fit_goes_on_where_a_stop_inside_an_epoch_left_off(training: Job, keep: bool) -> None:
    reports = training.by_rank(f"stopped.{keep}", RANKS)
    whole = list(range(RANKS * STEPS))
    # runs[fit][rank][epoch]: what was trained.
    runs = zip(*(report["runs"] for report in reports), strict=True)
    first, second = ([in_turn(list(epoch)) for epoch in zip(*of_ranks, strict=True)] for of_ranks in runs)
    assert [len(epoch) for epoch in first] == [RANKS * STEPS, RANKS * 7]
    assert first == [whole, whole[: RANKS * 7]]
    assert second == [whole[RANKS * 7 :], whole]


def test_steps_per_epoch_in_fit_takes_the_stream_on_over_passes(training: Job) -> None:
    reports = training.by_rank("steps_per_epoch", RANKS)
    epochs = [in_turn(list(epoch)) for epoch in zip(*(report["epochs"] for report in reports), strict=True)]
    assert [len(epoch) for epoch in epochs] == [RANKS * 7] * 4
    trained = [element for epoch in epochs for element in epoch]
    assert trained == [place % ELEMENTS for place in range(RANKS * 7 * 4)]


@pytest.fixture(scope="module")
def flow(start_job: Callable[..., Job]) -> Job:
    return start_job("flow.py", RANKS).succeed()


@pytest.mark.parametrize("check", ["varying.fit", "varying.loop"])
def test_epochs_of_varying_length_have_equal_steps_on_all_ranks(flow: Job, check: str) -> None:
    reports = flow.by_rank(check, RANKS)
    epochs = [in_turn(list(epoch)) for epoch in zip(*(report["epochs"] for report in reports), strict=True)]
    assert all(epoch == sorted(set(epoch)) for epoch in epochs)
    assert len({len(epoch) for epoch in epochs}) > 1, "the epochs do not vary: the test proves nothing"


def test_nothing_is_left_out_of_epochs_of_varying_length(flow: Job) -> None:
    in_fit, in_loop = flow.by_rank("varying.fit", RANKS), flow.by_rank("varying.loop", RANKS)
    statistics = flow.by_rank("varying.statistics", RANKS)[0]["epochs"]
    for fit, loop in zip(in_fit, in_loop, strict=True):
        steps = [len(epoch) for epoch in fit["epochs"] + loop["epochs"]]
        assert steps == [epoch["steps"] for epoch in statistics[: len(steps)]]
    for epoch in statistics[: len(steps)]:
        assert epoch["elements"] == epoch["steps"] * RANKS + epoch["dropped"]


@pytest.mark.parametrize("dataset", ["shuffle", "two pulls"])
def test_sixteen_steps_per_call_with_a_small_window_do_not_hang(flow: Job, dataset: str) -> None:
    reports = flow.by_rank(f"flow.{dataset}", RANKS)
    for rank, report in enumerate(reports):
        assert [sorted(epoch) for epoch in report["epochs"]] == [list(range(rank, 140, RANKS))] * 2
