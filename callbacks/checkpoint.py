"""`ModelCheckpoint`: beside each checkpoint that Keras writes, where the feeds stood: training can go on from it.

A file `<checkpoint>.feed` holds the states of all feeds; it is written when Keras has written the checkpoint, aside and
then renamed. `restore_feeds` gives the states back, on all ranks alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorflow import keras

from kerasfeed.backup import sync_folder
from kerasfeed.callbacks.backup import check_bound, check_feeders, states_of_feeds
from kerasfeed.callbacks.keras_loop import KerasLoop
from kerasfeed.collective import read_by_first
from kerasfeed.errors import StateError
from kerasfeed.feeder import DataFeeder
from kerasfeed.state import FeedState

SUFFIX = ".feed"
_WRITER = 0
_MAGIC = b"KFFEEDS\r\n"
# Magic, length of the index, SHA-256 of all that follows.
_HEAD = struct.Struct(">9sQ32s")


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's `ModelCheckpoint`, with the position of the data beside each checkpoint: in `<checkpoint>.feed`.

    Training can then start from any of them: load the checkpoint as always, and give the data back by `restore_feeds`.
    Where Keras does not write, as with `save_best_only`, nothing is written. All ranks may have it in their list of
    callbacks: only rank 0 writes, the checkpoint and the feeds.

    What a checkpoint of Keras leaves out (random generators, metrics of an epoch that was begun, memory of other
    callbacks) is left out here, too: `BackupAndRestore` has it.

    Example:

    ```python
    checkpoint = kerasfeed.callbacks.ModelCheckpoint(feeder, "model-{epoch}.keras")
    model.fit(feeder, epochs=10, callbacks=[kerasfeed.callbacks.FeedCallback(feeder), checkpoint])
    ...
    model = keras.models.load_model("model-7.keras")  # in another job
    kerasfeed.callbacks.restore_feeds("model-7.keras", feeder)
    model.fit(feeder, initial_epoch=7, epochs=10, callbacks=[kerasfeed.callbacks.FeedCallback(feeder)])
    ```

    Args:
        feeders: The `DataFeeder` that `fit` trains from, or a list of it and others whose position is to be kept.
        filepath: Where Keras writes its checkpoints, as in `keras.callbacks.ModelCheckpoint`.
        keras_arguments: The other arguments of `keras.callbacks.ModelCheckpoint`.

    Raises:
        TypeError: `feeders` holds something else than `DataFeeder`s.
        ValueError: Two feeders have the same name, or Keras refuses an argument. In `fit`: there is no `FeedCallback`.
        RuntimeError: This version of Keras writes its checkpoints in a way that is not known.
    """

    def __init__(
        self, feeders: DataFeeder | Sequence[DataFeeder], filepath: str | os.PathLike[str], **keras_arguments: Any
    ):
        super().__init__(os.fspath(filepath), **keras_arguments)
        self._feeders = check_feeders("ModelCheckpoint", feeders)

        if not hasattr(self, "_save_handler") and not hasattr(self, "_should_save_model"):
            raise RuntimeError(
                f"kerasfeed.callbacks.ModelCheckpoint: Keras {keras.__version__} is not known. Use BackupAndRestore"
            )
        self._due: list[str] = []
        self._surrounded = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Sees to it that the feeds are asked when all callbacks had their turn, whatever their order."""
        super().on_train_begin(logs)
        self._due = []
        loop = KerasLoop.find(self.model, "fit")
        self._surrounded = loop is not None and loop.surround(keras.callbacks.Callback(), _AfterAll(self))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Has it tried whether the feeds could go on from a checkpoint."""
        super().on_epoch_begin(epoch, logs)
        for feeder in self._feeders:
            feeder.session.check_replay()

    def on_train_end(self, logs: Any = None) -> None:
        """Ends that."""
        super().on_train_end(logs)
        for feeder in self._feeders:
            feeder.session.end_replay_check()

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        # Keras decides here whether there is to be a checkpoint, and writes it.
        if self._feeders[0].topology.rank != _WRITER:
            return
        check_bound("ModelCheckpoint", self._feeders)
        super()._save_model(epoch, batch, logs)
        if not self._surrounded:
            self.write_due()

    def _save_handler(self, filepath: str) -> None:
        # Keras 2 calls this to write a checkpoint.
        self._note(filepath)
        super()._save_handler(filepath)

    def _should_save_model(self, epoch: int, batch: int | None, logs: Any, filepath: str) -> bool:
        # Keras 3 asks this before it writes a checkpoint.
        saves = bool(super()._should_save_model(epoch, batch, logs, filepath))
        if saves:
            self._note(filepath)
        return saves

    def _note(self, checkpoint: str) -> None:
        # A kill may leave a checkpoint without feeds, which is an error, but never one with those of another.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_beside(checkpoint))
        self._due.append(checkpoint)

    def write_due(self) -> None:
        """Writes where the feeds stand beside the checkpoints that Keras has just written."""
        due, self._due = self._due, []
        if due:
            data = _pack(states_of_feeds(self._feeders))
            for checkpoint in due:
                _write(_beside(checkpoint), data)


