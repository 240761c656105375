"""Bytes of any length from one rank to all, and from all ranks to each, through Horovod: nothing is pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from kerasfeed.errors import FeedError, StateError
from kerasfeed.topology import Topology, initialized_horovod


def _horovod() -> Any:
    hvd: Any = initialized_horovod()
    if not hasattr(hvd, "allgather"):
        raise FeedError("the ranks can only meet through Horovod once hvd.init() was called in this process")
    return hvd


def _tensor(data: bytes) -> tf.Tensor:
    return tf.constant(np.frombuffer(data, np.uint8))


def connected(topology: Topology) -> bool:
    """Whether Horovod connects the ranks; those that meet in a folder share that, and nothing else."""
    return topology.size > 1 and topology.meeting_dir is None


def broadcast_bytes(data: bytes, root: int, name: str) -> bytes:
    """Returns the root rank's bytes on all ranks. A collective: blocks until all ranks are here."""
    hvd = _horovod()
    with tf.init_scope(), tf.device("CPU:0"):
        length = hvd.broadcast(tf.constant([len(data)], tf.int64), root_rank=root, name=f"{name}.length")
        mine = data if hvd.rank() == root else bytes(int(length[0]))
        return bytes(hvd.broadcast(_tensor(mine), root_rank=root, name=name).numpy()) if mine else b""


def gather_bytes(data: bytes, name: str) -> list[bytes]:
    """Returns the bytes of all ranks on all ranks. A collective: blocks until all ranks are here."""
    hvd = _horovod()
    with tf.init_scope(), tf.device("CPU:0"):
        lengths = hvd.allgather(tf.constant([len(data)], tf.int64), name=f"{name}.length").numpy()
        whole = hvd.allgather(_tensor(data), name=name).numpy()
    ends = np.cumsum(lengths)
    return [bytes(whole[end - length : end]) for length, end in zip(lengths, ends, strict=True)]


def read_by_first(read: Callable[[], bytes], topology: Topology, name: str) -> bytes:
    """Returns what rank 0 reads, on all ranks: what each of them would see may differ.

    A collective where Horovod connects the ranks; ranks that meet in a folder share it, and read by themselves.

    Raises:
        StateError: Reading failed with that, or with an `OSError`, on rank 0: then on all ranks.
    """
    together = connected(topology)
    data, failure = b"", ""
    if not together or topology.rank == 0:
        try:
            data = read()
        except (StateError, OSError) as error:
            failure = str(error)
    if together:
        failure = broadcast_bytes(failure.encode(), 0, f"{name}.failure").decode()
    if failure:
        raise StateError(failure)
    return broadcast_bytes(data, 0, name) if together else data
