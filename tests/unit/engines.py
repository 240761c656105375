"""The two windows that must do the same: the reference in Python, and the one in C++, compiled once.

In both a wait raises `WouldBlock`, unless `Waits.real`: so "nothing more can happen now" is a fact, not a guess about
time.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import threading
from pathlib import Path

from kerasfeed.native import window as native
from kerasfeed.native.library import Library
from kerasfeed.producer import window as reference

ENGINES = ("python", "native")
_ROOT = Path(__file__).resolve().parents[2]
_CORE = _ROOT / "kerasfeed" / "native" / "core"
_COMPILE = ("g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread")


class WouldBlock(Exception):
    """A wait of the window: there is nothing to do or to get now."""


class Waits(threading.Condition):
    """A condition whose waits are real in tests with threads only."""

    real = False

    def wait(self, timeout=None):
        if not Waits.real:
            raise WouldBlock
        return super().wait(timeout)


class NativeWindow(native.Window):
    """As `Waits`."""

    def __init__(self, *args, **options):
        super().__init__(*args, library=library(), **options)

    def _wait(self, name, *args, wakes):
        if Waits.real:
            return super()._wait(name, *args, wakes=wakes)
        answer = self._call(name, *args, 0.0, -1)
        if not answer.done:
            raise WouldBlock
        return answer


@functools.cache
def library() -> Library:
    sources = [_CORE / "window.cc", _CORE / "c_api.cc"]
    text = b"".join(path.read_bytes() for path in [*sources, *sorted(_CORE.glob("*.h"))])
    target = _ROOT / ".build" / "unit" / f"window-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Two environments may test at the same time.
        fresh = target.with_suffix(f".{os.getpid()}")
        subprocess.run([*_COMPILE, *map(str, sources), "-o", str(fresh)], check=True)
        fresh.rename(target)
    return Library(str(target))


def new_window(engine, *args, **options):
    return (reference.Window if engine == "python" else NativeWindow)(*args, **options)


def held(window):
    """Returns bytes and steps in memory, and the epochs of which dropped elements are."""
    if isinstance(window, NativeWindow):
        return window.held()
    return window._bytes, len(window._steps), sorted(window._remainders)
