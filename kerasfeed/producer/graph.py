"""What the graph of a dataset says: its ops tell what can be replayed, and how.

A graph also is how a dataset that was built elsewhere comes to the producer. Nothing here reads elements.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import dataset_options_pb2, graph_pb2
from tensorflow.python.data.ops import options as tf_options

# Ops that draw from a kernel's own generator, seeded by the graph seed (tensorflow/core/ops/random_ops.cc and
# image_ops.cc). The stateless ones and those of tf.random.Generator carry their state themselves.
_STATEFUL_RANDOM = frozenset(
    {
        "RandomUniform",
        "RandomUniformInt",
        "RandomStandardNormal",
        "ParameterizedTruncatedNormal",
        "TruncatedNormal",
        "RandomShuffle",
        "Multinomial",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomCrop",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
    }
)
_PYTHON = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
_RESOURCES = frozenset(
    {"VarHandleOp", "MutableHashTableV2", "MutableDenseHashTableV2", "RngReadAndSkip", "StatefulUniform"}
)
# Where datasets that draw have the first of their two seed inputs (tensorflow/core/ops/dataset_ops.cc).
_SEED_INPUTS = {"ShuffleDataset": 2, "ShuffleDatasetV3": 2, "ShuffleAndRepeatDataset": 2, "RandomDataset": 0}
_UNSTABLE_ATTRIBUTES = frozenset({"seed", "seed2", "metadata", "f", "token"})


def serialize_dataset(dataset: tf.data.Dataset) -> bytes:
    """Returns the graph of a dataset, so that another process can run it.

    Raises:
        ValueError: The graph calls into this process's Python, or holds resources of it.
    """
    try:
        graph = graph_of(dataset)
    except (tf.errors.OpError, NotImplementedError, ValueError) as error:
        raise ValueError(
            f"this tf.data.Dataset can't travel to the producer ({error}). Give a function that builds it instead: "
            "DataFeeder(lambda: dataset_code())"
        ) from error
    parsed = graph_pb2.GraphDef.FromString(graph)
    ops = _ops_in(parsed)
    for found, what in (
        (ops & _PYTHON, "calls Python code (py_function, numpy_function or from_generator)"),
        (ops & _RESOURCES, "captures a resource of this process (a tf.Variable, tf.random.Generator or mutable table)"),
    ):
        if found:
            raise ValueError(
                f"this tf.data.Dataset can't travel to the producer: it {what}, found as {', '.join(sorted(found))}. "
                "Give a function that builds the dataset instead: DataFeeder(lambda: dataset_code())"
            )
    return graph


def graph_of(dataset: tf.data.Dataset) -> bytes:
    """Returns the serialised `GraphDef` of a dataset.

    Raises:
        tf.errors.OpError, NotImplementedError, ValueError: It has none.
    """
    graph = dataset._as_serialized_graph(external_state_policy=tf_options.ExternalStatePolicy.IGNORE)
    return bytes(graph.numpy())


def seed_graph(data: bytes, seed: int) -> bytes:
    """Returns the graph of a dataset in which each unseeded shuffle and random op has a seed made from `seed`.

    In a graph that was built elsewhere the seeds are constants: (0, 0), which draws anew at each start, unless the
    script called `tf.random.set_seed`. Calling that in this process would not reach them.
    """
    graph = graph_pb2.GraphDef.FromString(data)
    count = 0
    scopes = [(graph.node, "")] + [(f.node_def, ":output:0") for f in graph.library.function]
    for nodes, output in scopes:
        consts = {node.name: node for node in nodes if node.op == "Const"}
        for node in list(nodes):
            if node.op in _SEED_INPUTS:
                first = _SEED_INPUTS[node.op]
                seeds = [consts.get(node.input[i].split(":")[0]) for i in (first, first + 1)]
                if all(c is not None and not tf.make_ndarray(c.attr["value"].tensor).any() for c in seeds):
                    count += 1
                    for index, value in ((first, seed), (first + 1, count)):
                        const = nodes.add(name=f"kerasfeed/seed_{count}_{index - first}", op="Const")
                        const.attr["dtype"].type = tf.int64.as_datatype_enum
                        const.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64))
                        node.input[index] = const.name + output
            elif node.op in _STATEFUL_RANDOM and not node.attr["seed"].i and not node.attr["seed2"].i:
                count += 1
                node.attr["seed"].i, node.attr["seed2"].i = seed, count
    return bytes(graph.SerializeToString())


def fingerprint_of(dataset: tf.data.Dataset) -> str:
    """Returns a hex digest of a dataset's graph, or "" where it can't be had.

    It covers ops, types, shapes and numbers (buffer sizes, batch sizes), in order. It leaves out what differs between
    two runs of the same script: names, which count upwards, seeds, and texts, among which are the paths of files.
    """
    try:
        graph = graph_pb2.GraphDef.FromString(graph_of(dataset))
    except (tf.errors.OpError, NotImplementedError, ValueError):
        return ""
    digest = hashlib.sha256()
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        seeds: set[str] = set()
        for node in nodes:
            if node.op in _SEED_INPUTS:
                first = _SEED_INPUTS[node.op]
                seeds.update(name.split(":")[0] for name in node.input[first : first + 2])
        for node in nodes:
            digest.update(node.op.encode() + b"\n")
            for name in sorted(set(node.attr) - _UNSTABLE_ATTRIBUTES):
                attribute = node.attr[name]
                # Of a list, and of nothing else that may hold a name or a text.
                if attribute.WhichOneof("value") in ("type", "shape", "b", "i", "f") or attribute.list.type:
                    digest.update(name.encode() + attribute.SerializeToString(deterministic=True))
            if node.op == "Const" and node.name not in seeds and node.attr["dtype"].type != tf.string.as_datatype_enum:
                digest.update(node.attr["value"].tensor.SerializeToString(deterministic=True))
        digest.update(b"\n")
    return digest.hexdigest()


def _ops_in(graph: graph_pb2.GraphDef) -> frozenset[str]:
    nodes = [node.op for node in graph.node]
    nodes += [node.op for function in graph.library.function for node in function.node_def]
    return frozenset(nodes)


@dataclasses.dataclass(frozen=True)
class Traits:
    """What the graph of a dataset says about replaying it.

    Attributes:
        random_ops: Names of its stateful random ops.
        keeps_state: Why a pass depends on the passes before it, beyond shuffles that reshuffle; empty if it does not.
        cache_files: Names of the files of `cache(filename)`.
        cheap_walk: Whether pulling one element of a pass leaves the same state behind as pulling all.
    """

    random_ops: frozenset[str] = frozenset()
    keeps_state: str = ""
    cache_files: tuple[str, ...] = ()
    cheap_walk: bool = False

    @classmethod
    def of(cls, dataset: tf.data.Dataset) -> Traits:
        """Returns the traits of a dataset; the most careful ones where its graph can't be had."""
        try:
            graph = graph_pb2.GraphDef.FromString(graph_of(dataset))
        except (tf.errors.OpError, NotImplementedError, ValueError):
            return cls(keeps_state="its graph can't be inspected")
        ops = _ops_in(graph)
        consts = {node.name: node for node in graph.node if node.op == "Const"}
        files = []
        for node in graph.node:
            if node.op.startswith("CacheDataset"):
                source = consts.get(node.input[1].split(":")[0].lstrip("^"))
                files.append(tf.make_ndarray(source.attr["value"].tensor).item().decode() if source is not None else "")
        reasons = []
        if "" in files:
            reasons.append("it holds an in-memory cache()")
        if ops & _RESOURCES:
            reasons.append("it holds a variable, table or tf.random.Generator")
        if any(n.op.startswith("ShuffleDataset") and not n.attr["reshuffle_each_iteration"].b for n in graph.node):
            reasons.append("it shuffles with reshuffle_each_iteration=False")
        stateful = bool(reasons) or bool(ops & _PYTHON) or any(op.startswith("Repeat") for op in ops)
        stateful = stateful or "ShuffleAndRepeatDatasetV2" in ops or bool(files)
        return cls(ops & _STATEFUL_RANDOM, " and ".join(reasons), tuple(f for f in files if f), not stateful)


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
    functions = {function.signature.name: function.node_def for function in graph.library.function}
    nodes = [node for body in (graph.node, *functions.values()) for node in body]
    obstacles, suspects, notes = [], [], []
    unordered_by_options = any(_gives_up_order(node) for node in nodes if node.op == "OptionsDataset")
    for node in nodes if not deterministic else ():
        if not _runs_in_parallel(node, graph.node, functions):
            continue
        what = _plain_name(node.op)
        called = {each.op for each in _called(node, functions)}
        if drawn := sorted(called & _STATEFUL_RANDOM):
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
    python = [node for node in nodes if node.op in _PYTHON and id(node) not in of_generators]
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
    if ops & _RESOURCES:
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
