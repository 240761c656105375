"""What a producer is made of beside its pipeline, in Python or in C++: the same parts, with the same interfaces.

The Python ones are the reference, and what works where nothing can be compiled; the native ones hand elements on
without Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kerasfeed.producer import digest, window
from kerasfeed.producer.launch import Progress
from kerasfeed.producer.service import DataSockets

if TYPE_CHECKING:  # TensorFlow comes with it
    from kerasfeed.native.engine import Engine
    from kerasfeed.native.pump import Flow

_NEWS_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the parts have to know.

    Attributes:
        spec: The dataset's element spec, as `spec.encode_spec` wrote it.
        full: Whether digests are of all bytes of large elements, too.
        journal_fd: The file of the feed's journal.
        host: The address to listen on.
        port: The port of the control plane, if one was asked for; data sockets listen on the next one. 0: any.
        max_buffer_bytes: The most that elements may take.
        ahead: How many elements are made ahead.
        free_bytes: How much of small elements may be ready beyond that.
    """

    spec: bytes
    full: bool
    journal_fd: int
    host: str
    port: int
    max_buffer_bytes: int
    ahead: int
    free_bytes: int


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of one producer.

    Attributes:
        window: A `Window`.
        digester: A `Digester`.
        journal: A `Journal`.
        data: Where ranks may fetch elements without gRPC; `None` if nowhere.
        flow: Pumps elements without Python; `None` if nothing does.
        close: Ends the threads of these parts, for who lives on after them.
    """

    window: Any
    digester: Any
    journal: Any
    data: DataSockets | None = None
    flow: Flow | None = None
    close: Callable[[], None] = lambda: None


def make_parts(
    engine: Engine | None,
    settings: Settings,
    window_options: dict[str, Any],
    progress: Progress,
    log: Callable[[str], None],
) -> Parts:
    """Returns the parts of the native engine, or of the Python engine if there is none.

    Args:
        engine: The native engine.
        settings: What the parts have to know.
        window_options: What `Window` takes.
        progress: Where it is noted how far the producer has come.
        log: Called with each warning.

    Raises:
        OSError: The data sockets can't listen.
    """
    if engine is None:
        return Parts(
            window.Window(**window_options, log=log),
            digest.Digester(settings.spec, settings.full),
            digest.Journal(settings.journal_fd),
        )
    from kerasfeed.native.digest import Digester, Journal
    from kerasfeed.native.pump import Flow
    from kerasfeed.native.server import Server
    from kerasfeed.native.window import Window

    library = engine.library
    steps = Window(**window_options, ready_bytes=settings.free_bytes, log=log, library=library)
    port = settings.port + 1 if settings.port else 0
    server = Server(library, steps, settings.host, port, settings.max_buffer_bytes)
    digester = Digester(library, settings.spec, settings.full)
    journal = Journal(library, settings.journal_fd)
    flow = Flow(library, engine.ops, steps, server, digester, journal, progress, settings.ahead)

    closed = threading.Event()

    def tell() -> None:
        while not closed.is_set():
            # If nobody hears it, this process is about to end. Until then ranks get what news let them have.
            with contextlib.suppress(OSError):
                steps.deliver(_NEWS_SECONDS)
                for line in server.log():
                    log(line)

    teller = threading.Thread(target=tell, name="kerasfeed-news", daemon=True)
    teller.start()

    def close() -> None:
        closed.set()
        teller.join()

    return Parts(steps, digester, journal, server, flow, close)
