"""Figures to Markdown: medians, ratios, goals and tables. Pure functions of what was measured."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.suite import ways
from benchmarks.suite.measure import Cell

NONE = "-"
_SIZES = ("2 KB", "200 KB", "9.6 MB", "38.5 MB")
_GOAL_RANKS = 2


def number(value: float, digits: int = 2) -> str:
    """Returns a number with that many significant digits, without an exponent."""
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def milliseconds(values: Sequence[float]) -> str:
    """Returns the median and the range of times in seconds, as milliseconds."""
    if not values:
        return NONE
    low, middle, high = (1e3 * value for value in (min(values), statistics.median(values), max(values)))
    return f"**{number(middle)}** ({number(low)} to {number(high)})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table: names to the left, figures to the right."""
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


class Results:
    """Cells, found by way, element and number of ranks."""

    def __init__(self, cells: Iterable[Cell]):
        self._cells = {(cell.way, cell.element, cell.ranks): cell for cell in cells}

    def cell(self, way: str, element: str, ranks: int) -> Cell | None:
        """Returns that cell, or `None` if it was not measured."""
        return self._cells.get((way, element, ranks))

    def median(self, way: str, element: str, ranks: int) -> float:
        """Returns the median time, or NaN if there is none."""
        cell = self.cell(way, element, ranks)
        return statistics.median(cell.seconds) if cell is not None and cell.seconds else math.nan

    def best(self, keys: Iterable[str], element: str, ranks: int) -> float:
        """Returns the shortest of these ways' median times, or NaN if there is none."""
        times = [time for key in keys if not math.isnan(time := self.median(key, element, ranks))]
        return min(times, default=math.nan)

    def best_service(self, element: str, ranks: int) -> float:
        """Returns the median time of tf.data service, in the better of its modes."""
        return self.best((*ways.SERVICE_READY, *ways.SERVICE_COORDINATED), element, ranks)

    def speedup(self, way: str, element: str, ranks: int) -> float:
        """Returns how many times faster a way is than tf.data service in the better of its modes."""
        return self.best_service(element, ranks) / self.median(way, element, ranks)

    def columns(self) -> list[tuple[str, int]]:
        """Returns the elements and numbers of ranks that were measured, in that order."""
        return list(dict.fromkeys((element, ranks) for _, element, ranks in self._cells))

    def keys(self, columns: Iterable[tuple[str, int]]) -> list[str]:
        """Returns the ways that were measured in any of these columns, in the order of `ways.WAYS`."""
        wanted = set(columns)
        measured = {way for way, element, ranks in self._cells if (element, ranks) in wanted}
        return [key for key in ways.WAYS if key in measured]


def _by_way(
    results: Results, columns: list[tuple[str, int]], show: Callable[[Cell], str], head: Callable[[str, int], str]
) -> str:
    rows = []
    for key in results.keys(columns):
        cells = [results.cell(key, element, ranks) for element, ranks in columns]
        rows.append([ways.WAYS[key].title, *(NONE if cell is None else show(cell) for cell in cells)])
    return table(["", *(head(element, ranks) for element, ranks in columns)], rows)


def _show_time(cell: Cell) -> str:
    return milliseconds(cell.seconds) if cell.seconds else "not available"


def _show_cpu(cell: Cell) -> str:
    if not cell.seconds:
        return NONE
    return f"{number(1e3 * statistics.median(cell.producer_cpu))} + {number(1e3 * statistics.median(cell.ranks_cpu))}"


def _show_speedup(results: Results) -> Callable[[Cell], str]:
    def show(cell: Cell) -> str:
        ratio = results.speedup(cell.way, cell.element, cell.ranks)
        return NONE if math.isnan(ratio) else number(ratio)

    return show


def reasons(cells: Iterable[Cell]) -> list[str]:
    """Returns what was not available, and why, once for each way and reason."""
    said: dict[tuple[str, str], None] = {}
    for cell in cells:
        if cell.unavailable:
            said[(ways.WAYS[cell.way].title, cell.unavailable)] = None
    return [f"{title}: {reason}" for title, reason in said]


@dataclasses.dataclass(frozen=True)
class Goal:
    """A ratio that was aimed at.

    Attributes:
        text: What is compared.
        measured: The ratio, NaN if there is none.
        wanted: Where the bound is.
        most: Whether it is an upper bound.
    """

    text: str
    measured: float
    wanted: float
    most: bool = False

    @property
    def reached(self) -> bool:
        """Whether the ratio is on the right side of the bound."""
        return self.measured <= self.wanted if self.most else self.measured >= self.wanted

    def row(self) -> list[str]:
        """Its row in the table of goals."""
        if math.isnan(self.measured):
            return [self.text, self._bound(), NONE, "not measured"]
        return [self.text, self._bound(), number(self.measured, 3), "yes" if self.reached else "no"]

    def _bound(self) -> str:
        return f"at {'most' if self.most else 'least'} {self.wanted:g}"


