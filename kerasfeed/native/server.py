"""The producer's data sockets (`core/server.h`) for Python: to listen, and to say who may connect."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from kerasfeed.native.library import BYTES, HANDLE, MADE, NUMBER, Library, decoded, encoded
from kerasfeed.native.window import Window

_FUNCTIONS = {
    "kf_server_new": (HANDLE, BYTES, BYTES, NUMBER, NUMBER, MADE),
    "kf_server_port": (HANDLE,),
    "kf_server_admit": (HANDLE, NUMBER, BYTES, BYTES),
    "kf_server_dismiss": (HANDLE, NUMBER),
    "kf_server_log": (HANDLE,),
    "kf_server_held": (HANDLE,),
}
_NAME_BYTES = 16


class Server:
    """Listens on a Unix socket without a name in the file system, for ranks on this host, and on TCP.

    Args:
        library: The engine's library.
        window: Where elements come from.
        host: The address to listen on, for TCP.
        port: The port; 0: a free one.
        pool_bytes: The most that shared memory takes.

    Raises:
        OSError: It can't listen; the message says why.
    """

    def __init__(self, library: Library, window: Window, host: str, port: int, pool_bytes: int):
        self._library = library
        # The window must outlive it.
        self._window = window
        library.declare(_FUNCTIONS)
        name = f"kerasfeed-{secrets.token_hex(_NAME_BYTES)}"
        self.handle, answer = library.make(
            self, "kf_server_new", "kf_server_free", window.handle, name.encode(), encoded(host), port, pool_bytes
        )
        if not self.handle:
            raise OSError(decoded(answer.text))
        self.port = library.ask("kf_server_port", self.handle).numbers[0]
        self.addresses = [f"unix:{name}", f"tcp:{self.port}"]

    def admit(self, rank: int, expected: bytes, answer: bytes) -> None:
        """This rank may connect, once, with the proof `expected`, and is answered with `answer`."""
        self._library.ask("kf_server_admit", self.handle, rank, expected, answer)

    def dismiss(self, rank: int) -> None:
        """What this rank has here ends: nothing that it says is heard any more."""
        self._library.ask("kf_server_dismiss", self.handle, rank)

    def log(self) -> Iterator[str]:
        """Yields what went wrong since the last call."""
        yield from decoded(self._library.ask("kf_server_log", self.handle).text).splitlines()

    @property
    def held_bytes(self) -> tuple[int, int]:
        """Bytes of shared memory that are reserved, and those that are used."""
        reserved, used, *_ = self._library.ask("kf_server_held", self.handle).numbers
        return reserved, used
