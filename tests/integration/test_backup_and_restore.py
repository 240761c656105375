"""Training that is killed and started again ends as if it had not been: data, weights, metrics and callbacks.

An exception from a callback plays the kill: `Job.run` then builds model, feeder and callbacks anew, as a script that is
started again does, under other random seeds.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from helpers import KERAS3, Recorder, by_value, end_sessions, together
from tensorflow import keras
from tensorflow.python.framework import config as framework_config

import kerasfeed
from kerasfeed.backup import BackupFolder
from kerasfeed.callbacks import BackupAndRestore, FeedCallback, ModelCheckpoint, restore_feeds
from kerasfeed.callbacks import backup as backup_module
from kerasfeed.callbacks.model_state import ModelState
from kerasfeed.schedule import Position

by_value(__name__)

COUNT = 10


@pytest.fixture(scope="module", autouse=True)
def deterministic():
    """What exact weights ask for."""
    tf.config.experimental.enable_op_determinism()
    if not KERAS3:
        keras.backend.experimental.enable_tf_random_generator()
    yield
    framework_config.disable_op_determinism()
    if not KERAS3:
        keras.backend.experimental.disable_tf_random_generator()


# ---- A job that can be killed ----


class Kills(keras.callbacks.Callback):
    """Keeps what a kill would leave of the backups: a copy of their folder after so many batches.

    Args:
        folder: The backups.
        after: Numbers of batches, counted over all epochs. One with ".5" is the moment when the next epoch has begun.
    """

    def __init__(self, folder: pathlib.Path, after: tuple[float, ...]):
        super().__init__()
        self._folder, self._after, self._batches = folder, after, 0

    def _keep(self, moment: float) -> None:
        if moment in self._after:
            copy = left_by_kill(self._folder, moment)
            copy.mkdir()
            if self._folder.exists():
                shutil.copytree(self._folder, copy, dirs_exist_ok=True)

    def on_epoch_begin(self, epoch, logs=None):
        self._keep(self._batches + 0.5)

    def on_train_batch_end(self, batch, logs=None):
        # Keras's own numbers can't be used to count, with several steps per execution.
        self._batches = int(self.model.notes.trained.count)
        self._keep(self._batches)


def left_by_kill(folder: pathlib.Path, moment: float) -> pathlib.Path:
    return folder.with_name(f"{folder.name}-{moment:g}")


def shuffled(count: int = COUNT) -> Callable[[], tf.data.Dataset]:
    """Returns a `dataset_fn` that shuffles and augments differently in each epoch; elements begin with their number."""

    def dataset_fn() -> tf.data.Dataset:
        def element(i):
            x = tf.cast(i, tf.float32)
            row = tf.stack([x, tf.sin(x), tf.cos(x * 3.0)])
            return tf.stack([row, row + tf.random.uniform([3])]), tf.stack([[tf.sin(x)], [tf.cos(x)]])

        return tf.data.Dataset.range(count).shuffle(count).map(element)

    return dataset_fn


class Network(keras.Sequential):
    """Has all that needs care: BatchNormalization, Dropout, an optimizer with slots, a metric."""

    def __init__(self) -> None:
        super().__init__(
            [
                keras.layers.Input([3]),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(4, activation="tanh"),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
        self.notes = _Notes()

    def train_step(self, data):
        self.notes.trained.note(data[0][0, 0])
        return super().train_step(data)

    def test_step(self, data):
        self.notes.tested.note(data[0][0, 0])
        return super().test_step(data)


class _Notes:
    def __init__(self) -> None:
        self.trained, self.tested = Recorder(), Recorder()


def compiled(network: Network, **options: Any) -> Network:
    options = {"optimizer": keras.optimizers.Adam(0.01), "metrics": ["mae"], **options}
    network.compile(loss="mse", jit_compile=False, **options)
    return network


@dataclasses.dataclass
class Run:
    """What one start of a job has done."""

    network: Network
    ids: list[int]
    tested: list[int]
    histories: list[tuple[list[int], dict[str, list[float]]]]  # of each fit
    values: list[np.ndarray]


@dataclasses.dataclass
class Job:
    """A script that trains, with what differs from test to test."""

    folder: pathlib.Path
    dataset_fn: Callable[..., tf.data.Dataset] = dataclasses.field(default_factory=shuffled)
    build: Callable[[], Network] = Network
    feeder_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    transform: Callable[[tf.data.Dataset], tf.data.Dataset] = lambda feeder: feeder
    compile_options: Callable[[], dict[str, Any]] = dict
    fit_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    validation_fn: Callable[..., tf.data.Dataset] | None = None
    more_callbacks: Callable[[], list[Any]] = list
    save_freq: Any = 1
    backup_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    backward: bool = False
    epochs: tuple[int, ...] = (3,)
    starts: int = 0

    def start(self, folder: pathlib.Path | None = None, kills: tuple[float, ...] = ()) -> Run:
        """Runs the script from its first line."""
        self.starts += 1
        folder = folder or self.folder
        # A process that starts again has counted no fits, and draws other numbers.
        backup_module._ended.clear()
        keras.backend.clear_session()
        keras.utils.set_random_seed(self.starts)
        network = compiled(self.build(), **self.compile_options())
        feeders = [kerasfeed.DataFeeder(self.dataset_fn, name="train", deterministic=True, **self.feeder_options)]
        options = {"verbose": 0, **self.fit_options}
        if self.validation_fn is not None:
            feeders.append(kerasfeed.DataFeeder(self.validation_fn, name="validation"))
            options["validation_data"] = feeders[1]
        histories = []
        try:
            keeper = Kills(folder, kills)
            for epochs in self.epochs:
                callbacks = [
                    FeedCallback(feeders[0]),
                    *self.more_callbacks(),
                    BackupAndRestore(feeders, folder, self.save_freq, **self.backup_options),
                ]
                callbacks = [*(reversed(callbacks) if self.backward else callbacks), keeper]
                got = network.fit(self.transform(feeders[0]), epochs=epochs, callbacks=callbacks, **options)
                histories.append((got.epoch, {name: list(map(float, values)) for name, values in got.history.items()}))
        finally:
            end_sessions([each.session for each in feeders])
        return Run(network, network.notes.trained.take(), network.notes.tested.take(), histories, values_of(network))


def values_of(network: Network) -> list[np.ndarray]:
    """Returns the values of all variables, the learning rate included."""
    state = ModelState(network)
    groups = ("weights", "optimizer", "statistics", "generators", "metrics")
    values = [np.array(v.numpy()) for group in groups for v in state.variables(group)]
    return [*values, np.array(network.optimizer.learning_rate)]


def check_kills(job: Job, kills: dict[float, int]) -> Run:
    """Runs the job undisturbed, and starts it again from what each kill left: the end is the same.

    Args:
        job: What to run.
        kills: After how many batches the job is killed (as in `Kills`), and after how many it goes on.

    Returns:
        The undisturbed run.
    """
    whole = job.start(kills=tuple(kills))
    for moment, goes_on in kills.items():
        run = job.start(left_by_kill(job.folder, moment))
        assert run.ids == whole.ids[goes_on:], moment
        assert run.tested == whole.tested[len(whole.tested) - len(run.tested) :], moment
        check_same_end(run, whole)
    return whole


def check_same_end(run: Run, whole: Run) -> None:
    """Compares what is left of two runs: the history, all variables, and the learning rate."""
    assert run.histories[-1] == whole.histories[-1]
    assert len(run.values) == len(whole.values)
    for ours, theirs in zip(run.values, whole.values, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "backup"


def test_training_that_was_killed_ends_as_if_it_had_not_been(folder):
    # At an epoch's last batch, and when the next has begun.
    job = Job(
        folder,
        validation_fn=shuffled(6),
        compile_options=lambda: {"optimizer": keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5)},
        # From one epoch to the next it leaves the averages in the model.
        more_callbacks=lambda: [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)] if KERAS3 else [],
    )
    whole = check_kills(job, {20: 19, 20.5: 20})
    assert sorted(whole.ids[:COUNT]) == list(range(COUNT))
    assert len(set(map(tuple, np.reshape(whole.ids, [3, COUNT])))) == 3
    assert len(set(map(tuple, np.reshape(whole.tested, [3, 6])))) > 1
    assert not folder.exists()


class Stopping(keras.callbacks.EarlyStopping):
    """One that is derived from Keras's remembers as that one does."""


