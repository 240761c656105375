"""On Keras 2 kerasfeed.horovod is Horovod's own."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.once("keras2")


def test_all_names_are_those_of_horovod() -> None:
    import horovod.tensorflow.keras as theirs

    import kerasfeed.horovod as ours

    assert {
        name for name in ours.__all__ if name != "callbacks" and getattr(ours, name) is not getattr(theirs, name)
    } == set()
    assert {
        n for n in ours.callbacks.__all__ if getattr(ours.callbacks, n) is not getattr(theirs.callbacks, n)
    } == set()
