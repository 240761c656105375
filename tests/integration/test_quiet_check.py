"""The quiet check on real feeds: what it says of a pipeline, and that training hears nothing else of it."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import signal
import tempfile
import threading
import time

import helpers
import psutil
import pytest
import tensorflow as tf
from helpers import id_batches, make_model
from tensorflow import keras

from kerasfeed import quiet_check
from kerasfeed.callbacks import BackupAndRestore, FeedCallback, ModelCheckpoint
from kerasfeed.replay_check import Try

helpers.by_value(__name__)
Data = tf.data.Dataset
COUNT = 12


def shuffled_and_random():
    noisy = Data.range(2 * COUNT).shuffle(20).map(lambda i: tf.cast(i, tf.float32) + tf.random.uniform([]))
    return noisy.batch(2)


def generator_that_draws_from_the_system():
    def generate():
        for i in range(COUNT):
            yield i if i < 3 else int.from_bytes(os.urandom(4), "big")

    return Data.from_generator(generate, output_signature=tf.TensorSpec([], tf.int64))


def random_in_a_parallel_map():
    return Data.range(100 * COUNT).map(lambda i: tf.random.uniform([]), num_parallel_calls=4).batch(100)


def more_elements_each_time(folder):
    def dataset_fn():
        return Data.range(COUNT if is_first_build(folder) else COUNT + 1)

    return dataset_fn


def large():
    """Larger than what the digests of `verify="blocks"` read whole."""
    return Data.range(3).map(lambda i: tf.fill([300_000], i))


def is_first_build(folder):
    """Whether `folder` has not seen a build yet; notes which process does the second."""
    first = os.path.join(folder, "first")
    if not os.path.exists(first):
        open(first, "x").close()
        return True
    with open(os.path.join(folder, "aside"), "x") as aside:
        aside.write(str(os.getpid()))
    os.rename(os.path.join(folder, "aside"), os.path.join(folder, "second"))
    return False


def raising_the_second_time(folder):
    def dataset_fn():
        if not is_first_build(folder):
            raise ValueError("only one of us may read this")
        return Data.range(COUNT)

    return dataset_fn


def hanging_the_second_time(folder):
    def dataset_fn():
        if not is_first_build(folder):
            time.sleep(600)
        return id_batches(COUNT)()

    return dataset_fn


@pytest.fixture(autouse=True)
def at_once(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(quiet_check, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(quiet_check, "_POLL_SECONDS", 0.05)
    # One that gives way takes minutes where the machine is busy.
    monkeypatch.setattr(quiet_check, "Try", lambda seed, scratch, quietly: Try(seed, scratch))
    caplog.set_level(logging.INFO, "kerasfeed")


@pytest.fixture
def said(caplog):
    """Returns a function that returns (level, text) of what was said of a feed's pipeline."""

    def of(name="train"):
        records = [record for record in caplog.records if record.name == "kerasfeed"]
        return [
            (record.levelname, record.getMessage())
            for record in records
            if record.getMessage().startswith(f"feed {name!r}:") and "replay" in record.getMessage()
        ]

    return of


@pytest.fixture
def checked(make_feeder, monkeypatch):
    """Returns a function that has the pipelines of feeders checked, side by side, and waits for it."""
    monkeypatch.setattr(quiet_check, "_turn", threading.Semaphore(2))
    # These passes are checked to their ends.
    monkeypatch.setattr(quiet_check, "_FEW", 1000)

    def check(feeds):
        feeders = [make_feeder(dataset, name=name, **options) for name, (dataset, options) in feeds.items()]
        helpers.together(*(feeder.session.connection for feeder in feeders))
        for feeder in feeders:
            # A window of this size holds all: nothing has to be pulled for the producer to go on.
            next(iter(feeder))
            feeder.session.check_replay()
        for feeder in feeders:
            over(feeder)

    return check


def over(feeder):
    helpers.wait_until(lambda: not feeder.session._quiet_check._thread.is_alive(), 60, "the check to end")


