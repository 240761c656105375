"""What a rank hands to the producer that it starts, over the child's standard input: settings as JSON, then the
dataset.

Only this pipe, between a process and the child that it starts itself, carries pickled code. It also is the child's
lifeline: it stays open as long as the rank lives.
"""

from __future__ import annotations

import array
import collections
import ctypes
import dataclasses
import io
import json
import linecache
import mmap
import os
import pickle
import struct
import types
from collections.abc import Callable, Sequence
from typing import IO, Any, ClassVar

import cloudpickle

_LENGTH = struct.Struct("<Q")
# What cloudpickle 3.1.3 (3.1.1 did not) puts in the place of a code object's file name.
_NO_FILE = "<dynamic-code>"
# A producer's folder for temporary files, which goes with the supervisor; it is known before all else.
SCRATCH_VARIABLE = "KERASFEED_SCRATCH"
# The argument of a trial that nobody is to notice.
QUIETLY = "quietly"


class Progress:
    """How far a feed's producers have come, in memory that outlives them: it is known even after a `kill -9`.

    Args:
        fd: A file of `Progress.SIZE` bytes, shared between the supervisor and its producers.
    """

    SIZE = 4 * 8

    def __init__(self, fd: int):
        # Each number is stored at once: a death in between leaves the old one or the new one.
        self._numbers = memoryview(mmap.mmap(fd, self.SIZE)).cast("q")

    def clear(self) -> None:
        """Nothing has been produced yet, nor asked for."""
        self._numbers[:] = memoryview(array.array("q", [-1] * 4))

    @property
    def produced(self) -> tuple[int, int]:
        """(pass, elements of it) that was produced furthest; (-1, -1) before the first element."""
        return self.read()[0]

    def read(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the furthest (pass, elements) that were produced, and the furthest from which a producer set out."""
        pass_, element, first_pass, first_element = self._numbers
        return (pass_, element), (first_pass, first_element)

    def note_produced(self, pass_: int, element: int) -> None:
        """So many elements of this pass are produced."""
        self._note(0, (pass_, element))

    def note_origin(self, pass_: int, element: int) -> None:
        """The ranks want this element next: all before it have reached them."""
        self._note(2, (pass_, element))

    def _note(self, at: int, place: tuple[int, int]) -> None:
        if place > (self._numbers[at], self._numbers[at + 1]):
            self._numbers[at], self._numbers[at + 1] = place

    @property
    def address(self) -> int:
        """Where the numbers lie in memory, for who notes what is produced without Python."""
        return ctypes.addressof(ctypes.c_int64.from_buffer(self._numbers))

    def close(self) -> None:
        """Lets go of the memory."""
        self._numbers.release()


@dataclasses.dataclass(frozen=True)
class TrialOptions:
    """How a pipeline is tried.

    Attributes:
        elements: Where passes are cut off.
        epochs: How many passes are read.
        deterministic: Whether it runs with op determinism.
        full: Whether digests are of all bytes of large elements, too.
        start: [pass, element] where it starts.
        save: Whether it is tried to save an iterator, too.
        read_caches: Whether `cache(filename)` is read where it is complete, as a producer that starts now would.
    """

    elements: int
    epochs: int
    deterministic: bool
    full: bool
    start: Sequence[int] = (0, 0)
    save: bool = False
    read_caches: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """Everything that a producer needs to know.

    Attributes:
        options: `FeedOptions.to_json()`; a trial's are `TrialOptions` as a dictionary.
        size: Number of ranks.
        seed: The feed's seed.
        module_path: The rank's `sys.path`.
        payload: `dataset_fn`, pickled by value where it must be, or a dataset's graph.
        payload_kind: "function" or "graph".
        source_spec: The element spec that goes with a graph, as `spec.encode_spec` wrote it, in text.
        modules: Modules of functions that are pickled by value.
        script: The file of the rank's `__main__`, if it has one.
        sources: Source code that lies in no file, as of a notebook's cells, by the name it goes by: AutoGraph needs it.
        token: The job's token.
        host: Address to listen on.
        port: Port to listen on; 0 picks a free one.
        parent: Process id of the rank that starts it.
        control_fd: Where the producer reports, a JSON line each: the pipe's writing end.
        progress_fd: The file of its `Progress`.
        journal_fd: The file of its `Journal`.
        restarted: Whether a producer of this feed has died before.
        counts: What is known of earlier epochs: (epoch, elements, steps, dropped).
        pass_lengths: Elements of the passes that ended before, by their number (JSON has text keys only).
        restored: Where a restored feed sets out, and the digest of what came before: (pass, element, digest).
        left: Ranks that have left, with the steps they trained, by epoch.
        parts: The parts of the `FeedState` that a restored feed goes on from, by name.
        segment: The fields of the `Segment` that a restored feed begins with.
        foreseen: `FeedState.mark` of that state, if no rank has restored it yet.
    """

    options: dict[str, Any]
    size: int
    seed: int
    module_path: list[str]
    payload: bytes
    payload_kind: str
    source_spec: str = ""
    modules: list[str] = dataclasses.field(default_factory=list)
    script: str = ""
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    token: bytes = b""
    host: str = ""
    port: int = 0
    parent: int = 0
    control_fd: int = -1
    progress_fd: int = -1
    journal_fd: int = -1
    restarted: bool = False
    counts: list[list[int]] = dataclasses.field(default_factory=list)
    pass_lengths: dict[str, int] = dataclasses.field(default_factory=dict)
    restored: list[Any] | None = None
    left: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    parts: dict[str, bytes] = dataclasses.field(default_factory=dict)
    segment: dict[str, Any] | None = None
    foreseen: str = ""

    def write_to(self, pipe: IO[bytes]) -> None:
        """Writes this to the child's standard input, an unbuffered pipe."""
        settings = dataclasses.asdict(self)
        settings["token"] = self.token.hex()
        del settings["payload"]
        settings["parts"] = list(self.parts)
        header = json.dumps(settings).encode()
        for part in (header, self.payload, *self.parts.values()):
            for data in (_LENGTH.pack(len(part)), part):
                view = memoryview(data)
                while view:
                    view = view[pipe.write(view) :]

    @classmethod
    def read_from(cls, fd: int) -> Launch:
        """Reads what `write_to` wrote."""
        settings = json.loads(_read_part(fd))
        settings["token"] = bytes.fromhex(settings["token"])
        payload = _read_part(fd)
        settings["parts"] = {name: _read_part(fd) for name in settings["parts"]}
        return cls(payload=payload, **settings)


def _read_part(fd: int) -> bytes:
    return _read_exactly(fd, _LENGTH.unpack(_read_exactly(fd, _LENGTH.size))[0])


def _read_exactly(fd: int, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = os.read(fd, min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError("the rank that starts this producer is gone")
        data += piece
    return bytes(data)


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return make, tuple(code.co_filename if argument == _NO_FILE else argument for argument in arguments)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, but code keeps the name of its file, without which AutoGraph and tracebacks find no source."""

    dispatch_table: ClassVar[Any] = collections.ChainMap(
        {types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )

    def __init__(self, file: IO[bytes]):
        super().__init__(file)
        self.modules: set[str] = set()

    def _dynamic_function_reduce(self, func: Any) -> Any:
        self.modules.add(func.__module__ or "")
        return super()._dynamic_function_reduce(func)


def pickle_function(function: Callable[..., Any]) -> tuple[bytes, list[str]]:
    """Returns `dataset_fn` as bytes for the child; functions of `__main__`, lambdas and closures go by value.

    Also returns the names of the modules that functions which go by value come from. AutoGraph looks into a function's
    module for its source code, so the child has to import them.

    Raises:
        TypeError: It captures what can't be pickled; the message says what.
    """
    data = io.BytesIO()
    pickler = _Pickler(data)
    try:
        pickler.dump(function)
        return data.getvalue(), sorted(pickler.modules - {"", "__main__"})
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, NotImplementedError, RuntimeError) as error:
        captured = ", ".join(_captured(function)) or "nothing that shows"
        raise TypeError(
            f"dataset_fn can't be sent to the producer: {error}. It captures: {captured}. "
            "Create what can't be pickled (models, locks, open files, iterators) inside dataset_fn"
        ) from error


def unsaved_sources(function: Callable[..., Any]) -> dict[str, str]:
    """Returns the source code of a function that lies in no file, by the name it goes by."""
    code = getattr(function, "__code__", None)
    if code is None or os.path.exists(code.co_filename):
        return {}
    text = "".join(linecache.getlines(code.co_filename))
    return {code.co_filename: text} if text else {}


def _captured(function: Callable[..., Any]) -> list[str]:
    code = getattr(function, "__code__", None)
    if code is None:
        return [type(function).__name__]
    names = list(code.co_freevars)
    names += [name for name in code.co_names if name in getattr(function, "__globals__", {})]
    return names
