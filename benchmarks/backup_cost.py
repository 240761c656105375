"""What a backup adds to Keras's own saving of weights, when the feed's state is replayed.

    make bench-backup

Measures, in turn and in one run: `model.save_weights`, and what comes beside it, that is, `feeder.state()`, its bytes,
and how much longer it takes to write the file that they become a part of (with fsync, as a backup does). The exit code
is 1 if the median of that is over 5 ms, or the state over 4 KB.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from tensorflow import keras

import kerasfeed

MAX_SECONDS = 0.005
MAX_BYTES = 4096
WARM_UP = 3
_INFO = b'{"fit": 0, "epoch": 3, "step": 500, "batches": 3500, "size": 2, "memory": [], "feeds": {}}'


def dataset_fn() -> tf.data.Dataset:
    """Is replayed: what its random ops draw can't be part of an iterator's state."""
    images = tf.data.Dataset.range(100_000).shuffle(10_000).batch(32)
    return images.map(lambda ids: (tf.random.uniform([32, 28, 28, 1]), ids % 10)).repeat()


def build_model() -> keras.Model:
    layers = keras.layers
    image = keras.Input([28, 28, 1])
    x = layers.Conv2D(32, 3, activation="relu")(image)
    x = layers.Conv2D(64, 3, strides=2, activation="relu")(x)
    x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
    model = keras.Model(image, layers.Dense(10)(x))
    model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def write(path: pathlib.Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_costs(path: pathlib.Path, state: bytes, first: bool) -> float:
    """Returns by how much the state makes writing longer, in seconds; `first`: which of the two is written first."""
    write(path, _INFO)  # The first one waits for the weights, too, which Keras leaves to the system to write.
    texts = [_INFO, _INFO + base64.b64encode(state)]
    if first:
        texts.reverse()
    costs = {len(text): seconds(lambda text=text: write(path, text)) for text in texts}
    return costs[max(costs)] - costs[min(costs)]


def row(name: str, times: list[float]) -> str:
    low, *_, high = np.percentile(times, [10, 90])
    return f"  {name:38} {1e3 * statistics.median(times):8.2f} {1e3 * low:8.2f} {1e3 * high:8.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures what a backup adds to saving the weights.")
    parser.add_argument("--rounds", type=int, default=50, help="measurements of each, at least 30 (default: 50)")
    args = parser.parse_args()
    if args.rounds < 30:
        parser.error(f"--rounds must be at least 30. Received: {args.rounds}")

    model = build_model()
    weights: list[float] = []
    parts: dict[str, list[float]] = {"feeder.state()": [], "to_bytes()": [], "write, with it and without": []}
    with tempfile.TemporaryDirectory(prefix="kerasfeed-bench-") as name:
        folder = pathlib.Path(name)
        feeder = kerasfeed.DataFeeder(dataset_fn, seed=1)
        for index, (images, labels) in enumerate(feeder):
            model.train_on_batch(images, labels)
            weights.append(seconds(lambda: model.save_weights(folder / "of.weights.h5")))
            # Each once, at a position that is new: nothing of the round before helps.
            times = [time.perf_counter()]
            state = feeder.state()
            times.append(time.perf_counter())
            data = state.to_bytes()
            times.append(time.perf_counter())
            times.append(times[-1] + write_costs(folder / "info", data, index % 2 == 0))
            for part, (began, ended) in zip(parts.values(), itertools.pairwise(times), strict=True):
                part.append(ended - began)
            if index + 1 == WARM_UP + args.rounds:
                break
        feeder.close()
    weights = weights[WARM_UP:]
    parts = {name: times[WARM_UP:] for name, times in parts.items()}
    added = [sum(times) for times in zip(*parts.values(), strict=True)]
    median = statistics.median(added)
    version = "3" if hasattr(keras, "ops") else "2"
    print(f"Keras {version}, a model of {model.count_params()} weights, {args.rounds} rounds; milliseconds:")
    print(f"  {'':38} {'median':>8} {'10 %':>8} {'90 %':>8}")
    print(row("model.save_weights", weights))
    print(row("added by the feed's state", added))
    for name, times in parts.items():
        print(row(f"    {name}", times))
    print(f"The state has {len(data)} bytes and is brought back by {state.way}.")
    problems = []
    if state.way != "replay":
        problems.append(f"expected a state that is replayed. Received: {state.way}")
    if median > MAX_SECONDS:
        problems.append(f"expected at most {1e3 * MAX_SECONDS:.0f} ms more. Received: {1e3 * median:.2f} ms")
    if len(data) > MAX_BYTES:
        problems.append(f"expected a state of at most {MAX_BYTES} bytes. Received: {len(data)}")
    for problem in problems:
        print(f"backup_cost.py: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
