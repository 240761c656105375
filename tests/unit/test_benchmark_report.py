"""The figures of `make bench`: medians, ratios, goals, tables, and what a `fit` comes to."""

from __future__ import annotations

import math

import pytest

from benchmarks.suite import fit, report, ways
from benchmarks.suite.elements import ELEMENTS, text_lines
from benchmarks.suite.measure import Cell

pytestmark = pytest.mark.once


def cell(way: str, seconds: list[float], element: str = "2 KB", ranks: int = 2) -> Cell:
    return Cell(way, element, ranks, 2048, 10, seconds, [0.001] * len(seconds), [0.002] * len(seconds))


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(0, 2, "0"), (0.0123, 2, "0.012"), (1.26, 2, "1.3"), (126.4, 2, "126"), (1.0, 3, "1.00"), (0.0999, 3, "0.0999")],
)
def test_numbers_have_significant_digits_and_no_exponent(value: float, digits: int, text: str) -> None:
    assert report.number(value, digits) == text


def test_times_are_medians_with_the_range_in_milliseconds() -> None:
    assert report.milliseconds([0.003, 0.001, 0.002, 0.009, 0.001]) == "**2.0** (1.0 to 9.0)"
    assert report.milliseconds([]) == report.NONE


def test_the_better_mode_of_the_service_is_found_for_each_element() -> None:
    results = report.Results(
        [
            cell("shm", [1.0, 2.0, 3.0]),
            cell("ready", [8.0, 9.0, 7.0]),
            cell("coordinated", [20.0]),
            cell("ready", [30.0], "200 KB"),
            cell("coordinated", [10.0], "200 KB"),
            cell("shm", [5.0], "200 KB"),
        ]
    )
    assert results.best_service("2 KB", 2) == 8.0
    assert results.speedup("shm", "2 KB", 2) == 4.0
    assert results.speedup("shm", "200 KB", 2) == 2.0
    assert results.best(ways.SERVICE_COORDINATED, "2 KB", 2) == 20.0


def test_what_was_not_measured_is_no_number() -> None:
    results = report.Results([Cell("shm", "2 KB", 2, 2048, unavailable="why not")])
    assert math.isnan(results.median("shm", "2 KB", 2))
    assert math.isnan(results.median("tcp", "2 KB", 2))
    assert math.isnan(results.best_service("2 KB", 2))


def test_a_way_that_is_not_available_keeps_its_row_and_its_reason() -> None:
    text = report.transports([cell("local", [0.001]), Cell("shm", "2 KB", 2, 2048, unavailable="why not")])
    assert "| kerasfeed, shared memory | not available |" in text
    assert "- kerasfeed, shared memory: why not" in text
    assert text.index("kerasfeed, shared memory") < text.index("floor: local pipeline")


def test_other_numbers_of_ranks_have_tables_of_their_own() -> None:
    text = report.transports([cell("local", [0.001]), cell("local", [0.004], ranks=8)])
    assert "2 KB, 8 ranks" in text
    assert "**4.0** (4.0 to 4.0)" in text


def goal_named(goals: list[report.Goal], part: str) -> report.Goal:
    (found,) = [goal for goal in goals if part in goal.text]
    return found


def test_goals_compare_the_medians() -> None:
    size = "9.6 MB"
    goals = report.transport_goals(
        report.Results(
            [
                cell("shm", [0.002], size),
                cell("tcp", [0.008], size),
                cell("ready", [0.009], size),
                cell("coordinated", [0.012], size),
                cell("copy", [0.001], size),
                cell("plain-tcp", [0.004], size),
            ]
        )
    )
    better = goal_named(goals, "9.6 MB: tf.data service, better mode / shared memory")
    assert better.measured == pytest.approx(4.5)
    assert better.reached
    assert goal_named(goals, "9.6 MB: tf.data service, coordinated").measured == pytest.approx(6)
    assert goal_named(goals, "plain copying").measured == pytest.approx(0.5)
    plain = goal_named(goals, "plain TCP")
    assert plain.measured == pytest.approx(0.5)
    assert not plain.reached
    assert math.isnan(goal_named(goals, "2 KB: shared memory / local").measured)


def test_an_upper_bound_is_reached_from_below() -> None:
    assert report.Goal("", 1.9, 2, most=True).row() == ["", "at most 2", "1.90", "yes"]
    assert report.Goal("", 2.1, 2, most=True).row() == ["", "at most 2", "2.10", "no"]
    assert report.Goal("", math.nan, 2).row() == ["", "at least 2", report.NONE, "not measured"]


def test_preprocessing_is_told_per_epoch() -> None:
    text = report.preprocessing([cell("whole", [0.5, 0.5, 0.5])])
    # 10 elements for each of 2 ranks: 20 times 1 ms and 2 ms, and 10 times 0.5 s.
    assert "| **0.0600** (0.0600 to 0.0600) | 0.0200 | 0.0400 | 5.00 |" in text


def test_a_fit_is_summed_up_without_its_first_and_its_last_epoch() -> None:
    times = []
    for epoch in range(4):
        start = 100.0 * epoch
        times += [("epoch", start), ("begin", start + 1), ("end", start + 4), ("begin", start + 5), ("end", start + 7)]
    times.append(("epoch", 500.0))
    found = fit.summary(times)
    assert found.epochs == [100.0, 100.0]
    assert found.first == [3.0, 3.0]
    assert found.others == [2.0, 2.0]
    assert found.pauses == [97.0, 97.0]


def test_a_slowdown_is_the_median_of_neighbours() -> None:
    def fits(*epochs: float) -> list[list[fit.Fit]]:
        return [[fit.Fit([epoch], [], [], [])] * 2 for epoch in epochs]

    measured = fit.Measured("load", "way", {"memory": fits(1, 2, 4), "feed": fits(1.1, 2.0, 4.8)})
    assert measured.slowdown() == pytest.approx(1.1)


def test_text_is_the_same_every_time_and_varies_in_length() -> None:
    lines = text_lines()
    assert lines == text_lines()
    lengths = {len(line) for element in lines for line in element}
    assert min(lengths) < 50
    assert max(lengths) > 2000
    assert ELEMENTS["text"].bytes == sum(len(line) for element in lines for line in element) // len(lines)
