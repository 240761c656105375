"""The dataset that the user holds: a `tf.data.Dataset` whose elements come from a producer, one for each rank.

It builds nothing until it is looked at: whoever first asks for its spec, its cardinality or an iterator starts the
feed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops

from kerasfeed import spec as spec_lib
from kerasfeed.checkpoint import FeedCheckpoint
from kerasfeed.cursor import Ticket
from kerasfeed.options import DEFAULT_MAX_BUFFER_BYTES, DEFAULT_MAX_STATE_BYTES, FeedOptions
from kerasfeed.producer import launch
from kerasfeed.producer.graph import serialize_dataset
from kerasfeed.producer.pipeline import takes_context
from kerasfeed.schedule import Position
from kerasfeed.session import EpochStatistics, Session, Source, close_in_background
from kerasfeed.state import FeedState
from kerasfeed.topology import Topology, initialized_horovod


class DataFeeder(tf.data.Dataset):
    """A dataset that one producer process feeds to all ranks: each element is produced once and reaches one rank.

    It goes wherever a `tf.data.Dataset` goes: `model.fit`, `evaluate`, `predict`, a `for` loop, `.map(...)`. All ranks
    build the same feeders, each under a name of its own. The producer is a child process of one rank; it runs
    `dataset_fn`, and element `s * size + r` of an epoch is what rank `r` trains in step `s`.

    Example:

    ```python
    import horovod.tensorflow.keras as hvd
    import kerasfeed

    def dataset_fn(ctx):  # runs in the producer only; ctx is a tf.distribute.InputContext
        return tf.data.TFRecordDataset(files).shuffle(10_000).map(parse).batch(64)

    hvd.init()
    feeder = kerasfeed.DataFeeder(dataset_fn, producer=0)
    model.fit(feeder, epochs=10, callbacks=[kerasfeed.callbacks.FeedCallback(feeder)])
    ```

    Args:
        dataset: A function that returns the `tf.data.Dataset` to feed, called in the producer with one argument, a
            `tf.distribute.InputContext` whose `num_replicas_in_sync` is the number of ranks, or with none. It may be a
            lambda, a closure or a function of `__main__`. Or a `tf.data.Dataset`, whose graph then travels.
        name: The feed's name in messages and statistics. Default `"train"`.
        producer: Rank that starts the producer. Default 0, unless a `FeedCallback` says otherwise.
        policy: Who gets which element. `"round_robin"`, the only one so far: element k goes to rank k mod size.
        remainder: What becomes of the elements at an epoch's end that make no complete step. `"drop"`, the only one so
            far; how many were dropped is in `statistics()`.
        steps_per_epoch: Steps in an epoch. Default `None`: an epoch is one pass over the dataset. With it the passes
            over the dataset are joined to one endless stream, so that it suits `repeat()`ed datasets and others.
        seed: Seed of TensorFlow, Python and NumPy in the producer, from 0 to 2**31 - 1. Default `None`: a random one.
        deterministic: Whether the producer runs with `tf.config.experimental.enable_op_determinism()`, which a parallel
            `map` with random ops needs to repeat its results. Default `False`.
        prefetch: Steps that the producer keeps ready beyond those it has sent, at least 2 whatever is given; each rank
            holds up to as many that it has not pulled yet. Of small elements there may be 128 KiB more, but no more
            than `max_buffer_bytes`. Default 8, unless a `FeedCallback` says otherwise.
        max_buffer_bytes: Most bytes of produced elements that the producer holds. Room for two steps is made all the
            same, with a warning. Default 1 GiB.
        verify: How an element that is produced again, after a death or a restore, is held to what it was.
            `"blocks"`, the default: by a digest of all its bytes up to 32 KiB, and of blocks spread over larger ones;
            if it differs, `ReplayMismatchError` is raised. `"full"`: by a digest of all bytes of all elements.
            `"warn"`: as `"blocks"`, but training goes on, with a warning.
        check_replay: Whether it is tried in the background, in the first epoch of a training that is backed up, if the
            pipeline can be replayed: a second process of low priority builds it and compares its first elements. If
            not, a warning names what stands in the way. Default `True`.
        resume: How a restored feed gets back to where it was. `"replay"`: the pass is produced again, and what was
            trained of it skipped. `"snapshot"`: the pipeline's iterator, which was saved at or before that place, goes
            on, and what was trained since is skipped. `"window"`: the iterator, which was saved ahead of that place,
            goes on, after the elements in between, which were saved, too: nothing has to repeat itself. `"auto"`, the
            default: from a window where the graph says that elements or their order may differ from run to run, from a
            snapshot else. Whatever is chosen, pipelines whose iterator can't be saved (Python code), is too large or
            does not hold all that they depend on are replayed. The producer logs what was chosen, and why.
        max_state_bytes: Most bytes of a saved iterator, with its elements, in the feed's state. Default 64 MiB.
        transport: How elements travel to this rank. `"shm"`: through shared memory, without a copy, if the producer is
            on the same host. `"tcp"`: over a TCP connection of their own. `"grpc"`: through Python, which is slower.
            `"auto"`, the default: the first of these that works; the log says which. The first two need the native
            engine on both sides.
        topology: The place of this process among the ranks. Default `None`: from Horovod if it is initialised when the
            feeder is first used, else one process.
        port: Port on which the producer listens; TCP for elements has the next one. Default 0: free ones.
        start_timeout: Seconds to wait for ranks that have not come yet. Default 600.

    Raises:
        TypeError: `dataset` is neither a function nor a dataset, or an argument has the wrong type.
        ValueError: An argument is out of range or not supported yet, or the graph of a dataset can't travel.
    """

    def __init__(
        self,
        dataset: Callable[..., tf.data.Dataset] | tf.data.Dataset,
        *,
        name: str = "train",
        producer: int | None = None,
        policy: str = "round_robin",
        remainder: str = "drop",
        steps_per_epoch: int | None = None,
        seed: int | None = None,
        deterministic: bool = False,
        prefetch: int | None = None,
        max_buffer_bytes: int = DEFAULT_MAX_BUFFER_BYTES,
        verify: str = "blocks",
        check_replay: bool = True,
        resume: str = "auto",
        max_state_bytes: int = DEFAULT_MAX_STATE_BYTES,
        transport: str = "auto",
        topology: Topology | None = None,
        port: int = 0,
        start_timeout: float = 600.0,
    ):
        options = FeedOptions(
            name=name,
            producer=producer,
            policy=policy,
            remainder=remainder,
            steps_per_epoch=steps_per_epoch,
            seed=seed,
            deterministic=deterministic,
            prefetch=prefetch,
            max_buffer_bytes=max_buffer_bytes,
            verify=verify,
            check_replay=check_replay,
            resume=resume,
            max_state_bytes=max_state_bytes,
            transport=transport,
            port=port,
            start_timeout=start_timeout,
        )
        if topology is not None and not isinstance(topology, Topology):
            raise TypeError(f"DataFeeder: topology must be a kerasfeed.Topology. Received: {topology!r}")
        self.session = Session(prepare(dataset), options, topology)
        self._inner: tf.data.Dataset | None = None
        self._limited: tf.data.Dataset | None = None
        self._checkpoint = FeedCheckpoint(self.session)
        super().__init__(None)
        self._options_attr = _source_options()
        # At exit the session's own hook closes it, which knows whether the script failed.
        weakref.finalize(self, close_in_background, self.session).atexit = False
        if topology is not None or initialized_horovod() is not None:
            self.session.meet()

    # ---- The dataset ----

    @property
    def element_spec(self) -> Any:
        """The structure of the elements, as the producer's dataset has it."""
        return self.session.element_spec

    def cardinality(self) -> tf.Tensor:
        """Returns the steps of a whole epoch, or tf.data's `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`."""
        return tf.constant(self.session.cardinality, tf.int64)

    def __iter__(self) -> Iterator[Any]:
        if not tf.executing_eagerly():
            return super().__iter__()  # type: ignore[no-any-return]
        # Steps in an epoch are no limit here: a `fit` that keeps one iterator goes on from epoch to epoch.
        return FeedIterator(self)

    def _inputs(self) -> list[tf.data.Dataset]:
        return []

    @property
    def _variant_tensor(self) -> tf.Tensor:
        if self._limited is None:
            inner = self._build(direct=False)
            steps = self.session.cardinality
            with tf.init_scope():
                if steps == tf.data.INFINITE_CARDINALITY:
                    inner = _with_cardinality(inner, None)
                elif steps >= 0:
                    inner = _with_cardinality(inner, steps)
            self._limited = inner
        return self._limited._variant_tensor

    def _unlimited(self) -> tf.data.Dataset:
        if self._inner is None:
            self._inner = self._build(direct=True)
        return self._inner

    def _build(self, direct: bool) -> tf.data.Dataset:
        connection, session = self.session.connection(), self.session
        elements = connection.elements()
        # The dataset belongs to no graph, whoever asks for it first.
        with tf.init_scope():
            if connection.stream is not None:
                inner = session.native_dataset(elements.signature, direct)
            else:
                inner = tf.data.Dataset.from_generator(
                    lambda: _Pulls(session, direct), output_signature=elements.signature
                )
            if elements.rebuild is not None:
                inner = inner.map(elements.rebuild)
            return inner.with_options(_source_options())

    def __repr__(self) -> str:
        spec = f" element_spec={self.session.element_spec}" if self.session.running else ""
        return f"<DataFeeder {self.name!r}{spec}>"

    __str__ = __repr__

    def __bool__(self) -> bool:
        return True

    # ---- The feed ----

    @property
    def name(self) -> str:
        """The feed's name."""
        return self.session.name

    @property
    def topology(self) -> Topology:
        """The place of this process among the ranks."""
        return self.session.topology()

    def statistics(self) -> list[EpochStatistics]:
        """Returns what became of each epoch so far: elements produced and dropped, steps, and steps trained by rank.

        Example:
            >>> feeder.statistics()
            [EpochStatistics(epoch=0, elements=103, steps=51, dropped=1, complete=True, trained={0: 51, 1: 51})]

        The producer's rank knows all of it once every rank has left the feed; before, as much as was reported.
        """
        return self.session.statistics()

    def state(self, position: Position | None = None, *, again_after: int = 0) -> FeedState:
        """Returns what it takes to go on from here in another job: a few numbers, and where it helps a snapshot.

        Example:

        ```python
        path.write_bytes(feeder.state().to_bytes())
        ...
        feeder.restore(kerasfeed.FeedState.from_bytes(path.read_bytes()))
        ```

        Args:
            position: The first step (epoch, step) that is not trained. Default `None`: as this rank has it. In a loop
                of your own a step counts as trained when the next one is pulled.
            again_after: In how many steps this will be called again. Default 0: not known. A snapshot is taken ahead of
                need, so that there is none without it.

        Raises:
            FeedError: The producer can't say, because it can't be reached or has failed.
        """
        return self.session.state(None if position is None else Position(*position), again_after)

    def restore(self, state: FeedState) -> None:
        """Goes on where `state` stood: the next iterator, or the next `fit`, starts there. Call it on all ranks.

        The number of ranks may be another one. A feed that runs is left, and starts again when it is used.

        Args:
            state: What `state()` returned, perhaps in another job.

        Raises:
            StateError: The state is another feed's. That the pipeline is another one is told when the feed starts.
        """
        self.session.restore(state)

    @property
    def checkpoint(self) -> FeedCheckpoint:
        """The feed's position as a part of a `tf.train.Checkpoint`, for loops of your own.

        Example:

        ```python
        checkpoint = tf.train.Checkpoint(model=model, feed=feeder.checkpoint)
        manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=3)
        checkpoint.restore(manager.latest_checkpoint)  # on all ranks; the next iterator goes on from there
        for x, y in feeder:
            train_step(x, y)
            manager.save()  # on rank 0: all that the loop has taken is trained
        ```

        Saving takes what was pulled for trained: save when that is so, and iterate over the feeder itself, as a dataset
        made from it may pull ahead. Inside `fit`, what counts is what `FeedCallback` says.
        """
        return self._checkpoint

    def close(self) -> None:
        """Leaves the producer, which ends when all ranks have left it. Iterating again starts it again."""
        self.session.close()


