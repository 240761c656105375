"""The plot: time per element and rank of each way, for each element, with two ranks."""

from __future__ import annotations

import pathlib
import statistics

from benchmarks.suite import ways
from benchmarks.suite.measure import Cell
from benchmarks.suite.report import Results

_RANKS = 2
_OURS, _SERVICE, _OTHER, _FLOOR = "#1b6ca8", "#e08e45", "#8d8d8d", "#c9c9c9"


def _color(key: str) -> str:
    if key in ("shm", "tcp", "grpc"):
        return _OURS
    if key in (*ways.SERVICE_READY, *ways.SERVICE_COORDINATED):
        return _SERVICE
    return _FLOOR if ways.WAYS[key].title.startswith("floor") else _OTHER


def draw(cells: list[Cell], path: pathlib.Path) -> None:
    """Draws one panel per element: bars from the medians, lines from the fastest to the slowest run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = Results(cells)
    columns = [column for column in results.columns() if column[1] == _RANKS]
    if not columns:
        return
    keys = results.keys(columns)
    figure, axes = pyplot.subplots(
        1, len(columns), figsize=(4 + 3 * len(columns), 0.8 + 0.34 * len(keys)), sharey=True, squeeze=False
    )
    for axis, (element, ranks) in zip(axes[0], columns, strict=True):
        for place, key in enumerate(keys):
            cell = results.cell(key, element, ranks)
            if cell is None or not cell.seconds:
                axis.annotate(
                    "not available", (0.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=7
                )
                continue
            times = [1e3 * seconds for seconds in cell.seconds]
            middle = statistics.median(times)
            axis.barh(place, middle, color=_color(key))
            axis.plot([min(times), max(times)], [place, place], color="black", linewidth=1)
            axis.annotate(f" {middle:.3g}", (max(times), place), va="center", fontsize=7)
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        axis.set_xlim(low, high * 4)
        axis.set_title(element)
        axis.set_xlabel("ms per element and rank")
        axis.grid(axis="x", alpha=0.3)
    axes[0][0].set_yticks(range(len(keys)), [ways.WAYS[key].title for key in keys])
    axes[0][0].set_ylim(len(keys) - 0.5, -0.5)
    figure.suptitle("Two ranks on one host: medians, lines from the fastest to the slowest run; shorter is better")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
