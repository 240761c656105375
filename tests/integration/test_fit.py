"""`model.fit` and its relatives train each element once, whatever Keras does with iterators."""

from __future__ import annotations

import itertools
import logging
import re
import time

import pytest
import tensorflow as tf
from helpers import (
    KERAS3,
    EpochIds,
    Recording,
    StopAfter,
    by_value,
    end_sessions,
    id_batches,
    lines_of,
    make_model,
    wait_until,
)
from tensorflow import keras

import kerasfeed
from kerasfeed.callbacks import FeedCallback

by_value(__name__)

COUNT = 11
EPOCH = list(range(COUNT))


@pytest.fixture(scope="module")
def kept():
    """A feeder of 11 batches whose producer goes on from test to test; `fit_kept` and `finish_epoch` train from it."""
    feeder = kerasfeed.DataFeeder(id_batches(COUNT), name="kept")
    assert int(feeder.cardinality()) == COUNT
    yield feeder
    end_sessions([feeder.session])


@pytest.fixture(scope="module")
def shared_model():
    return make_model()


@pytest.fixture
def model(shared_model) -> Recording:
    """A model that is compiled once for all tests, with nothing noted."""
    for notes in vars(shared_model.notes).values():
        notes.take()
    return shared_model


def fit(model, dataset, feeder, *callbacks, keep=True, **options):
    """Trains with a `FeedCallback`, and returns the ids that each epoch trained."""
    ids = EpochIds()
    options.setdefault("verbose", 0)
    model.fit(dataset, callbacks=[*callbacks, FeedCallback(feeder, keep=keep), ids], **options)
    return ids.epochs


def totals(capsys) -> list[str]:
    """Returns the totals that Keras's progress bar has shown, each once, in order."""
    # Without colours; what is overwritten counts as a line, too.
    text = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", capsys.readouterr().out)
    found = re.findall(r"^\s*\d+/(\d+|Unknown)\b", re.sub("[\r\b]+", "\n", text), re.MULTILINE)
    return list(dict.fromkeys(found))


# ---- One fit ----


def test_fit_with_validation_trains_each_element_once_and_ends_the_producers(make_feeder, model, capsys):
    feeder, validation = make_feeder(id_batches(COUNT)), make_feeder(id_batches(4), name="validation")
    epochs = fit(model, feeder, feeder, keep=False, epochs=3, validation_data=validation, verbose=1)
    assert epochs == [EPOCH] * 3
    assert model.notes.tested.take() == [0, 1, 2, 3] * 3
    # The progress bar knows the total before the first epoch is over.
    out = capsys.readouterr().out
    assert out.count(f"{COUNT}/{COUNT}") >= 3
    assert "Unknown" not in out
    wait_until(lambda: feeder.session.producer_pid is None, what="the producer to end with the training")
    for epoch, numbers in enumerate(feeder.statistics()):
        assert (numbers.epoch, numbers.elements, numbers.steps, numbers.dropped) == (epoch, COUNT, COUNT, 0)
        assert numbers.complete
        assert numbers.trained == {0: COUNT}
    # Production stopped at the last epoch that fit runs.
    assert len(feeder.statistics()) == 3
    assert [s.elements for s in validation.statistics()[:3]] == [4, 4, 4]
    # The callback left nothing on the model.
    assert "train_function" not in model.__dict__ or "translating" not in repr(model.train_function)
    assert "translating" not in repr(model.test_function)


def test_fit_without_a_callback_works(kept, model):
    ids = EpochIds()
    model.fit(kept, epochs=2, callbacks=[ids], verbose=0)
    assert ids.epochs == [EPOCH] * 2
    # And a fit with one goes on from there.
    assert fit(model, kept, kept, epochs=1) == [EPOCH]


def test_evaluate_and_predict_make_one_pass_each(kept, model):
    for _ in range(2):
        model.evaluate(kept, verbose=0)
        assert model.notes.tested.take() == EPOCH
        predictions = model.predict(kept.map(lambda x, y: x), verbose=0)
        assert model.notes.predicted.take() == EPOCH
        assert len(predictions) == 2 * COUNT
    assert fit(model, kept, kept, epochs=1) == [EPOCH]


def test_class_weight_works(kept, model):
    assert fit(model, kept, kept, epochs=2, class_weight={0: 0.5, 1: 2.0}) == [EPOCH] * 2


