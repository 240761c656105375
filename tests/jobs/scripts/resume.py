"""A training that is started several times, with another number of ranks each time: one start of it.

    resume.py FOLDER END_AFTER

All ranks end themselves after END_AFTER batches, as a kill would; 0: never. Only rank 0 can see FOLDER, which gets
backups and checkpoints. The start with three ranks first reads on from a checkpoint of the one with two.
"""

from __future__ import annotations

import quick  # noqa: F401 (before TensorFlow)

# isort: split

import os
import pathlib
import sys
from typing import Any

import horovod.tensorflow as hvd
from models import Recorder, batches, build_network, horovod_callbacks
from reporting import FOLDER, RANK, SIZE, error_of, meet, report
from tensorflow import keras

import kerasfeed

ELEMENTS = 42
EPOCHS = 3
CHECKPOINT = "{epoch}-{batch}.weights.h5"


def shuffled():
    return batches(ELEMENTS).shuffle(ELEMENTS)


class Journal(keras.callbacks.Callback):
    """Notes what each epoch trained, and the statistics of BatchNormalization; ends all ranks at once."""

    def __init__(self, recorder: Recorder, layer: Any, end_after: int = 0):
        super().__init__()
        self._recorder, self._layer, self._end_after = recorder, layer, end_after
        self._epoch = 0
        self.epochs: list[Any] = []
        self.statistics: list[list[float]] = []

    def _note_statistics(self) -> None:
        self.statistics.append([float(value) for value in self._layer.moving_mean.numpy()])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        if not self.statistics:
            self._note_statistics()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note_statistics()
        if len(self.statistics) == self._end_after + 1 > 1:
            self.on_epoch_end(self._epoch)
            self.report()
            meet("end")
            os._exit(1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append([epoch, self._recorder.take()])

    def report(self) -> None:
        report("trained", epochs=self.epochs, statistics=self.statistics)


def read_on(feeder: kerasfeed.DataFeeder, checkpoint: pathlib.Path) -> None:
    """Reads two steps behind a checkpoint of the start before."""
    kerasfeed.callbacks.restore_feeds(checkpoint, feeder)
    report("checkpoint", elements=[int(features["id"]) for features, _ in feeder.take(2)])
    try:
        kerasfeed.callbacks.restore_feeds(checkpoint.with_name("missing"), feeder)
    except kerasfeed.StateError as error:
        report("missing checkpoint", **error_of(error))


def main(folder: pathlib.Path, end_after: int) -> None:
    if RANK != 0:
        folder = FOLDER / "nowhere"
    recorder, layer = Recorder(), keras.layers.BatchNormalization()
    network = build_network(recorder, [layer])
    feeder = kerasfeed.DataFeeder(shuffled)
    if SIZE == 3:
        read_on(feeder, folder / CHECKPOINT.format(epoch=1, batch=5))
    journal = Journal(recorder, layer, end_after)
    callbacks = [
        *horovod_callbacks(network),
        kerasfeed.callbacks.FeedCallback(feeder),
        kerasfeed.callbacks.ModelCheckpoint(feeder, folder / CHECKPOINT, save_weights_only=True, save_freq=5),
        kerasfeed.callbacks.BackupAndRestore(feeder, folder / "backups", save_freq=3),
        journal,
    ]
    network.fit(feeder, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    journal.report()


if __name__ == "__main__":
    hvd.init()
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
