"""The elements that are fed, and the pipelines that yield them.

Those of the first table cost next to nothing to produce: the same tensor is yielded again and again, by reference. The
one of the third table decodes and augments images.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf

TEXT_LINES = 64  # in an element
TEXT_LENGTHS = (20, 4000)  # bytes of a line; the logarithm is uniform
TEXT_ELEMENTS = 16  # different ones, in turn
TEXT_LETTERS = b"abcdefghijklmnopqrstuvwxyz      eeeetaoin"
EPOCH_BATCHES = 24  # of preprocessed images
IMAGES = 32  # in a batch


@dataclasses.dataclass(frozen=True)
class Element:
    """One kind of element.

    Attributes:
        name: As tables have it.
        bytes: Its size; of text the mean.
        build: Returns an endless `tf.data.Dataset` of such elements.
    """

    name: str
    bytes: int
    build: Callable[[], tf.data.Dataset]


def text_lines() -> list[list[bytes]]:
    """Returns the lines of each element of text, always the same."""
    draw = random.Random(4)
    low, high = TEXT_LENGTHS

    def line() -> bytes:
        return bytes(draw.choices(TEXT_LETTERS, k=round(low * (high / low) ** draw.random())))

    return [[line() for _ in range(TEXT_LINES)] for _ in range(TEXT_ELEMENTS)]


def _same(shape: list[int], dtype: str) -> tf.data.Dataset:
    import tensorflow as tf

    # Bytes without a pattern: tf.data service may compress them.
    numbers = tf.random.stateless_uniform(shape, [4, 4], 0, 256, tf.int32)
    return tf.data.Dataset.from_tensors(tf.cast(numbers, dtype) + tf.cast(0.37, dtype)).repeat()


def _text() -> tf.data.Dataset:
    import tensorflow as tf

    kinds = [tf.data.Dataset.from_tensors(tf.constant(lines)).repeat() for lines in text_lines()]
    turns = tf.data.Dataset.range(len(kinds)).repeat()
    return tf.data.Dataset.choose_from_datasets(kinds, turns)


def _images() -> tf.data.Dataset:
    """Decoded, cropped, flipped and scaled: what an image pipeline does."""
    import tensorflow as tf

    noise = tf.random.Generator.from_seed(4)
    small = [noise.uniform([16, 16, 3], 0, 255) for _ in range(IMAGES)]
    files = tf.stack([tf.io.encode_jpeg(tf.cast(tf.image.resize(image, [256, 256]), tf.uint8)) for image in small])

    def prepare(file: tf.Tensor) -> tf.Tensor:
        image = tf.image.random_crop(tf.io.decode_jpeg(file, channels=3), [224, 224, 3])
        image = tf.image.random_flip_left_right(image)
        return tf.image.random_brightness(tf.image.convert_image_dtype(image, tf.float32), 0.1)

    images = tf.data.Dataset.from_tensor_slices(files).repeat()
    return images.map(prepare, num_parallel_calls=tf.data.AUTOTUNE).batch(IMAGES)


ELEMENTS = {
    "2 KB": Element("2 KB", 2_048, lambda: _same([32, 16], "float32")),
    "200 KB": Element("200 KB", 200_704, lambda: _same([64, 784], "float32")),
    "9.6 MB": Element("9.6 MB", 9_633_792, lambda: _same([64, 224, 224, 3], "uint8")),
    "38.5 MB": Element("38.5 MB", 38_535_168, lambda: _same([64, 224, 224, 3], "float32")),
    "text": Element("text", sum(len(line) for lines in text_lines() for line in lines) // TEXT_ELEMENTS, _text),
}
PREPROCESSED = Element("images", IMAGES * 224 * 224 * 3 * 4, _images)


def named(name: str) -> Element:
    """Returns the element of that name."""
    return PREPROCESSED if name == PREPROCESSED.name else ELEMENTS[name]
