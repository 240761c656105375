"""Horovod on Keras 3: two ranks end where one process ends that trains both ranks' batches as one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from horovod_job import Job

pytestmark = [pytest.mark.horovod, pytest.mark.once]

STEPS = 8


@pytest.fixture(scope="module")
def training(start_job: Callable[..., Job]) -> Job:
    return start_job("keras3_training.py", 2).succeed()


def by_hand(clip: float | None = None, momentum: float = 0.0, passes: int = 1) -> list[float]:
    """Returns the weights after training with the mean gradient of both ranks, by hand."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2 * STEPS, 4, 3)).astype(np.float32)
    y = x.sum(2, keepdims=True) + 1
    kernel, bias = np.full([3, 1], 0.5), np.zeros([1])
    moments = [np.zeros([3, 1]), np.zeros([1])]
    sums = [np.zeros([3, 1]), np.zeros([1])]
    for step in range(STEPS):
        for rank in range(2):
            xs, ys = x[2 * step + rank], y[2 * step + rank]
            error = 2 * (xs @ kernel + bias - ys) / len(xs)
            sums[0] += xs.T @ error / 2
            sums[1] += error.sum(0) / 2
        if (step + 1) % passes:
            continue
        gradients = [total / passes for total in sums]
        sums = [np.zeros([3, 1]), np.zeros([1])]
        if clip is not None:
            gradients = [g * min(1.0, clip / np.linalg.norm(g)) for g in gradients]
        moments = [momentum * m - 0.1 * g for m, g in zip(moments, gradients, strict=True)]
        kernel, bias = kernel + moments[0], bias + moments[1]
    return [*kernel.ravel(), *bias]


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ("averaged", by_hand(momentum=0.9)),
        ("clipped", by_hand(clip=0.5)),
        ("passes", by_hand(passes=2)),
    ],
)
def test_ranks_train_with_the_mean_of_their_gradients(training: Job, check: str, expected: list[float]) -> None:
    reports = training.by_rank(check, 2)
    assert reports[0]["weights"] == reports[1]["weights"]
    np.testing.assert_allclose(reports[0]["weights"], expected, rtol=1e-4)
    for rank, report in enumerate(reports):
        assert report["iterations"] == STEPS
        # Of the other rank it may not know all yet.
        assert [trained[str(rank)] for trained in report["trained"]] == [STEPS]


def test_all_ranks_have_the_root_ranks_weights_after_the_first_batch(training: Job) -> None:
    reports = training.by_rank("broadcast", 2)
    assert [report["weights"] for report in reports] == [[0.0, 0.0, 0.0, 0.0]] * 2


def test_learning_rates_warm_up_and_follow_the_schedule(training: Job) -> None:
    warming = [0.1 / 2 * ((batch + 1) / STEPS / 2 + 1) for batch in range(2 * STEPS)]
    expected = [*warming, *[0.1] * STEPS, *[0.05] * STEPS]
    for report in training.by_rank("warmup", 2):
        np.testing.assert_allclose(report["rates"], expected, rtol=1e-6)
        assert warming[-1] == pytest.approx(0.1)


def test_metrics_are_averaged_over_the_ranks(training: Job) -> None:
    first, second = training.by_rank("warmup", 2)
    assert first["losses"] == second["losses"]
    apart = training.by_rank("averaged", 2)
    assert apart[0]["losses"] != apart[1]["losses"], "the ranks' own losses differ, or this shows nothing"
    assert first["losses"][-1] < first["losses"][0]
