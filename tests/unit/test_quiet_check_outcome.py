"""What the quiet check makes of a try that came to its end or did not, and of what goes wrong: without a process."""

from __future__ import annotations

import dataclasses
import logging
import re
import types

import pytest

from kerasfeed import quiet_check
from kerasfeed.options import FeedOptions
from kerasfeed.producer import graph
from kerasfeed.replay_check import Outcome

RACE = "random ops in a parallel map"


@pytest.fixture
def check(caplog):
    """A check that was not started, of a producer that runs."""
    caplog.set_level(logging.INFO, "kerasfeed")
    launch = types.SimpleNamespace(options=FeedOptions().to_json())
    supervisor = types.SimpleNamespace(pid=1, launch=launch, pass_lengths={}, first_digests=lambda: ["a"] * 50)
    return quiet_check.QuietCheck(supervisor, "[]", "ab")


def outcome(digests, *obstacles, read=0, **more):
    return Outcome(dataclasses.asdict(graph.GraphWord(obstacles)), "[]", "ab", {0: list(digests)}, read=read, **more)


LATE, RAISED = {"failure": "it took too long"}, {"read": 1, "failed_in": 0, "failure": "ValueError: boom"}


@pytest.mark.parametrize(
    ("again", "level", "text"),
    [
        (outcome("abc", read=1), "INFO", "its first 3 elements came again as they were"),
        (outcome("aXc", read=1), "WARNING", "element 1 of pass 0 was another one"),
        (outcome("ab", read=1), "WARNING", "pass 0 had 3 elements, and 2 when"),
        (outcome("abc", RACE, read=1), "WARNING", RACE),
        (outcome("ab", **LATE), "INFO", "its first 2 elements .* More could not be tried: it took too long"),
        (outcome("aX", **LATE), "WARNING", "element 1 of pass 0 was another one"),
        (outcome("", **LATE), "INFO", "could not be tried .*: it took too long"),
        (outcome("", RACE, **LATE), "WARNING", RACE),
        (outcome("ab", **RAISED), "INFO", "its first 2 elements .* More could not be tried: ValueError: boom"),
        (outcome("aX", **RAISED), "WARNING", "element 1 of pass 0 was another one"),
        (Outcome(failure="its process died"), "INFO", "could not be tried .*: its process died"),
        (dataclasses.replace(outcome("abc", read=1), fingerprint="cd"), "WARNING", "builds another graph each time"),
    ],
)
def test_one_line_says_what_came_of_it(check, caplog, again, level, text):
    check._tell(list("abc"), None, again)
    [record] = caplog.records
    assert record.levelname == level
    assert record.getMessage().startswith("feed 'train': ")
    assert re.search(text, record.getMessage())


def test_what_came_too_late_is_not_told(check, caplog):
    check._supervisor.pid = None
    check._tell(list("abc"), None, outcome("aXc", read=1))
    assert caplog.records == []


def test_whatever_goes_wrong_is_no_more_than_a_line_in_the_log(check, caplog, monkeypatch):
    monkeypatch.setattr(quiet_check, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(check._supervisor, "first_digests", lambda: {}["gone"])
    check.start()
    check._thread.join(5)
    [record] = caplog.records
    assert record.levelname == "INFO"
    assert "could not be tried whether this pipeline can be replayed: KeyError" in record.getMessage()


def test_a_thread_that_can_not_be_started_is_no_more_than_a_line_in_the_log(check, caplog, monkeypatch):
    def start():
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(check._thread, "start", start)
    check.start()
    check.stop()
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_feeds_wait_for_their_turn_and_leave_it_when_they_are_stopped(check, monkeypatch):
    monkeypatch.setattr(quiet_check, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(quiet_check, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(check._supervisor, "first_digests", pytest.fail)
    with quiet_check._turn:
        check.start()
        check._thread.join(0.1)
        assert check._thread.is_alive()
        check.stop()
        assert not check._thread.is_alive()
    assert quiet_check._turn.acquire(blocking=False)
    quiet_check._turn.release()
