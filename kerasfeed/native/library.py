"""The engine's library as Python calls it: `core/*c_api.h` and `ops/c_api.h` say which functions there are.

All of them return a status and fill in a reply: some numbers and a text. What each takes before the reply is declared
by the module that uses it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kerasfeed.producer.window import BindError

NUMBER, FLAG, SECONDS, HANDLE = ctypes.c_int64, ctypes.c_int32, ctypes.c_double, ctypes.c_void_p
NUMBERS = ctypes.POINTER(ctypes.c_int64)
BYTES = ctypes.c_char_p
TEXT = (BYTES, NUMBER)
MADE = ctypes.POINTER(HANDLE)
_DONE, _BIND_ERROR = 1, 2


class _Reply(ctypes.Structure):
    _fields_ = (
        ("numbers", NUMBERS),
        ("count", NUMBER),
        ("text", ctypes.c_void_p),
        ("bytes", NUMBER),
    )


class Answer(NamedTuple):
    """What a function had to say.

    Attributes:
        done: Whether there was anything; else there is none, or not now.
        numbers: As its declaration says.
        text: The same.
    """

    done: bool
    numbers: list[int]
    text: bytes


class Library:
    """A loaded library.

    Args:
        path: The file.

    Raises:
        OSError: It can't be loaded.
    """

    def __init__(self, path: str):
        self._loaded = ctypes.CDLL(path)
        self._reply_free = self.function("kf_reply_free", ctypes.POINTER(_Reply))
        self._functions: dict[str, Any] = {}

    def function(self, name: str, *types: Any, returns: Any = None) -> Any:
        """Returns a function that takes no reply."""
        # A view of its own: types are not shared with others who declare the same function.
        function = ctypes.CDLL(self._loaded._name, handle=self._loaded._handle)[name]
        function.argtypes, function.restype = types, returns
        return function

    def declare(self, functions: Mapping[str, Sequence[Any]]) -> None:
        """Says what functions take before the reply, by their names."""
        for name, types in functions.items():
            if name not in self._functions:
                self._functions[name] = self.function(name, *types, ctypes.POINTER(_Reply), returns=ctypes.c_int32)

    def ask(self, name: str, *args: Any) -> Answer:
        """Calls a function that was declared.

        Raises:
            BindError: The function says so.
            RuntimeError: It is broken; the message says how.
        """
        reply = _Reply()
        status = self._functions[name](*args, ctypes.byref(reply))
        numbers = reply.numbers[: reply.count] if reply.count else []
        text = ctypes.string_at(reply.text, reply.bytes) if reply.bytes else b""
        if reply.count or reply.bytes:
            self._reply_free(ctypes.byref(reply))
        if status == _BIND_ERROR:
            raise BindError(decoded(text))
        if status < 0:
            raise RuntimeError(f"{name}: {decoded(text)}")
        return Answer(status == _DONE, numbers, text)

    def make(self, owner: object, new: str, free: str, *args: Any) -> tuple[int, Answer]:
        """Calls a function that makes something, which is freed when `owner` is gone. Returns its handle.

        Not at exit: threads may still be in a call then.
        """
        handle = HANDLE()
        answer = self.ask(new, *args, ctypes.byref(handle))
        if handle.value is None:
            return 0, answer
        weakref.finalize(owner, self.function(free, HANDLE), handle.value).atexit = False
        return handle.value, answer


def array(values: Sequence[int]) -> Any:
    """Returns an array of numbers."""
    return (NUMBER * len(values))(*values)


def flat(pairs: Mapping[int, int]) -> list[int]:
    """Returns keys and values in turn."""
    return [number for pair in pairs.items() for number in pair]


def encoded(text: str) -> bytes:
    """Returns a text as the library takes it."""
    return text.encode("utf-8", "backslashreplace")


def sized(text: str) -> tuple[bytes, int]:
    """Returns a text and its length, as the library takes them."""
    data = encoded(text)
    return data, len(data)


def decoded(data: bytes) -> str:
    """Returns what the library calls a text."""
    return data.decode("utf-8", "replace")
