"""What Keras's callbacks remember comes back as it was, whatever the types of their values and whoever derived them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from tensorflow import keras

from kerasfeed.callbacks import memory


class Derived(keras.callbacks.EarlyStopping):
    pass


def through_bytes(found: memory.Memory, model: Any) -> memory.Memory:
    shared = memory.best_weights(found, model, trainable=True)
    own = memory.best_weights(found, model, trainable=False)
    assert not set(shared) & set(own)
    return memory.unpack(memory.pack(found), shared | own)


def model_of(*weights: str) -> Any:
    return SimpleNamespace(weights=list(weights), trainable_variables=[w for w in weights if w.startswith("trained")])


def test_values_of_logs_keep_their_types_and_bits() -> None:
    history = keras.callbacks.History()
    values = [0.1, np.float32(0.1), 3, float("inf"), None, np.arange(6, dtype=np.int16).reshape(2, 3), np.float64(0.2)]
    history.epoch, history.history = [0, 4], {"array": values, "dict": [{"array": [1]}]}
    ((name, found),) = through_bytes(memory.memory_of([history]), model_of())
    assert (name, found["epoch"]) == ("History", [0, 4])
    assert found["history"]["dict"] == [{"array": [1]}]
    for value, expected in zip(found["history"]["array"], values, strict=True):
        np.testing.assert_array_equal(value, expected)
        assert np.asarray(value).dtype == np.asarray(expected).dtype
    assert isinstance(found["history"]["array"][1], np.float32)
    assert np.isnan(memory.unpack(memory.pack([("History", {"epoch": [float("nan")]})]), {})[0][1]["epoch"][0])


def test_best_weights_come_back_to_the_callback_that_held_them() -> None:
    def callbacks() -> list[Any]:
        return [keras.callbacks.EarlyStopping(), Derived(), keras.callbacks.EarlyStopping(), keras.callbacks.Callback()]

    model = model_of("trained 0", "statistics", "trained 1")
    before, after = callbacks(), callbacks()
    for number, callback in enumerate(before[1:3]):
        callback.wait, callback.best = number + 5, np.float32(number)
        callback.best_weights = [np.full([2], 10.0 * number + index) for index in range(3)]
    memory.remember(after, through_bytes(memory.memory_of(before), model))
    assert after[0].best_weights is None
    for number, callback in enumerate(after[1:3]):
        assert (callback.wait, callback.best) == (number + 5, number)
        assert [float(weight[0]) for weight in callback.best_weights] == [10.0 * number + index for index in range(3)]


def test_best_weights_that_only_another_rank_holds_are_begun_anew() -> None:
    model = model_of("trained", "statistics")
    callback = keras.callbacks.EarlyStopping()
    callback.best_weights = [np.zeros(1), np.zeros(1)]
    found = memory.memory_of([callback])
    own = memory.best_weights(found, model, trainable=False)
    assert memory.unpack(memory.pack(found), own)[0][1]["best_weights"] is None
