"""Horovod's Keras callbacks: on Keras 2 its own, on Keras 3 the same names and arguments, written anew."""

from __future__ import annotations

from kerasfeed.horovod.keras_version import KERAS_3

if KERAS_3:
    from kerasfeed.horovod.keras3_callbacks import (
        BestModelCheckpoint,
        BroadcastGlobalVariablesCallback,
        LearningRateScheduleCallback,
        LearningRateWarmupCallback,
        MetricAverageCallback,
    )
else:
    from horovod.tensorflow.keras.callbacks import (  # type: ignore[no-redef]
        BestModelCheckpoint,
        BroadcastGlobalVariablesCallback,
        LearningRateScheduleCallback,
        LearningRateWarmupCallback,
        MetricAverageCallback,
    )

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
