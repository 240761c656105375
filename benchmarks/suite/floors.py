"""The floors that `floors.cc` measures: plain copying and plain TCP."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

_SOURCE = pathlib.Path(__file__).with_name("floors.cc")
_SECONDS = 60.0


def build(folder: pathlib.Path) -> pathlib.Path:
    """Compiles the program, if it is not there or older than its source; returns where it is."""
    program = folder / "floors"
    if not program.exists() or program.stat().st_mtime < _SOURCE.stat().st_mtime:
        folder.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, "-std=c++17", "-O2", "-pthread", str(_SOURCE), "-o", str(program)], check=True)
    return program


def measure(program: pathlib.Path, way: str, size: int, ranks: int, seconds: float) -> dict[str, float]:
    """Returns what an element for each rank costs: its time, and the CPU time of both sides, per element and rank."""
    if way == "copy":
        command = [str(program), "copy", str(size), str(seconds)]
    else:
        command = [str(program), "tcp", str(size), str(ranks), str(seconds)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS).stdout
    measured: dict[str, float] = json.loads(output)
    if way == "copy":
        measured["seconds"] *= ranks  # one thread copies for all
    return measured
