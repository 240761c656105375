"""What job scripts share: reports, which are lines of JSON that the tests parse, and meetings of ranks by files."""

from __future__ import annotations

import json
import os
import pathlib
import time
from typing import Any

FOLDER = pathlib.Path(os.environ["KERASFEED_TEST_FOLDER"])
RANK = int(os.environ.get("HOROVOD_RANK", os.environ.get("KERASFEED_TEST_RANK", "0")))
SIZE = int(os.environ.get("HOROVOD_SIZE", os.environ.get("KERASFEED_TEST_SIZE", "1")))


def report(check: str, **values: Any) -> None:
    """Prints a report. One write, so that what other threads print does not come in between."""
    line = "@report " + json.dumps({"check": check, "rank": RANK, **values}) + "\n"
    os.write(1, line.encode())


def tell(name: str) -> None:
    """Says to whoever calls `hear(name)` that they may go on."""
    (FOLDER / f"told-{name}").touch()


def hear(name: str, seconds: float = 60.0) -> None:
    """Waits for `tell(name)` of any rank."""
    deadline = time.monotonic() + seconds
    while not (FOLDER / f"told-{name}").exists():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"nobody told {name!r} within {seconds:g} s")
        time.sleep(0.02)


def meet(name: str, seconds: float = 60.0) -> None:
    """Waits until all ranks are here, without Horovod: works while it, or the feed, is broken."""
    tell(f"{name}-{RANK}")
    for rank in range(SIZE):
        hear(f"{name}-{rank}", seconds)


def error_of(error: BaseException) -> dict[str, str]:
    """Returns what a report says about an exception."""
    return {"error": type(error).__name__, "message": str(error)[-4000:]}
