"""Iterates feeds on every rank and reports which element came in which step."""

from __future__ import annotations

import lean  # noqa: F401 (before TensorFlow)

# isort: split

import horovod.tensorflow as hvd
import tensorflow as tf
from reporting import RANK, SIZE, report

import kerasfeed

ELEMENTS = 23
SEED = 20


def in_order():
    return tf.data.Dataset.range(ELEMENTS)


def shuffled():
    # The index is the place in the producer's own order.
    return tf.data.Dataset.range(ELEMENTS).shuffle(ELEMENTS).enumerate()


def main() -> kerasfeed.DataFeeder:
    hvd.init()
    last = SIZE - 1
    ordered = kerasfeed.DataFeeder(in_order, name="ordered", producer=last)
    for epoch in range(2):
        report(f"ordered.{epoch}", elements=[int(element) for element in ordered])
    report("producer", pid=ordered.session.producer_pid)
    ordered.close()
    hvd.allreduce(tf.zeros([]), name="all have left")
    if last == RANK:
        report("statistics", epochs=[vars(epoch) for epoch in ordered.statistics()])

    mixed = kerasfeed.DataFeeder(shuffled, name="shuffled", seed=SEED)
    for epoch in range(2):
        report(f"shuffled.{epoch}", elements=[[int(index), int(value)] for index, value in mixed])

    # Two feeds at once, with producers on different ranks.
    first, second = (kerasfeed.DataFeeder(in_order, name=f"pair{i}", producer=p) for i, p in enumerate((0, last)))
    report("pairs", elements=[[int(a), int(b)] for a, b in zip(first, second, strict=True)])

    # This iterator is still alive when the script ends.
    global alive
    alive = iter(ordered)
    report("alive", element=int(next(alive)))
    return mixed


if __name__ == "__main__":
    feeder = main()
    also_alive = iter(feeder)
    next(also_alive)