class Schedule(keras.callbacks.LearningRateScheduler):
    """A learning rate that depends on the one before."""

    def __init__(self) -> None:
        super().__init__(lambda epoch, rate: rate * 0.7)


def test_kills_with_steps_per_execution_and_all_callbacks_in_another_order(folder):
    job = Job(
        folder,
        dataset_fn=shuffled(11),
        validation_fn=shuffled(5),
        # Each validation leaves its pass before the end; the next one is a new pass.
        fit_options={"validation_steps": 3},
        compile_options=lambda: {"steps_per_execution": 4},
        more_callbacks=lambda: [
            Schedule(),
            keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=1, min_delta=10.0, cooldown=2),
            Stopping(patience=4, min_delta=10.0, restore_best_weights=True),
        ],
        save_freq=6,
        backward=True,
        epochs=(9,),
    )
    # Epochs are 4 + 4 + 3 batches; backups are of batch 8, 15, 19, 26 ...; the rate is reduced in the second epoch,
    # before the kill, and in the fourth. EarlyStopping ends the fifth, and brings back the weights of the first.
    whole = check_kills(job, {30: 26})
    assert whole.histories[0][0] == [0, 1, 2, 3, 4]


def test_killed_in_the_second_fit_the_first_is_not_run_again(folder):
    job = Job(folder, save_freq="epoch", epochs=(2, 3))
    check_kills(job, {35: 30})
    assert not folder.exists()