def test_a_fit_over_a_mapped_feeder_trains_each_element_once(kept, model):
    mapped = kept.map(lambda x, y: (x + 100.0, y)).prefetch(2)
    assert fit(model, mapped, kept, epochs=2) == [[i + 100 for i in EPOCH]] * 2


@pytest.mark.parametrize("steps", [2, 4])
def test_steps_per_execution_trains_each_element_once(kept, steps):
    model = make_model(steps_per_execution=steps)
    before = len(kept.statistics())
    assert fit(model, kept, kept, epochs=2) == [EPOCH] * 2
    assert fit(model, kept, kept, epochs=1) == [EPOCH]
    trained = [s.trained[0] for s in kept.statistics() if s.complete]
    assert len(kept.statistics()) >= before
    assert trained[-3:] == [COUNT] * 3


# ---- Steps per epoch ----


def test_steps_per_epoch_of_the_feeder_joins_passes(make_feeder, model, capsys):
    feeder = make_feeder(id_batches(5), steps_per_epoch=7)
    stream = [i % 5 for i in range(28)]
    assert fit(model, feeder, feeder, epochs=3, verbose=1) == [stream[:7], stream[7:14], stream[14:21]]
    assert totals(capsys) == ["7"]
    # Saying it twice is no contradiction, saying otherwise is.
    assert fit(model, feeder, feeder, epochs=1, steps_per_epoch=7) == [stream[21:28]]
    with pytest.raises(ValueError, match=r"steps_per_epoch=7.*steps_per_epoch=4"):
        fit(model, feeder, feeder, epochs=1, steps_per_epoch=4)


def test_steps_per_epoch_of_fit_loses_and_doubles_nothing_at_the_ends_of_passes(kept, model):
    stream = EPOCH * 10
    at = 0

    def check(epochs, lengths):
        nonlocal at
        for ids, length in zip(epochs, lengths, strict=True):
            assert ids == stream[at : at + length]
            at += length

    check(fit(model, kept, kept, epochs=4, steps_per_epoch=4), [4] * 4)  # 5 elements into the second pass
    check(fit(model, kept, kept, epochs=1, steps_per_epoch=3), [3])
    check(fit(model, kept, kept, epochs=2, steps_per_epoch=COUNT), [COUNT] * 2)
    # Without it the pass that was begun comes to its end first.
    check(fit(model, kept, kept, epochs=2), [3, COUNT])


def test_steps_per_epoch_equal_to_the_cardinality_trains_whole_passes(kept, model):
    assert fit(model, kept, kept, epochs=3, steps_per_epoch=COUNT) == [EPOCH] * 3
    assert fit(model, kept, kept, epochs=1) == [EPOCH]


def test_a_repeated_feeder_with_steps_per_epoch_runs_through_passes(kept, model):
    epochs = fit(model, kept.repeat(), kept, epochs=4, steps_per_epoch=5)
    assert [i for ids in epochs for i in ids] == (EPOCH * 2)[:20]
    # What is left of the second pass is trained next.
    assert fit(model, kept, kept, epochs=2) == [EPOCH[9:], EPOCH]


# ---- Several fits, and fits that stop early ----


def test_two_fits_in_a_row_go_on_whether_the_producer_is_kept_or_not(make_feeder, model):
    feeder = make_feeder(id_batches(COUNT))
    assert fit(model, feeder, feeder, keep=True, epochs=1) == [EPOCH]
    first = feeder.session.producer_pid
    assert fit(model, feeder, feeder, keep=False, epochs=1) == [EPOCH]
    wait_until(lambda: feeder.session.producer_pid is None, what="the producer to end")
    assert fit(model, feeder, feeder, StopAfter(4), keep=False, epochs=2) == [EPOCH[:4]]
    assert fit(model, feeder, feeder, keep=True, epochs=2) == [EPOCH[4:], EPOCH]
    assert feeder.session.producer_pid != first
    assert [s.trained for s in feeder.statistics()[:4]] == [{0: COUNT}] * 4


