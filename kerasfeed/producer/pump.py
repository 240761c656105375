"""The pump: the producer's main thread, which takes elements from the pipeline and puts them into the window.

It works only when the window asks for work, and ends when the window says so. An exception of the pipeline becomes the
window's failure: the pump then has nothing more to do.
"""

from __future__ import annotations

import functools
import traceback

from kerasfeed.producer.launch import Progress
from kerasfeed.producer.pipeline import EndOfPass, Pipeline
from kerasfeed.producer.verifier import Mismatch, Verifier
from kerasfeed.producer.way_back import WayBack
from kerasfeed.producer.waypoint import Waypoint
from kerasfeed.producer.window import FailureKind, Pause, Produce, Seek, Window
from kerasfeed.schedule import Position


def run(window: Window, pipeline: Pipeline, verifier: Verifier, way_back: WayBack, progress: Progress) -> None:
    """Pumps until the window has no more work.

    Args:
        window: Where elements go.
        pipeline: Where they come from.
        verifier: Compares what is produced again with what it was.
        way_back: Asks for the pipeline's iterator, between two elements, where that will be of use.
        progress: Where it is noted how far the producer has come.
    """
    try:
        while (work := window.wait_for_work(way_back.wanted)) is not None:
            if isinstance(work, Pause):
                way_back.answer(functools.partial(waypoint_at, window, pipeline))
                continue
            _do(work, window, pipeline, verifier, progress)
            if way_back.due(pipeline.standing):
                way_back.take(pipeline.standing, functools.partial(pipeline.waypoint, pipeline.standing))
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


def _do(work: Seek | Produce, window: Window, pipeline: Pipeline, verifier: Verifier, progress: Progress) -> None:
    try:
        if isinstance(work, Seek):
            progress.note_origin(work.pass_, work.element)

            def ended(pass_: int, elements: int) -> None:
                window.note_pass_length(pass_, elements)
                verifier.ended(pass_, elements)

            verifier.forget_before(window.first_pass)
            pipeline.seek(work.pass_, work.element, work.joined, ended, verifier.produced)
            verifier.arrived(work.pass_, work.element)
            return
        element = pipeline.next()
        pass_, index = pipeline.standing
        verifier.produced(pass_, index - 1, element)
    except EndOfPass as end:
        try:
            verifier.ended(end.pass_, end.elements)
        except Mismatch as mismatch:
            window.fail(work.generation, str(mismatch), FailureKind.MISMATCH)
            return
        verifier.forget_before(window.first_pass)
        window.end_pass(work.generation, end.pass_, end.elements)
    except Mismatch as mismatch:
        window.fail(work.generation, str(mismatch), FailureKind.MISMATCH)
    except (Exception, SystemExit):
        pass_, index = pipeline.standing
        window.fail(work.generation, f"element {index} of pass {pass_} raised:\n{traceback.format_exc()}")
    else:
        window.put(work.generation, element)
        progress.note_produced(pass_, index)
