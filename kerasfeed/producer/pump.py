"""The pump: the producer's main thread, which takes elements from the pipeline and puts them into the window.

It works only when the window asks for work, and ends when the window says so. An exception of the pipeline becomes the
window's failure: the pump then has nothing more to do.
"""

from __future__ import annotations

import traceback

from kerasfeed.producer.launch import Progress
from kerasfeed.producer.pipeline import EndOfPass, Pipeline
from kerasfeed.producer.window import Produce, Seek, Window


def run(window: Window, pipeline: Pipeline, progress: Progress) -> None:
    """Pumps until the window has no more work.

    Args:
        window: Where elements go.
        pipeline: Where they come from.
        progress: Where it is noted how far the producer has come.
    """
    try:
        while (work := window.wait_for_work()) is not None:
            _do(work, window, pipeline, progress)
    except BaseException:
        # Without its pump a window would let all ranks wait for ever.
        window.abandon(f"the producer is broken:\n{traceback.format_exc()}")
        raise


def _do(work: Seek | Produce, window: Window, pipeline: Pipeline, progress: Progress) -> None:
    try:
        if isinstance(work, Seek):
            progress.note_origin(work.pass_, work.element)
            pipeline.seek(work.pass_, work.element, work.joined, window.note_pass_length)
            return
        element = pipeline.next()
    except EndOfPass as end:
        window.end_pass(work.generation, end.pass_, end.elements)
    except (Exception, SystemExit):
        pass_, index = pipeline.standing
        window.fail(work.generation, f"element {index} of pass {pass_} raised:\n{traceback.format_exc()}")
    else:
        window.put(work.generation, element)
        progress.note_produced(*pipeline.standing)