@pytest.mark.once
def test_what_is_said_of_a_pipeline(checked, said, tmp_path):
    cache = str(tmp_path / "cache")
    for _ in Data.range(COUNT).shuffle(COUNT).cache(cache):
        pass
    longer, broken = tmp_path / "longer", tmp_path / "broken"
    longer.mkdir()
    broken.mkdir()
    checked(
        {
            "good": (shuffled_and_random, {}),
            "drawing": (generator_that_draws_from_the_system, {}),
            "racing": (random_in_a_parallel_map, {}),
            "longer": (more_elements_each_time(longer), {}),
            "broken": (raising_the_second_time(broken), {}),
            "large": (large, {"verify": "full"}),
            # Its elements are of another seed; a producer that starts again reads them, too.
            "cached": (lambda: Data.range(COUNT).shuffle(COUNT).cache(cache), {}),
        }
    )
    for name, count in (("good", COUNT), ("large", 3), ("cached", COUNT)):
        assert said(name) == [
            (
                "INFO",
                f"feed {name!r}: this pipeline can be replayed, as far as was tried: its first {count} elements came "
                "again as they were",
            )
        ]
    for name, texts in {
        "drawing": ["element 3 of pass 0 was another one", "from_generator", "kerasfeed.check(dataset_fn) says more"],
        "racing": ["random ops (RandomUniform) in a parallel map", "deterministic=True", 'verify="warn"'],
        "longer": [f"pass 0 had {COUNT} elements, and {COUNT + 1} when it was produced again", "builds another graph"],
    }.items():
        [(level, text)] = said(name)
        assert level == "WARNING"
        for part in texts:
            assert part in text
    [(level, text)] = said("broken")
    assert level == "INFO"
    assert "could not be tried" in text
    assert "ValueError: only one of us may read this" in text
    assert not list(tmp_path.glob("kerasfeed-check-*"))


class Interruption(Exception):
    """What may end a training."""


class Holding(keras.callbacks.Callback):
    """Holds training in the first batch until something is so."""

    def __init__(self, until):
        super().__init__()
        self.until = until

    def on_train_batch_end(self, batch, logs=None):
        if self.until is not None:
            self.until()
            self.until = None


@pytest.mark.parametrize("saving", ["backup", "checkpoint"])
def test_a_fit_that_saves_positions_is_checked_once(make_feeder, tmp_path, said, saving):
    feeder = make_feeder(id_batches(COUNT))
    saver = BackupAndRestore(feeder, tmp_path / "backup")
    if saving == "checkpoint":
        saver = ModelCheckpoint(feeder, tmp_path / "{epoch}.weights.h5", save_weights_only=True)
    callbacks = [saver, FeedCallback(feeder), Holding(lambda: over(feeder))]
    make_model().fit(feeder, epochs=2, callbacks=callbacks, verbose=0)
    assert [level for level, _ in said()] == ["INFO"]
    assert "came again as they were" in said()[0][1]


@pytest.mark.once
def test_a_fit_is_not_checked_if_it_saves_nothing_goes_on_from_a_backup_or_does_not_want_it(make_feeder, tmp_path):
    off = make_feeder(id_batches(COUNT), name="off", check_replay=False)
    backup = BackupAndRestore(off, tmp_path / "off", delete_checkpoint=False)
    make_model().fit(off, callbacks=[backup, FeedCallback(off)], verbose=0)
    state = off.state()
    unsaved, restored = make_feeder(id_batches(COUNT), name="unsaved"), make_feeder(id_batches(COUNT), name="off")
    make_model().fit(unsaved, callbacks=[FeedCallback(unsaved)], verbose=0)
    restored.restore(state)
    checkpoint = ModelCheckpoint(restored, tmp_path / "{epoch}.weights.h5", save_weights_only=True)
    make_model().fit(restored, callbacks=[checkpoint, FeedCallback(restored)], verbose=0)
    assert [feeder.session._quiet_check for feeder in (off, unsaved, restored)] == [None] * 3


