"""Trains a small network on handwritten digits: one tf.data pipeline, in a process of its own, feeds all Horovod ranks.

    horovodrun --gloo -np 2 python examples/digits.py

Each image carries an id. At the end the ids that the ranks have trained are added up: this shows that none was missed
and none came twice. The exit code is 0 only if that is so and the network has learnt its digits.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf
from tensorflow import keras

import kerasfeed
import kerasfeed.horovod as hvd

RECORDS = pathlib.Path(".cache/digits").resolve()
TRAINING_FILES = [str(RECORDS / f"training-{i}.tfrecord") for i in range(4)]
VALIDATION_FILE = str(RECORDS / "validation.tfrecord")
TRAINING_IMAGES = 1440  # of 1797; the others are for validation
BATCH = 24  # 60 elements in an epoch, 12 in a validation: nothing is left over with 1, 2, 3, 4, 6 or 12 ranks
VALIDATION_BATCH = 30
WARMUP_EPOCHS = 3
REQUIRED_ACCURACY = 0.97

FEATURES = {
    "image": tf.io.FixedLenFeature([8, 8, 1], tf.float32),
    "label": tf.io.FixedLenFeature([], tf.int64),
    "id": tf.io.FixedLenFeature([], tf.int64),
}


def write_records() -> None:
    """Writes the images to TFRecord files, unless an earlier run did."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    training_ids = np.array_split(np.arange(TRAINING_IMAGES), len(TRAINING_FILES))
    validation_ids = np.arange(TRAINING_IMAGES, len(labels))
    RECORDS.mkdir(parents=True, exist_ok=True)
    for file, ids in zip([*TRAINING_FILES, VALIDATION_FILE], [*training_ids, validation_ids], strict=True):
        if os.path.exists(file):
            continue
        partial = f"{file}.{os.getpid()}"
        with tf.io.TFRecordWriter(partial) as writer:
            for id_ in ids:
                feature = {
                    "image": tf.train.Feature(float_list=tf.train.FloatList(value=images[order[id_]] / 16)),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[labels[order[id_]]])),
                    "id": tf.train.Feature(int64_list=tf.train.Int64List(value=[id_])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
        os.replace(partial, file)  # A reader finds the whole file or none.


def parse(records: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Returns ({"image", "id"}, label) of a batch of records."""
    parsed = tf.io.parse_example(records, FEATURES)
    return {"image": parsed["image"], "id": parsed["id"]}, parsed["label"]


def augment(features: dict[str, tf.Tensor], label: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Turns each image by up to 12 degrees and shifts it by up to one pixel, each by its own random amounts."""
    images = features["image"]
    count = tf.shape(images)[0]
    angle = tf.random.uniform([count], -np.pi / 15, np.pi / 15)
    shift_x, shift_y = tf.unstack(tf.random.uniform([2, count], -1.0, 1.0))
    cos, sin, zero, center = tf.cos(angle), tf.sin(angle), tf.zeros([count]), 3.5
    # Output pixel (x, y) comes from (t0 x + t1 y + t2, t3 x + t4 y + t5).
    transforms = [
        *(cos, -sin, center * (1 - cos + sin) + shift_x),
        *(sin, cos, center * (1 - cos - sin) + shift_y),
        *(zero, zero),
    ]
    images = tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=tf.stack(transforms, axis=1),
        output_shape=[8, 8],
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode="CONSTANT",
    )
    return {**features, "image": images}, label


def training_fn() -> tf.data.Dataset:
    """The training pipeline. Only the producer runs it."""
    dataset = tf.data.TFRecordDataset(TRAINING_FILES).shuffle(TRAINING_IMAGES).batch(BATCH).map(parse).map(augment)
    # A record file does not tell its length. Said here, Keras and Horovod's warm-up know it from the first epoch on.
    return dataset.apply(tf.data.experimental.assert_cardinality(TRAINING_IMAGES // BATCH))


def validation_fn() -> tf.data.Dataset:
    """The validation pipeline. Only the producer runs it."""
    dataset = tf.data.TFRecordDataset(VALIDATION_FILE).batch(VALIDATION_BATCH).map(parse)
    return dataset.map(lambda features, label: (features["image"], label))


class Ledger(keras.callbacks.Callback):
    """Counts for each epoch how often this rank has trained each image.

    The model does not track this variable: Horovod would broadcast it from rank 0 with the weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = tf.Variable(tf.zeros([TRAINING_IMAGES], tf.int64), trainable=False)
        self.epochs: list[np.ndarray] = []

    def record(self, ids: tf.Tensor) -> None:
        """Called in each training step with the ids of its images."""
        self.counts.scatter_nd_add(ids[:, tf.newaxis], tf.ones_like(ids))

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.epochs.append(self.counts.numpy())
        self.counts.assign(tf.zeros_like(self.counts))


class Network(keras.Model):
    """A model that trains on images alone, and writes their ids into a ledger."""

    ledger: Ledger

    def train_step(self, data: tuple) -> dict:
        features, label = data
        self.ledger.record(features["id"])
        return super().train_step((features["image"], label))


def build_network(ledger: Ledger) -> Network:
    layers = keras.layers
    image = keras.Input([8, 8, 1])
    x = layers.Conv2D(32, 3, padding="same", activation="relu")(image)
    x = layers.Conv2D(32, 3, padding="same", activation="relu")(x)
    x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(64, 3, padding="same", activation="relu")(x)
    x = layers.Dropout(0.3)(layers.Flatten()(x))
    network = Network(image, layers.Dense(10, activation="softmax")(x))
    network.ledger = ledger
    return network


def account(feeder: kerasfeed.DataFeeder, counts: np.ndarray) -> list[str]:
    """Prints what the feed did, and returns what is wrong with it.

    Args:
        feeder: The training feeder, after `fit`, on the producer's rank.
        counts: How often each image (column) was trained in each epoch (row), over all ranks.
    """
    size = feeder.topology.size
    produced = TRAINING_IMAGES // BATCH
    dropped = produced % size
    epochs = feeder.statistics()
    problems = []
    if [e.epoch for e in epochs] != list(range(len(counts))):
        problems.append(f"expected statistics of {len(counts)} epochs. Received those of: {[e.epoch for e in epochs]}")
    columns = ["epoch", "produced", "dropped", *(f"trained by rank {rank}" for rank in range(size))]
    print(f"\nElements of feed {feeder.name!r}, {BATCH} images each:", "  ".join(columns), sep="\n")
    for e, seen in zip(epochs, counts, strict=False):
        row = [e.epoch, e.elements, e.dropped, *(e.trained.get(rank, 0) for rank in range(size))]
        print("  ".join(f"{value:{len(column)}}" for value, column in zip(row, columns, strict=True)))
        expected = [e.epoch, produced, dropped, *[produced // size] * size]
        missed, doubled = np.flatnonzero(seen == 0).tolist(), np.flatnonzero(seen > 1).tolist()
        if row != expected:
            problems.append(f"epoch {e.epoch}: expected the row {expected}. Received: {row}")
        if len(missed) != dropped * BATCH:
            problems.append(
                f"epoch {e.epoch}: expected {dropped * BATCH} images not trained. Received the ids: {missed}"
            )
        if doubled:
            problems.append(f"epoch {e.epoch}: expected no image trained twice. Received the ids: {doubled}")
    if not problems:
        print(f"feed {feeder.name!r}: {len(counts)} epochs of {produced} elements ({TRAINING_IMAGES} images): ", end="")
        if dropped:
            print(f"{dropped} of each epoch make no step of {size} ranks and were dropped, ", end="")
            print("every other element was trained once in its epoch, none twice")
        else:
            print("every element was trained once in every epoch, none missed, none twice")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains digits on all ranks from one tf.data pipeline.")
    parser.add_argument("--epochs", type=int, default=36, help="passes over the training data (default: 36)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the network and of the feed (default: 1)")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs must be at least 1. Received: {args.epochs}")

    hvd.init()
    keras.utils.set_random_seed(args.seed)
    if hvd.rank() == 0:
        write_records()  # Rank 0 runs the producers: no other rank needs the files.
    feeder = kerasfeed.DataFeeder(training_fn, seed=args.seed)
    validation = kerasfeed.DataFeeder(validation_fn, name="val", seed=args.seed)

    ledger = Ledger()
    network = build_network(ledger)
    peak = 1e-3 * hvd.size()
    network.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(peak)),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    decay_epochs = max(1, args.epochs - WARMUP_EPOCHS)
    history = network.fit(
        feeder,
        validation_data=validation,
        epochs=args.epochs,
        verbose=2 if hvd.rank() == 0 else 0,
        callbacks=[
            kerasfeed.callbacks.FeedCallback(feeder),
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(peak, warmup_epochs=WARMUP_EPOCHS),
            hvd.callbacks.LearningRateScheduleCallback(
                peak, lambda epoch: 1 - (epoch - WARMUP_EPOCHS) / decay_epochs, start_epoch=WARMUP_EPOCHS
            ),
            ledger,
        ],
    )
    counts = np.asarray(hvd.allreduce(np.stack(ledger.epochs), name="ledger", op=hvd.Sum))
    if hvd.rank() != 0:
        return 0
    problems = account(feeder, counts)
    accuracy = history.history["val_accuracy"][-1]
    if accuracy < REQUIRED_ACCURACY:
        problems.append(f"expected a validation accuracy of at least {REQUIRED_ACCURACY}. Received: {accuracy:.4f}")
    for problem in problems:
        print(f"digits.py: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
