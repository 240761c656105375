"""The package as a user meets it: names, docstrings, version, what is in the Makefile and README, and the example."""

from __future__ import annotations

import inspect
import os
import pathlib
import re
import subprocess
import sys
from importlib import metadata

import pytest

import kerasfeed

ROOT = pathlib.Path(__file__).resolve().parents[1]
BIN = pathlib.Path(sys.executable).parent
NAMES = {
    "DataFeeder",
    "EpochStatistics",
    "FeedClosedError",
    "FeedError",
    "FeedInterrupted",
    "FeedState",
    "ProducerError",
    "RankError",
    "ReplayMismatchError",
    "ReplayReport",
    "StateError",
    "Topology",
    "callbacks",
    "check",
}


def public_objects() -> dict[str, object]:
    modules = (kerasfeed, kerasfeed.callbacks)
    return {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in module.__all__}


def test_all_names_what_is_public() -> None:
    assert set(kerasfeed.__all__) >= NAMES
    assert {"BackupAndRestore", "FeedCallback", "ModelCheckpoint", "restore_feeds"} <= set(kerasfeed.callbacks.__all__)
    for name, value in public_objects().items():
        assert value is not None, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kerasfeed.nothing


def test_public_objects_say_what_they_are_for() -> None:
    for name, value in public_objects().items():
        assert inspect.getdoc(value), f"{name} has no docstring"
        for member, method in inspect.getmembers(value, inspect.isroutine):
            # Of the classes' own; what Keras and TensorFlow define is theirs.
            if member.startswith("_") or not getattr(method, "__module__", "").startswith("kerasfeed"):
                continue
            assert inspect.getdoc(method), f"{name}.{member} has no docstring"


def test_docstrings_name_every_argument() -> None:
    for name, value in public_objects().items():
        if not inspect.isclass(value) or issubclass(value, Exception):
            continue
        arguments = [argument for argument in inspect.signature(value).parameters if argument not in ("self", "source")]
        text = inspect.getdoc(value) or ""
        assert "Args:" in text or "Attributes:" in text, name
        for argument in arguments:
            assert re.search(rf"^ +{argument}: ", text, re.MULTILINE), f"{name}: nothing about {argument}"


@pytest.mark.parametrize(
    "name",
    [
        "DataFeeder",
        "FeedState",
        "callbacks.BackupAndRestore",
        "callbacks.FeedCallback",
        "callbacks.ModelCheckpoint",
        "callbacks.restore_feeds",
        "check",
    ],
)
def test_docstrings_have_an_example(name: str) -> None:
    value = public_objects()[f"kerasfeed.{name}"]
    assert "Example" in (inspect.getdoc(value) or "")


def test_version_is_the_same_everywhere() -> None:
    declared = re.search(r'version="([^"]+)"', (ROOT / "setup.py").read_text())
    assert declared is not None
    assert declared[1] == kerasfeed.__version__
    assert metadata.version("kerasfeed") == kerasfeed.__version__


def test_import_needs_neither_horovod_nor_keras() -> None:
    code = (
        "import sys; import kerasfeed; "
        "print([m for m in sys.modules if m.split('.')[0] == 'horovod' or m == 'kerasfeed.callbacks'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_nothing_unpickles_but_the_producers_own_pipe() -> None:
    unpickling = re.compile(
        r"pickle\.loads?\b|Unpickler|broadcast_object|allgather_object|marshal\.load|allow_pickle=True"
    )
    found = set()
    for folder in ("kerasfeed", "callbacks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line in path.read_text().splitlines():
                if unpickling.search(line):
                    found.add((path.relative_to(ROOT).as_posix(), line.strip()))
    assert {path for path, _ in found} == {"kerasfeed/producer/__main__.py"}, found
    assert all("cloudpickle.loads(launch.payload)" in line for _, line in found), found


def test_makefile_has_its_targets() -> None:
    text = (ROOT / "Makefile").read_text()
    for target in (
        "help",
        "env-keras2",
        "env-keras3",
        "env-tf221",
        "test",
        "test-native",
        "test-ops",
        "lint",
        "format",
        "demo",
        "proto",
        "clean",
    ):
        assert re.search(rf"^(.* )?{target}( .*)?:( |$)", text, re.MULTILINE), target
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


@pytest.mark.horovod
def test_example_says_that_every_element_was_trained_once() -> None:
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "TF_CPP_MIN_LOG_LEVEL": "3"}
    # Three epochs are too few for the accuracy that the script asks for: its exit code says so.
    done = subprocess.run(
        [BIN / "horovodrun", "--gloo", "-np", "2", BIN / "python", "examples/digits.py", "--epochs", "3"],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        start_new_session=True,
        check=False,
    )
    lines = [line.partition("<stdout>:")[2] or line for line in done.stdout.splitlines()]
    proof = [line for line in lines if line.startswith("feed 'train':")]
    assert len(proof) == 1, done.stdout[-8000:]
    assert "every element was trained once" in proof[0]
    problems = [line for line in lines if "missed" in line or "more than once" in line]
    assert problems in ([], proof), done.stdout[-8000:]
