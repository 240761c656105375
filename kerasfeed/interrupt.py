"""Ctrl-C while the main thread is inside TensorFlow: lets waits for data give up, so that `KeyboardInterrupt` can rise.

Python runs signal handlers in the main thread, between byte codes. A main thread that sits in a TensorFlow op which
waits for our data would never get there. So a thread reads the signal's number from `signal.set_wakeup_fd`, which C
code writes at once, and wakes every wait.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kerasfeed.native.feed import Feed

_lock = threading.Lock()
_count = 0
_waiting: weakref.WeakSet[threading.Condition] = weakref.WeakSet()
_feeds: weakref.WeakSet[Feed] = weakref.WeakSet()
_installed_in: int | None = None
# Where TensorFlow's C++ finds the exceptions that it raises.
_EXCEPTION_FILES = ("tensorflow/python/eager/core.py", "tensorflow/python/framework/errors_impl.py")

# Where C++ calls Python.
_CALLBACK_FILE = "kerasfeed/native/feed.py"


def count() -> int:
    """How often Ctrl-C was pressed. A wait that began at another count gives up."""
    return _count


def register(condition: threading.Condition) -> None:
    """This condition is notified at Ctrl-C, for as long as it lives."""
    with _lock:
        _waiting.add(condition)


def register_feed(feed: Feed) -> None:
    """Who waits in this feed, in C++, is told of Ctrl-C, for as long as it lives."""
    with _lock:
        _feeds.add(feed)


def install() -> None:
    """Starts to watch for Ctrl-C, once per process. Only in the main thread, and if nobody watches already."""
    global _installed_in
    if _installed_in == os.getpid() or threading.current_thread() is not threading.main_thread():
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    earlier = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    if earlier != -1:
        # An event loop (asyncio, say) owns the signals: leave them to it.
        signal.set_wakeup_fd(earlier, warn_on_full_buffer=False)
        os.close(read_end)
        os.close(write_end)
        return
    _installed_in = os.getpid()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)
    # A child that is forked shares the pipe: what it catches must not wake this process.
    os.register_at_fork(after_in_child=_let_go)
    threading.Thread(target=_watch, args=(read_end,), name="kerasfeed-interrupt", daemon=True).start()


def _let_go() -> None:
    signal.set_wakeup_fd(-1)


def _handle(number: int, frame: types.FrameType | None) -> None:
    """Raises `KeyboardInterrupt`, but not where TensorFlow makes an exception of the wait that gave up.

    The main thread is then in that exception's `__init__`, called from C++ that turns another exception raised there
    into a RuntimeError which says nothing of Ctrl-C. So it is raised in the function that called the C++, at the moment
    when the exception arrives there: a trace function is told of it, and may raise another in its place.

    The same where the main thread is in what a native dataset asks Python: nothing can be raised through C++.
    """
    caller = _beyond_callbacks(frame)
    while caller is not None and caller.f_code.co_filename.endswith(_EXCEPTION_FILES):
        caller = caller.f_back
    if caller is frame or caller is None or sys.gettrace() is not None:
        raise KeyboardInterrupt
    caller.f_trace = _raise_in_caller
    sys.settrace(lambda frame, event, argument: None)


def _beyond_callbacks(frame: types.FrameType | None) -> types.FrameType | None:
    """Returns the frame that called the C++ that called back into Python; `frame` itself if nothing did."""
    beyond = each = frame
    while each is not None:
        if each.f_code.co_filename.endswith(_CALLBACK_FILE):
            beyond = each.f_back
        each = each.f_back
    return beyond


def _raise_in_caller(frame: types.FrameType, event: str, argument: object) -> None:
    sys.settrace(None)
    frame.f_trace = None
    raise KeyboardInterrupt


def _watch(read_end: int) -> None:
    while numbers := os.read(read_end, 64):
        if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) is _handle:
            notify()


def notify() -> None:
    """Wakes every registered wait, as Ctrl-C does."""
    global _count
    with _lock:
        _count += 1
        waiting, feeds = list(_waiting), list(_feeds)
    for condition in waiting:
        with condition:
            condition.notify_all()
    for feed in feeds:
        feed.interrupt()
