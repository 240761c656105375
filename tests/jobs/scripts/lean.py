"""To be imported before TensorFlow, by scripts that don't use Keras: they start in half the time.

`import tensorflow` imports Keras, too, and goes on without it where it is missing. The garbage collector would look at
all modules again and again.
"""

from __future__ import annotations

import gc
import sys

_KERAS = "keras.src.optimizers"

gc.disable()
sys.modules[_KERAS] = None  # type: ignore[assignment]
import tensorflow  # noqa: E402, F401

del sys.modules[_KERAS]
gc.freeze()
gc.enable()
