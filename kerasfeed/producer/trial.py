"""A try at a pipeline, in a process as a producer's: elements come out of it as digests, and what its graph says.

`kerasfeed.check` starts two. The first reads the passes one after the other; the second starts inside a pass, as a
restored feed does, reads to the end, then goes back to the passes before. Each reports in JSON lines over a pipe.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kerasfeed.producer import __main__ as process
from kerasfeed.producer.launch import SCRATCH_VARIABLE, Launch

_MAX_SAVED_BYTES = 1 << 30
_GONE_CODE = 4
_ABRIDGED = 500


@dataclasses.dataclass(frozen=True)
class GraphWord:
    """What the graph of a dataset says about replaying it.

    Attributes:
        obstacles: What can't be relied on to repeat itself.
        suspects: What may be the cause, if the pipeline does not repeat itself.
        notes: Under which conditions it repeats itself, and what coming back costs.
        may_keep_state: Whether a pass may depend on how far the passes before it were read.
    """

    obstacles: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    may_keep_state: bool = True


def read_graph(graph: Any, traits: Any, cardinality: int, deterministic: bool) -> GraphWord:
    """Returns what a graph says.

    Args:
        graph: The `GraphDef` of a dataset.
        traits: The `Traits` of the same dataset.
        cardinality: Its cardinality.
        deterministic: Whether TensorFlow's op determinism is on, under which parallel transformations keep order and
            call a function with random ops one element after the other.
    """
    from kerasfeed.producer import pipeline

    functions = {function.signature.name: function.node_def for function in graph.library.function}
    nodes = [node for body in (graph.node, *functions.values()) for node in body]
    obstacles, suspects, notes = [], [], []
    unordered_by_options = any(_gives_up_order(node) for node in nodes if node.op == "OptionsDataset")
    for node in nodes if not deterministic else ():
        if not _runs_in_parallel(node, graph.node, functions):
            continue
        what = _plain_name(node.op)
        called = {each.op for each in _called(node, functions)}
        if drawn := sorted(called & pipeline._STATEFUL_RANDOM):
            obstacles.append(
                f"random ops ({', '.join(drawn)}) in a parallel {what}: its calls draw in an order that differs from "
                "run to run. Use deterministic=True, stateless random ops (tf.random.stateless_*), or no "
                "num_parallel_calls"
            )
        order = node.attr["deterministic"].s
        if order == b"false" or node.attr["sloppy"].b or (order == b"default" and unordered_by_options):
            obstacles.append(
                f"a parallel {what} with deterministic=False: elements come in the order in which they are ready. "
                "Leave that out, or use deterministic=True in the feed"
            )
    generators = [node for node in nodes if node.op == "GeneratorDataset"]
    of_generators = {id(each) for node in generators for each in _called(node, functions)}
    python = [node for node in nodes if node.op in pipeline._PYTHON and id(node) not in of_generators]
    if generators:
        suspects.append("from_generator: a generator that keeps state, or draws numbers that the feed does not seed")
    if python:
        suspects.append(
            "Python code (py_function or numpy_function): state that it keeps, or numbers that the feed does not seed "
            "(a random.Random or numpy Generator of its own, os.urandom)"
        )
    ops = {node.op for node in nodes}
    if "Timestamp" in ops:
        suspects.append("tf.timestamp: the time is never the same")
    if ops & pipeline._RESOURCES:
        suspects.append(
            "a tf.Variable, table or tf.random.Generator: its state, or a seed that was made at random, as by "
            "Generator.from_non_deterministic_state"
        )
    if any(op.startswith("DataServiceDataset") for op in ops):
        suspects.append("tf.data service: its workers decide what comes when")
        notes.append("it reads from tf.data service, whose workers need not send the same again")
    if traits.cache_files:
        notes.append(
            f"it caches in {', '.join(traits.cache_files)}: it can be replayed as long as these files stay as they are "
            "(they were not touched here, the cache was written elsewhere)"
        )
    if traits.random_ops and traits.keeps_state:
        drawing = ", ".join(sorted(traits.random_ops))
        notes.append(f"{drawing} draws the same numbers in every epoch, because {traits.keeps_state}")
    built_for_each_pass = traits.random_ops and not traits.keeps_state
    if not traits.cheap_walk and not built_for_each_pass:
        notes.append("it may keep state from epoch to epoch: to come back to one, all before it are produced again")
        if cardinality < 0:
            notes.append(
                "it has no known cardinality: where a loop that is left inside a pass would have ended can't be known. "
                "Give it one with assert_cardinality"
            )
    return GraphWord(tuple(dict.fromkeys(obstacles)), tuple(suspects), tuple(notes), not traits.cheap_walk)


def _gives_up_order(node: Any) -> bool:
    from tensorflow.core.framework import dataset_options_pb2

    options = dataset_options_pb2.Options.FromString(node.attr["serialized_options"].s)
    return options.HasField("deterministic") and not options.deterministic


def _runs_in_parallel(node: Any, outer: Any, functions: dict[str, Any]) -> bool:
    if not any(part in node.op for part in ("ParallelMapDataset", "ParallelInterleaveDataset", "MapAndBatchDataset")):
        return False
    if not node.op.startswith("ParallelMapDataset"):
        return True
    # Its last input is num_parallel_calls: with one there is no race.
    name = node.input[-1].split(":")[0]
    for body in (outer, *functions.values()):
        if any(each is node for each in body):
            consts = [each for each in body if each.name == name and each.op == "Const"]
            return not any(_is_one(const.attr["value"].tensor) for const in consts)
    return True


def _is_one(tensor: Any) -> bool:
    import tensorflow as tf

    return bool((tf.make_ndarray(tensor) == 1).all())


def _called(node: Any, functions: dict[str, Any]) -> Iterator[Any]:
    """Yields the nodes of all functions that a node calls, and of those that they call."""
    seen: set[str] = set()
    waiting = collections.deque([node])
    while waiting:
        for attribute in waiting.popleft().attr.values():
            for function in (attribute.func, *attribute.list.func):
                if function.name in functions and function.name not in seen:
                    seen.add(function.name)
                    waiting.extend(functions[function.name])
                    yield from functions[function.name]


def _plain_name(op: str) -> str:
    return "interleave" if "Interleave" in op else "map"


# ---- The process ----


def main() -> None:
    """Imports TensorFlow while the caller is busy, then does what it is told over standard input."""
    lifeline = process.take_lifeline()
    scratch = os.environ.pop(SCRATCH_VARIABLE)
    tf = process.import_tensorflow()

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

    sys.path[:] = launch.module_path
    process.stand_in_for_script(launch.script, launch.sources)
    process.keep_generated_code_in(scratch)
    if launch.options["deterministic"]:
        tf.config.experimental.enable_op_determinism()
    try:
        _try(launch, scratch, report, _cache_elsewhere(scratch))
    except BaseException:  # user code may raise anything, and whoever waits has to hear of it
        report(raised=traceback.format_exc())
    report(done=True)
    control.close()
    process.finish()


def _cache_elsewhere(folder: str) -> dict[str, str]:
    """Lets `cache(filename)` write into `folder`: a trial must not leave its elements to the training that follows.

    Returns the names that were asked for, by those that are used; it fills up as the pipeline is built.
    """
    import tensorflow as tf

    cache, asked = tf.data.Dataset.cache, {}

    def elsewhere(self: Any, filename: Any = "", *args: Any, **kwargs: Any) -> Any:
        if isinstance(filename, (str, os.PathLike)) and os.fspath(filename):
            name = os.fspath(filename)
            # Both trials find the same, as a producer finds what the one before it wrote.
            filename = os.path.join(folder, f"cache-{hashlib.sha256(name.encode()).hexdigest()[:16]}")
            asked[filename] = name
        return cache(self, filename, *args, **kwargs)

    tf.data.Dataset.cache = elsewhere
    return asked


def _try(launch: Launch, scratch: str, report: Callable[..., None], cache_names: Mapping[str, str]) -> None:
    """Reports what the graph says, the digests of each pass as it was read, and whether the iterator can be saved."""
    import tensorflow as tf
    from tensorflow.core.framework import graph_pb2

    from kerasfeed.producer import digest
    from kerasfeed.producer import pipeline as pipelines

    limit, epochs, start = launch.options["elements"], launch.options["epochs"], launch.options["start"]

    class Cut(pipelines.Pipeline):
        """A pipeline whose passes have `limit` elements at most, so that walking over one does not take for ever."""

        def _build(self, pass_: int) -> tf.data.Dataset:
            self.uncut = super()._build(pass_)
            return self.uncut.take(limit)

    source, source_spec = process.load_source(launch)
    # A try is no feed's: what the pipeline has to say of other feeds is in the notes.
    pipeline = Cut(source, source_spec, launch.size, launch.seed, launch.restarted, whole=epochs, log=lambda text: None)
    dataset = pipeline.uncut
    cardinality = int(dataset.cardinality())
    try:
        graph = graph_pb2.GraphDef.FromString(pipelines._graph_of(dataset))
    except (tf.errors.OpError, NotImplementedError, ValueError) as error:
        word = GraphWord(notes=(f"its graph can't be inspected: {error}",))
    else:
        traits = pipelines.Traits.of(dataset)
        traits = dataclasses.replace(traits, cache_files=tuple(cache_names.get(f, f) for f in traits.cache_files))
        word = read_graph(graph, traits, cardinality, launch.options["deterministic"])
    report(graph=dataclasses.asdict(word), spec=pipeline.spec.decode(), fingerprint=pipeline.fingerprint)

    digester = digest.Digester(pipeline.spec, full=True)
    found: list[str] = []

    def skipped(pass_: int, index: int, element: Any) -> None:
        found.append(f"{digester.digest(element):016x}")

    def read(passes: Iterable[int], first: int) -> bool:
        for pass_ in passes:
            found.clear()
            try:
                pipeline.seek(pass_, first, False, lambda *_: None, skipped)
                first = 0
                while True:
                    found.append(f"{digester.digest(pipeline.next()):016x}")
            except pipelines.EndOfPass:
                report(read=pass_, digests=found)
            except (Exception, SystemExit):
                report(read=pass_, digests=found, raised=traceback.format_exc())
                return False
        return True

    if read(range(start[0], epochs), start[1]):
        read(range(start[0]), 0)
    if launch.options["save"]:
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
