"""How the ranks of a feed find its producer: a key-value store where there is one, else Horovod's broadcast.

A store carries an address and a nonce, never a secret: Horovod's listens on all addresses without one. The token comes
from `KERASFEED_TOKEN` or a broadcast of raw bytes.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import fcntl
import http.client
import json
import os
import pathlib
import secrets
import socket
import struct
import tempfile
import urllib.parse
from typing import Any

import tensorflow as tf

from kerasfeed import auth
from kerasfeed.errors import FeedError, ProducerError
from kerasfeed.topology import Topology, initialized_horovod

_HOROVOD_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_HOROVOD_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
_HOROVOD_INTERFACE = "HOROVOD_GLOO_IFACE"
_HTTP_SECONDS = 10.0
_SCOPE = "kerasfeed"
_SIOCGIFADDR = 0x8915
# An address that is on no network (TEST-NET-1, RFC 5737): the way there is the way to anywhere else.
_ELSEWHERE = "192.0.2.1"
_BROADCAST_BYTES = 512


class Store(abc.ABC):
    """A key-value store that all ranks of a job reach."""

    @abc.abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Sets a key, which may have a value already."""

    @abc.abstractmethod
    def get(self, key: str) -> bytes | None:
        """Returns a key's value, or `None`."""


class HorovodStore(Store):
    """The store that `horovodrun --gloo` runs: HTTP PUT and GET of `/scope/key`."""

    def __init__(self, host: str, port: int):
        self.host, self.port = host, port

    def put(self, key: str, value: bytes) -> None:
        status, _ = self._request("PUT", key, value)
        if status != http.client.OK:
            raise FeedError(f"Horovod's store at {self.host}:{self.port} answers {status} to a PUT of {key}")

    def get(self, key: str) -> bytes | None:
        status, body = self._request("GET", key)
        if status == http.client.NOT_FOUND:
            return None
        if status != http.client.OK:
            raise FeedError(f"Horovod's store at {self.host}:{self.port} answers {status} to a GET of {key}")
        return body

    def _request(self, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_HTTP_SECONDS)
        try:
            connection.request(method, f"/{_SCOPE}/{urllib.parse.quote(key, safe='')}", body)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise FeedError(f"Horovod's store at {self.host}:{self.port} can't be reached: {error}") from error
        finally:
            connection.close()


class FolderStore(Store):
    """A folder that all ranks can read and write."""

    def __init__(self, path: str):
        self._path = pathlib.Path(path)
        self._path.mkdir(parents=True, exist_ok=True)

    def put(self, key: str, value: bytes) -> None:
        handle, temporary = tempfile.mkstemp(dir=self._path, prefix=".")
        with os.fdopen(handle, "wb") as file:
            file.write(value)
        os.replace(temporary, self._file(key))

    def get(self, key: str) -> bytes | None:
        try:
            return self._file(key).read_bytes()
        except FileNotFoundError:
            return None

    def _file(self, key: str) -> pathlib.Path:
        return self._path / urllib.parse.quote(key, safe="")


def find_store(topology: Topology) -> Store | None:
    """Returns the store of this job, or `None` where there is none: the ranks then meet by a broadcast.

    Raises:
        ValueError: There are several ranks, but nothing by which they could meet.
    """
    if topology.meeting_dir is not None:
        return FolderStore(topology.meeting_dir)
    if topology.size == 1:
        return None
    host, port = os.environ.get(_HOROVOD_ADDRESS), os.environ.get(_HOROVOD_PORT, "")
    if host and port.isdigit():
        return HorovodStore(host, int(port))
    if initialized_horovod() is None:
        raise ValueError(
            f"Topology(size={topology.size}) was {topology.source}: without Horovod it needs meeting_dir, "
            f"a folder that all ranks share, and {auth.TOKEN_VARIABLE}"
        )
    return None


def broadcast(data: bytes | None, root: int, size: int, name: str) -> bytes:
    """Returns the root rank's `size` bytes on all ranks. A collective: blocks until all ranks are here."""
    hvd: Any = initialized_horovod()
    if not hasattr(hvd, "broadcast"):
        raise FeedError("the ranks can only meet through Horovod once hvd.init() was called in this process")
    padded = (data or b"").ljust(size, b"\0")
    with tf.init_scope(), tf.device("CPU:0"):
        values = tf.constant(list(padded), tf.uint8)
        return bytes(hvd.broadcast(values, root_rank=root, name=name).numpy())


