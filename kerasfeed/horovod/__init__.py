"""Horovod's Keras API for Keras 2 and Keras 3, by one import: `import kerasfeed.horovod as hvd`.

On Keras 2 every name is Horovod's own. On Keras 3 Horovod's optimizer, its callbacks and its `load_model` fail
(`'Variable' object has no attribute 'ref'`): those are written anew, over the same `horovod.tensorflow`.

Example:

```python
import kerasfeed.horovod as hvd  # was: import horovod.tensorflow.keras as hvd

hvd.init()
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size())), loss)
model.fit(dataset, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
```
"""

from __future__ import annotations

from horovod.tensorflow.keras import (
    Average,
    Compression,
    ProcessSet,
    Sum,
    add_process_set,
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    reducescatter,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)

from kerasfeed.horovod import callbacks
from kerasfeed.horovod.keras_version import KERAS_3

if KERAS_3:
    from kerasfeed.horovod.keras3_optimizer import DistributedOptimizer, load_model
else:
    from horovod.tensorflow.keras import DistributedOptimizer, load_model  # type: ignore[no-redef]

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
