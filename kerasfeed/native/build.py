"""Builds the native engine: a library per TensorFlow version and source, with the package or in the user's cache.

An installation into an environment with TensorFlow runs this file and brings the library along. Else the first who
needs one builds it. Many ranks may start at once, and die at any moment: one of them builds, the others wait for it,
and a library is there whole or not at all. Where nothing can be built, `BuildError` says why.

It imports neither TensorFlow nor the rest of the package until it is told to: an installer has neither.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import logging
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

SOURCES = pathlib.Path(__file__).parent
_LOG = logging.getLogger("kerasfeed")
_SANITIZE_VARIABLE = "KERASFEED_SANITIZE"
# What is wrong with the code is for `make test-native` to say: here warnings would cost a tenth of the time.
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-pthread", "-fvisibility=hidden", "-w")
# The pull from an iterator lives in the second one, which TensorFlow's own flags don't name.
_TENSORFLOW_LIBRARIES = ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2")
_KEPT_LINES = 20
_POLL_SECONDS = 0.1
# For one call of the compiler, and for all that another process does.
_COMPILE_SECONDS = 600.0
_WAIT_SECONDS = 1200.0
# Each release leaves a library for each TensorFlow: one that nobody has used for so long is removed.
_FORGET_SECONDS = 90 * 24 * 3600.0
_NOTE_SECONDS = 24 * 3600.0
_NAME = re.compile(r"tensorflow-.+-[0-9a-f]{16}-[0-9a-f]{8}\.so")


class BuildError(RuntimeError):
    """The native engine can't be built here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Sources that are compiled as one, so that the compiler reads headers once: half of the time.

    So what is private to a file needs a name that no other file of the part has.

    Args:
        sources: The files.
        flags: For the compiler, beside what all get.
    """

    sources: tuple[pathlib.Path, ...]
    flags: tuple[str, ...] = ()


def core_sources() -> tuple[pathlib.Path, ...]:
    """Returns the sources that compile without TensorFlow."""
    return tuple(sorted((SOURCES / "core").glob("*.cc")))


def op_sources() -> tuple[pathlib.Path, ...]:
    """Returns the sources of the TensorFlow ops."""
    return tuple(sorted((SOURCES / "ops").glob("*.cc")))


def library() -> pathlib.Path:
    """Returns the path of the engine's library for the installed TensorFlow, built if need be.

    Raises:
        BuildError: There is no compiler, or it does not build against this TensorFlow.
    """
    label, parts, needs = _engine()
    shipped = SOURCES / "prebuilt" / f"{label}-{_source_key(parts)}.so"
    if shipped.exists() and not os.environ.get(_SANITIZE_VARIABLE):
        return shipped
    return build(label, parts, needs)


def _engine() -> tuple[str, list[Part], list[str]]:
    import tensorflow as tf

    parts = [Part(core_sources()), Part(op_sources(), tuple(tf.sysconfig.get_compile_flags()))]
    folder = pathlib.Path(tf.sysconfig.get_lib())
    return f"tensorflow-{tf.__version__}", parts, [name for name in _TENSORFLOW_LIBRARIES if (folder / name).exists()]


def build(label: str, parts: Sequence[Part], needs: Sequence[str] = ()) -> pathlib.Path:
    """Returns the path of a library in the cache, built if need be.

    Args:
        label: What it is for, in its name.
        parts: What it is made of.
        needs: Names of the libraries that it uses, which a process that loads it has loaded.

    Raises:
        BuildError: There is no compiler, or it fails.
    """
    compiler = _compiler()
    name = f"{label}-{_source_key(parts)}-{_compiler_key(compiler, parts, needs)}.so"
    tried = []
    for folder in _folders():
        path = folder / name
        if path.exists():
            _note_use(path)
            return path
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _build_once(compiler, parts, needs, path)
            return path
        except OSError as error:
            tried.append(f"{folder}: {error}")
    raise BuildError(f"there is no folder to build it in ({'; '.join(tried)}). Name one in KERASFEED_CACHE")


def _compiler() -> list[str]:
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("c++") or ""]
    if not compiler[0]:
        raise BuildError("there is no C++ compiler: install g++ 9 or later, or name one in CXX")
    sanitizers = os.environ.get(_SANITIZE_VARIABLE)
    return [*compiler, *(["-g1", f"-fsanitize={sanitizers}"] if sanitizers else [])]


def _folders() -> Iterator[pathlib.Path]:
    named = os.environ.get("KERASFEED_CACHE")
    if named:
        yield pathlib.Path(named).absolute()
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):
        yield pathlib.Path(home) / "kerasfeed"
    # Not shared with others, who could put a library there.
    folder = pathlib.Path(tempfile.gettempdir()) / f"kerasfeed-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o077:
            yield folder


def _source_key(parts: Sequence[Part]) -> str:
    """What a library is made of, known without a compiler."""
    digest = hashlib.sha256(repr((platform.machine(), _FLAGS)).encode())
    headers = sorted(SOURCES.rglob("*.h"))
    for source in (*headers, *(source for part in parts for source in part.sources)):
        text = source.read_bytes()
        digest.update(f"{source.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:16]


def _compiler_key(compiler: Sequence[str], parts: Sequence[Part], needs: Sequence[str]) -> str:
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"the C++ compiler {compiler[0]} does not run: {error}") from error
    # Where headers lie does not matter: many environments have the same TensorFlow.
    flags = [[flag for flag in part.flags if not flag.startswith("-I")] for part in parts]
    return hashlib.sha256(version + repr((compiler[1:], flags, list(needs))).encode()).hexdigest()[:8]


def _build_once(compiler: Sequence[str], parts: Sequence[Part], needs: Sequence[str], path: pathlib.Path) -> None:
    """Builds the library, unless another process does already: then that one's outcome is ours, too."""
    failure = path.with_suffix(".failed")
    known = _written(failure)
    with _locked(_lock_of(path)) as alone:
        if path.exists():
            return
        if _written(failure) != known:
            raise BuildError(failure.read_text())
        if alone:
            _remove_remains(path.parent, path)
        _LOG.info("building the native engine, which takes some 10 s and is done once: %s", path)
        try:
            _compile(compiler, parts, needs, path)
        except BuildError as error:
            # Those who wait would all try it again, one after the other.
            failure.write_text(str(error))
            raise
        failure.unlink(missing_ok=True)
        _remove_unused(path.parent)


