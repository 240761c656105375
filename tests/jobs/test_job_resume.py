"""A job that dies inside an epoch goes on with another number of ranks, from backups that only rank 0 can see."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from horovod_job import Job

pytestmark = pytest.mark.horovod

ELEMENTS = 42
# A backup is made after each three batches; all elements of an epoch fit into steps of 2, then 3 ranks, then one.
# Ranks, and after how many batches all of them are killed.
STARTS = ((2, 8), (3, 17), (1, 0))
# Elements of the first two epochs that had been trained when their last backup was made.
SAVED = (2 * 6, 3 * 5)


@pytest.fixture(scope="module")
def jobs(start_job: Callable[..., Job], tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    folder = tmp_path_factory.mktemp("resume")
    found = []
    for ranks, end_after in STARTS:
        job = start_job("resume.py", ranks, str(folder), str(end_after))
        found.append(job.fail() if end_after else job.succeed())
        assert not (job.folder / "nowhere").exists(), "another rank than the first has written"
        assert (folder / "backups").exists() == bool(end_after), "training that has ended deletes its backups"
    return found


def trained(job: Job, ranks: int) -> dict[int, list[int]]:
    """Returns what all ranks of a job have trained, by epoch, step by step."""
    epochs: dict[int, list[int]] = {}
    for of_ranks in zip(*(report["epochs"] for report in job.by_rank("trained", ranks)), strict=True):
        (epoch,) = {epoch for epoch, _ in of_ranks}
        epochs[epoch] = [element for step in zip(*(ids for _, ids in of_ranks), strict=True) for element in step]
    return epochs


def test_each_element_is_trained_once_per_epoch_by_two_then_three_ranks_then_one(jobs: list[Job]) -> None:
    two, three, one = (trained(job, ranks) for job, (ranks, _) in zip(jobs, STARTS, strict=True))
    assert (list(two), list(three), list(one)) == ([0], [0, 1], [1, 2])
    epochs = [two[0][: SAVED[0]] + three[0], three[1][: SAVED[1]] + one[1], one[2]]
    for epoch in epochs:
        assert sorted(epoch) == list(range(ELEMENTS))
    assert len(set(map(tuple, epochs))) == 3, "every epoch has the same order"
    # What was trained after the last backup is trained again, and is what it was.
    for before, after, saved, again in ((two[0], three[0], SAVED[0], 2 * 2), (three[1], one[1], SAVED[1], 3 * 2)):
        assert len(before) == saved + again
        assert after[:again] == before[saved:]


def test_statistics_are_each_ranks_own_and_those_of_rank_0_on_new_ranks(jobs: list[Job]) -> None:
    reports = [job.by_rank("trained", ranks) for job, (ranks, _) in zip(jobs, STARTS, strict=True)]
    # When their last backup was made, so many batches after they had begun.
    two = [report["statistics"][6] for report in reports[0]]
    three = [report["statistics"][10 + 5] for report in reports[1]]
    assert two[0] != two[1]
    assert [report["statistics"][0] for report in reports[1]] == [two[0], two[1], two[0]]
    assert [report["statistics"][0] for report in reports[2]] == [three[0]]


def test_another_number_of_ranks_is_told(jobs: list[Job]) -> None:
    told = [[line for line in job.output.splitlines() if "the backup is of" in line] for job in jobs]
    assert [len(lines) for lines in told] == [0, 1, 1]
    assert "the backup is of 2 ranks, now there are 3: ranks that are new start with" in told[1][0]
    assert "the backup is of 3 ranks, now there are 1" in told[2][0]


def test_all_ranks_read_on_from_a_checkpoint_that_only_rank_0_can_see(jobs: list[Job]) -> None:
    reports = jobs[1].by_rank("checkpoint", 3)
    read = [element for step in zip(*(report["elements"] for report in reports), strict=True) for element in step]
    # The checkpoint is of the fifth step of two ranks.
    assert read == trained(jobs[0], 2)[0][2 * 5 :]


def test_missing_checkpoint_is_told_to_all_ranks(jobs: list[Job]) -> None:
    for report in jobs[1].by_rank("missing checkpoint", 3):
        assert report["error"] == "StateError"
        assert "missing.feed" in report["message"]