def transport_goals(results: Results) -> list[Goal]:
    """Returns what was aimed at for two ranks, and what was measured."""
    ranks = _GOAL_RANKS
    goals = []
    for size in _SIZES:
        shm = results.median("shm", size, ranks)
        goals.append(
            Goal(f"{size}: tf.data service, better mode / shared memory", results.best_service(size, ranks) / shm, 4)
        )
        coordinated = results.best(ways.SERVICE_COORDINATED, size, ranks)
        goals.append(Goal(f"{size}: tf.data service, coordinated / shared memory", coordinated / shm, 5))
    local = results.median("local", "2 KB", ranks)
    goals.append(
        Goal("2 KB: shared memory / local pipeline", results.median("shm", "2 KB", ranks) / local, 2, most=True)
    )
    copying = results.median("copy", "9.6 MB", ranks) / results.median("shm", "9.6 MB", ranks)
    goals.append(Goal("9.6 MB: bytes moved by shared memory / by plain copying", copying, 0.4))
    for size in _SIZES:
        ratio = results.best_service(size, ranks) / results.median("tcp", size, ranks)
        goals.append(Goal(f"{size}: tf.data service, better mode / TCP", ratio, 2.5))
    plain = results.median("plain-tcp", "9.6 MB", ranks) / results.median("tcp", "9.6 MB", ranks)
    goals.append(Goal("9.6 MB: bytes moved by TCP / by plain TCP", plain, 0.6))
    return goals


def goals_table(goals: Iterable[Goal]) -> str:
    """Returns the table of goals."""
    return table(["goal", "aimed at", "measured", "reached"], [goal.row() for goal in goals])


def transports(cells: list[Cell]) -> str:
    """Returns the tables of the ways across."""
    results = Results(cells)
    two = [column for column in results.columns() if column[1] == _GOAL_RANKS]
    others = [column for column in results.columns() if column[1] != _GOAL_RANKS]
    parts = []
    if two:
        element_only: Callable[[str, int], str] = lambda element, _: element  # noqa: E731
        parts += [
            "### Two ranks: time",
            "Milliseconds per element and rank: median (fastest to slowest run).",
            _by_way(results, two, _show_time, element_only),
            "### Two ranks: times faster than tf.data service in its better mode",
            "Medians. Which of its modes that is differs from element to element.",
            _by_way(results, two, _show_speedup(results), element_only),
            "### Two ranks: CPU time",
            "Milliseconds per element and rank: producer + ranks. Medians.",
            _by_way(results, two, _show_cpu, element_only),
        ]
    if others:
        parts += [
            "### Other numbers of ranks: time",
            "Milliseconds per element and rank: median (fastest to slowest run).",
            _by_way(results, others, _show_time, lambda element, ranks: f"{element}, {ranks} ranks"),
            "### Other numbers of ranks: CPU time",
            "Milliseconds per element and rank: producer + ranks. Medians.",
            _by_way(results, others, _show_cpu, lambda element, ranks: f"{element}, {ranks} ranks"),
        ]
    missing = reasons(cells)
    if missing:
        parts.append("Not available:\n\n" + "\n".join(f"- {reason}" for reason in missing))
    return "\n\n".join(parts)


def preprocessing(cells: list[Cell]) -> str:
    """Returns the table of what a pipeline with real work costs."""
    rows = []
    for cell in cells:
        title = ways.WAYS[cell.way].title
        if not cell.seconds:
            rows.append([f"{cell.ranks} ranks: {title}", *[NONE] * 4])
            continue
        steps, shared = cell.count, cell.count * cell.ranks
        producer = shared * statistics.median(cell.producer_cpu)
        ranks = shared * statistics.median(cell.ranks_cpu)
        total = [shared * sum(pair) for pair in zip(cell.producer_cpu, cell.ranks_cpu, strict=True)]
        spread = f"**{number(statistics.median(total), 3)}** ({number(min(total), 3)} to {number(max(total), 3)})"
        wall = number(steps * statistics.median(cell.seconds), 3)
        rows.append([f"{cell.ranks} ranks: {title}", spread, number(producer, 3), number(ranks, 3), wall])
    return table(["CPU seconds per epoch", "all processes", "producer", "ranks", "wall seconds"], rows)


def machine(facts: dict[str, Any]) -> str:
    """Returns what was measured on."""
    return table(["", ""], [[name, str(value)] for name, value in facts.items()])
