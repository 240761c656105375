"""Who am I, how many are we: the ranks of a job, found from Horovod or given by the user."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

# Variables by which launchers tell a process its place: (size, rank, launcher).
_LAUNCHERS = (
    ("HOROVOD_SIZE", "HOROVOD_RANK", "horovodrun"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "Open MPI"),
    ("PMI_SIZE", "PMI_RANK", "MPI"),
)
_HOROVOD_MODULES = ("horovod.tensorflow", "horovod.torch", "horovod.mxnet")


@dataclasses.dataclass(frozen=True)
class Topology:
    """The place of this process among the ranks of its job.

    Example:

    ```python
    topology = kerasfeed.Topology(rank=0, size=1)
    feeder = kerasfeed.DataFeeder(dataset_fn, topology=topology)
    ```

    Args:
        rank: This process's number, from 0 to `size - 1`.
        size: Number of ranks in the job.
        local_rank: Number of this process among those on its host. Defaults to `rank`.
        local_size: Number of ranks on this host. Defaults to `size`: all ranks on one host.
        meeting_dir: Folder that all ranks can read and write, by which ranks that Horovod does not connect learn where
            the producer listens. Needed for `size > 1` without Horovod, together with `KERASFEED_TOKEN`. Jobs that
            share a folder need different tokens.

    Raises:
        ValueError: A number is out of its range.
    """

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    meeting_dir: str | None = None
    source: str = dataclasses.field(default="given explicitly", compare=False)

    def __post_init__(self) -> None:
        if self.local_rank is None:
            object.__setattr__(self, "local_rank", self.rank)
        if self.local_size is None:
            object.__setattr__(self, "local_size", self.size)
        for name in ("rank", "size", "local_rank", "local_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"Topology: {name} must be an int. Received: {value!r}")
        if self.size < 1:
            raise ValueError(f"Topology: size must be at least 1. Received: {self.size}")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"Topology: rank must be from 0 to {self.size - 1} (size - 1). Received: {self.rank}")
        assert self.local_rank is not None
        assert self.local_size is not None
        if not 1 <= self.local_size <= self.size:
            raise ValueError(f"Topology: local_size must be from 1 to {self.size} (size). Received: {self.local_size}")
        if not 0 <= self.local_rank < self.local_size:
            raise ValueError(
                f"Topology: local_rank must be from 0 to {self.local_size - 1} (local_size - 1). "
                f"Received: {self.local_rank}"
            )

    @property
    def one_host(self) -> bool:
        """Whether all ranks run on this host."""
        return self.local_size == self.size

    @classmethod
    def detect(cls) -> Topology:
        """Returns the topology of this process: from Horovod when it is initialised, else one process.

        Raises:
            RuntimeError: A launcher started several processes, but Horovod was not initialised: call `hvd.init()`
                before the feeder is used.
        """
        hvd = initialized_horovod()
        if hvd is not None:
            return cls(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), source="Horovod")
        for size_name, rank_name, launcher in _LAUNCHERS:
            size = os.environ.get(size_name, "")
            if size.isdigit() and int(size) > 1 and rank_name in os.environ:
                raise RuntimeError(
                    f"{launcher} started {size} processes ({size_name}={size}), but Horovod is not initialised in this "
                    f"one (rank {os.environ[rank_name]}). Call hvd.init() before the feeder is first used, "
                    "or give DataFeeder(topology=...)."
                )
        return cls(source="one process")


def initialized_horovod() -> Any | None:
    """Returns the Horovod module that this process has imported and initialised, or `None`. Imports nothing."""
    for name in _HOROVOD_MODULES:
        module = sys.modules.get(name)
        if module is not None and getattr(module, "is_initialized", lambda: False)():
            return module
    return None
