"""The pump: the producer's main thread, which takes elements from the pipeline and puts them into the window.

It works only when the window asks for work, and ends when the window says so. An exception of the pipeline becomes the
window's failure: the pump then has nothing more to do. With the native engine elements flow without Python, from the
iterator into the window, and what is rare comes back here: seeking, the end of a pass, what fails, saving the iterator.
"""

from __future__ import annotations

import functools
import traceback
from typing import TYPE_CHECKING

from kerasfeed.producer.launch import Progress
from kerasfeed.producer.pipeline import EndOfPass, Pipeline
from kerasfeed.producer.verifier import Mismatch, Verifier
from kerasfeed.producer.way_back import WayBack
from kerasfeed.producer.waypoint import Waypoint
from kerasfeed.producer.window import FailureKind, Pause, Produce, Seek, Window
from kerasfeed.schedule import Position

if TYPE_CHECKING:
    from kerasfeed.native.pump import Flow


def run(
    window: Window,
    pipeline: Pipeline,
    verifier: Verifier,
    way_back: WayBack,
    progress: Progress,
    flow: Flow | None = None,
) -> None:
    """Pumps until the window has no more work.

    Args:
        window: Where elements go.
        pipeline: Where they come from.
        verifier: Compares what is produced again with what it was.
        way_back: Asks for the pipeline's iterator, between two elements, where that will be of use.
        progress: Where it is noted how far the producer has come.
        flow: The native engine's pump; `None`: each element passes here.
    """
    pump = _Pump(window, pipeline, verifier, way_back, progress, flow)
    try:
        # What somebody wants who wakes the pump after this is seen before it flows, or stops the flow.
        wakes = flow.wakes if flow is not None else 0
        while (work := window.wait_for_work(way_back.wanted)) is not None:
            pump.do(work, wakes)
            wakes = flow.wakes if flow is not None else 0
    except BaseException:
        # Without its pump a window would let all ranks wait for ever.
        window.abandon(f"the producer is broken:\n{traceback.format_exc()}")
        raise
    finally:
        way_back.close()


def waypoint_at(window: Window, pipeline: Pipeline, position: Position) -> Waypoint | None:
    """Returns the iterator as it stands, with what it is ahead of a position; `None` if not all of that is in memory.

    Raises:
        tf.errors.OpError, RuntimeError: The iterator can't be saved.
    """
    kept, place, stop = window.untrained(position), window.locate(position), pipeline.standing
    if kept is None:
        return None
    at, left, lengths = place, len(kept), {}
    while at < stop:
        if window.pass_length(at[0]) == at[1]:
            lengths[at[0]] = at[1]
            at = (at[0] + 1, 0)
        elif left:
            at, left = (at[0], at[1] + 1), left - 1
        else:
            return None
    return pipeline.waypoint(place, kept, lengths) if at == stop and not left else None


class _Pump:
    def __init__(
        self,
        window: Window,
        pipeline: Pipeline,
        verifier: Verifier,
        way_back: WayBack,
        progress: Progress,
        flow: Flow | None,
    ):
        self._window = window
        self._pipeline = pipeline
        self._verifier = verifier
        self._way_back = way_back
        self._progress = progress
        self._flow = flow

    def do(self, work: Seek | Produce | Pause, wakes: int) -> None:
        if isinstance(work, Pause):
            self._way_back.answer(functools.partial(waypoint_at, self._window, self._pipeline))
            return
        pipeline = self._pipeline
        next_: Seek | None = None
        try:
            if isinstance(work, Seek):
                self._seek(work)
            elif self._flow is not None and pipeline.flows:
                next_ = self._let_flow(self._flow, wakes)
            else:
                self._produce(work)
        except EndOfPass as end:
            self._end_pass(work.generation, end)
        except Mismatch as mismatch:
            self._window.fail(work.generation, str(mismatch), FailureKind.MISMATCH)
        except (Exception, SystemExit):
            pass_, index = pipeline.standing
            self._window.fail(work.generation, f"element {index} of pass {pass_} raised:\n{traceback.format_exc()}")
        if self._way_back.due(pipeline.standing):
            self._way_back.take(pipeline.standing, functools.partial(pipeline.waypoint, pipeline.standing))
        if next_ is not None:
            self.do(next_, wakes)

    def _seek(self, seek: Seek) -> None:
        window, verifier = self._window, self._verifier
        self._progress.note_origin(seek.pass_, seek.element)

        def ended(pass_: int, elements: int) -> None:
            window.note_pass_length(pass_, elements)
            verifier.ended(pass_, elements)

        verifier.forget_before(window.first_pass)
        self._pipeline.seek(seek.pass_, seek.element, seek.joined, ended, verifier.produced)
        verifier.arrived(seek.pass_, seek.element)

    def _produce(self, work: Produce) -> None:
        element = self._pipeline.next()
        pass_, index = self._pipeline.standing
        self._verifier.produced(pass_, index - 1, element)
        self._window.put(work.generation, element)
        self._progress.note_produced(pass_, index)

    def _let_flow(self, flow: Flow, wakes: int) -> Seek | None:
        """Returns what the window wants when it wants something else."""
        limit = self._way_back.until_due(self._pipeline.standing)
        tolerance = self._verifier.tolerance
        outcome = self._pipeline.flow(functools.partial(flow.run, wakes=wakes, tolerance=tolerance), limit)
        if outcome.strange:
            pass_, index = self._pipeline.standing
            self._verifier.found(pass_, index - 1, outcome.was, outcome.now)
        return outcome.seek

    def _end_pass(self, generation: int, end: EndOfPass) -> None:
        try:
            self._verifier.ended(end.pass_, end.elements)
        except Mismatch as mismatch:
            self._window.fail(generation, str(mismatch), FailureKind.MISMATCH)
            return
        self._verifier.forget_before(self._window.first_pass)
        self._window.end_pass(generation, end.pass_, end.elements)
