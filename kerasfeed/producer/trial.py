"""A try at a pipeline, in a process as a producer's: elements come out of it as digests, and what its graph says.

`kerasfeed.check` starts two. The first reads the passes one after the other; the second starts inside a pass, as a
restored feed does, reads to the end, then goes back to the passes before. The quiet check of a running feed starts one,
which gives way to training in all. Each reports in JSON lines over a pipe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import resource
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kerasfeed.producer import __main__ as process
from kerasfeed.producer.launch import QUIETLY, SCRATCH_VARIABLE, Launch, TrialOptions

_MAX_SAVED_BYTES = 1 << 30
_GONE_CODE = 4
_ABRIDGED = 500


def main() -> None:
    """Does what it is told over standard input; imports TensorFlow before, while the caller may be busy."""
    lifeline = process.take_lifeline()
    scratch = os.environ.pop(SCRATCH_VARIABLE)
    if QUIETLY in sys.argv:
        # What comes first takes long then: whoever writes is not to wait for it.
        _give_way()
    else:
        process.import_tensorflow()

    try:
        launch = Launch.read_from(lifeline)
    except EOFError:
        # Whoever started it is gone, and would have removed this.
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(_GONE_CODE)
    os.set_inheritable(launch.control_fd, False)
    threading.Thread(
        target=process.watch_lifeline, args=(lifeline, launch.parent, scratch), name="lifeline", daemon=True
    ).start()
    control = os.fdopen(launch.control_fd, "w", buffering=1)

    def report(**news: Any) -> None:
        control.write(json.dumps(news) + "\n")

    tf = process.import_tensorflow()
    options = TrialOptions(**launch.options)
    sys.path[:] = launch.module_path
    process.stand_in_for_script(launch.script, launch.sources)
    process.keep_generated_code_in(scratch)
    if options.deterministic:
        tf.config.experimental.enable_op_determinism()
    try:
        _try(launch, options, scratch, report, _cache_elsewhere(scratch, options.read_caches))
    except BaseException:  # user code may raise anything, and whoever waits has to hear of it
        report(raised=traceback.format_exc())
    report(done=True)
    control.close()
    process.finish()


def _give_way() -> None:
    """Lets all other processes have time and memory first."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    # A kernel that shares time between sessions first takes niceness for a matter inside each. And if memory runs out,
    # it is to end this process.
    for name, value in (("autogroup", "19"), ("oom_score_adj", "1000")):
        with contextlib.suppress(OSError):
            pathlib.Path("/proc/self", name).write_text(value)


def _cache_elsewhere(folder: str, read_complete: bool) -> dict[str, str]:
    """Lets `cache(filename)` write into `folder`: a trial must not leave its elements to the training that follows.

    Returns the names that were asked for, by those that are used; it fills up as the pipeline is built.

    Args:
        folder: Where the files go.
        read_complete: Whether a cache that is complete is read, as a producer that starts now would.
    """
    import tensorflow as tf

    cache, asked = tf.data.Dataset.cache, {}

    def elsewhere(self: Any, filename: Any = "", *args: Any, **kwargs: Any) -> Any:
        if isinstance(filename, (str, os.PathLike)) and os.fspath(filename):
            name = os.fspath(filename)
            if read_complete and tf.io.gfile.exists(f"{name}.index"):
                return cache(self, filename, *args, **kwargs)
            # Both trials find the same, as a producer finds what the one before it wrote.
            filename = os.path.join(folder, f"cache-{hashlib.sha256(name.encode()).hexdigest()[:16]}")
            asked[filename] = name
        return cache(self, filename, *args, **kwargs)

    tf.data.Dataset.cache = elsewhere
    return asked


def _try(
    launch: Launch,
    options: TrialOptions,
    scratch: str,
    report: Callable[..., None],
    cache_names: Mapping[str, str],
) -> None:
    """Reports what the graph says, the digests of the elements as they come, and whether the iterator can be saved."""
    import tensorflow as tf
    from tensorflow.core.framework import graph_pb2

    from kerasfeed.producer import digest
    from kerasfeed.producer import graph as graphs
    from kerasfeed.producer import pipeline as pipelines

    class Cut(pipelines.Pipeline):
        """A pipeline whose passes are cut off, so that walking over one does not take for ever."""

        def _build(self, pass_: int) -> tf.data.Dataset:
            self.uncut = super()._build(pass_)
            return self.uncut.take(options.elements)

    source, source_spec = process.load_source(launch)
    # A try is no feed's: what the pipeline has to say of other feeds is in the notes.
    pipeline = Cut(
        source, source_spec, launch.size, launch.seed, launch.restarted, whole=options.epochs, log=lambda text: None
    )
    dataset = pipeline.uncut
    cardinality = int(dataset.cardinality())
    try:
        graph = graph_pb2.GraphDef.FromString(graphs.graph_of(dataset))
    except (tf.errors.OpError, NotImplementedError, ValueError) as error:
        word = graphs.GraphWord(notes=(f"its graph can't be inspected: {error}",))
    else:
        traits = graphs.Traits.of(dataset)
        traits = dataclasses.replace(traits, cache_files=tuple(cache_names.get(f, f) for f in traits.cache_files))
        word = graphs.read_graph(graph, traits, cardinality, options.deterministic)
    fingerprint = graphs.fingerprint_of(dataset)
    report(graph=dataclasses.asdict(word), spec=pipeline.spec.decode(), fingerprint=fingerprint)

    digester = digest.Digester(pipeline.spec, options.full)

    def came(pass_: int, index: int, element: Any) -> None:
        report(element=pass_, digest=f"{digester.digest(element):016x}")

    def read(passes: Iterable[int], first: int) -> bool:
        for pass_ in passes:
            try:
                pipeline.seek(pass_, first, False, lambda *_: None, came)
                first = 0
                while True:
                    came(*pipeline.standing, pipeline.next())
            except pipelines.EndOfPass:
                report(read=pass_)
            except (Exception, SystemExit):
                report(read=pass_, raised=traceback.format_exc())
                return False
        return True

    pass_, element = options.start
    if read(range(pass_, options.epochs), element):
        read(range(pass_), 0)
    if options.save:
        del pipeline
        report(unsaved=_why_not_saved(dataset, scratch))


def _why_not_saved(dataset: Any, folder: str) -> str:
    """Returns why an iterator over a dataset can't be saved; empty if it can."""
    import tensorflow as tf

    # A shuffle buffer is saved whole, however large: the disk must not fill up over a trial.
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    bound = _MAX_SAVED_BYTES if most == resource.RLIM_INFINITY else min(_MAX_SAVED_BYTES, most)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bound, most))
    try:
        iterator = iter(dataset)
        next(iterator, None)
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            tf.train.Checkpoint(iterator=iterator).write(os.path.join(aside, "iterator"))
    except Exception as error:
        # The first words are TensorFlow's own function names, in braces.
        reason = str(error).rpartition("}} ")[2].partition(" [Op:")[0].strip()
        return (reason or type(error).__name__)[:_ABRIDGED]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    return ""


if __name__ == "__main__":
    main()