def test_steps_given_to_fit_shorten_the_epoch_that_goes_on_and_no_other(folder):
    # The backup is 6 steps into the second epoch, and 3 into the second pass.
    job = Job(folder, fit_options={"steps_per_epoch": 7})
    whole = check_kills(job, {14: 13})
    assert sorted(whole.ids[:COUNT]) == sorted(whole.ids[COUNT : 2 * COUNT]) == list(range(COUNT))
    assert len(whole.ids) == 21


def test_steps_given_to_the_feeder_and_a_dataset_made_from_it(folder):
    job = Job(
        folder,
        feeder_options={"steps_per_epoch": 7},
        transform=lambda feeder: feeder.map(lambda x, y: (x, y)),
        compile_options=lambda: {"steps_per_execution": 2},
    )
    whole = check_kills(job, {13: 11})
    assert len(whole.ids) == 21


def test_epochs_of_unknown_and_varying_length(folder):
    def some():
        return shuffled(20)().filter(lambda x, y: tf.random.uniform([]) < 0.5)

    job = Job(folder, dataset_fn=some, feeder_options={"seed": 3}, save_freq=2)
    whole = check_kills(job, {19: 18})
    assert len(whole.ids) > 20


class Unbuilt(keras.Model):
    """A model that Keras builds with the first batch: its inputs are whole numbers, and `call` has one more metric."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(COUNT, 3)
        self.dense = keras.layers.Dense(1)
        self.size = keras.metrics.Mean("size") if KERAS3 else None
        self.notes = _Notes()

    def call(self, x):
        y = self.dense(self.embedding(x))
        size = tf.reduce_mean(tf.abs(y))
        if KERAS3:
            self.size.update_state(size)
        else:
            self.add_metric(size, name="size")
        return y

    def train_step(self, data):
        self.notes.trained.note(tf.cast(data[0][0], tf.float32))
        return super().train_step(data)


def test_model_that_keras_builds_with_the_first_batch(folder):
    def numbers():
        return (
            tf.data.Dataset.range(COUNT)
            .shuffle(COUNT)
            .map(lambda i: (i[tf.newaxis], tf.cast(i, tf.float32)[tf.newaxis]))
        )

    def options():
        adam = keras.optimizers.Adam(0.01)
        scaled = keras.mixed_precision.LossScaleOptimizer(adam, initial_scale=2.0, dynamic_growth_steps=4)
        return {"optimizer": scaled}

    whole = check_kills(Job(folder, numbers, Unbuilt, compile_options=options), {14: 13})
    assert "size" in whole.histories[0][1]
    # The loss scale doubled after each four of thirty batches.
    assert 2.0**8 in [float(value) for value in whole.values if np.shape(value) == ()]


# ---- When training has ended ----


def test_backup_that_stays_holds_the_end_of_training(folder, caplog):
    """And the one before the newest is used where the newest is damaged."""
    job = Job(
        folder,
        more_callbacks=lambda: [
            keras.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0, restore_best_weights=True)
        ],
        save_freq=3,
        backup_options={"double_checkpoint": True, "delete_checkpoint": False},
        epochs=(4,),
    )
    whole = job.start()
    assert whole.histories[0][0] == [0, 1]
    # The same script trains nothing more: EarlyStopping has ended the training.
    run = job.start()
    assert run.ids == []
    check_same_end(run, whole)
    # Without it training goes on to the last epoch, now from batch 18. Then the backups are deleted.
    older, newer = sorted(folder.glob("backup-*"))
    (newer / "shared").write_bytes((newer / "shared").read_bytes()[:-1])
    job.more_callbacks, job.epochs = list, (3,)
    job.backup_options = {"double_checkpoint": True, "delete_checkpoint": True}
    run = job.start()
    assert f"The one before it is used: {older}" in caplog.text
    assert run.ids[:2] == whole.ids[18:]
    assert sorted(run.ids[2:]) == list(range(COUNT))
    ((epochs, history),) = run.histories
    assert epochs == [0, 1, 2]
    assert history["loss"][:2] == whole.histories[0][1]["loss"]
    assert not folder.exists()


# ---- Backups that must not be used ----


def noting(path: pathlib.Path) -> Callable[[], tf.data.Dataset]:
    """Returns the `dataset_fn` of `shuffled` that adds a byte to a file whenever it is called."""
    name, inner = str(path), shuffled()

    def dataset_fn() -> tf.data.Dataset:
        with open(name, "a") as file:
            file.write(".")
        return inner()

    return dataset_fn


def test_a_producer_stands_at_the_backup_before_anybody_has_restored_it(folder, make_feeder, tmp_path):
    """Keras asks for the dataset's structure before callbacks run: the pipeline would be built, and started, twice."""

    def built():
        return len((tmp_path / "built").read_text()) if (tmp_path / "built").exists() else 0

    job = Job(folder, noting(tmp_path / "built"), save_freq=4)
    # Built anew for each pass, as it draws random numbers.
    whole, before = job.start(kills=(14,)), built()
    assert before == 3
    copy = shutil.copytree(left_by_kill(folder, 14), tmp_path / "copy")
    run = job.start(left_by_kill(folder, 14))
    assert run.ids == whole.ids[12:]
    check_same_end(run, whole)
    assert built() - before == 3  # to look at it, for the pass that is gone on with, and for the last one

    # Who reads before it is restored reads from the beginning, and who restores then goes on where the backup stood.
    feeder = make_feeder(shuffled(), deterministic=True)
    backup = BackupAndRestore(feeder, copy, 4)
    backup.set_model(compiled(Network()))
    assert feeder.element_spec[0].shape == (2, 3)
    assert feeder.session._connection.welcome().foreseen
    assert sorted(int(x[0, 0]) for x, _ in feeder) == list(range(COUNT))
    assert not feeder.session._connection.welcome().foreseen
    backup.begin(backup.model)
    assert [int(x[0, 0]) for x, _ in feeder] == whole.ids[12:20]