class _Pulls:
    """What a generator-backed dataset iterates: one pull of a step after the other.

    Not a generator: one that has raised is over, and asking it again would look like the end of the epoch.
    """

    def __init__(self, session: Session, direct: bool):
        self._session = session
        self._direct = direct
        self._ticket: Ticket | None = None

    def __iter__(self) -> _Pulls:
        return self

    def __next__(self) -> Any:
        if self._ticket is None:
            self._ticket = self._session.open_iterator(self._direct)
        value = self._session.pull(self._ticket)
        if value is None:
            raise StopIteration
        return value


class FeedIterator(iterator_ops.OwnedIterator):
    """An iterator over a `DataFeeder` that raises the feed's own errors, not TensorFlow's wrapping of them."""

    def __init__(self, feeder: DataFeeder):
        # A feeder that nobody else holds must not be closed while it is iterated.
        self.feeder = feeder
        super().__init__(feeder._unlimited())

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except tf.errors.OpError:
            failure = self.feeder.session.failure
            if failure is None:
                raise
            raise type(failure)(str(failure)) from None


def prepare(dataset: Any, argument: str = "DataFeeder: dataset") -> Callable[[], Source]:
    """Returns a function that makes the dataset ready to travel, to be called on the producer's rank only.

    Args:
        dataset: What the user gave.
        argument: What messages call it.
    """
    if isinstance(dataset, tf.data.Dataset):

        def source() -> Source:
            spec = spec_lib.encode_spec(dataset.element_spec).decode()
            return Source(serialize_dataset(dataset), "graph", spec)

        return source
    if isinstance(dataset, (str, bytes)):
        raise ValueError(
            f"{argument}: the address of a producer that already runs is not supported yet. Received: {dataset!r}"
        )
    if not callable(dataset):
        raise TypeError(
            f"{argument} must be a function that returns a tf.data.Dataset, or a tf.data.Dataset. "
            f"Received: {type(dataset).__name__}"
        )
    takes_context(dataset)

    def pickled() -> Source:
        payload, modules = launch.pickle_function(dataset)
        return Source(payload, "function", modules=modules, sources=launch.unsaved_sources(dataset))

    return pickled


