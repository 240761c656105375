"""`BackupAndRestore`: training that was killed goes on where its backup stood: weights, optimizer, data and all.

Saving waits until every other callback has had its turn, and comes before the next turn of any: what
`on_train_batch_end` calls for is written when the next batch begins, or the next epoch, or when training ends.
Restoring happens once in a `fit`, when the first of the callbacks that need it begins: the order of callbacks in the
list does not matter.
"""

from __future__ import annotations

import base64
import functools
import json
import logging
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from tensorflow import keras

from kerasfeed.backup import BackupFolder
from kerasfeed.callbacks import memory, model_state
from kerasfeed.callbacks.keras_loop import KerasLoop
from kerasfeed.collective import broadcast_bytes, connected, gather_bytes, read_by_first
from kerasfeed.errors import StateError
from kerasfeed.feeder import DataFeeder, derives_from_feeder
from kerasfeed.session import Session
from kerasfeed.state import FeedState

_LOG = logging.getLogger("kerasfeed")
_WRITER = 0
_SMALL_STATE_BYTES = 4096
# What is packed beside variables.
_MEMORY, _BEST = "memory", "best weights"
# Which `fit` calls with this folder have come to their end in this process, by its path.
_ended: dict[str, int] = {}
# Who writes to a folder in this process, by its path: a fit that raised may not be over, as long as somebody holds its
# exception, and the next one takes its place.
_writers: weakref.WeakValueDictionary[str, BackupFolder] = weakref.WeakValueDictionary()