_job_token: bytes | None = None


def job_token(topology: Topology) -> bytes:
    """Returns the token of this job, the same on all ranks; may be a collective at the first call.

    Raises:
        ValueError: There is no way to share one.
    """
    global _job_token
    from_environment = auth.token_from_environment()
    if from_environment is not None:
        return from_environment
    if topology.size == 1:
        return auth.new_token()
    if _job_token is None:
        if initialized_horovod() is None:
            raise ValueError(
                f"ranks that Horovod does not connect need {auth.TOKEN_VARIABLE}, the same secret of at least 16 "
                "characters on all of them"
            )
        fresh = auth.new_token() if topology.rank == 0 else None
        _job_token = broadcast(fresh, 0, auth.TOKEN_BYTES, "kerasfeed.token")
    return _job_token


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a producer listens. `serial` tells a restarted producer from the one before it."""

    host: str
    port: int
    serial: str

    def to_json(self) -> bytes:
        """Returns this as JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()


class Meeting:
    """One run of one feed's producer: where the producer's rank says where it listens, and the others look.

    Args:
        store: The job's store, or `None`: then the address comes by `tell`, from a broadcast or within the process.
        key: The same on all ranks, and for this run of this feed alone.
    """

    def __init__(self, store: Store | None, key: str):
        self._store = store
        self._key = key
        self._told: Address | None = None
        self._failure: str | None = None

    def publish(self, host: str, port: int) -> None:
        """The producer listens here from now on."""
        earlier, self._told = self._told, Address(host, port, secrets.token_hex(8))
        if self._store is None:
            return
        try:
            self._store.put(self._key, self._told.to_json())
        except FeedError:
            # A producer that was restarted where the one before it listened is found all the same.
            if earlier is None or (earlier.host, earlier.port) != (host, port):
                raise

    def publish_failure(self, message: str) -> None:
        """There will be no producer."""
        self._failure = message
        if self._store is not None:
            self._store.put(self._key, json.dumps({"failure": message}).encode())

    def tell(self, address: Address) -> None:
        """Says where the producer listens, as learnt by other means than the store."""
        self._told = address

    def locate(self) -> Address | None:
        """Returns where the producer listens, or `None` if that is not known yet.

        Raises:
            ProducerError: There will be no producer; the message says why.
        """
        if self._failure is not None:
            raise ProducerError(self._failure)
        if self._store is not None:
            try:
                data = self._store.get(self._key)
            except FeedError:
                # A store that fails once must not take away what is known.
                if self._told is None:
                    raise
                data = None
            if data is not None:
                value = json.loads(data)
                if "failure" in value:
                    raise ProducerError(str(value["failure"]))
                self._told = Address(str(value["host"]), int(value["port"]), str(value["serial"]))
        return self._told


def meet_by_broadcast(meeting: Meeting, topology: Topology, producer: int, name: str) -> None:
    """Hands the producer's address from its rank to all others: a collective."""
    mine = meeting.locate() if topology.rank == producer else None
    data = mine.to_json() if mine is not None else None
    value = json.loads(broadcast(data, producer, _BROADCAST_BYTES, f"kerasfeed.address.{name}").rstrip(b"\0"))
    meeting.tell(Address(str(value["host"]), int(value["port"]), str(value["serial"])))


def listening_host(topology: Topology) -> str:
    """Returns the address a producer listens on: loopback if all ranks share this host, else the ranks' own network."""
    if topology.one_host:
        return "127.0.0.1"
    interface = os.environ.get(_HOROVOD_INTERFACE, "").split(",")[0]
    if interface:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    target = os.environ.get(_HOROVOD_ADDRESS) or _ELSEWHERE
    host = ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # Connecting a datagram socket sends nothing: it only picks the interface that leads there.
        probe.connect((target, 9))
        host = str(probe.getsockname()[0])
    if not host or host.startswith("127."):
        raise FeedError(
            f"the ranks run on several hosts, but the way to {target} does not tell on which address of this host they "
            f"reach it. Name the network interface in {_HOROVOD_INTERFACE}"
        )
    return host