def _note_use(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _NOTE_SECONDS:
            os.utime(path)


def _remove_unused(folder: pathlib.Path) -> None:
    for path in folder.glob("*.so"):
        with contextlib.suppress(OSError):
            if _NAME.fullmatch(path.name) and time.time() - path.stat().st_mtime > _FORGET_SECONDS:
                path.unlink()
                _lock_of(path).unlink(missing_ok=True)


def _written(path: pathlib.Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return None


def _lock_of(path: pathlib.Path) -> pathlib.Path:
    return path.with_suffix(".lock")


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[bool]:
    """Holds a lock that ends with this process; tells whether there is one: some networks' file systems have none."""
    deadline, locked, told = time.monotonic() + _WAIT_SECONDS, False, False
    with open(path, "a") as lock:
        while not locked:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except BlockingIOError:
                if not told:
                    _LOG.info("another process builds the native engine: waiting for it")
                told = True
                if time.monotonic() > deadline:
                    raise BuildError(f"another process is still at it after {_WAIT_SECONDS:.0f} s: {path}") from None
                time.sleep(_POLL_SECONDS)
            except OSError:
                # Then each builds, and the last one's library stays.
                break
        yield locked


def _remove_remains(folder: pathlib.Path, own: pathlib.Path) -> None:
    """Removes what killed processes left of their builds: those whose locks can be had, or are held by this process."""
    for remains in folder.glob("building-*"):
        path = folder / remains.name.removeprefix("building-").rpartition("-")[0]
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if path != own:
                lock = stack.enter_context(open(_lock_of(path), "a"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(remains, ignore_errors=True)


def _compile(compiler: Sequence[str], parts: Sequence[Part], needs: Sequence[str], path: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory(
        dir=path.parent, prefix=f"building-{path.name}-", ignore_cleanup_errors=True
    ) as name:
        scratch = pathlib.Path(name)
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
            try:
                objects = _compile_parts(compiler, parts, scratch, workers)
            except BaseException:
                workers.shutdown(cancel_futures=True)
                raise
        # The libraries have a gigabyte, and to look into them takes seconds: their names are all that is needed.
        stubs = [str(scratch / name) for name in needs]
        for name, stub in zip(needs, stubs, strict=True):
            _run(
                [*compiler, "-shared", "-nostdlib", f"-Wl,-soname,{name}", "-x", "c++", os.devnull, "-o", stub], scratch
            )
        aside = scratch / path.name
        _run([*compiler, "-shared", "-pthread", *objects, "-Wl,--no-as-needed", *stubs, "-o", str(aside)], scratch)
        with open(aside, "rb") as written:
            os.fsync(written.fileno())
        os.replace(aside, path)


def _compile_parts(
    compiler: Sequence[str], parts: Sequence[Part], scratch: pathlib.Path, workers: concurrent.futures.Executor
) -> list[str]:
    """Compiles the parts side by side, and returns the object files."""
    runs, objects = [], []
    for number, part in enumerate(parts):
        whole = scratch / f"{number}.cc"
        whole.write_text("".join(f'#include "{source.absolute()}"\n' for source in part.sources))
        objects.append(str(whole.with_suffix(".o")))
        command = [*compiler, *_FLAGS, *part.flags, f"-I{SOURCES}", "-c", str(whole), "-o", objects[-1]]
        runs.append(workers.submit(_run, command, scratch))
    for run in runs:
        run.result()
    return objects


def _run(command: Sequence[str], scratch: pathlib.Path) -> None:
    # What a compiler leaves behind when it is killed goes with the rest; its errors are to be found by their word.
    env = {**os.environ, "TMPDIR": str(scratch), "LC_ALL": "C"}
    env.pop("LD_PRELOAD", None)
    try:
        subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_SECONDS,
        )
    except OSError as error:
        raise BuildError(f"the C++ compiler {command[0]} does not run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {_COMPILE_SECONDS:.0f} s") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        first = next((line for line in said if "error" in line), said[0] if said else "it says nothing")
        raise BuildError("\n".join([f"{command[0]}: {first}", *said[:_KEPT_LINES]])) from error


def ship(folder: pathlib.Path) -> pathlib.Path:
    """Builds the library for the installed TensorFlow into a folder, from where it is to be installed as `prebuilt`.

    Raises:
        BuildError: As `library`.
    """
    label, parts, needs = _engine()
    path = folder / f"{label}-{_source_key(parts)}.so"
    folder.mkdir(parents=True, exist_ok=True)
    _compile(_compiler(), parts, needs, path)
    return path


if __name__ == "__main__":
    try:
        print(ship(pathlib.Path(sys.argv[1])))
    except (BuildError, OSError) as error:
        sys.exit(f"kerasfeed's native engine: {error}")
