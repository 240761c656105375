"""The second table: `model.fit` fed by kerasfeed, against the same data from memory; and the pause between epochs.

Two ranks train side by side, each on one core, without Horovod: its waiting for the other rank would hide what is
measured. Both kinds of `fit` alternate, in the same processes, with the same model.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from benchmarks.suite import processes, report
from benchmarks.suite.processes import Processes, ask_all

RANKS = 2
# Of a fit. The first one is not counted, nor the last: a rank that is done leaves its core to the other.
EPOCHS = 4
FEATURES = 1024
BATCH = 64


@dataclasses.dataclass(frozen=True)
class Load:
    """How heavy the model's step is.

    Attributes:
        name: In tables.
        layers: Units of the hidden layers.
        steps: In an epoch.
    """

    name: str
    layers: tuple[int, ...]
    steps: int


LOADS = (Load("compute-bound", (2048, 2048), 50), Load("light", (), 150))
KINDS = ("memory", "feed")


@dataclasses.dataclass
class Fit:
    """What one rank saw of one `fit`, in seconds, without its first and its last epoch.

    Attributes:
        epochs: Time of each epoch, from its begin to the next one's.
        first: Duration of each epoch's first step.
        others: Duration of all other steps.
        pauses: From the end of an epoch's last step to the end of the next one's first step.
    """

    epochs: list[float]
    first: list[float]
    others: list[float]
    pauses: list[float]


def _batches(steps: int) -> Any:
    import tensorflow as tf

    x = tf.random.stateless_uniform([BATCH, FEATURES], [4, 4])
    y = tf.random.stateless_uniform([BATCH], [4, 5], 0, 10, tf.int64)
    return tf.data.Dataset.from_tensors((x, y)).repeat(steps)


def _from_memory(steps: int) -> Any:
    """Returns the batches without tf.data's own tuning: ends of epochs would wait 0.6 s for its thread."""
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return _batches(steps).with_options(options)


def _model(layers: tuple[int, ...]) -> Any:
    from tensorflow import keras

    model = keras.Sequential([keras.Input([FEATURES])])
    for units in layers:
        model.add(keras.layers.Dense(units, activation="relu"))
    model.add(keras.layers.Dense(10))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _watch(times: list[tuple[str, float]]) -> Any:
    from tensorflow import keras

    class Watch(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            times.append(("epoch", time.monotonic()))

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            times.append(("begin", time.monotonic()))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            times.append(("end", time.monotonic()))

        def on_train_end(self, logs: Any = None) -> None:
            times.append(("epoch", time.monotonic()))

    return Watch()


def summary(times: list[tuple[str, float]]) -> Fit:
    """Returns what the times of a `fit` come to: a list of (`"epoch"`, `"begin"` or `"end"`, when)."""
    fit = Fit([], [], [], [])
    starts = [index for index, (what, _) in enumerate(times) if what == "epoch"]
    for begin, end in itertools.pairwise(starts[1:-1]):
        fit.epochs.append(times[end][1] - times[begin][1])
        steps = [when for _, when in times[begin + 1 : end]]
        durations = [ended - began for began, ended in zip(steps[::2], steps[1::2], strict=True)]
        fit.first.append(durations[0])
        fit.others += durations[1:]
        fit.pauses.append(steps[1] - times[begin - 1][1])
    return fit


class _Trainer:
    def __init__(self, rank: int, folder: str):
        self._rank = rank
        self._folder = folder
        self._ready: dict[tuple[int, str], Callable[[list[tuple[str, float]]], None]] = {}

    def prepare(self, index: int) -> list[str]:
        """Builds the model and both inputs, and trains an epoch from each. Returns how elements come."""
        import kerasfeed

        load = LOADS[index]
        model = _model(load.layers)
        steps = load.steps
        feeder = kerasfeed.DataFeeder(
            lambda: _batches(steps * RANKS),
            name=load.name,
            check_replay=False,
            topology=kerasfeed.Topology(self._rank, RANKS, meeting_dir=self._folder),
        )
        callback = kerasfeed.callbacks.FeedCallback(feeder, keep=True)

        def fit(data: Any, callbacks: list[Any], epochs: int) -> None:
            model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks)

        memory = _from_memory(steps)
        self._ready[index, "memory"] = lambda times: fit(memory, [_watch(times)], EPOCHS)
        self._ready[index, "feed"] = lambda times: fit(feeder, [callback, _watch(times)], EPOCHS)
        processes.run_on_all_cores()  # the producer inherits that
        fit(memory, [], 1)
        fit(feeder, [callback], 1)
        processes.run_on_one_core(self._rank)
        return [getattr(feeder.session, "way", "gRPC")]

    def fit(self, index: int, kind: str) -> Fit:
        """Trains `EPOCHS` epochs."""
        times: list[tuple[str, float]] = []
        self._ready[index, kind](times)
        return summary(times)