@pytest.mark.parametrize("transform", ["plain", "prefetch", "mapped"])
def test_early_stopping_inside_an_epoch_loses_nothing_and_repeats_nothing(kept, model, transform):
    dataset = {
        "plain": kept,
        "prefetch": kept.prefetch(4),
        "mapped": kept.map(lambda x, y: (x, y), num_parallel_calls=2),
    }[transform]
    assert fit(model, dataset, kept, StopAfter(5), epochs=3) == [EPOCH[:5]]
    assert fit(model, dataset, kept, StopAfter(2), epochs=3) == [EPOCH[5:7]]
    assert fit(model, dataset, kept, epochs=3) == [EPOCH[7:], EPOCH, EPOCH]
    # Stopped at the last step of an epoch, the next one is whole.
    assert fit(model, dataset, kept, StopAfter(COUNT), epochs=3) == [EPOCH]
    assert fit(model, dataset, kept, epochs=1) == [EPOCH]


def test_early_stopping_with_steps_per_execution_goes_on_with_the_first_step_not_trained(kept):
    model = make_model(steps_per_execution=2)
    assert fit(model, kept, kept, StopAfter(2), epochs=2) == [EPOCH[:4]]
    assert fit(model, kept, kept, epochs=2) == [EPOCH[4:], EPOCH]


# ---- Epochs of varying length ----


def test_epochs_of_varying_length_are_each_complete(make_feeder, model):
    def dataset_fn():
        ids = tf.data.Dataset.range(40).filter(lambda i: tf.random.uniform([]) < 0.5)
        return ids.map(lambda i: (tf.fill([2, 1], tf.cast(i, tf.float32)), tf.zeros([2, 1])))

    feeder = make_feeder(dataset_fn, seed=1)
    epochs = fit(model, feeder, feeder, epochs=6, keep=True)
    oracle = make_feeder(dataset_fn, seed=1)
    expected = [[int(x[0, 0]) for x, _ in oracle] for _ in range(7)]
    lengths = [len(ids) for ids in expected]
    # Longer and shorter ones follow each other.
    assert any(a < b for a, b in itertools.pairwise(lengths[:6]))
    assert any(a > b for a, b in itertools.pairwise(lengths[:6]))
    assert epochs == expected[:6]
    assert fit(model, feeder, feeder, epochs=1) == expected[6:]
    assert [s.steps for s in feeder.statistics()[:6]] == lengths[:6]


def test_the_progress_bar_knows_an_unknown_length_from_the_second_epoch_on(make_feeder, model, capsys):
    def dataset_fn():
        return tf.data.Dataset.range(9).filter(lambda i: True).map(lambda i: (tf.fill([2, 1], i), tf.zeros([2, 1])))

    feeder = make_feeder(dataset_fn)
    assert fit(model, feeder, feeder, epochs=2, verbose=1) == [list(range(9))] * 2
    # Keras 2 shows the total as "Unknown" while it does not know it, Keras 3 too; the first one that is known is right.
    assert [total for total in totals(capsys) if total != "Unknown"] == ["9"]


# ---- What is refused or warned of ----


def test_a_bare_callback_is_refused_where_keras_would_call_it_from_a_thread_pool(kept, model, monkeypatch):
    model.fit(kept, callbacks=FeedCallback(kept, keep=True), verbose=0)
    assert model.notes.trained.take() == EPOCH
    if KERAS3:
        # Keras 3 uses a thread pool with backends that allow it, which TensorFlow did in some versions.
        monkeypatch.setattr("keras.src.backend.IS_THREAD_SAFE", True)
        with pytest.raises(ValueError, match=r"kept.*callbacks=\[\.\.\.\]"):
            model.fit(kept, callbacks=FeedCallback(kept, keep=True), verbose=0)
        assert model.notes.trained.take() == []
    assert fit(model, kept, kept, epochs=1) == [EPOCH]


def test_a_callback_of_another_feeder_is_refused(kept, model, make_feeder):
    other = make_feeder(lambda: 1 / 0, name="other")
    with pytest.raises(ValueError, match="'other': fit does not train from it"):
        model.fit(kept, callbacks=[FeedCallback(other)], verbose=0)
    assert not other.session.started
    assert model.notes.trained.take() == []
    assert fit(model, kept, kept, epochs=1) == [EPOCH]


def test_evaluating_the_trained_feeder_inside_fit_is_refused(make_feeder, model):
    feeder = make_feeder(id_batches(4))

    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.evaluate(feeder, verbose=0)

    for callbacks, options in ([], {"validation_data": feeder}), ([Evaluate()], {}):
        with pytest.raises(ValueError, match="evaluate inside fit on feed 'train'"):
            fit(model, feeder, feeder, *callbacks, epochs=1, **options)
        assert model.notes.tested.take() == []
        model.notes.trained.take()
    assert fit(model, feeder, feeder, epochs=1) == [[0, 1, 2, 3]]