def test_what_does_not_fit_is_told_and_the_backup_stays(folder, make_feeder):
    """Another model's, feed's or pipeline's, a damaged one, a folder of another job or that can't be written to."""
    feeder = make_feeder(shuffled(), seed=1)

    def callback(*feeders, path=folder, **options):
        return BackupAndRestore(feeders or feeder, path, **options)

    def refused(network, backup, message):
        values = [np.array(v) for v in network.get_weights()]
        backup.set_model(network)
        with pytest.raises(kerasfeed.StateError, match=message):
            backup.begin(network)
        for now, before in zip(network.get_weights(), values, strict=True):
            np.testing.assert_array_equal(now, before)
        assert feeder.session.cursor.acknowledged == (0, 0)
        assert (folder / "backup-1" / "manifest.json").is_file()

    network = compiled(Network())
    network.optimizer.build(network.trainable_variables)
    writer = callback()
    writer.set_model(network)
    writer.begin(network)
    writer.on_epoch_end(0)
    writer.save_pending()
    # A second callback of this process takes the place of the first, whose fit may have failed.
    other_model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(2)])
    other_model.compile("sgd", "mse")
    refused(other_model, callback(), "another model's: expected 2 variables of weights, it has")
    refused(network, callback(make_feeder(shuffled(), name="other")), "nothing of feed 'other'; it has train")
    refused(network, callback(make_feeder(shuffled(), seed=2)), "seed: the state has 1, the feed has 2")
    another = make_feeder(lambda: shuffled()().take(3))
    assert int(another.cardinality()) == 3
    refused(network, callback(another), "fingerprint.*The pipeline changed")
    blocked = folder.with_name("file")
    blocked.write_text("")
    refused(network, callback(path=blocked), f"{blocked}.*can't be used for backups")
    mine = callback()
    with BackupFolder(folder):
        refused(network, mine, f"{folder}: must have one writer.*Give each job a folder of its own")
    assert not getattr(network, "_training_state", None)
    assert not getattr(network, "_initial_epoch", None)
    # The same callback is not stuck after that.
    assert mine.begin(network) == 1
    mine._folder.unlock()
    assert feeder.session.cursor.acknowledged == (0, 0)  # As it was when the backup was written.
    file = folder / "backup-1" / "info"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    refused(network, callback(), "no backup is good")