class BackupAndRestore(keras.callbacks.Callback):
    """Saves all that training needs to go on, and restores it when the script is started again.

    A backup holds the weights, the optimizer, the epoch and the step, where the data stand, what is each rank's own
    (statistics of BatchNormalization, random generators, metrics), and what Keras's callbacks remember, with the
    history that `fit` returns. It is written by rank 0, whole or not at all. When the same script starts again, `fit`
    goes on from there, inside an epoch too, on all ranks, also if there are more or fewer of them. Use it on all ranks,
    together with `FeedCallback`, in any order.

    Example:

    ```python
    model.fit(feeder, epochs=10, callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        kerasfeed.callbacks.FeedCallback(feeder),
        kerasfeed.callbacks.BackupAndRestore(feeder, "backup/", save_freq=500),
    ])
    ```

    Args:
        feeders: The `DataFeeder` that `fit` trains from, or a list of it and others whose position is to be kept, such
            as that of the validation data.
        backup_dir: Folder for backups, which nothing else uses. Only rank 0 needs it if Horovod connects the ranks;
            else all ranks must see it.
        save_freq: `"epoch"`, the default: at the end of each epoch. Or an int: after so many batches, counted over all
            epochs.
        double_checkpoint: Whether the backup before the newest one is kept too, for the case that the newest is
            damaged. Default `False`.
        delete_checkpoint: Whether the backups are deleted when training ends. Default `True`. If not, the last one is
            of the end of training: the same `fit` then trains nothing, and one with more epochs trains on.

    Raises:
        TypeError: `feeders` holds something else than `DataFeeder`s.
        ValueError: `save_freq` is neither `"epoch"` nor an int of at least 1. In `fit`: there is no `FeedCallback`.
        StateError: In `fit`: the backup is damaged, or belongs to another model or feed; or `backup_dir` can't be
            written to, or another job does.
    """

    def __init__(
        self,
        feeders: DataFeeder | Sequence[DataFeeder],
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ):
        super().__init__()
        self.feeders = check_feeders("BackupAndRestore", feeders)
        whole = isinstance(save_freq, int) and not isinstance(save_freq, bool)
        if save_freq != "epoch" and not (whole and int(save_freq) >= 1):
            raise ValueError(
                f'BackupAndRestore: save_freq must be "epoch" or an int of at least 1. Received: {save_freq!r}'
            )
        self._folder = BackupFolder(backup_dir, keep=2 if double_checkpoint else 1)
        self._path = os.path.realpath(backup_dir)
        for feeder in self.feeders:
            feeder.session.foresee = functools.partial(_foresee, self._folder, self._path)
        self._save_freq = save_freq
        self._delete = delete_checkpoint
        self._loop: KerasLoop | None = None
        self._memory: memory.Memory = []
        self._late_metrics: bytes | None = None
        self._begun = self._skipped = self._surrounded = False
        self._trained = self.feeders[0]
        self._feed_states: dict[str, bytes] | None = None
        self._restored: bytes | None = None
        self._over: Any = None
        self._starts: list[Any] = []
        self._resumed_epoch: int | None = None
        self._epoch = 0
        self._step = 0
        self._batches = 0
        self._unsaved = 0
        self._pending = False

    # ---- Restoring ----

    def begin(self, model: Any) -> int | None:
        """Restores what there is, at the first call in a `fit`. Returns the Keras epoch it goes on in, or `None`.

        `FeedCallback` calls it as well: the feed must be restored before it is bound to the `fit`.
        """
        loop = KerasLoop.find(model, "fit")
        if not self._begun or (loop is not None and not loop.same_call(self._loop)):
            self._begun, self._loop = True, loop
            self._skipped = self._surrounded = self._pending = False
            self._epoch = self._step = self._batches = self._unsaved = 0
            self._memory, self._late_metrics, self._feed_states, self._restored = [], None, None, None
            self._starts = []
            if loop is not None:
                self._trained = next((f for f in self.feeders if derives_from_feeder(loop.dataset, f)), self._trained)
                self._surrounded = loop.surround(_BeforeAll(self), _AfterAll(self))
                if self._over is not None:
                    self._over.detach()
                self._over = loop.when_over(_end_fit, self._folder, weakref.ref(model), self._starts)
            try:
                self._resumed_epoch = self._restore(model)
            except BaseException:
                self._begun = False
                self._folder.unlock()
                raise
        return self._resumed_epoch

    def _restore(self, model: Any) -> int | None:
        state = model_state.ModelState(model)
        unsaved = state.unsaved_generators()
        if unsaved:
            _LOG.warning(
                "BackupAndRestore: Keras can't save the random state of %s: a restored training draws other numbers "
                "there. Call keras.backend.experimental.enable_tf_random_generator() before the model is built",
                ", ".join(unsaved),
            )
        parts = self._load()
        if parts is None:
            return None
        info = json.loads(parts["info"])
        parts.update({f"feed-{name}": base64.b64decode(text) for name, text in info["feeds"].items()})
        fit = _ended.get(self._path, 0)
        if info["fit"] != fit:
            if info["fit"] > fit:
                # This fit was over when the backup was made, in the next one.
                return self._skip(model)
            return None
        # All is compared before anything is changed.
        feed_states = [self._feed_state(parts, feeder) for feeder in self.feeders]
        if self._loop is not None:
            # Keras builds some models, and all metrics, only from what they are fed.
            self._loop.build(model)
        state.build(self._trained.element_spec)
        state.unpack(parts["shared"], model_state.SHARED)
        self._restore_own(state, parts, info["size"])
        for feeder, feed_state in zip(self.feeders, feed_states, strict=True):
            position = feeder.session.restore(feed_state)
            _LOG.info("feed %r: restored at %s", feeder.name, position)
        self._restored = parts["shared"]
        for callback in self._callbacks():
            # Horovod's would give all ranks what is rank 0's own, after the first batch: they have the same weights.
            if hasattr(callback, "broadcast_done"):
                callback.broadcast_done = True
        self._batches, self._epoch, self._step = info["batches"], info["epoch"], self._resumed_step(info)
        if info["stopped"] and memory.may_stop(self._callbacks()):
            # What EarlyStopping has ended stays ended.
            return self._run_nothing(model)
        self._set_counters(model, self._epoch, self._step)
        return self._epoch

    def _feed_state(self, parts: dict[str, bytes], feeder: DataFeeder) -> FeedState:
        name = f"feed-{feeder.name}"
        if name not in parts:
            raise StateError(
                f"the backup in {self._path} has nothing of feed {feeder.name!r}; it has "
                f"{', '.join(sorted(n.removeprefix('feed-') for n in parts if n.startswith('feed-')))}"
            )
        state = FeedState.from_bytes(parts[name])
        feeder.session.check(state)
        return state

    def _restore_own(self, state: model_state.ModelState, parts: dict[str, bytes], size: int) -> None:
        rank, now = self._topology.rank, self._topology.size
        known = rank < size and f"own-{rank}" in parts
        own = parts[f"own-{rank}"] if known else parts[f"own-{_WRITER}"]
        if known:
            state.unpack(own, ("statistics", "generators"))
        else:
            state.unpack(own, ("statistics",))
        if now != size and rank == _WRITER:
            _LOG.warning(
                "BackupAndRestore: the backup is of %d ranks, now there are %d: ranks that are new start with random "
                "generators of their own and with the statistics of rank %d",
                size,
                now,
                _WRITER,
            )
        # Keras resets metrics when an epoch begins, and makes some of them only with the first batch.
        self._late_metrics = own
        best = model_state.arrays(parts["shared"], _BEST) | model_state.arrays(own, _BEST)
        (text,) = model_state.arrays(own, _MEMORY).values()
        self._memory = memory.unpack(text.tobytes(), best)

    def _resumed_step(self, info: dict[str, Any]) -> int:
        start = self._trained.session.cursor.acknowledged
        return int(info["step"]) if self._topology.size == info["size"] else start.step

    def _skip(self, model: Any) -> int:
        self._skipped = True
        return self._run_nothing(model)

    def _run_nothing(self, model: Any) -> int:
        _LOG.info("BackupAndRestore: this fit was over when the backup in %s was made", self._path)
        epochs = self._loop.last_epoch if self._loop is not None else 0
        self._set_counters(model, epochs, 0)
        return epochs

    def _set_counters(self, model: Any, epoch: int, step: int) -> None:
        if hasattr(model, "_training_state"):
            self._starts.append(_Counters(model, epoch, step))
            model._training_state = self._starts[0]
        else:
            self._starts.append(_Epoch(epoch))
            model._initial_epoch = self._starts[0]

    def _load(self) -> dict[str, bytes] | None:
        """Returns all parts of the newest backup, the same on all ranks; `None` if there is no backup."""
        parts: dict[str, bytes] = {}

        def read() -> bytes:
            try:
                if self._topology.rank == _WRITER:
                    self._lock()
                backup = self._folder.newest()
            except OSError as error:
                raise StateError(f"{self._path}: can't be used for backups: {error}") from error
            if backup is not None:
                parts.update({name: backup.read(name) for name in backup.names})
            return json.dumps(sorted(parts)).encode()

        names = json.loads(read_by_first(read, self._topology, "kerasfeed.backup"))
        if connected(self._topology):
            # One by one: all of it at once would be in memory twice.
            parts = {n: broadcast_bytes(parts.get(n, b""), _WRITER, f"kerasfeed.backup.{n}") for n in names}
        return parts or None

    def _lock(self) -> None:
        """Becomes the writer now: a folder that can't be written to is better told before an epoch is trained."""
        before = _writers.get(self._path)
        if before is not None and before is not self._folder:
            before.unlock()
        self._folder.lock()
        _writers[self._path] = self._folder

    # ---- Saving ----

    def save_pending(self) -> None:
        """Writes the backup that was called for."""
        if self._pending:
            self._save(self.model)

    def note_feeds(self) -> None:
        """Takes down where the feeds stand, for the last backup: `FeedCallback` is about to close them."""
        if self._unsaved and not self._delete and self._topology.rank == _WRITER:
            self._feed_states = states_of_feeds(self.feeders, self._steps_between)

    def _save(self, model: Any, at_end: bool = False) -> None:
        self._pending, self._unsaved = False, 0
        topology, callbacks = self._topology, self._callbacks()
        state, remembered = model_state.ModelState(model), memory.memory_of(callbacks)
        text = np.frombuffer(memory.pack(remembered), np.uint8)
        best = memory.best_weights(remembered, model, trainable=False)
        own = state.pack(model_state.OWN, {_MEMORY: {_MEMORY: text}, _BEST: best})
        owns = gather_bytes(own, "kerasfeed.backup.own") if connected(topology) else [own]
        if topology.rank != _WRITER:
            return
        feed_states = self._feed_states or states_of_feeds(self.feeders, self._steps_between)
        small = {name: data for name, data in feed_states.items() if len(data) <= _SMALL_STATE_BYTES}
        info = {
            "fit": _ended.get(self._path, 0),
            "epoch": self._epoch,
            "step": self._step,
            "batches": self._batches,
            "size": topology.size,
            "stopped": at_end and memory.has_stopped(callbacks),
            # A file of its own costs another wait for the disk.
            "feeds": {name: base64.b64encode(data).decode() for name, data in small.items()},
        }
        best = memory.best_weights(remembered, model, trainable=True)
        shared = state.pack(model_state.SHARED, {_BEST: best})
        parts: dict[str, Any] = {"info": json.dumps(info).encode(), "shared": shared}
        parts.update({f"own-{rank}": data for rank, data in enumerate(owns)})
        parts.update({f"feed-{name}": data for name, data in feed_states.items() if name not in small})
        self._folder.write(parts, {key: info[key] for key in ("fit", "epoch", "step", "size")})

    @property
    def _steps_between(self) -> int:
        return 0 if self._save_freq == "epoch" else int(self._save_freq)

    def _callbacks(self) -> list[Any]:
        return self._loop.callbacks if self._loop is not None else []

    @property
    def _topology(self) -> Any:
        return self.feeders[0].topology

    # ---- Hooks ----

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the newest backup, if there is one."""
        self.begin(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Writes the backup of the epoch before."""
        for feeder in self.feeders:
            feeder.session.check_replay()
        self.save_pending()
        if epoch != self._resumed_epoch:
            self._step = 0
        self._epoch = epoch
        if not self._surrounded:
            self.epoch_begun()

    def remember(self) -> None:
        """Gives Keras's callbacks back what they remembered, before their first turn since training began."""
        if self._restored is not None:
            memory.remember(self._callbacks(), self._memory)

    def epoch_begun(self) -> None:
        """Where an epoch goes on that was begun before: undoes what its beginning has done for the second time."""
        if self._restored is None:
            return
        if self._step or not self._surrounded:
            self.remember()
        shared, self._restored = self._restored, None
        if self._step:
            # A schedule may have set the learning rate from what it was, and Keras has reset the metrics.
            model_state.ModelState(self.model).unpack(shared, model_state.SHARED)
            self._restore_metrics()

    def _restore_metrics(self) -> None:
        if self._late_metrics is None:
            return
        state = model_state.ModelState(self.model)
        if len(state.variables("metrics")) == model_state.count(self._late_metrics, "metrics"):
            state.unpack(self._late_metrics, ("metrics",))
            self._late_metrics = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Writes the backup that the batch before called for."""
        self.save_pending()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts batches; the backup is written when all callbacks had their turn."""
        if self._late_metrics is not None and self._step and self._resumed_epoch == self._epoch:
            # Metrics that Keras has made just now, with the first batch: they add up what they saw.
            model_state.ModelState(self.model).unpack(self._late_metrics, ("metrics",), add=True)
        self._late_metrics = None
        steps = self._loop.steps_per_call if self._loop is not None else 1
        self._step += steps
        self._unsaved += steps
        before, self._batches = self._batches, self._batches + steps
        if self._save_freq != "epoch":
            freq = int(self._save_freq)
            self._pending = self._pending or before // freq < self._batches // freq

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Calls for the backup of this epoch."""
        self._epoch, self._step = epoch + 1, 0
        if self._save_freq == "epoch":
            self._pending = True

    def on_train_end(self, logs: Any = None) -> None:
        """Deletes the backups, or writes the last one; when all callbacks had their turn, if that can be had."""
        for feeder in self.feeders:
            feeder.session.end_replay_check()
        if not self._surrounded:
            self.finish()

    def finish(self) -> None:
        """Deletes the backups, or writes the last one."""
        self._begun = False
        if self._restored is not None:
            # There was no epoch left to train.
            self.remember()
            self._restore_metrics()
        if not self._delete:
            if self._unsaved:
                self._save(self.model, at_end=True)
        elif self._topology.rank == _WRITER and not self._skipped:
            self._folder.delete()
        self._pending, self._feed_states, self._restored = False, None, None
        _ended[self._path] = _ended.get(self._path, 0) + 1
        if self._over is not None:
            self._over.detach()
        _end_fit(self._folder, weakref.ref(self.model), self._starts)


def _end_fit(folder: BackupFolder, model: Any, starts: list[Any]) -> None:
    """Leaves the folder to others, and the model without what made this `fit` begin elsewhere."""
    folder.unlock()
    for name in ("_training_state", "_initial_epoch"):
        if any(start is getattr(model(), name, None) for start in starts):
            setattr(model(), name, None)


class _Epoch(int):
    """Where Keras 3 is to begin; it can be told from a number that is another one's."""


