"""The optimizer and the callbacks of kerasfeed.horovod on Keras 3, in one process: what they take, keep and refuse."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def hvd():
    import kerasfeed.horovod as hvd

    hvd.init()
    yield hvd
    hvd.shutdown()


def model(optimizer=None, seed: int = 0) -> keras.Model:
    keras.utils.set_random_seed(seed)
    made = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    made.compile(optimizer, "mse")
    return made


def train(made: keras.Model, batches: int = 4, **kwargs) -> keras.callbacks.History:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(4 * batches, 3)), rng.normal(size=(4 * batches, 2))
    return made.fit(x, y, batch_size=4, shuffle=False, verbose=0, **kwargs)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.01, global_clipnorm=0.5),
    "average": lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    "lion": lambda: keras.optimizers.Lion(0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_rank_trains_as_with_the_optimizer_itself(hvd, kind):
    plain, distributed = model(OPTIMIZERS[kind]()), model(hvd.DistributedOptimizer(OPTIMIZERS[kind]()))
    train(plain)
    train(distributed)
    for one, other in zip(plain.get_weights(), distributed.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert int(distributed.optimizer.iterations) == int(plain.optimizer.iterations)


@pytest.mark.parametrize("eagerly", [False, True])
def test_passes_are_added_up_and_applied_together(hvd, eagerly):
    together, apart = model(keras.optimizers.SGD(0.1)), model()
    apart.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2), "mse", run_eagerly=eagerly
    )
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(8, 3)), rng.normal(size=(8, 2))
    apart.fit(x, y, batch_size=2, shuffle=False, verbose=0)
    # The sum of two means over 2 is twice the mean over 4.
    together.optimizer.learning_rate = 0.2
    together.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    for one, other in zip(together.get_weights(), apart.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert int(apart.optimizer.iterations) == 4


def test_it_is_saved_as_what_it_wraps_and_loaded_with_its_state(hvd, tmp_path):
    trained = model(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)))
    train(trained)
    path = str(tmp_path / "model.keras")
    trained.save(path)
    plain = keras.models.load_model(path)
    assert type(plain.optimizer) is keras.optimizers.Adam
    loaded = hvd.load_model(path)
    assert type(loaded.optimizer) is not keras.optimizers.Adam
    assert isinstance(loaded.optimizer, keras.optimizers.Adam)
    train(trained)
    train(plain)
    train(loaded)
    for one, two, three in zip(trained.get_weights(), plain.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)
        np.testing.assert_allclose(one, three, rtol=1e-5)


@pytest.mark.parametrize("grouped", [lambda made: 2, lambda made: [made.trainable_variables[:1]]])
def test_gradients_that_travel_in_groups_reach_their_variables(hvd, grouped):
    plain, distributed = model(keras.optimizers.SGD(0.1)), model()
    distributed.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), groups=grouped(distributed)), "mse")
    train(plain)
    train(distributed)
    for one, other in zip(plain.get_weights(), distributed.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_embeddings_have_sparse_gradients(hvd):
    def build(optimizer):
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.Input([2], dtype="int32"), keras.layers.Embedding(5, 3), keras.layers.Flatten()])
        made.compile(optimizer, "mse")
        return made

    x, y = np.array([[0, 1], [1, 4]] * 4), np.ones([8, 6])
    plain = build(keras.optimizers.SGD(0.1))
    plain.fit(x, y, verbose=0)
    for options in ({}, {"sparse_as_dense": True}):
        distributed = build(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options))
        distributed.fit(x, y, verbose=0)
        np.testing.assert_allclose(plain.get_weights()[0], distributed.get_weights()[0], rtol=1e-5)
    refused = build(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2))
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        refused.fit(x, y, verbose=0)


def test_a_step_that_a_rank_may_skip_alone_is_refused(hvd):
    inner = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match=r"Write DistributedOptimizer\(LossScaleOptimizer"):
        train(model(keras.optimizers.LossScaleOptimizer(inner)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda hvd: hvd.DistributedOptimizer("adam"), "expected a Keras 3 optimizer. Received: 'adam'"),
        (
            lambda hvd: hvd.DistributedOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD())),
            "not distributed yet. Received: one that is",
        ),
        (lambda hvd: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=7), "op must be .* Received: 7"),
        (
            lambda hvd: hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0),
            "at least 1. Received: 0",
        ),
        (
            lambda hvd: hvd.DistributedOptimizer(
                keras.optimizers.SGD(gradient_accumulation_steps=4), backward_passes_per_step=2
            ),
            "not by both. Received: 2 and 4",
        ),
        (lambda hvd: hvd.callbacks.LearningRateScheduleCallback(None, 0.5), "initial_lr must be a number"),
        (lambda hvd: hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[3]), "Received: 3"),
    ],
)
def test_bad_arguments_are_named(hvd, make, message):
    with pytest.raises(ValueError, match=message):
        make(hvd)


def test_momentum_that_cannot_be_corrected_is_warned_of(hvd, caplog):
    made = model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
    with caplog.at_level(logging.WARNING, "kerasfeed"):
        train(made, callbacks=[hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)])
    assert "momentum stays 0.9" in caplog.text


def test_each_rank_keeps_its_local_variables_and_its_seeds(hvd, monkeypatch):
    import horovod.tensorflow

    sent = []
    monkeypatch.setattr(
        horovod.tensorflow, "broadcast_variables", lambda variables, root_rank: sent.extend(v.name for v in variables)
    )
    made = keras.Sequential([keras.Input([3]), keras.layers.Dense(2, name="kept"), keras.layers.Dropout(0.5)])
    made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    kept = made.layers[0].kernel
    train(made, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=kept)])
    assert sorted(name.split("/")[-1] for name in sent) == ["bias:0", "iteration:0", "learning_rate:0"]


def test_xla_is_off_where_gradients_go_through_horovod(hvd, caplog):
    made = model()
    made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=True)
    train(made, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert not made.jit_compile
    assert "without XLA" in caplog.text


def test_the_names_are_those_of_horovod(hvd):
    import horovod.tensorflow.keras as theirs

    ours = set(hvd.__all__)
    assert {name for name in vars(theirs) if name in ours} == ours
    assert {n for n in dir(theirs.callbacks) if n.endswith(("Callback", "Checkpoint"))} == set(hvd.callbacks.__all__)


def test_an_optimizer_that_is_built_keeps_its_state(hvd):
    trained = model(keras.optimizers.Adam(0.1))
    train(trained)
    distributed = hvd.DistributedOptimizer(trained.optimizer)
    assert [v.path.split("/", 1)[-1] for v in distributed.variables] == [
        v.path.split("/", 1)[-1] for v in trained.optimizer.variables
    ]
    for mine, its in zip(distributed.variables, trained.optimizer.variables, strict=True):
        np.testing.assert_array_equal(tf.convert_to_tensor(mine), tf.convert_to_tensor(its))