def test_a_backup_needs_the_callback_that_counts(folder, make_feeder):
    feeder = make_feeder(shuffled())
    with pytest.raises(ValueError, match="BackupAndRestore: expected a FeedCallback of a feed among 'train'"):
        compiled(Network()).fit(feeder, epochs=1, verbose=0, callbacks=[BackupAndRestore(feeder, folder)])


# ---- Without fit ----


def in_an_order():
    return tf.data.Dataset.range(23).shuffle(23)


def in_an_order_of_its_own():
    import os

    # The feed's seed does not reach it: each producer has another order.
    return tf.data.Dataset.range(23).shuffle(23, seed=int.from_bytes(os.urandom(4), "little"))


@pytest.mark.parametrize(
    ("dataset_fn", "resume", "way"),
    [(in_an_order, "auto", "replay"), (in_an_order_of_its_own, "window", "window")],
)
def test_two_then_three_ranks_then_one_train_each_element_once(make_ranks, dataset_fn, resume, way):

    def train(feeders, steps):
        """All ranks take so many steps; returns what they got, and the state after it."""

        def rank(feeder):
            got = [int(value) for value in feeder.take(steps)]
            # What a rank has taken is trained, also the last step.
            return got, feeder.state(Position(0, feeders_step[0] + steps)) if feeder is feeders[0] else None

        results = [outcome.result() for outcome in together(*[lambda f=f: rank(f) for f in feeders])]
        end_sessions([feeder.session for feeder in feeders])
        return [i for got, _ in results for i in got], results[0][1]

    feeders_step = [0]
    trained, state = train(make_ranks(2, dataset_fn, resume=resume, seed=4), 4)
    for size, steps in ((3, 3), (1, 6)):
        assert state.way == way
        feeders = make_ranks(size, dataset_fn, resume=resume)
        for feeder in feeders:
            feeder.restore(state)
        feeders_step[0] = feeders[0].session.cursor.acknowledged.step
        more, state = train(feeders, steps)
        trained += more
    assert sorted(trained) == list(range(23))


