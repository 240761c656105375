"""A rank on a host of its own, while the cable between the hosts is pulled and put back."""

from __future__ import annotations

import lean  # noqa: F401 (before TensorFlow)

# isort: split

import socket
import time

import tensorflow as tf
from reporting import FOLDER, RANK, SIZE, hear, meet, report

import kerasfeed

# Together more than what sockets and the rank hold.
ELEMENT_BYTES = 2 << 20
STEPS = 50


def dataset_fn():
    return tf.data.Dataset.range(SIZE * STEPS).map(
        lambda index: {"id": index, "x": tf.fill([ELEMENT_BYTES // 8], index)}
    )


if __name__ == "__main__":
    topology = kerasfeed.Topology(RANK, SIZE, local_rank=0, local_size=1, meeting_dir=str(FOLDER / "meeting"))
    feeder = kerasfeed.DataFeeder(dataset_fn, topology=topology)
    elements, longest, began = [], 0.0, time.monotonic()
    for step, element in enumerate(feeder):
        longest = max(longest, time.monotonic() - began)
        assert bool(tf.reduce_all(element["x"] == element["id"]))
        elements.append(int(element["id"]))
        if step == STEPS // 5:
            report("before", host=socket.gethostname())
            hear("pulled")
            longest = 0.0
        began = time.monotonic()
    report("stream", elements=elements, way=feeder.session.way, longest=longest)
    meet("end")
