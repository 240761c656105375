"""What `ModelState` packs is what training needs to go on, and nothing of it is forgotten."""

from __future__ import annotations

from typing import Any

import pytest
from tensorflow import keras

from kerasfeed.callbacks.model_state import SHARED, ModelState

KERAS3 = hasattr(keras, "ops")
OPTIMIZERS = [keras.optimizers.Adam] + ([] if KERAS3 else [keras.optimizers.legacy.Adam])


def compiled(optimizer: Any) -> Any:
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    model.compile(optimizer=optimizer, loss="mse")
    return model


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_learning_rate_that_a_callback_has_set_comes_back(optimizer: Any) -> None:
    # As LearningRateScheduler, ReduceLROnPlateau and Horovod's warm-up leave it.
    before, after = compiled(optimizer(0.5)), compiled(optimizer(0.5))
    for model in (before, after):
        ModelState(model).build(None)
    before.optimizer.learning_rate = 0.125
    ModelState(after).unpack(ModelState(before).pack(SHARED), SHARED)
    assert float(after.optimizer.learning_rate) == 0.125


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_learning_rate_is_packed_once(optimizer: Any) -> None:
    state = ModelState(compiled(optimizer(0.5)))
    state.build(None)
    variables = state.variables("optimizer")
    assert sum("learning_rate" in getattr(variable, "path", variable.name) for variable in variables) == 1
    assert len({id(variable) for variable in variables}) == len(variables)


def test_learning_rate_of_a_schedule_follows_the_iterations() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    before, after = compiled(keras.optimizers.SGD(schedule)), compiled(keras.optimizers.SGD(schedule))
    for model in (before, after):
        ModelState(model).build(None)
    before.optimizer.iterations.assign(3)
    ModelState(after).unpack(ModelState(before).pack(SHARED), SHARED)
    assert int(after.optimizer.iterations) == 3