def test_a_checkpoint_has_the_position_that_is_trained_then(tmp_path, make_feeder):
    """Whatever the order of callbacks, of batches and of epochs, and only where Keras writes one."""

    class WorseAfterOne(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["rank"] = abs(epoch - 1)

    feeder, validation = make_feeder(shuffled()), make_feeder(shuffled(4), name="validation")
    keras.utils.set_random_seed(1)
    network = compiled(Network())
    feeders, where = [feeder, validation], str(tmp_path)
    checkpoints = [
        ModelCheckpoint(feeders, where + "/epoch-{epoch}.keras"),
        ModelCheckpoint(feeders, where + "/step-{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=4),
        ModelCheckpoint(feeder, where + "/best.h5", save_best_only=True, monitor="rank", mode="min"),
    ]
    callbacks = [WorseAfterOne(), checkpoints[0], FeedCallback(feeder, keep=True), *checkpoints[1:]]
    network.fit(feeder, validation_data=validation, epochs=3, verbose=0, callbacks=callbacks)
    trained, tested = network.notes.trained.take(), network.notes.tested.take()
    states = {path.name: path for path in tmp_path.glob("*.feed")}
    steps = ["1-4", "1-8", "2-2", "2-6", "2-10", "3-4", "3-8"]
    expected = [f"epoch-{e}.keras" for e in (1, 2, 3)] + [f"step-{s}.weights.h5" for s in steps] + ["best.h5"]
    assert sorted(states) == sorted(f"{name}.feed" for name in expected)
    assert {path.name for path in tmp_path.iterdir()} - set(states) == set(expected)

    def positions(name):
        restore_feeds(tmp_path / name, feeders if name != "best.h5" else feeder)
        return [each.session.cursor.acknowledged for each in feeders]

    assert positions("epoch-2.keras") == [(2, 0), (2, 0)]
    assert positions("best.h5")[0] == (2, 0)
    assert positions("epoch-3.keras") == [(3, 0), (3, 0)]
    assert positions("step-2-10.weights.h5") == [(2, 0), (1, 0)]
    assert positions("step-2-6.weights.h5") == [(1, 6), (1, 0)]
    # Training starts from any of them.
    network.load_weights(where + "/step-2-6.weights.h5")
    network.fit(
        feeder,
        validation_data=validation,
        initial_epoch=1,
        epochs=3,
        verbose=0,
        callbacks=[FeedCallback(feeder)],
    )
    assert network.notes.trained.take() == trained[16:]
    assert network.notes.tested.take() == tested[4:]

    # What is not there, damaged or another feed's is told, and changes no feed.
    at = feeder.session.cursor.acknowledged
    other = make_feeder(shuffled(), name="other")
    path = states["epoch-1.keras.feed"]
    data = path.read_bytes()
    for damage, message in (
        (data[:-1], "damaged"),
        (data[:20] + b"?" + data[21:], "damaged"),
        (b"", "not a feed file"),
        (None, r"No such file.*epoch-1.keras.feed"),
    ):
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)
        with pytest.raises(kerasfeed.StateError, match=message):
            restore_feeds(tmp_path / "epoch-1.keras", feeder)
        path.touch()
    with pytest.raises(kerasfeed.StateError, match="has nothing of feed 'other'; it has 'train', 'validation'"):
        restore_feeds(states["epoch-2.keras.feed"], [feeder, other])
    assert feeder.session.cursor.acknowledged == at
    assert not other.session.started


def test_tensorflows_checkpoint_manager_saves_a_loop_and_its_data(tmp_path, make_feeder):
    def build():
        feeder, seen = make_feeder(shuffled(6)), tf.Variable(0, dtype=tf.int64)
        checkpoint = tf.train.Checkpoint(seen=seen, feed=feeder.checkpoint)
        return feeder, seen, tf.train.CheckpointManager(checkpoint, str(tmp_path), max_to_keep=2)

    def train(feeder, seen, manager, steps, save_at=()):
        ids = []
        while len(ids) < steps:
            for x, _ in feeder:
                ids.append(int(x[0, 0]))
                seen.assign_add(1)
                if int(seen) in save_at:
                    manager.save(checkpoint_number=seen)
                if len(ids) == steps:
                    break
        return ids

    whole = train(*build(), 24, save_at=(9, 12, 14))
    for number in (12, 14):  # At an epoch's end, and inside one.
        feeder, seen, manager = build()
        manager.checkpoint.restore(f"{tmp_path}/ckpt-{number}").assert_consumed()
        assert int(seen) == number
        assert train(feeder, seen, manager, 24 - number) == whole[number:]
