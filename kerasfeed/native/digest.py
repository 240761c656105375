"""Digests and the journal (`core/digest.h`, `core/journal.h`) with the interface of `kerasfeed.producer.digest`.

The pump notes and compares digests in C++; what is produced and skipped in Python, and what belongs into a feed's
state, goes through here, to the same journal.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import xxhash

from kerasfeed.native.library import HANDLE, NUMBER, NUMBERS, Library, array

if TYPE_CHECKING:  # TensorFlow comes with it
    from kerasfeed.spec import EncodedElement

_UNSIGNED = ctypes.c_uint64
_KNOWN = ctypes.POINTER(_UNSIGNED)
_MAX_RUNS = 1 << 16


def _error(library: Library) -> str:
    text = library.function("kerasfeed_digest_error", returns=ctypes.c_char_p)()
    return bytes(text or b"").decode("utf-8", "replace")


class Digester:
    """Makes the digests of a dataset's elements; see `kerasfeed.producer.digest.Digester`.

    Args:
        library: The engine's library.
        spec: The dataset's element spec, as `spec.encode_spec` wrote it.
        full: Whether every byte counts.
    """

    def __init__(self, library: Library, spec: bytes, full: bool = False):
        new = library.function("kerasfeed_digester_new", ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, returns=HANDLE)
        self.handle = new(spec, len(spec), full)
        if not self.handle:
            raise RuntimeError(_error(library))
        free = library.function("kerasfeed_digester_delete", HANDLE)
        weakref.finalize(self, free, self.handle).atexit = False
        pointers = ctypes.POINTER(ctypes.c_void_p)
        self._digest = library.function(
            "kerasfeed_digester_digest",
            *(HANDLE, NUMBER, NUMBERS, NUMBERS, NUMBERS, pointers, NUMBER, _KNOWN),
            returns=ctypes.c_int,
        )
        self._library = library

    def digest(self, element: EncodedElement) -> int:
        """Returns 64 bits over the shapes and bytes of an element."""
        components = element.components
        buffers = [(ctypes.c_char * max(1, len(b))).from_buffer_copy(bytes(b) or b"\0") for b in element.buffers]
        digest = _UNSIGNED()
        failed = self._digest(
            self.handle,
            len(components),
            array([len(component.shape) for component in components]),
            array([size for component in components for size in component.shape]),
            array([component.length for component in components]),
            (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(buffer) for buffer in buffers)),
            element.size,
            ctypes.byref(digest),
        )
        if failed:
            raise RuntimeError(_error(self._library))
        return digest.value


class Journal:
    """What was produced, with its digests; see `kerasfeed.producer.digest.Journal`.

    Args:
        library: The engine's library.
        fd: A file from `Journal.create` there.
    """

    def __init__(self, library: Library, fd: int):
        self._library = library
        new = library.function("kerasfeed_journal_open", ctypes.c_int, NUMBER, returns=HANDLE)
        self.handle = new(fd, _MAX_RUNS)
        if not self.handle:
            raise RuntimeError(_error(library))
        weakref.finalize(self, library.function("kerasfeed_journal_close", HANDLE), self.handle).atexit = False
        known = (ctypes.POINTER(NUMBER),)
        self._note = self._function("note", NUMBER, NUMBER, _UNSIGNED, _KNOWN)
        self._note_end = self._function("note_end", NUMBER, NUMBER, *known)
        self._elements = self._function("elements", NUMBER, *known)
        self._forget_before = self._function("forget_before", NUMBER)
        self._digests = self._function("digests", NUMBER, NUMBER, NUMBER, _KNOWN)

    def _function(self, name: str, *types: Any) -> Any:
        return self._library.function(f"kerasfeed_journal_{name}", HANDLE, *types, returns=ctypes.c_int)

    def _ask(self, function: Any, known: Any, *args: int) -> int | None:
        status = function(self.handle, *args, ctypes.byref(known))
        if status < 0:
            raise RuntimeError(_error(self._library))
        return known.value if status else None

    def note(self, pass_: int, element: int, digest: int) -> int | None:
        """This element was produced. Returns the digest that it had when it was produced before, if that is known."""
        return self._ask(self._note, _UNSIGNED(), pass_, element, digest)

    def note_end(self, pass_: int, elements: int) -> int | None:
        """This pass ended after so many elements. Returns how many it had before, if that is known."""
        return self._ask(self._note_end, NUMBER(), pass_, elements)

    def elements(self, pass_: int) -> int | None:
        """How many elements this pass had when it ended, if that is known."""
        return self._ask(self._elements, NUMBER(), pass_)

    def forget_before(self, pass_: int) -> None:
        """Passes before this one will not be produced again."""
        if self._forget_before(self.handle, pass_) < 0:
            raise RuntimeError(_error(self._library))

    def chain(self, pass_: int, element: int, first: int = 0) -> str:
        """Returns XXH3 of 128 bits over the digests of a pass's elements from `first` up to this one, in hex digits."""
        digests = (_UNSIGNED * max(0, element - first))()
        status = self._digests(self.handle, pass_, first, element, digests)
        if status < 0:
            raise RuntimeError(_error(self._library))
        return xxhash.xxh3_128(digests).hexdigest() if status else ""
