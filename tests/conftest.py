"""Settings of all tests in environments with TensorFlow."""

from __future__ import annotations

import gc
from importlib import metadata

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs what is the same everywhere in one environment; by name it runs in any."""
    if metadata.version("keras").startswith("3") or config.args != config.getini("testpaths"):
        return
    elsewhere = [item for item in items if item.get_closest_marker("once")]
    items[:] = [item for item in items if item not in set(elsewhere)]
    config.hook.pytest_deselected(items=elsewhere)


def pytest_collection_finish() -> None:
    """Leaves all that imports have made out of garbage collection: many tests collect, and each time took 0.13 s."""
    gc.collect()
    gc.freeze()
