"""Which engine a process uses: the native one, built and loaded once, or the one in Python.

`KERASFEED_ENGINE` asks for one: `native` fails where that is not to be had, `python` is the reference. Without it the
native engine does the work, and where it can't be built or loaded, the Python one does, with a warning that says why.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from typing import Any

from kerasfeed.errors import FeedError
from kerasfeed.native import build
from kerasfeed.native.library import Library

ENGINE_VARIABLE = "KERASFEED_ENGINE"
ENGINES = ("native", "python")
_LOG = logging.getLogger("kerasfeed")


@dataclasses.dataclass(frozen=True)
class Engine:
    """The native engine, loaded.

    Attributes:
        library: For calls from Python.
        ops: The module of its TensorFlow ops.
    """

    library: Library
    ops: Any


_lock = threading.Lock()
_loaded: Engine | None = None
_reason: str | None = None
_warned = False


def load() -> Engine | None:
    """Returns the native engine, built and loaded at the first call, or `None` for the Python engine.

    Raises:
        ValueError: `KERASFEED_ENGINE` names no engine.
        FeedError: `KERASFEED_ENGINE` is `native`, and that can't be built or loaded here.
    """
    wanted = os.environ.get(ENGINE_VARIABLE) or None
    if wanted not in (None, *ENGINES):
        raise ValueError(f"{ENGINE_VARIABLE}: expected {' or '.join(ENGINES)}, received {wanted!r}")
    if wanted == "python":
        return None
    with _lock:
        engine = _load_once()
        if engine is None:
            _refuse(wanted)
        return engine


def _load_once() -> Engine | None:
    global _loaded, _reason
    if _loaded is None and _reason is None:
        try:
            _loaded = _load()
        except build.BuildError as error:
            _reason = str(error)
        except Exception as error:
            # TensorFlow has many errors for a library that does not fit.
            _reason = f"its library does not load: {error}"
    return _loaded


def _load() -> Engine:
    # The producer imports it in its own way, before.
    import tensorflow as tf

    path = str(build.library())
    # First: TensorFlow finds the ops only in a library that is not loaded yet.
    ops = tf.load_op_library(path)
    return Engine(Library(path), ops)


def _refuse(wanted: str | None) -> None:
    global _warned
    assert _reason is not None
    if wanted == "native":
        raise FeedError(f"{ENGINE_VARIABLE} is 'native', but the native engine can't be used: {_reason}")
    if not _warned:
        _LOG.warning(
            "the native engine can't be used, so the slower one in Python does the work: %s. It needs g++ 9 or later "
            "(or what CXX names) and a folder to build in (or what KERASFEED_CACHE names); %s=native raises this in "
            "full, %s=python does without it and without this warning.",
            _reason.partition("\n")[0],
            ENGINE_VARIABLE,
            ENGINE_VARIABLE,
        )
        _warned = True
