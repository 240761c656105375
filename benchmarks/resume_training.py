"""The training that resume_check.py kills: one rank of it. It knows nothing of kills and restarts.

    horovodrun --gloo -np 2 python benchmarks/resume_training.py FOLDER SEED

Every source of chance is in it: reshuffling, augmentation with stateful random ops, Dropout, and BatchNormalization,
whose statistics each rank has for itself. FOLDER gets the backups; from each rank a line for each step that it trains,
as it trains it (`trained-<rank>`); and, at the end, digests of all its variables (`final-<rank>.json`).
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import sys
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from resume_settings import BATCH, EPOCHS, PREFETCH, SAVE_FREQ, STEPS
from tensorflow import keras

import kerasfeed

KERAS3 = hasattr(keras, "ops")
SIDE = 12
CLASSES = 4
LEARNING_RATE = 1e-3


# --- the data ---------------------------------------------------------------------------------------------------------


def dataset_fn(ctx: tf.distribute.InputContext) -> tf.data.Dataset:
    """Images with ids, in another order and augmented in another way in every epoch. Only the producer runs it."""
    images = STEPS * ctx.num_replicas_in_sync * BATCH
    noise = np.random.default_rng(0).normal(size=[images, SIDE, SIDE, 1]).astype(np.float32)
    data = {"id": np.arange(images), "image": noise}, np.arange(images) % CLASSES
    dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(images // 4).batch(BATCH)
    return dataset.map(augment, num_parallel_calls=tf.data.AUTOTUNE)


def augment(features: dict[str, tf.Tensor], label: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Stateful random ops, as people use them: what they draw depends on how often they were called before."""
    image = features["image"] + tf.cast(label, tf.float32)[:, tf.newaxis, tf.newaxis, tf.newaxis]
    image = tf.image.random_flip_left_right(image)
    image = tf.image.random_brightness(image, 0.2)
    image = tf.image.random_contrast(image, 0.8, 1.2)
    return {**features, "image": image}, label


# --- the model --------------------------------------------------------------------------------------------------------


class Network(keras.Model):
    """Trains on the images, writes down what it trains on, and on Keras 3 averages the gradients.

    On Keras 2, Horovod's optimizer does that; on Keras 3 it fails.
    """

    record: Any

    def train_step(self, data: Any) -> Any:
        features, label = data
        tf.numpy_function(self.record, [self.optimizer.iterations, features["id"], features["image"]], [])
        if not KERAS3:
            return super().train_step((features["image"], label))
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=label, y_pred=self(features["image"], training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        averaged = [hvd.allreduce(gradient, name=f"gradient.{i}") for i, gradient in enumerate(gradients)]
        self.optimizer.apply_gradients(zip(averaged, self.trainable_weights, strict=True))
        return {"loss": loss}


def build_network() -> Network:
    layers = keras.layers
    image = keras.Input([SIDE, SIDE, 1])
    x = layers.Conv2D(16, 3, use_bias=False)(image)
    x = layers.Activation("relu")(layers.BatchNormalization()(x))
    x = layers.Dropout(0.2)(layers.Conv2D(16, 3, strides=2, activation="relu")(x))
    x = layers.Dense(32, activation="relu")(layers.Flatten()(x))
    x = layers.BatchNormalization()(layers.Dropout(0.4)(x))
    network = Network(image, layers.Dense(CLASSES)(x))
    optimizer = keras.optimizers.Adam(LEARNING_RATE)
    arguments: dict[str, Any] = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    if KERAS3:
        arguments["jit_compile"] = False
    else:
        import horovod.tensorflow.keras as hvd_keras

        optimizer = hvd_keras.DistributedOptimizer(optimizer)
    network.compile(optimizer=optimizer, **arguments)
    return network


def horovod_callbacks(network: Network) -> list[keras.callbacks.Callback]:
    """Horovod's own callbacks; on Keras 3 they fail, and rank 0's weights are handed out here."""
    if KERAS3:
        for index, variable in enumerate(network.weights):
            if "seed_generator" not in variable.path:  # what Dropout draws is each rank's own
                variable.assign(hvd.broadcast(tf.convert_to_tensor(variable), 0, name=f"weight.{index}"))
        return []
    import horovod.tensorflow.keras as hvd_keras

    return [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd_keras.callbacks.LearningRateWarmupCallback(LEARNING_RATE * hvd.size(), warmup_epochs=2),
    ]


# --- what is written down ---------------------------------------------------------------------------------------------


class Records:
    """Appends a line for each step: its number, a digest of the images' bytes as they came, and their ids."""

    def __init__(self, path: pathlib.Path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def __call__(self, step: np.ndarray, ids: np.ndarray, images: np.ndarray) -> None:
        digest = hashlib.sha256(images.tobytes()).hexdigest()
        line = f"{int(step)} {digest} {','.join(map(str, ids.tolist()))}\n"
        os.write(self._file, line.encode())  # one write: there after a kill -9, whole or not at all


def digests_of(network: Network) -> dict[str, str]:
    """Returns the SHA-256 of the bytes of all variables, by what they are."""
    optimizer = network.optimizer
    variables = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    groups = {
        "weights": network.trainable_variables,
        "statistics": [v for v in network.non_trainable_variables if "seed_generator" not in name_of(v)],
        "optimizer": [*variables, optimizer.learning_rate],
        "generators": [generator_of(layer) for layer in network.layers if isinstance(layer, keras.layers.Dropout)],
    }
    return {
        name: hashlib.sha256(b"".join(np.asarray(v).tobytes() for v in group)).hexdigest()
        for name, group in groups.items()
    }


def name_of(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name))


def generator_of(dropout: Any) -> Any:
    return dropout.seed_generator.state if KERAS3 else dropout._random_generator._generator.state


# --- the training -----------------------------------------------------------------------------------------------------


def main() -> None:
    folder, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    hvd.init()
    tf.config.experimental.enable_op_determinism()
    if not KERAS3:
        keras.backend.experimental.enable_tf_random_generator()
    keras.utils.set_random_seed(seed + hvd.rank())

    network = build_network()
    network.record = Records(folder / f"trained-{hvd.rank()}")
    # Room for two steps: no more of them are ready or sent ahead because they are small.
    feeder = kerasfeed.DataFeeder(dataset_fn, seed=seed, deterministic=True, prefetch=PREFETCH, max_buffer_bytes=1)
    history = network.fit(
        feeder,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[
            *horovod_callbacks(network),
            kerasfeed.callbacks.FeedCallback(feeder),
            kerasfeed.callbacks.BackupAndRestore(feeder, folder / "backup", save_freq=SAVE_FREQ),
        ],
    )
    final = {"variables": digests_of(network), "loss": float(history.history["loss"][-1])}
    (folder / f"final-{hvd.rank()}.json").write_text(json.dumps(final))


if __name__ == "__main__":
    main()
