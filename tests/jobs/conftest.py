"""Settings of the tests that run whole jobs: all of them start processes of their own, most of them `horovodrun`."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from horovod_job import Job


@pytest.fixture(scope="module")
def start_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Job]]:
    """Returns a function that starts a job of a script under `horovodrun`; what is left at the end is killed."""
    jobs: list[Job] = []

    def start(script: str, ranks: int, *arguments: str, plain: bool = False, **env: str) -> Job:
        folder: pathlib.Path = tmp_path_factory.mktemp(pathlib.Path(script).stem)
        jobs.append(Job.horovod(script, ranks, folder, arguments, env, plain))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """Shows the output of the jobs that a failed test looked at."""
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Job):
                report.sections.append((f"output of {name}", value.output[-20_000:]))
