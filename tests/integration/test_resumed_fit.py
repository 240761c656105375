"""A `fit` that was interrupted goes on where its backup stood, and Horovod's callbacks do not begin anew."""

from __future__ import annotations

import pytest
from helpers import EpochIds, by_value, id_batches, make_model
from tensorflow import keras

from kerasfeed.callbacks import BackupAndRestore, FeedCallback

by_value(__name__)

COUNT = 11


class Interruption(Exception):
    """Stands for the death of the job."""


class InterruptAt(keras.callbacks.Callback):
    def __init__(self, batches: int):
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise Interruption


class BroadcastOnce(keras.callbacks.Callback):
    """Does what Horovod's `BroadcastGlobalVariablesCallback` does, under the same name, and counts."""

    def __init__(self):
        super().__init__()
        self.broadcast_done = False
        self.broadcasts = 0

    def on_train_batch_end(self, batch, logs=None):
        if not self.broadcast_done:
            self.broadcasts += 1
            self.broadcast_done = True


@pytest.mark.parametrize("backup_first", [False, True])
def test_restored_fit_trains_the_rest_and_broadcasts_nothing(make_feeder, tmp_path, backup_first):
    """Horovod would give rank 0's BatchNorm statistics to all ranks, after the first batch."""
    ended = []
    for interrupt in (InterruptAt(COUNT + 6), None):
        model, ids, broadcast = make_model(), EpochIds(), BroadcastOnce()
        feeder = make_feeder(id_batches(COUNT), name="train", seed=1)
        callbacks = [broadcast, FeedCallback(feeder), ids]
        callbacks.insert(0 if backup_first else 3, BackupAndRestore(feeder, tmp_path / "backup", save_freq=4))
        if interrupt is not None:
            with pytest.raises(Interruption):
                model.fit(feeder, epochs=3, callbacks=[*callbacks, interrupt], verbose=0)
        else:
            model.fit(feeder, epochs=3, callbacks=callbacks, verbose=0)
        feeder.close()
        ended.append((ids.epochs, broadcast.broadcasts))
    # The backup of batch 16, the fifth of the second epoch, was written when batch 17 began.
    whole = list(range(COUNT))
    assert ended == [([whole], 1), ([whole[5:], whole], 0)]
