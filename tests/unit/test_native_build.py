"""The native engine's library is built once, whole or not at all, and found again; where that fails, it is said why."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from kerasfeed.errors import FeedError
from kerasfeed.native import build, engine

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 60.0
# Counts its calls, but for the one that asks for its version, and waits as long as a file is there.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && { cat "$FAKE/version"; exit; }
echo "$$" >>"$FAKE/calls"
while [ -e "$FAKE/hold" ]; do sleep 0.02; done
exec g++ "$@"
"""
# As a rank that starts; the rest of the package is not imported, nor is TensorFlow.
RANK = """
import importlib.util, logging, os, pathlib, sys
spec = importlib.util.spec_from_file_location("build", sys.argv[1])
build = sys.modules["build"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
handlers = [logging.StreamHandler(sys.stdout), logging.FileHandler(os.environ["FAKE"] + "/log")]
logging.basicConfig(level=logging.INFO, handlers=handlers, format="%(name)s: %(message)s")
build.SOURCES = pathlib.Path(sys.argv[2])
try:
    print(build.build("label", [build.Part(build.core_sources())]))
except build.BuildError as error:
    print(f"BuildError: {error}")
"""


class Place:
    """A tree with a library of one number, a compiler that counts, and a cache."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.cache, self.tree = folder, folder / "cache", folder / "native"
        self.compiler, self.hold = folder / "compiler", folder / "hold"
        (self.tree / "core").mkdir(parents=True)
        (self.tree / "ops").mkdir()
        self.header, self.source = self.tree / "core" / "number.h", self.tree / "core" / "number.cc"
        self.header.write_text("#define NUMBER 7\n")
        self.source.write_text('#include "core/number.h"\nextern "C" __attribute__((visibility("default")))\n')
        with self.source.open("a") as source:
            source.write("int number() { return NUMBER; }\n")
        (self.tree / "ops" / "op.cc").write_text("int op() { return 1; }\n")
        (folder / "version").write_text("a compiler 1.0\n")
        self.compiler.write_text(COMPILER)
        self.compiler.chmod(0o755)
        monkeypatch.setattr(build, "SOURCES", self.tree)
        for name, value in {"CXX": self.compiler, "KERASFEED_CACHE": self.cache, "FAKE": folder}.items():
            monkeypatch.setenv(name, str(value))
        for name in ("KERASFEED_SANITIZE", "KERASFEED_ENGINE", "LD_PRELOAD"):
            monkeypatch.delenv(name, raising=False)

    def build(self, label: str = "label", flags: tuple[str, ...] = (), needs: tuple[str, ...] = ()) -> Path:
        return build.build(label, [build.Part(build.core_sources(), flags)], needs)

    def calls(self) -> int:
        return self._lines("calls")

    def notes(self) -> int:
        """How many lines all ranks have logged: each one, that it builds or that it waits."""
        return self._lines("log")

    def _lines(self, name: str) -> int:
        log = self.folder / name
        return len(log.read_text().splitlines()) if log.exists() else 0

    def remains(self) -> list[str]:
        return sorted(path.name for path in self.cache.glob("building-*"))

    def ranks(self, count: int) -> list[subprocess.Popen[str]]:
        command = [sys.executable, "-c", RANK, build.__file__, str(self.tree)]
        return [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Place:
    return Place(tmp_path, monkeypatch)


def number(path: Path) -> int:
    return ctypes.CDLL(str(path)).number()


def said(ranks: list[subprocess.Popen[str]]) -> list[list[str]]:
    return [rank.communicate(timeout=LIMIT)[0].splitlines() for rank in ranks]


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def fake_tensorflow(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str = "9.8.7") -> types.ModuleType:
    """Puts a module in the place of TensorFlow, with a library that ops are to be linked to."""
    (folder / "tf").mkdir(exist_ok=True)
    (folder / "tf" / "libtensorflow_framework.so.2").touch()
    module = types.ModuleType("tensorflow")
    module.__version__ = version
    module.sysconfig = types.SimpleNamespace(get_compile_flags=lambda: ["-DTF"], get_lib=lambda: str(folder / "tf"))
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    return module


# ---- Once ----


def test_a_library_is_built_once_and_leaves_nothing_beside_it(place, caplog):
    with caplog.at_level(logging.INFO, "kerasfeed"):
        path = place.build()
        calls = place.calls()
        assert place.build() == path
    assert number(path) == 7
    assert place.calls() == calls
    assert sorted(file.suffix for file in place.cache.iterdir()) == [".lock", ".so"]
    assert [record.message for record in caplog.records if "building the native engine" in record.message] != []
    assert len(caplog.records) == 1


def test_one_of_many_ranks_builds_and_all_get_the_library(place):
    place.hold.touch()
    ranks = place.ranks(8)
    wait_until(lambda: place.notes() == 8, "one rank to build and seven to wait")
    place.hold.unlink()
    lines = said(ranks)
    assert {line[-1] for line in lines} == {str(next(place.cache.glob("*.so")))}
    assert place.calls() == 2  # one source, one link
    assert sorted(line[0].split(":")[1].split()[0] for line in lines if len(line) > 1) == ["another"] * 7 + ["building"]
    assert number(Path(lines[0][-1])) == 7
    assert place.remains() == []


def test_a_killed_builder_leaves_no_library_and_blocks_nobody(place):
    place.hold.touch()
    (first,) = place.ranks(1)
    wait_until(lambda: place.calls() == 1, "the first call of the compiler")
    others = place.ranks(2)
    wait_until(lambda: place.notes() == 3, "the others to wait")
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=LIMIT)
    assert list(place.cache.glob("*.so")) == []
    wait_until(lambda: place.calls() == 2, "another rank to build")
    place.hold.unlink()  # for the orphaned compiler, too
    lines = said(others)
    assert number(Path(lines[0][-1])) == 7
    assert lines[0][-1] == lines[1][-1]
    assert place.remains() == []


def test_ranks_that_wait_for_a_build_that_fails_do_not_try_it_again(place):
    place.source.write_text("int number() { return nothing; }\n")
    place.hold.touch()
    ranks = place.ranks(4)
    wait_until(lambda: place.notes() == 4, "one rank to build and three to wait")
    place.hold.unlink()
    lines = said(ranks)
    assert place.calls() == 1
    assert all(
        any("BuildError" in line and "error: 'nothing' was not declared" in line for line in rank) for rank in lines
    )
    # Who comes later does: what was missing may have been installed.
    with pytest.raises(build.BuildError, match="'nothing' was not declared"):
        place.build()
    assert place.calls() == 2
    assert place.remains() == []


def test_remains_of_killed_builders_are_removed_and_those_of_others_at_work_stay(place):
    place.cache.mkdir()
    (place.cache / "building-old.so-abc").mkdir()
    (place.cache / "building-old.so-abc" / "1.o").touch()
    place.hold.touch()
    (working,) = place.ranks(1)
    wait_until(lambda: place.calls() == 1, "the first call of the compiler")
    (at_work,) = place.remains()  # the old one is gone by now
    place.compiler.write_text(COMPILER.replace("$FAKE/hold", "$FAKE/never"))
    assert number(place.build("another")) == 7
    assert place.remains() == [at_work]
    place.hold.unlink()
    said([working])
    assert place.remains() == []


def test_libraries_that_nobody_has_used_for_months_are_removed_by_who_builds_one(place):
    months_ago = time.time() - 100 * 24 * 3600
    used = place.build("tensorflow-9.8.7")
    unused = place.cache / f"tensorflow-2.15.1-{16 * '0'}-{8 * '0'}.so"
    foreign = place.cache / "libother.so"
    for path in (unused, foreign):
        path.touch()
    unused.with_suffix(".lock").touch()
    for path in (used, unused, foreign):
        os.utime(path, (months_ago, months_ago))
    assert place.build("tensorflow-9.8.7") == used
    place.source.write_text(place.source.read_text() + "int another;\n")
    built = place.build("tensorflow-9.8.7")
    assert {path.name for path in place.cache.glob("*.so")} == {used.name, built.name, foreign.name}
    assert not unused.with_suffix(".lock").exists()


def test_where_files_cannot_be_locked_each_builds_and_nothing_is_removed(place, monkeypatch):
    def no_locks(*args):
        raise OSError("no locks available")

    monkeypatch.setattr(build.fcntl, "flock", no_locks)
    (place.cache / "building-other.so-abc").mkdir(parents=True)
    assert number(place.build()) == 7
    assert place.remains() == ["building-other.so-abc"]


# ---- What a library is known by ----


def test_a_library_is_for_its_source_headers_compiler_flags_and_label(place, monkeypatch):
    paths = [place.build()]
    assert place.build(flags=("-I/elsewhere",)) == paths[0]
    paths += [place.build("other"), place.build(flags=("-DOTHER",))]
    place.header.write_text("#define NUMBER 8\n")
    paths.append(place.build())
    assert number(paths[-1]) == 8
    place.source.write_text(place.source.read_text().replace("NUMBER", "NUMBER + 1"))
    paths.append(place.build())
    (place.folder / "version").write_text("a compiler 1.1\n")
    paths.append(place.build())
    monkeypatch.setenv("KERASFEED_SANITIZE", "undefined")
    paths.append(place.build())
    assert len(set(paths)) == len(paths)
    assert all(path.exists() for path in paths)


def test_a_library_asks_for_others_by_name_without_looking_at_them(place):
    path = place.build(needs=("libsomething.so.3",))
    headers = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    assert "[libsomething.so.3]" in headers
    with pytest.raises(OSError, match=r"libsomething\.so\.3"):
        ctypes.CDLL(str(path))


def test_a_library_is_for_a_version_of_tensorflow(place, monkeypatch):
    fake_tensorflow(monkeypatch, place.folder)
    path = build.library()
    assert path.name.startswith("tensorflow-9.8.7-")
    headers = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    assert "[libtensorflow_framework.so.2]" in headers
    assert "libtensorflow_cc" not in headers  # that TensorFlow has none
    fake_tensorflow(monkeypatch, place.folder, "9.8.8")
    assert build.library() != path


def test_the_library_that_an_installation_brought_needs_no_compiler(place, monkeypatch):
    fake_tensorflow(monkeypatch, place.folder)
    shipped = build.ship(place.tree / "prebuilt")
    assert sorted(place.tree.joinpath("prebuilt").iterdir()) == [shipped]
    monkeypatch.setenv("CXX", "/nonexistent")
    assert build.library() == shipped
    for change in (
        lambda: fake_tensorflow(monkeypatch, place.folder, "9.8.8"),
        lambda: place.header.write_text("#define NUMBER 8\n"),
    ):
        change()
        with pytest.raises(build.BuildError, match="/nonexistent does not run"):
            build.library()
        fake_tensorflow(monkeypatch, place.folder)


def test_sanitizers_want_a_library_of_their_own(place, monkeypatch):
    fake_tensorflow(monkeypatch, place.folder)
    shipped = build.ship(place.tree / "prebuilt")
    monkeypatch.setenv("KERASFEED_SANITIZE", "address")
    assert build.library().parent == place.cache != shipped.parent


# ---- What fails ----


def test_no_compiler_is_said(place, monkeypatch):
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(place.folder / "nothing"))
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler: install g\+\+"):
        place.build()


def test_a_compiler_may_have_arguments(place, monkeypatch):
    monkeypatch.setenv("CXX", f"{shutil.which('env')} NOTHING=1 g++")
    assert number(place.build()) == 7


def test_without_a_home_the_library_lies_in_a_private_folder(place, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.delenv("KERASFEED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    path = place.build()
    assert path.parent == tmp_path / f"kerasfeed-{os.getuid()}"
    assert path.parent.stat().st_mode & 0o077 == 0
    path.parent.chmod(0o777)
    with pytest.raises(build.BuildError, match="Name one in KERASFEED_CACHE"):
        place.build()


def test_all_files_of_all_parts_are_in_the_library(place):
    (place.tree / "core" / "more.cc").write_text(
        'extern "C" __attribute__((visibility("default"))) int more() { return 2; }'
    )
    (place.tree / "ops" / "op.cc").write_text(
        'extern "C" __attribute__((visibility("default"))) int op() { return OP; }'
    )
    path = build.build("both", [build.Part(build.core_sources()), build.Part(build.op_sources(), ("-DOP=3",))])
    library = ctypes.CDLL(str(path))
    assert (library.number(), library.more(), library.op()) == (7, 2, 3)
    assert place.calls() == 3


# ---- The engine ----


@pytest.fixture
def fresh(place, monkeypatch) -> Place:
    """A process that has not loaded an engine yet."""
    for name, value in {"_loaded": None, "_reason": None, "_warned": False}.items():
        monkeypatch.setattr(engine, name, value)
    return place


def broken(monkeypatch, message="g++: a.cc:1:2: error: no\nmore of it") -> list[int]:
    calls = []

    def library():
        calls.append(1)
        raise build.BuildError(message)

    monkeypatch.setattr(build, "library", library)
    return calls


def test_the_python_engine_is_had_by_asking_for_it(fresh, monkeypatch, caplog):
    calls = broken(monkeypatch)
    monkeypatch.setenv("KERASFEED_ENGINE", "python")
    assert engine.load() is None
    assert calls == []
    assert caplog.records == []


@pytest.mark.parametrize("value", ["Native", "c++", " "])
def test_an_unknown_engine_is_an_error_that_names_those_there_are(fresh, monkeypatch, value):
    monkeypatch.setenv("KERASFEED_ENGINE", value)
    with pytest.raises(
        ValueError, match=f"KERASFEED_ENGINE: expected native or python, received '{value}'".replace("+", r"\+")
    ):
        engine.load()


@pytest.mark.parametrize("value", [None, ""])
def test_where_nothing_can_be_built_one_warning_says_why_and_what_to_do(fresh, monkeypatch, caplog, value):
    calls = broken(monkeypatch)
    if value is not None:
        monkeypatch.setenv("KERASFEED_ENGINE", value)
    assert [engine.load() for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("kerasfeed", "WARNING")
    assert "g++: a.cc:1:2: error: no" in record.message
    assert "more of it" not in record.message
    assert "KERASFEED_ENGINE=python" in record.message
    assert calls == [1]


def test_the_native_engine_is_insisted_on_by_name(fresh, monkeypatch, caplog):
    broken(monkeypatch)
    monkeypatch.setenv("KERASFEED_ENGINE", "native")
    for _ in range(2):
        with pytest.raises(FeedError, match=r"(?s)KERASFEED_ENGINE is 'native'.*error: no.*more of it"):
            engine.load()
    assert caplog.records == []


def test_a_library_that_does_not_load_is_as_good_as_none(fresh, monkeypatch, caplog, tmp_path):
    (tmp_path / "torn.so").write_text("not a library")
    monkeypatch.setattr(build, "library", lambda: tmp_path / "torn.so")
    assert engine.load() is None
    (record,) = caplog.records
    assert "does not load" in record.message
    assert "torn.so" in record.message


def test_threads_that_ask_at_once_get_the_same_engine(fresh, monkeypatch):
    loads = []

    def load_slowly():
        loads.append(1)
        time.sleep(0.1)
        return engine.Engine(None, None)

    monkeypatch.setattr(engine, "_load", load_slowly)
    found = []
    threads = [threading.Thread(target=lambda: found.append(engine.load())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert loads == [1]
    assert len(found) == 8
    assert all(one is found[0] for one in found)


# ---- Installation ----

FAKE_TENSORFLOW = """
import types
__version__ = "9.8.7"
sysconfig = types.SimpleNamespace(get_compile_flags=lambda: [], get_lib=lambda: "/nonexistent")
"""


def install(place: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of setup.py beside a TensorFlow that is a fake, with a compiler that only makes files."""
    (place.folder / "path" / "tensorflow").mkdir(parents=True, exist_ok=True)
    (place.folder / "path" / "tensorflow" / "__init__.py").write_text(FAKE_TENSORFLOW)
    place.compiler.write_text('#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && echo >"$2"; shift; done\n')
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(place.folder / "path"), **env},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_an_installation_brings_all_sources_and_the_library(place):
    target = place.folder / "lib"
    install(place, "build_py", "--build-lib", str(target))
    installed = target / "kerasfeed" / "native"
    for folder in ("core", "ops"):
        names = {path.name for path in (ROOT / "kerasfeed" / "native" / folder).iterdir()}
        assert {path.name for path in (installed / folder).iterdir()} == names
    (library,) = (installed / "prebuilt").iterdir()
    # It is the one that the installed package will look for.
    code = "import sys; sys.path[:0] = sys.argv[1:]; import build; print(build.library())"
    found = subprocess.run(
        [sys.executable, "-c", code, str(installed), str(place.folder / "path")],
        env={**os.environ, "CXX": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == str(library)


def test_an_installation_goes_on_where_nothing_can_be_built(place):
    target = place.folder / "lib"
    done = install(place, "build_py", "--build-lib", str(target), CXX="/nonexistent")
    assert "the native engine is not built now, but at first use" in done.stderr
    assert "/nonexistent does not run" in done.stderr
    assert (target / "kerasfeed" / "native" / "build.py").exists()
    assert list((target / "kerasfeed" / "native").glob("prebuilt/*")) == []


def test_an_installation_for_the_python_engine_builds_nothing(place):
    target = place.folder / "lib"
    install(place, "build_py", "--build-lib", str(target), KERASFEED_ENGINE="python")
    assert not (target / "kerasfeed" / "native" / "prebuilt").exists()