def main(connection_: connection.Connection, rank: int, folder: str) -> None:
    """Runs a rank."""
    trainer = _Trainer(rank, folder)
    processes.serve(connection_, {"prepare": trainer.prepare, "fit": trainer.fit})
    os._exit(0)


@dataclasses.dataclass
class Measured:
    """All fits of one load.

    Attributes:
        load: Its name.
        way: How elements came.
        fits: For each kind, for each repetition, what the ranks saw.
    """

    load: str
    way: str
    fits: dict[str, list[list[Fit]]]

    def epoch(self, kind: str) -> list[float]:
        """Returns the time of an epoch in each repetition: the mean over ranks and epochs."""
        return [statistics.fmean(t for fit in ranks for t in fit.epochs) for ranks in self.fits[kind]]

    def steps(self, kind: str, which: str) -> list[float]:
        """Returns all times of that name of all repetitions and ranks."""
        return [t for ranks in self.fits[kind] for fit in ranks for t in getattr(fit, which)]

    def slowdown(self) -> float:
        """Returns how long an epoch from the feed takes against one from memory: the median of ratios in turn."""
        pairs = zip(self.epoch("feed"), self.epoch("memory"), strict=True)
        return statistics.median(fed / memory for fed, memory in pairs)


def measure(repetitions: int) -> list[Measured]:
    """Trains in turn from memory and from the feed."""
    env = {
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "KERASFEED_TOKEN": f"benchmark-{time.time_ns():x}-fit",
    }
    found = []
    with tempfile.TemporaryDirectory(prefix="kerasfeed-bench-") as folder:
        arguments = [(rank, folder) for rank in range(RANKS)]
        with Processes("trainer", main, arguments, **env) as ranks:
            for index, load in enumerate(LOADS):
                way = ask_all(ranks.workers, "prepare", index)[0][0]
                fits: dict[str, list[list[Fit]]] = {kind: [] for kind in KINDS}
                for turn in range(repetitions):
                    for kind in KINDS if turn % 2 else reversed(KINDS):
                        fits[kind].append(ask_all(ranks.workers, "fit", index, kind))
                found.append(Measured(load.name, way, fits))
    return found


def table(found: list[Measured]) -> str:
    """Returns the second table."""
    head = ["ms", "epoch", "step, median", "step, 99 %", "first step of an epoch", "pause between epochs"]
    rows = []
    for measured in found:
        for kind in KINDS:
            title = "from memory" if kind == "memory" else f"kerasfeed, {measured.way}"
            others = sorted(measured.steps(kind, "others"))
            rows.append(
                [
                    f"{measured.load}, {title}",
                    report.milliseconds(measured.epoch(kind)),
                    report.number(1e3 * statistics.median(others), 3),
                    report.number(1e3 * others[len(others) * 99 // 100], 3),
                    report.milliseconds(measured.steps(kind, "first")),
                    report.milliseconds(measured.steps(kind, "pauses")),
                ]
            )
    return report.table(head, rows)


def goals(found: list[Measured]) -> list[report.Goal]:
    """Returns what was aimed at for `fit` on the compute-bound step, and what was measured."""
    measured = found[0]
    step = statistics.median(measured.steps("memory", "others"))
    first = statistics.median(measured.steps("feed", "first"))
    longest = max(measured.steps("feed", "others"))
    return [
        report.Goal("compute-bound step, ms", 1e3 * step, 20),
        report.Goal("fit on it: kerasfeed / memory", measured.slowdown(), 1.02, most=True),
        report.Goal(
            "fit on it: first step of later epochs, median / longest other step", first / longest, 1, most=True
        ),
    ]