class _BeforeAll(keras.callbacks.Callback):
    """Writes what was called for before any other callback changes something, as a learning-rate schedule does."""

    def __init__(self, backup: BackupAndRestore):
        super().__init__()
        self._backup = backup

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # Keras has asked where to begin, and is not to begin there again.
        if isinstance(getattr(self._backup.model, "_initial_epoch", None), _Epoch):
            self._backup.model._initial_epoch = None
        self._backup.save_pending()
        self._backup.remember()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._backup.save_pending()

    def on_train_end(self, logs: Any = None) -> None:
        # There may have been no epoch.
        self._backup.remember()


class _AfterAll(keras.callbacks.Callback):
    """Writes the last backup after all other callbacks, of which one may bring back the best weights."""

    def __init__(self, backup: BackupAndRestore):
        super().__init__()
        self._backup = backup

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        check_bound("BackupAndRestore", self._backup.feeders)
        self._backup.epoch_begun()

    def on_train_end(self, logs: Any = None) -> None:
        self._backup.finish()


class _Counters:
    """Where Keras 2 is to begin: it asks what it takes for the state of its own `BackupAndRestore`."""

    def __init__(self, model: Any, epoch: int, step: int):
        self._model = model
        self._counters = epoch, step

    def maybe_load_initial_counters_from_ckpt(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        # Only this fit is to begin there.
        self._model._training_state = None
        return self._counters


def check_feeders(who: str, feeders: DataFeeder | Sequence[DataFeeder]) -> list[DataFeeder]:
    """Returns the feeders that a callback was given as a list; raises where they are none."""
    found = [feeders] if isinstance(feeders, DataFeeder) else list(feeders)
    for feeder in found:
        if not isinstance(feeder, DataFeeder):
            raise TypeError(f"{who}: feeders must be DataFeeders. Received: {type(feeder).__name__}")
    names = [feeder.name for feeder in found]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{who}: feeders must be at least one, with names of their own. Received: {names}")
    return found


def check_bound(who: str, feeders: Sequence[DataFeeder]) -> None:
    """Raises `ValueError` where, inside `fit`, no `FeedCallback` says what is trained."""
    if not any(feeder.session.cursor.bound for feeder in feeders):
        names = ", ".join(repr(feeder.name) for feeder in feeders)
        raise ValueError(
            f"{who}: expected a FeedCallback of a feed among {names} in fit's callbacks: without it nobody knows which "
            "elements are trained. Received: none"
        )


def _foresee(folder: BackupFolder, path: str, session: Session) -> FeedState | None:
    """Returns the state of a feed in the newest backup, if this rank can see it; not all of the backup is read."""
    topology = session.topology()
    backup = folder.peek() if not connected(topology) or topology.rank == _WRITER else None
    if backup is None:
        return None
    info = json.loads(backup.read("info"))
    if info["fit"] != _ended.get(path, 0):
        # It is of another fit than the one that begins.
        return None
    text = info["feeds"].get(session.name)
    return FeedState.from_bytes(base64.b64decode(text) if text is not None else backup.read(f"feed-{session.name}"))


def states_of_feeds(feeders: Sequence[DataFeeder], again_after: int = 0) -> dict[str, bytes]:
    """Returns where the feeds stand inside `fit`, as bytes by name; see `DataFeeder.state`."""
    states = {}
    for feeder in feeders:
        cursor = feeder.session.cursor
        # Of one that only evaluates no step counts as trained before the next one is pulled.
        position = None if cursor.bound else cursor.next_start
        states[feeder.name] = feeder.state(position, again_after=again_after if cursor.bound else 0).to_bytes()
    return states
