"""The feeds of this process that native datasets read from, by their numbers, and what such a dataset asks Python.

A graph can name a feed by a number only. So does the op, when it asks: once where an iterator begins, at each end of an
epoch, and when a wait is long. The answers are those of the feed's owner, called in TensorFlow's threads.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from kerasfeed.native.library import HANDLE, TEXT, Library, encoded, sized
from kerasfeed.producer.window import FailureKind

if TYPE_CHECKING:
    from kerasfeed.native.reader import Reader

_KINDS = tuple(FailureKind)
_MESSAGE_BYTES = 16384
_NUMBER, _MESSAGE = ctypes.c_int64, ctypes.c_void_p
_CALLBACKS = {
    "open": ctypes.CFUNCTYPE(_NUMBER, _NUMBER, ctypes.c_int32, _MESSAGE),
    "ended": ctypes.CFUNCTYPE(_NUMBER, _NUMBER, _NUMBER, _NUMBER, _NUMBER, _MESSAGE),
    "waiting": ctypes.CFUNCTYPE(_NUMBER, _NUMBER, _NUMBER, ctypes.c_double, ctypes.c_int32, _MESSAGE),
    "failed": ctypes.CFUNCTYPE(_NUMBER, _NUMBER, _NUMBER, _NUMBER, ctypes.c_char_p, _MESSAGE),
}


_FUNCTIONS = {
    "kf_feed_new": TEXT,
    "kf_feed_begin": (_NUMBER, HANDLE),
    **{f"kf_feed_{name}": (_NUMBER,) for name in ("free", "alert", "interrupt", "close")},
}


class Owner(Protocol):
    """Who answers for a feed. What it raises becomes the error of the dataset's op."""

    def read_begins(self, direct: bool) -> int:
        """An iterator pulls for the first time. Returns the number of its read."""

    def read_comes_to_end(self, read: int, epoch: int, steps: int) -> bool:
        """Returns whether it goes on with the next epoch."""

    def read_waits(self, read: int, seconds: float, interrupted: bool) -> None:
        """It has waited for `seconds` for its next step. Raises if it is not to wait on."""

    def read_fails(self, read: int, kind: FailureKind | None, message: str) -> NoReturn:
        """There is no next step. `kind` is `None` if the read is void."""


class _Callbacks(ctypes.Structure):
    _fields_ = tuple(_CALLBACKS.items())


_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()
# Per library: C++ calls them as long as the process lives.
_kept: list[_Callbacks] = []


def _cut(text: str) -> bytes:
    """Returns a text that fits into the op's message. What TensorFlow raises it with must be whole characters."""
    return encoded(text)[: _MESSAGE_BYTES - 1].decode("utf-8", "ignore").encode()


def _answer(message: int, feed: int, method: str, *args: Any) -> int:
    try:
        owner = _owners.get(feed)
        if owner is None:
            raise RuntimeError("the DataFeeder of this dataset is gone")
        return int(getattr(owner, method)(*args) or 0)
    except BaseException as error:  # none can pass through C++
        text = _cut(f"{type(error).__name__}: {error}")
        ctypes.memmove(message, text + b"\0", len(text) + 1)
        return -1


def _open(feed: int, direct: int, message: int) -> int:
    return _answer(message, feed, "read_begins", bool(direct))


def _ended(feed: int, read: int, epoch: int, steps: int, message: int) -> int:
    return _answer(message, feed, "read_comes_to_end", read, epoch, steps)


def _waiting(feed: int, read: int, seconds: float, interrupted: int, message: int) -> int:
    return _answer(message, feed, "read_waits", read, seconds, bool(interrupted))


def _failed(feed: int, read: int, kind: int, text: bytes, message: int) -> int:
    reason = text.decode("utf-8", "replace")
    return _answer(message, feed, "read_fails", read, _KINDS[kind] if kind >= 0 else None, reason)


class Feed:
    """A feed that datasets of this process can name.

    Args:
        library: The engine's library.
        name: The feed's name, for messages.
        owner: Who answers for it. It must hold this feed: when it is gone, so is the feed.
    """

    def __init__(self, library: Library, name: str, owner: Owner):
        self._library = library
        library.declare(_FUNCTIONS)
        if not _kept:
            functions: dict[str, Callable[..., int]] = {
                "open": _open,
                "ended": _ended,
                "waiting": _waiting,
                "failed": _failed,
            }
            _kept.append(_Callbacks(*(_CALLBACKS[name](function) for name, function in functions.items())))
            library.function("kf_feed_set_callbacks", ctypes.c_void_p)(ctypes.byref(_kept[0]))
        (self.number,) = library.ask("kf_feed_new", *sized(name)).numbers
        _owners[self.number] = owner
        weakref.finalize(self, library.ask, "kf_feed_free", self.number).atexit = False

    def begin(self, reader: Reader) -> None:
        """Iterators that begin from now on read from this reader."""
        self._library.ask("kf_feed_begin", self.number, reader.handle)

    def alert(self) -> None:
        """Whoever waits asks its owner now whether to wait on."""
        self._library.ask("kf_feed_alert", self.number)

    def interrupt(self) -> None:
        """Whoever waits asks its owner now, and says that Ctrl-C was pressed."""
        self._library.ask("kf_feed_interrupt", self.number)

    def close(self) -> None:
        """Whoever reads from the present reader gets an error, and asks its owner nothing any more."""
        self._library.ask("kf_feed_close", self.number)