@pytest.mark.once
@pytest.mark.parametrize("end", ["fit", "exception", "producer"])
def test_a_check_that_hangs_ends_with_what_it_is_about(make_feeder, tmp_path, said, end):
    feeder = make_feeder(hanging_the_second_time(tmp_path))
    pids = []

    def stop():
        pids.append(int(helpers.wait_until(lambda: helpers.lines_of(tmp_path / "second"), 60)[0]))
        if end == "exception":
            raise Interruption
        if end == "producer":
            # The one that comes after it builds the pipeline, too.
            (tmp_path / "first").unlink()
            os.kill(feeder.session.producer_pid, signal.SIGKILL)
            helpers.wait_until(lambda: helpers.is_gone(pids[0]), 2)
            over(feeder)

    callbacks = [FeedCallback(feeder, keep=True), BackupAndRestore(feeder, tmp_path / "backup"), Holding(stop)]
    with contextlib.suppress(Interruption):
        make_model().fit(feeder, callbacks=callbacks, verbose=0)
    helpers.wait_until(lambda: helpers.is_gone(pids[0]), 2)
    over(feeder)
    assert not list(tmp_path.glob("kerasfeed-check-*"))
    assert said() == []


@pytest.mark.once
def test_a_try_that_takes_too_long_is_ended(make_feeder, monkeypatch, said, tmp_path):
    monkeypatch.setattr(quiet_check, "_TRIAL_SECONDS", 0.2)
    feeder = make_feeder(id_batches(COUNT))
    next(iter(feeder))
    feeder.session.check_replay()
    over(feeder)
    [(level, text)] = said()
    assert level == "INFO"
    assert "could not be tried whether this pipeline can be replayed: it took too long" in text
    assert not list(tmp_path.glob("kerasfeed-check-*"))


@pytest.mark.once
def test_a_process_that_does_not_read_what_it_is_told_is_not_waited_for(make_feeder, monkeypatch, said):
    class Stopped(Try):
        def __init__(self, *args, **more):
            super().__init__(*args)
            os.kill(self._child.pid, signal.SIGSTOP)

    monkeypatch.setattr(quiet_check, "Try", Stopped)
    more_than_a_pipe_holds = os.urandom(1 << 20)

    def dataset_fn():
        return Data.range(COUNT + 0 * len(more_than_a_pipe_holds))

    feeder = make_feeder(dataset_fn)
    next(iter(feeder))
    feeder.session.check_replay()
    helpers.wait_until(lambda: feeder.session._quiet_check._try is not None)
    began = time.monotonic()
    feeder.close()
    assert time.monotonic() - began < 3
    assert not feeder.session._quiet_check._thread.is_alive()
    assert said() == []


@pytest.mark.once
def test_its_process_gives_way_to_others_and_its_output_is_not_seen(tmp_path):
    with Try(0, str(tmp_path), quietly=True) as process:
        pid = process._child.pid
        helpers.wait_until(lambda: psutil.Process(pid).nice() == 19, 60, "it to give way")
        adjusted = pathlib.Path(f"/proc/{pid}/oom_score_adj")
        helpers.wait_until(lambda: adjusted.read_text().strip() == "1000", 60, "it to give way in memory")
        assert [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (1, 2)] == [os.devnull] * 2


@pytest.mark.once
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_a_check_that_hangs_ends_with_its_rank(tmp_path, end):
    source = """
        import os, sys, time
        import tensorflow as tf
        import kerasfeed
        from kerasfeed import quiet_check
        from kerasfeed.replay_check import Try
        quiet_check._DELAY_SECONDS = 0.0
        quiet_check.Try = lambda seed, scratch, quietly: Try(seed, scratch)

        def dataset_fn():
            if os.path.exists("first"):
                open(f"second-{os.getpid()}", "x").close()
                time.sleep(600)
            open("first", "x").close()
            return tf.data.Dataset.range(12)

        feeder = kerasfeed.DataFeeder(dataset_fn)
        iterator = iter(feeder)
        next(iterator)
        feeder.session.check_replay()
        while not any(name.startswith("second-") for name in os.listdir()):
            time.sleep(0.02)
        print("under way", flush=True)
        if sys.argv[1] == "kill":
            time.sleep(600)
    """
    with helpers.Script(tmp_path, source, end, env={"TMPDIR": str(tmp_path)}) as script:
        script.wait_for("under way")
        if end == "kill":
            script.process.kill()
        assert script.wait(10) == (-signal.SIGKILL if end == "kill" else 0), script.text
    [second] = tmp_path.glob("second-*")
    helpers.wait_until(lambda: helpers.is_gone(int(second.name.partition("-")[2])), 5)
    helpers.wait_until(lambda: not list(tmp_path.glob("kerasfeed-*")), 5)
