"""What whole jobs have shown to be wrong, each cut down to the smallest case that shows it."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from kerasfeed import Topology
from kerasfeed.producer.window import Delivery, Produce, Seek, Window
from kerasfeed.rendezvous import listening_host
from kerasfeed.schedule import Position
from kerasfeed.spec import EncodedElement

SIZE = 2
CREDIT = (8, 1 << 20)


def pump(window: Window, works: int) -> None:
    """Does the pump's work, as long as there is some."""
    for _ in range(works):
        if not isinstance(work := window.wait_for_work(), (Seek, Produce)):
            return
        if isinstance(work, Produce):
            window.put(work.generation, EncodedElement((), (), 8))


@pytest.mark.parametrize(
    ("behind", "ahead"),
    [(Position(0, 0), Position(0, 11)), (Position(0, 15), Position(1, 3))],
    ids=["in one epoch", "over an epoch's end"],
)
def test_restarted_producer_serves_the_rank_that_is_furthest_behind(behind: Position, ahead: Position) -> None:
    """The producer was killed. The rank that is behind asks again first, then the one that is ahead."""
    window = Window(size=SIZE, prefetch=8, max_bytes=1 << 20)
    window.attend(0, ahead, None)
    window.attend(1, behind, None)
    window.read(1, 1, behind, False, *CREDIT)
    pump(window, works=2)
    window.read(0, 1, ahead, False, *CREDIT)
    pump(window, works=8)
    deadline = time.monotonic() + 2.0
    item = window.wait_for_item(1, lambda: time.monotonic() >= deadline)
    assert isinstance(item, Delivery), f"rank 1 never gets {behind}: the window went on to {ahead} without it"
    assert item.position == behind


def test_producer_of_ranks_on_several_hosts_does_not_listen_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many hosts resolve their own name to 127.0.0.1 or 127.0.1.1, where ranks on other hosts can't come."""
    for name in ("HOROVOD_GLOO_IFACE", "HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    host = ""
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # It may refuse.
        host = listening_host(Topology(0, 2, local_rank=0, local_size=1, meeting_dir="/tmp"))
    assert not host.startswith("127."), "no rank on another host can reach the producer"
