"""Settings of all tests in environments with TensorFlow."""

from __future__ import annotations

import gc
from importlib import metadata

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs what is the same everywhere in one environment; by name it runs in any."""
    if config.args != config.getini("testpaths"):
        return
    here = "keras3" if metadata.version("keras").startswith("3") else "keras2"
    elsewhere = [item for item in items if _environment(item) not in ("", here)]
    items[:] = [item for item in items if item not in set(elsewhere)]
    config.hook.pytest_deselected(items=elsewhere)


def _environment(item: pytest.Item) -> str:
    mark = item.get_closest_marker("once")
    return "" if mark is None else mark.args[0] if mark.args else "keras3"


def pytest_collection_finish() -> None:
    """Leaves all that imports have made out of garbage collection: many tests collect, and each time took 0.13 s."""
    gc.collect()
    gc.freeze()