class _AfterAll(keras.callbacks.Callback):
    """Has the feeds asked after all other callbacks: among them is the one that counts what is trained."""

    def __init__(self, checkpoint: ModelCheckpoint):
        super().__init__()
        self._checkpoint = checkpoint

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._checkpoint.write_due()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._checkpoint.write_due()


def restore_feeds(path: str | os.PathLike[str], feeders: DataFeeder | Sequence[DataFeeder]) -> None:
    """Lets feeds go on where they stood when a checkpoint was written by `kerasfeed.callbacks.ModelCheckpoint`.

    Call it on all ranks, before `fit`; the number of ranks may be another one. Only rank 0 needs to see the file if
    Horovod connects the ranks.

    Example:

    ```python
    model = keras.models.load_model("model-7.keras")
    kerasfeed.callbacks.restore_feeds("model-7.keras", feeder)
    model.fit(feeder, initial_epoch=7, epochs=10, callbacks=[kerasfeed.callbacks.FeedCallback(feeder)])
    ```

    Args:
        path: The checkpoint, as Keras wrote it, or the file beside it whose name ends with `.feed`.
        feeders: The `DataFeeder`s to restore, one or a list.

    Raises:
        TypeError: `feeders` holds something else than `DataFeeder`s.
        StateError: There is no such file, it is damaged, or it is of other feeds. None of the feeds is changed.
    """
    found = check_feeders("restore_feeds", feeders)
    file = os.fspath(path) if os.fspath(path).endswith(SUFFIX) else _beside(os.fspath(path))
    data = read_by_first(Path(file).read_bytes, found[0].topology, "kerasfeed.feeds")
    try:
        saved = _unpack(data)
        states = []
        for feeder in found:
            if feeder.name not in saved:
                raise StateError(f"has nothing of feed {feeder.name!r}; it has {', '.join(sorted(map(repr, saved)))}")
            states.append(FeedState.from_bytes(saved[feeder.name]))
            feeder.session.check(states[-1])
    except StateError as error:
        raise StateError(f"{file}: {error}") from error
    for feeder, state in zip(found, states, strict=True):
        feeder.restore(state)


def _beside(checkpoint: str) -> str:
    # The SavedModel format has a folder for a checkpoint.
    return checkpoint.rstrip(os.sep) + SUFFIX


def _pack(states: dict[str, bytes]) -> bytes:
    index = json.dumps([[name, len(data)] for name, data in states.items()]).encode()
    body = b"".join([index, *states.values()])
    return _HEAD.pack(_MAGIC, len(index), hashlib.sha256(body).digest()) + body


def _unpack(data: bytes) -> dict[str, bytes]:
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        raise StateError(f"must begin with {_MAGIC!r}. Received: {data[: len(_MAGIC)]!r}: not a feed file, or damaged")
    _, size, digest = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if hashlib.sha256(body).digest() != digest:
        raise StateError(f"its SHA-256 must be {digest.hex()}. Received: {hashlib.sha256(body).hexdigest()}: damaged")
    states, at = {}, size
    for name, length in json.loads(body[:size]):
        states[name] = body[at : at + length]
        at += length
    return states


def _write(path: str, data: bytes) -> None:
    """Writes a file whole or not at all."""
    aside = f"{path}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with open(aside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
    sync_folder(Path(path).absolute().parent)
