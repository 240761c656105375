"""A rank that Horovod does not connect to the others: each has a network namespace of its own, as on its own host."""

from __future__ import annotations

import lean  # noqa: F401 (before TensorFlow)

# isort: split

import psutil
import tensorflow as tf
from reporting import FOLDER, RANK, SIZE, meet, report

import kerasfeed
from kerasfeed import rendezvous


def dataset_fn():
    return tf.data.Dataset.range(101).map(lambda index: {"id": index, "x": tf.fill([1000], index)})


if __name__ == "__main__":
    topology = kerasfeed.Topology(RANK, SIZE, local_rank=0, local_size=1, meeting_dir=str(FOLDER / "meeting"))
    if RANK == 0:
        report("host", address=rendezvous.listening_host(topology))
    for producer in range(SIZE):
        feeder = kerasfeed.DataFeeder(dataset_fn, name=f"by {producer}", topology=topology, producer=producer)
        elements = []
        for element in feeder:
            assert bool(tf.reduce_all(element["x"] == element["id"]))
            elements.append(int(element["id"]))
        report(f"stream {producer}", elements=elements, way=feeder.session.way)
        pid = feeder.session.producer_pid
        if pid is not None:
            listening = [c for c in psutil.Process(pid).net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
            report(f"listens {producer}", addresses=[c.laddr.ip for c in listening])
    meet("end")