def _source_options() -> tf.data.Options:
    options = tf.data.Options()
    # tf.distribute would rewrite the graph to shard it, and inject_prefetch would pull ahead by an unknown amount.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_optimization.inject_prefetch = False
    # There is nothing to tune in a source, and ending the tuning thread stalls the end of every epoch.
    options.autotune.enabled = False
    return options


def _with_cardinality(dataset: tf.data.Dataset, steps: int | None) -> tf.data.Dataset:
    """Returns the dataset with a cardinality (`None`: infinite) that its op answers, though it may end earlier.

    `assert_cardinality` would raise on an epoch that was begun in its middle. A choice between this dataset and an
    endless one is endless to tf.data, yet ends when this one does; `take` then makes it `steps`.
    """
    always_first = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64)).repeat()
    choices = [dataset, dataset.repeat()]
    chosen = tf.data.Dataset.choose_from_datasets(choices, always_first, stop_on_empty_dataset=True)
    if steps is not None:
        chosen = chosen.take(steps)
    return chosen.with_options(_source_options())


def feeders_of(dataset: Any) -> list[DataFeeder]:
    """Returns the feeders that a dataset is made from; one that is a feeder itself is all there is."""
    if isinstance(dataset, DataFeeder):
        return [dataset]
    inputs = getattr(dataset, "_inputs", None)
    return [feeder for each in inputs() for feeder in feeders_of(each)] if callable(inputs) else []


def derives_from_feeder(dataset: Any, feeder: DataFeeder | None = None) -> bool:
    """Whether a dataset is, or is made from, a feeder (from this one, if it is given)."""
    found = feeders_of(dataset)
    return bool(found) if feeder is None else any(each is feeder for each in found)
