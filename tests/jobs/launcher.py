"""`horovodrun`, but for its question whether Horovod was built with Gloo: for that it imports TensorFlow, up to twice.

That takes longer than all else that it does. The tests of the stream and of the example run the program itself.
"""

from __future__ import annotations

from horovod.runner import launch

if __name__ == "__main__":
    launch.gloo_built = lambda verbose=False: True
    launch.run_commandline()
