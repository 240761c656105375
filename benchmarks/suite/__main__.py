"""Measures kerasfeed and other ways of feeding ranks, side by side, and writes tables, a JSON file and a plot.

    make bench

docs/benchmarks.md says what is measured, and how.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import platform
import signal
import sys
import time
from importlib import metadata
from typing import Any

from benchmarks.suite import elements, fit, floors, measure, plot, report, ways
from benchmarks.suite.measure import Cell, Pace

ROOT = pathlib.Path(__file__).resolve().parents[2]
GRID_RANKS = 2
# With other numbers of ranks: elements, and ways.
OTHER_RANKS = (1, 4, 8)
OTHER_SHARE = 0.6  # of a run's time
OTHER_ELEMENTS = ("2 KB", "9.6 MB")
OTHER_WAYS = ("shm", "tcp", "grpc", "ready", "coordinated", "queue", "whole", "local", "copy", "plain-tcp")
BROADCAST_RANKS = (2, 4)  # with 8, Horovod's negotiation of 8 ranks on few cores is all that would be seen
PREPROCESSING_RANKS = (2, 4)
PREPROCESSING_WAYS = ("shm", "ready", "whole")
FEWEST_REPETITIONS = 5


def facts() -> dict[str, Any]:
    """Returns what was measured on, and with."""
    model = next(
        (line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),  # noqa: SIM115
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = {name: metadata.version(name) for name in ("tensorflow", "keras", "horovod", "numpy")}
    return {
        "processor": f"{model}, {os.cpu_count()} cores",
        "memory": f"{memory / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        **versions,
        "load before": ", ".join(f"{load:.2f}" for load in os.getloadavg()),
    }


def ways_for(ranks: int) -> list[str]:
    """Returns the ways that are measured with that many ranks."""
    if ranks == GRID_RANKS:
        return list(ways.WAYS)
    return [key for key in ways.WAYS if key in OTHER_WAYS or (key == "broadcast" and ranks in BROADCAST_RANKS)]


def measure_ways(
    args: argparse.Namespace, program: pathlib.Path, deadline: float
) -> tuple[list[Cell], list[Cell], list[str]]:
    """Returns the cells of the first table and of the third, and what was left out because time was over."""
    cells: list[Cell] = []
    preprocessing: list[Cell] = []
    left_out: list[str] = []
    for ranks in args.ranks:
        keys = [key for key in ways_for(ranks) if not args.ways or key in args.ways]
        names = [name for name in args.elements if ranks == GRID_RANKS or name in OTHER_ELEMENTS]
        third = [key for key in PREPROCESSING_WAYS if key in keys and ranks in PREPROCESSING_RANKS]
        if "transports" not in args.tables:
            names, keys = [], third
        blocks = [*names, *([elements.PREPROCESSED.name] if third and "preprocessing" in args.tables else [])]
        pace = Pace(args.seconds * (1 if ranks == GRID_RANKS else OTHER_SHARE), args.repetitions)
        for name in blocks:
            if time.monotonic() > deadline:
                left_out.append(f"{name}, {ranks} ranks")
                continue
            is_third = name == elements.PREPROCESSED.name
            with measure.Ranks(ranks, name, third if is_third else keys, program) as group:
                if is_third:
                    preprocessing += group.measure(pace, elements.EPOCH_BATCHES // ranks)
                else:
                    cells += group.measure(pace)
    return cells, preprocessing, left_out


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.suite", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--results", type=pathlib.Path, default=ROOT / "benchmarks" / "results", help="folder to write to"
    )
    parser.add_argument("--repetitions", type=int, default=5, help="runs of each cell (default: 5)")
    parser.add_argument("--seconds", type=float, default=0.4, help="length of a run, about (default: 0.4)")
    parser.add_argument("--minutes", type=float, default=13.5, help="begin nothing after that (default: 13.5)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[GRID_RANKS, *OTHER_RANKS], help="numbers of ranks")
    parser.add_argument("--elements", nargs="+", default=list(elements.ELEMENTS), choices=list(elements.ELEMENTS))
    parser.add_argument("--ways", nargs="+", default=[], choices=list(ways.WAYS), help="these rows only")
    parser.add_argument(
        "--tables",
        nargs="+",
        default=["transports", "fit", "preprocessing"],
        choices=["transports", "fit", "preprocessing"],
        help="these tables only",
    )
    args = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("matplotlib is not installed: use `make bench`, or install requirements/bench.txt")
    if args.repetitions < FEWEST_REPETITIONS:
        measure.say(f"{args.repetitions} runs of each cell: fewer than {FEWEST_REPETITIONS} are good for a try only")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # processes that were started are ended
    began = time.monotonic()
    about = facts()
    measure.say("building the floors")
    program = floors.build(ROOT / ".build" / "bench")
    fits: list[fit.Measured] = []
    if "fit" in args.tables:
        measure.say("model.fit, from memory and from the feed")
        fits = fit.measure(args.repetitions)
    cells: list[Cell] = []
    preprocessing: list[Cell] = []
    if "transports" in args.tables or "preprocessing" in args.tables:
        measure.say("ways across")
        cells, preprocessing, left_out = measure_ways(args, program, began + 60 * args.minutes)
        if left_out:
            about["left out, since time was over"] = "; ".join(left_out)
            measure.say(f"left out, since {args.minutes:g} minutes were over: {'; '.join(left_out)}")
    about["load after"] = ", ".join(f"{load:.2f}" for load in os.getloadavg())
    about["taken"] = f"{time.strftime('%Y-%m-%d')}, in {(time.monotonic() - began) / 60:.1f} minutes"
    write(args.results, about, cells, preprocessing, fits)
    return 0


def write(
    folder: pathlib.Path, about: dict[str, Any], cells: list[Cell], preprocessing: list[Cell], fits: list[fit.Measured]
) -> None:
    """Writes `results.md`, `results.json` and `results.png`, and prints the goals."""
    folder.mkdir(parents=True, exist_ok=True)
    goals = [*report.transport_goals(report.Results(cells)), *(fit.goals(fits) if fits else [])]
    goals = [goal for goal in goals if goal.measured == goal.measured]
    parts = [
        "# Benchmark results",
        "Written by `make bench`. [How to read them](../../docs/benchmarks.md).",
        report.machine(about),
    ]
    if goals:
        parts += ["## Goals, for two ranks", report.goals_table(goals)]
    if cells:
        plot.draw(cells, folder / "results.png")
        parts += ["## Ways across", "![Time per element and rank](results.png)", report.transports(cells)]
    if fits:
        parts += ["## `model.fit`", fit.table(fits)]
    if preprocessing:
        parts += ["## A pipeline with work to do", report.preprocessing(preprocessing)]
    text = "\n\n".join(parts) + "\n"
    (folder / "results.md").write_text(text)
    data = {
        "machine": about,
        "goals": [{**dataclasses.asdict(goal), "reached": goal.reached} for goal in goals],
        "transports": [dataclasses.asdict(cell) for cell in cells],
        "preprocessing": [dataclasses.asdict(cell) for cell in preprocessing],
        "fit": [dataclasses.asdict(measured) for measured in fits],
    }
    (folder / "results.json").write_text(json.dumps(data, indent=1) + "\n")
    print(report.goals_table(goals))
    measure.say(f"written to {folder}")


if __name__ == "__main__":
    sys.exit(main())
