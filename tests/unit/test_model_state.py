"""What `ModelState` packs is what training needs to go on, and nothing of it is forgotten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tensorflow import keras

from kerasfeed.callbacks.model_state import SHARED, ModelState

KERAS3 = hasattr(keras, "ops")
OPTIMIZERS = [keras.optimizers.Adam] + ([] if KERAS3 else [keras.optimizers.legacy.Adam])


def scaled(optimizer: Any) -> Any:
    """Returns a maker of this optimizer as mixed precision wraps it."""
    return lambda rate: keras.mixed_precision.LossScaleOptimizer(optimizer(rate), initial_scale=8.0)


ALL_OPTIMIZERS = OPTIMIZERS + [scaled(optimizer) for optimizer in OPTIMIZERS]


def compiled(optimizer: Any) -> Any:
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    model.compile(optimizer=optimizer, loss="mse")
    return model


@pytest.mark.parametrize("optimizer", ALL_OPTIMIZERS)
def test_learning_rate_that_a_callback_has_set_comes_back(optimizer: Any) -> None:
    # As LearningRateScheduler, ReduceLROnPlateau and Horovod's warm-up leave it.
    before, after = compiled(optimizer(0.5)), compiled(optimizer(0.5))
    for model in (before, after):
        ModelState(model).build(None)
    before.optimizer.learning_rate = 0.125
    ModelState(after).unpack(ModelState(before).pack(SHARED), SHARED)
    assert float(after.optimizer.learning_rate) == 0.125


@pytest.mark.parametrize("optimizer", ALL_OPTIMIZERS)
def test_learning_rate_is_packed_once(optimizer: Any) -> None:
    model = compiled(optimizer(0.5))
    state = ModelState(model)
    state.build(None)
    variables = state.variables("optimizer")
    rate = model.optimizer.learning_rate
    assert sum("learning_rate" in getattr(v, "path", v.name) and float(v) == float(rate) for v in variables) == 1
    assert len({id(variable) for variable in variables}) == len(variables)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_loss_scale_and_the_count_of_good_steps_come_back(optimizer: Any) -> None:
    def scale_of(model: Any) -> Any:
        own = model.optimizer if KERAS3 else model.optimizer._loss_scale
        return (own.dynamic_scale, own.step_counter) if KERAS3 else (own.current_loss_scale, own.counter)

    before, after = compiled(scaled(optimizer)(0.5)), compiled(scaled(optimizer)(0.5))
    for model in (before, after):
        ModelState(model).build(None)
    for variable, value in zip(scale_of(before), (64.0, 3), strict=True):
        variable.assign(value)
    ModelState(after).unpack(ModelState(before).pack(SHARED), SHARED)
    assert [float(variable) for variable in scale_of(after)] == [64.0, 3.0]


def test_averages_of_the_weights_come_back() -> None:
    before, after = (compiled(keras.optimizers.SGD(0.5, use_ema=True)) for _ in range(2))
    for model in (before, after):
        ModelState(model).build(None)
    for average in before.optimizer._model_variables_moving_average:
        average.assign(average + 7.0)
    ModelState(after).unpack(ModelState(before).pack(SHARED), SHARED)
    for ours, theirs in zip(*(m.optimizer._model_variables_moving_average for m in (after, before)), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


def test_mixed_precision_model_comes_back_with_its_own_types() -> None:
    def mixed() -> Any:
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2, dtype="mixed_bfloat16")])
        model.compile(optimizer=scaled(OPTIMIZERS[0])(0.5), loss="mse")
        return model

    before, after = mixed(), mixed()
    for model in (before, after):
        ModelState(model).build(None)
    ModelState(after).unpack(ModelState(before).pack(SHARED), SHARED)
    for ours, theirs in zip(after.get_weights(), before.get_weights(), strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours, theirs)


def test_learning_rate_of_a_schedule_follows_the_iterations() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    before, after = compiled(keras.optimizers.SGD(schedule)), compiled(keras.optimizers.SGD(schedule))
    for model in (before, after):
        ModelState(model).build(None)
    before.optimizer.iterations.assign(3)
    ModelState(after).unpack(ModelState(before).pack(SHARED), SHARED)
    assert int(after.optimizer.iterations) == 3