def test_settings_of_the_callback_fill_what_the_feeder_left_open(make_feeder, kept):
    with pytest.raises(TypeError, match="DataFeeder"):
        FeedCallback(tf.data.Dataset.range(3))
    open_, given = make_feeder(id_batches(3)), make_feeder(id_batches(3), producer=0, prefetch=4)
    FeedCallback(open_, producer=0, prefetch=3)
    assert (open_.session.options.producer, open_.session.options.prefetch) == (0, 3)
    FeedCallback(open_, producer=0, prefetch=3)
    FeedCallback(given, producer=0, prefetch=4)
    for setting in ({"producer": 1}, {"prefetch": 5}):
        with pytest.raises(ValueError, match=f"{next(iter(setting))} is"):
            FeedCallback(given, **setting)
    with pytest.raises(RuntimeError, match="prefetch=5 comes too late"):
        FeedCallback(kept, prefetch=5)
    for bad in ({"prefetch": 0}, {"producer": -1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            FeedCallback(make_feeder(id_batches(3)), **bad)


@pytest.mark.parametrize("transform", ["filter", "unbatch"])
def test_a_dataset_that_is_not_one_to_one_is_named_as_unfit_for_exact_resume(kept, model, caplog, transform):
    if transform == "filter":
        dataset, expected = kept.filter(lambda x, y: x[0, 0] != 3.0), [i for i in EPOCH if i != 3]
    else:
        dataset, expected = kept.unbatch().batch(1), [i for i in EPOCH for _ in range(2)]
    with caplog.at_level(logging.WARNING, "kerasfeed"):
        assert fit(model, dataset, kept, epochs=2) == [expected] * 2
    warnings = [r.getMessage() for r in caplog.records if "one by one" in r.getMessage()]
    assert len(warnings) == 1
    assert f"feed 'kept': epoch 0 trained {len(expected)} batches from {COUNT} steps" in warnings[0]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "kerasfeed"):
        assert fit(model, kept.map(lambda x, y: (x, y)), kept, epochs=1) == [EPOCH]
    assert not caplog.records


# ---- Counting, and producing ahead ----


def test_statistics_count_what_was_produced_dropped_and_trained(make_feeder, model):
    feeder = make_feeder(id_batches(6))
    fit(model, feeder, feeder, StopAfter(8), epochs=3, keep=True)
    first, second = feeder.statistics()[:2]
    assert (first.epoch, first.elements, first.steps, first.dropped, first.complete) == (0, 6, 6, 0, True)
    assert first.trained == {0: 6}
    assert (second.epoch, second.trained) == (1, {0: 2})


def test_the_next_epoch_is_produced_while_validation_runs_and_nothing_beyond_the_last(make_feeder, model, tmp_path):
    log = tmp_path / "produced"
    path = str(log)
    count = 6

    def dataset_fn():
        def note(i):
            with open(path, "a") as file:
                file.write(f"{int(i)}\n")
            return i

        ids = tf.data.Dataset.range(count).map(lambda i: tf.ensure_shape(tf.py_function(note, [i], tf.int64), []))
        return ids.map(lambda i: (tf.fill([2, 1], tf.cast(i, tf.float32)), tf.zeros([2, 1])))

    waited = []

    def validate():
        began = time.monotonic()
        epoch = len(waited)
        if epoch == 0:
            wait_until(lambda: len(lines_of(log)) > count, what="the second pass to start during validation")
        waited.append(time.monotonic() - began)
        yield [[0.0]], [[0.0]]

    signature = (tf.TensorSpec([1, 1]), tf.TensorSpec([1, 1]))
    validation = tf.data.Dataset.from_generator(validate, output_signature=signature)
    feeder = make_feeder(dataset_fn, prefetch=3)
    assert fit(model, feeder, feeder, epochs=2, keep=True, validation_data=validation) == [list(range(count))] * 2
    assert len(waited) == 2
    # Whatever happens between fits, only a new fit asks for a third pass.
    assert len(feeder.statistics()) == 2
    assert len(lines_of(log)) == 2 * count
