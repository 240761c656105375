"""The user's dataset in the producer: built under a seed, walked to any element, one encoded element at a time.

Seeding must not change what a pipeline means. A pipeline with stateful random ops (`tf.random.*`, `tf.image.random_*`)
would draw the same numbers in every epoch once `tf.random.set_seed` has been called; so it is built anew for each pass,
under a seed of (seed, pass). All others are built once, and a pass is an iterator over the same dataset, as in `fit`.
"""

from __future__ import annotations

import collections
import contextlib
import glob
import inspect
import json
import os
import pathlib
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.ops import gen_experimental_dataset_ops

from kerasfeed import spec as spec_lib
from kerasfeed.producer.graph import Traits, fingerprint_of, graph_of, read_graph, seed_graph
from kerasfeed.producer.waypoint import Place, Waypoint

if TYPE_CHECKING:
    from kerasfeed.native.pump import Outcome

_CONTEXT_NAMES = ("ctx", "context", "input_context")


def takes_context(function: Callable[..., Any]) -> bool:
    """Whether `dataset_fn` wants the input context.

    Raises:
        TypeError: It needs more than one argument.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    required += [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(required) > 1:
        raise TypeError(
            "dataset_fn must take one argument (the tf.distribute.InputContext) or none. "
            f"Received: a function with the required arguments {', '.join(p.name for p in required)}"
        )
    if required:
        return required[0] in positional
    return bool(positional and positional[0].name in _CONTEXT_NAMES)


class EndOfPass(Exception):
    """A pass over the dataset is over.

    Args:
        pass_: Which pass, from 0.
        elements: How many elements it had.
    """

    def __init__(self, pass_: int, elements: int):
        super().__init__(f"pass {pass_} ended after {elements} elements")
        self.pass_ = pass_
        self.elements = elements


class Pipeline:
    """The elements of a dataset, pass after pass, from any element on.

    Args:
        source: `dataset_fn`, or the bytes of a dataset's graph.
        source_spec: The element spec that goes with a graph.
        size: Number of ranks: `num_replicas_in_sync` of the input context.
        seed: The feed's seed.
        restarted: Whether a producer of this feed has died before, perhaps with its job: the cache locks that it left
            are removed.
        lengths: Elements of the passes that ended under producers before this one.
        whole: Passes before this one are known to have been produced to their end, in an earlier job.
        scratch: Folder for temporary files.
        log: Called with each warning.
    """

    def __init__(
        self,
        source: Callable[..., Any] | bytes,
        source_spec: Any,
        size: int,
        seed: int,
        restarted: bool = False,
        lengths: dict[int, int] | None = None,
        whole: int = 0,
        scratch: str | None = None,
        log: Callable[[str], None] = print,
    ):
        self._source = source
        self._source_spec = source_spec
        self._size = size
        self._seed = seed
        self._scratch = scratch
        self._log = log
        self._dataset = self._build(0)
        self._flattened: Any = None
        self._flattened_for: Any = None
        self._traits = Traits.of(self._dataset)
        self._per_pass = bool(self._traits.random_ops) and not self._traits.keeps_state
        if self._traits.random_ops and not self._per_pass:
            log(
                f"the dataset uses {', '.join(sorted(self._traits.random_ops))}, which draws the same numbers in "
                f"every epoch: the feed seeds TensorFlow, and can't build the dataset anew for each epoch because "
                f"{self._traits.keeps_state}. Use stateless random ops, or a tf.random.Generator"
            )
        if restarted:
            for name in self._traits.cache_files:
                for lock in glob.glob(glob.escape(name) + "_*.lockfile"):
                    log(f"removing the lock that a dead producer left: {lock}")
                    os.remove(lock)
        self.spec = spec_lib.encode_spec(self._dataset.element_spec)
        self.fingerprint = fingerprint_of(self._dataset)
        self._claimed = int(self._dataset.cardinality())
        self._iterator: Iterator[Any] | None = None
        self._pass = -1
        self._element = 0
        self._fresh_pass = 0
        self._lengths = dict(lengths or {})
        self._whole = whole
        self._offered: Waypoint | None = None
        # What comes out before the iterator goes on.
        self._ahead: collections.deque[spec_lib.EncodedElement | EndOfPass] = collections.deque()
        self._said_unrepeatable = False
        self._miscounts = False

    @property
    def cardinality(self) -> int:
        """Elements in a pass, or tf.data's `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`."""
        return self._claimed

    @property
    def standing(self) -> tuple[int, int]:
        """(pass, element) of what `next` yields."""
        inside = self._iterator is not None or self._ahead
        return (self._pass, self._element) if inside else (self._pass + 1, 0)

    def _build(self, pass_: int) -> tf.data.Dataset:
        # SeedSequence mixes (seed, pass) so that neighbouring passes have unrelated seeds.
        mixed = int(np.random.SeedSequence((self._seed, pass_)).generate_state(1)[0]) & 0x7FFFFFFF
        random.seed(mixed)
        np.random.seed(mixed)
        tf.random.set_seed(mixed)
        if isinstance(self._source, bytes):
            graph = seed_graph(self._source, mixed)
            variant = gen_experimental_dataset_ops.dataset_from_graph(graph)
            return dataset_ops._VariantDataset(variant, self._source_spec)
        context = tf.distribute.InputContext(1, 0, self._size)
        dataset = self._source(context) if takes_context(self._source) else self._source()
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(f"dataset_fn must return a tf.data.Dataset. Received: {type(dataset).__name__}")
        return dataset

    def _new_iterator(self) -> Iterator[Any]:
        """Returns an iterator over the dataset's elements, or over their components where they hold composite tensors.

        To tf.data a composite tensor is one opaque variant: its components are what can travel.
        """
        if self._dataset is not self._flattened_for:
            self._flattened, self._flattened_for = spec_lib.without_composites(self._dataset), self._dataset
        iterator: Iterator[Any] = iter(self._flattened)
        return iterator

    def _start_pass(self, pass_: int) -> None:
        """Makes the iterator of a pass; in a dataset that is built once, after walking the passes before it."""
        left, self._iterator = self._iterator, None
        self._ahead.clear()
        if self._per_pass:
            # An old iterator's threads could draw from the new seeds: it has to go first.
            del left
            if pass_ != 0 or self._fresh_pass != 0:
                self._dataset = self._build(pass_)
            self._fresh_pass = pass_
        elif pass_ < self._fresh_pass:
            del left
            self._dataset, self._fresh_pass = self._build(0), 0
        elif left is not None and not self._traits.cheap_walk:
            self._leave(left)
        while self._fresh_pass < pass_:
            self._walk(self._new_iterator(), self._fresh_pass)
            self._fresh_pass += 1
        self._iterator = self._new_iterator()
        self._fresh_pass += 1
        self._pass, self._element = pass_, 0
        self._miscounts = False

    def _walk(self, iterator: Iterator[Any], pass_: int) -> None:
        """Leaves the dataset in the state in which pass `pass_` left it, if that is possible."""
        next(iterator, None)
        ends = pass_ < self._whole or pass_ in self._lengths or self._claimed >= 0
        if ends and not self._traits.cheap_walk:
            for _ in iterator:
                pass

    def _leave(self, iterator: Iterator[Any]) -> None:
        """Ends a pass that was left before its end, and whose state the next one takes over.

        Where it would have ended is known only if it has a cardinality: one that has none may be endless.
        """
        pass_ = self._fresh_pass - 1
        if self._claimed >= 0 or pass_ in self._lengths:
            for _ in iterator:
                pass
        elif not self._said_unrepeatable:
            self._said_unrepeatable = True
            self._log(
                f"pass {pass_} was left before its end. The dataset keeps state from pass to pass and has no "
                "cardinality, so that from here on a producer that has to start again can't repeat it. "
                "Give it one with assert_cardinality"
            )

    def seek(
        self,
        pass_: int,
        element: int,
        joined: bool,
        ended: Callable[[int, int], None],
        skipped: Callable[[int, int, spec_lib.EncodedElement], None] = lambda pass_, element, value: None,
    ) -> None:
        """Stands at an element, so that `next` yields it.

        Args:
            pass_: The pass over the dataset.
            element: The element of that pass. In a joined stream it may lie in a later pass.
            joined: Whether passes follow each other without a gap.
            ended: Called with (pass, elements) for each pass whose end is met.
            skipped: Called with (pass, index, element) for each element of that pass, and of those that follow it in a
                joined stream, on the way there.

        Raises:
            RuntimeError: The pass has less elements than it had before, or an endless stream is empty.
        """
        while joined and 0 < self._lengths.get(pass_, element + 1) <= element:
            element -= self._lengths[pass_]
            pass_ += 1
        elsewhere = self._miscounts or self.standing[0] != pass_ or self.standing[1] > element
        if not self._take_offered(pass_, element, None if elsewhere else self.standing) and elsewhere:
            self._start_pass(pass_)
        to_skip = element - self.standing[1]
        while to_skip > 0:
            try:
                value = self.next()
                skipped(self._pass, self._element - 1, value)
                to_skip -= 1
            except EndOfPass as end:
                ended(end.pass_, end.elements)
                if not joined:
                    raise RuntimeError(
                        f"this pipeline can't be replayed: pass {pass_} now has {end.elements} elements, but element "
                        f"{element} of it was produced before"
                    ) from None
                if end.elements == 0:
                    raise RuntimeError("the dataset is empty") from None

    @property
    def unfit_for_iterators(self) -> str:
        """Why its iterator can't be taken up in another process; empty if it can."""
        if self._traits.cache_files:
            return f"it holds cache({self._traits.cache_files[0]!r}), whose files may have changed meanwhile"
        return self._traits.keeps_state and f"{self._traits.keeps_state}, which no iterator holds"

    @property
    def unfit_for_snapshots(self) -> str:
        """Why its iterator, saved and restored, would not yield again what it yielded; empty if it would."""
        if self._traits.random_ops:
            return f"it uses {', '.join(sorted(self._traits.random_ops))}, whose state no iterator holds"
        return self.unfit_for_iterators

    def why_unsteady(self, deterministic: bool) -> str:
        """Why it may yield other elements, or in another order, when it is run again; empty if nothing says so.

        Args:
            deterministic: Whether TensorFlow's op determinism is on.
        """
        try:
            graph = graph_pb2.GraphDef.FromString(graph_of(self._dataset))
        except (tf.errors.OpError, NotImplementedError, ValueError):
            return ""
        return "; ".join(read_graph(graph, self._traits, self._claimed, deterministic).obstacles)

    def waypoint(
        self, place: Place, kept: Iterable[spec_lib.EncodedElement] = (), lengths: Mapping[int, int] | None = None
    ) -> Waypoint:
        """Returns what it takes to go on at `place`, in this process or another.

        What an earlier waypoint has brought, and what has not come out yet, is part of it: the iterator is behind that.

        Args:
            place: Where it goes on: where this stands, or before.
            kept: The elements from there to where this stands.
            lengths: Elements of the passes that ended in between.

        Raises:
            tf.errors.OpError, RuntimeError: The iterator can't be saved.
        """
        stop, elements, ended = self.standing, list(kept), dict(lengths or {})
        for item in self._ahead:
            if isinstance(item, EndOfPass):
                ended[item.pass_] = item.elements
                stop = (item.pass_ + 1, 0)
            else:
                elements.append(item)
                stop = (stop[0], stop[1] + 1)
        return Waypoint(place, stop, self.save(), tuple(elements), ended)

    def save(self) -> bytes:
        """Returns the iterator as it stands, beyond all that is kept; nothing where a pass begins and it is not made.

        Raises:
            tf.errors.OpError: A part of it can't be saved.
            RuntimeError: It has raised, and has lost count.
        """
        if self._miscounts:
            raise RuntimeError("an element raised, and the iterator went on behind it")
        if self._iterator is None:
            return b""
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            tf.train.Checkpoint(iterator=self._iterator).write(os.path.join(folder, "iterator"))
            files = {name: pathlib.Path(folder, name).read_bytes() for name in sorted(os.listdir(folder))}
        head = json.dumps([[name, len(data)] for name, data in files.items()]).encode()
        return b"".join([len(head).to_bytes(8, "little"), head, *files.values()])

    def offer(self, waypoint: Waypoint) -> None:
        """Says where the pipeline can be taken up: a `seek` to what comes after it may go there."""
        self._offered = waypoint
        self._lengths.update(waypoint.lengths)

    def _take_offered(self, pass_: int, element: int, standing: Place | None) -> bool:
        """Goes to the offered waypoint if that lies between `standing` and the element.

        Returns whether the pipeline stands in this pass now: at its start, if the offer is of no use.
        """
        offered = self._offered
        if offered is None or not offered.place <= (pass_, element) or pass_ > offered.stop[0]:
            return False
        if standing is not None and standing >= offered.place:
            return False
        try:
            self.restore(offered)
            while self.standing[0] < pass_:
                with contextlib.suppress(EndOfPass):
                    self.next()
        except Exception as error:  # in many ways
            self._offered = None
            self._log(f"the saved iterator can't be used, the pipeline is replayed instead: {error}")
            # What was tried may have drawn from the dataset's seeds: it is built anew.
            self._fresh_pass = pass_ + 1
            self._start_pass(pass_)
        return True

    def restore(self, waypoint: Waypoint) -> None:
        """Stands at a waypoint, which may come from another process.

        Raises:
            tf.errors.OpError, ValueError: It is another pipeline's.
        """
        self._iterator = None
        stop = waypoint.stop[0]
        if waypoint.iterator:
            self._dataset = self._build(stop if self._per_pass else 0)
            self._iterator, self._fresh_pass = self._load(waypoint.iterator), stop + 1
        elif waypoint.stop[1]:
            raise ValueError(f"there is none for element {waypoint.stop[1]} of pass {stop}")
        self._miscounts = False
        self._ahead.clear()
        pass_, element = waypoint.place
        kept = iter(waypoint.kept)
        while (pass_, element) < waypoint.stop:
            if waypoint.lengths.get(pass_) == element:
                self._ahead.append(EndOfPass(pass_, element))
                pass_, element = pass_ + 1, 0
            else:
                self._ahead.append(next(kept))
                element += 1
        inside = self._iterator is not None or self._ahead
        self._pass, self._element = waypoint.place if inside else (stop - 1, 0)

    def _load(self, data: bytes) -> Iterator[Any]:
        iterator = self._new_iterator()
        size = int.from_bytes(data[:8], "little")
        at = 8 + size
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            for name, length in json.loads(data[8:at]):
                pathlib.Path(folder, os.path.basename(name)).write_bytes(data[at : at + length])
                at += length
            tf.train.Checkpoint(iterator=iterator).read(os.path.join(folder, "iterator")).assert_consumed()
        return iterator

    def next(self) -> spec_lib.EncodedElement:
        """Returns the next element.

        Raises:
            EndOfPass: The pass is over; the next call starts the next one.
        """
        if self._ahead:
            return self._next_ahead()
        if self._iterator is None:
            self._start_pass(self._pass + 1)
        assert self._iterator is not None
        try:
            value = next(self._iterator)
        except tf.errors.OpError:
            # tf.data goes on behind the element that failed: from here on this iterator counts wrong.
            self._miscounts = True
            raise
        except StopIteration:
            self._iterator = None
            self._lengths[self._pass] = self._element
            raise EndOfPass(self._pass, self._element) from None
        if 0 <= self._claimed <= self._element:
            raise RuntimeError(
                f"the dataset says that it has {self._claimed} elements (its cardinality), but it yields more. "
                "Correct its assert_cardinality"
            )
        self._element += 1
        return spec_lib.encode_element(value)

    @property
    def flows(self) -> bool:
        """Whether elements may be taken from the iterator itself, as `flow` does."""
        in_iterator = self._iterator is not None and not self._ahead
        return in_iterator and not self._miscounts and not 0 <= self._claimed <= self._element

    def flow(self, run: Callable[[Any, Place, int], Outcome], limit: int | None) -> Outcome:
        """Lets `run` take elements from the iterator, given its resource, where it stands, and how many at most.

        Args:
            run: Returns how many it took, and why no more.
            limit: After how many elements to come back; `None`: when there is reason to.

        Raises:
            EndOfPass: The pass is over.
            tf.errors.OpError: An element raised.
        """
        # Whether there are more than the dataset says, `next` finds out.
        claimed = self._claimed - self._element if self._claimed >= 0 else None
        most = min((bound for bound in (limit, claimed) if bound is not None), default=-1)
        iterator: Any = self._iterator
        outcome = run(iterator._iterator_resource, self.standing, most)
        self._element += outcome.produced
        if outcome.error is not None:
            self._miscounts = True
            raise outcome.error
        if outcome.ended:
            self._iterator = None
            self._lengths[self._pass] = self._element
            raise EndOfPass(self._pass, self._element)
        return outcome

    def _next_ahead(self) -> spec_lib.EncodedElement:
        item = self._ahead.popleft()
        if isinstance(item, spec_lib.EncodedElement):
            self._element += 1
            return item
        if self._ahead or self._iterator is not None:
            self._pass, self._element = item.pass_ + 1, 0
        raise item
