"""Backups in a folder: one rank writes them, all ranks read them, and a crash at any moment leaves the last good one.

What comes in is files by name and a few JSON values. A backup is written aside, its manifest last, and renamed into
place when all of it is on the disk; a backup leaves the same way, so that a `backup-<serial>` is never half there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import io
import json
import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from kerasfeed.errors import StateError

FORMAT = 1
MANIFEST = "manifest.json"
LOCK = "kerasfeed.lock"

_LOG = logging.getLogger("kerasfeed")
_BACKUP = re.compile(r"backup-(0|[1-9][0-9]*)")
_ASIDE = re.compile(r"kerasfeed-(incomplete|removed)-[0-9]+-[0-9a-f]{16}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
# A reader that is overtaken this often is not unlucky: somebody writes all the time.
_MAX_OVERTAKEN = 100

Part = bytes | Callable[[BinaryIO], None]


class _ReplacedError(StateError):
    """The backup was there and is gone: a writer has replaced it."""


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """What a backup's manifest says about one of its files.

    Attributes:
        size: Its length in bytes.
        sha256: The hex digest of its bytes.
    """

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Backup:
    """A backup that is complete.

    Attributes:
        path: Its folder.
        serial: Its number; a later backup has a higher one.
        info: The JSON values that were written with it.
        files: Its files by name.
    """

    path: Path
    serial: int
    info: Mapping[str, Any] = dataclasses.field(hash=False)
    files: Mapping[str, StoredFile] = dataclasses.field(hash=False, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its files."""
        return tuple(self.files)

    def read(self, name: str) -> bytes:
        """Returns the bytes of a file, checked against the manifest.

        Raises:
            KeyError: The backup has no file of that name.
            StateError: The file is damaged, or a writer has replaced the backup since.
        """
        if name not in self.files:
            raise KeyError(f"{self.path}: no file {name!r}. It has: {', '.join(map(repr, self.names))}")
        with _opened(self.path, name) as file:
            data = file.read()
        self._compare(name, len(data), hashlib.sha256(data).hexdigest())
        return data

    def verify(self) -> None:
        """Reads all files, without keeping them in memory.

        Raises:
            StateError: One is damaged, or a writer has replaced the backup since.
        """
        for name, stored in self.files.items():
            with _opened(self.path, name) as file:
                size = os.fstat(file.fileno()).st_size
                digest = hashlib.file_digest(file, "sha256").hexdigest() if size == stored.size else ""
            self._compare(name, size, digest)

    def _compare(self, name: str, size: int, digest: str) -> None:
        stored = self.files[name]
        if size != stored.size:
            raise StateError(f"{self.path / name}: must have {stored.size} bytes. Received: {size}")
        if digest != stored.sha256:
            raise StateError(f"{self.path / name}: its SHA-256 must be {stored.sha256}. Received: {digest}")


class BackupFolder:
    """The backups of one feed. Any process may read; one at a time may write.

    Args:
        path: The folder. It need not exist: the first `write` makes it.
        keep: How many complete backups stay.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int = 1):
        if not isinstance(keep, int) or isinstance(keep, bool):
            raise TypeError(f"BackupFolder: keep must be an int. Received: {keep!r}")
        if keep < 1:
            raise ValueError(f"BackupFolder: keep must be at least 1. Received: {keep}")
        # The process may change its working folder.
        self.path = Path(os.path.abspath(path))
        self.keep = keep
        self._mutex = threading.RLock()
        self._lock_file: io.FileIO | None = None
        self._exclusive = False
        self._damaged: set[int] = set()

    # --- the lock -----------------------------------------------------------------------------------------------------

    def lock(self) -> BackupFolder:
        """Makes this process the folder's writer until `unlock`, or until it ends. `with folder.lock(): ...` works too.

        Raises:
            StateError: Another writer is at work.
            OSError: The folder can't be made or written to.
        """
        with self._mutex:
            if self._lock_file is not None and not _has_name(self._lock_file, self.path / LOCK):
                # Somebody removed the folder meanwhile.
                self.unlock()
            if self._lock_file is None:
                _make_folder(self.path)
                self._lock_file = self._acquire()
                _holders.add(self)
        return self

    def unlock(self) -> None:
        """Lets another process be the writer."""
        with self._mutex:
            if self._lock_file is not None:
                self._lock_file.close()
                self._lock_file = None

    def __enter__(self) -> BackupFolder:
        return self.lock()

    def __exit__(self, *exc_info: object) -> None:
        self.unlock()

    def _acquire(self) -> io.FileIO:
        path = self.path / LOCK
        while True:
            # Not by mode "a" or "w": the content is the holder's until the lock is ours.
            file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")
            try:
                self._exclusive = _flock(file, path)
                # The one that held it may have deleted it: the lock of a file that has no name keeps nobody out.
                if _has_name(file, path):
                    # For people only, so a full disk does not matter here.
                    with contextlib.suppress(OSError):
                        file.truncate(0)
                        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
                    return file
            except BaseException:
                file.close()
                raise
            file.close()

    # --- writing ------------------------------------------------------------------------------------------------------

    def write(self, parts: Mapping[str, Part], info: Mapping[str, Any]) -> Backup:
        """Writes a backup, and removes those that it makes superfluous. Becomes the folder's writer if nobody is.

        Args:
            parts: The files by name: bytes, or a function that writes to the file it is given (and may seek in it).
            info: JSON values that go with them.

        Raises:
            TypeError, ValueError: A name, a part or `info` can't be stored.
            StateError: Another writer is at work.
            OSError: The file system refused, as when the disk is full. The backups that were there are untouched.
        """
        for name, part in parts.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name) or name == MANIFEST:
                raise ValueError(
                    f"{self.path}: a part's name must be letters, digits, '_', '-', '.', not {MANIFEST!r}. "
                    f"Received: {name!r}"
                )
            if not isinstance(part, bytes) and not callable(part):
                raise TypeError(f"{self.path}: part {name!r} must be bytes or a function. Received: {part!r}")
        info = json.loads(json.dumps(dict(info), allow_nan=False))
        with self._mutex:
            self.lock()
            self._remove_stale()
            serial = max(self._serials(), default=0) + 1
            incomplete = self._aside("incomplete")
            path = self.path / f"backup-{serial}"
            try:
                incomplete.mkdir()
                files = {name: _write_file(incomplete / name, part) for name, part in sorted(parts.items())}
                manifest = _encode_manifest(serial, info, files)
                _write_file(incomplete / MANIFEST, manifest)
                sync_folder(incomplete)
                incomplete.rename(path)
                # Until this is done, a power failure may undo the rename: no older backup may go before.
                sync_folder(self.path)
                self._damaged.discard(serial)
            except BaseException as error:
                error.add_note(f"while writing {path}; the backups before it are untouched")
                shutil.rmtree(incomplete, ignore_errors=True)
                raise
            try:
                self._prune(serial)
            except (OSError, StateError) as error:
                _LOG.warning("%s: can't remove a superfluous backup: %s", self.path, error)
            return Backup(path, serial, info, files)

    def _aside(self, why: str) -> Path:
        return self.path / f"kerasfeed-{why}-{os.getpid()}-{secrets.token_hex(8)}"

    def _remove_stale(self) -> None:
        """Removes what a dead writer left. The lock says that there is no other living one."""
        if self._exclusive:
            for path in self._entries(_ASIDE):
                shutil.rmtree(path, ignore_errors=True)

    def _prune(self, newest: int) -> None:
        complete = {newest}
        for serial in sorted(self._serials(), reverse=True):
            if len(complete) < self.keep and serial not in self._damaged and self._looks_complete(serial):
                complete.add(serial)
        for serial in sorted(self._serials() - complete):
            self._remove(serial)

    def _looks_complete(self, serial: int) -> bool:
        """Without reading the files: a backup that is read is checked then."""
        try:
            backup = self._open_backup(serial)
            return all((backup.path / name).stat().st_size == file.size for name, file in backup.files.items())
        except (StateError, OSError):
            return False

    def _remove(self, serial: int) -> bool:
        """Removes a backup in one step, as a reader sees it. What never had a manifest may be the user's: it stays."""
        path = self.path / f"backup-{serial}"
        if path.is_symlink() or not (path / MANIFEST).is_file():
            return False
        removed = self._aside("removed")
        path.rename(removed)
        shutil.rmtree(removed)
        return True

    def delete(self) -> None:
        """Removes all backups and the lock, and the folder if nothing else is in it.

        Raises:
            StateError: Another writer is at work.
            OSError: The file system refused.
        """
        with self._mutex:
            if not self.path.exists():
                self.unlock()
                return
            self.lock()
            self._remove_stale()
            for serial in sorted(self._serials()):
                if not self._remove(serial):
                    _LOG.warning("%s: not removed, it is a link or has no %s", self.path / f"backup-{serial}", MANIFEST)
            (self.path / LOCK).unlink(missing_ok=True)
            self.unlock()
            with contextlib.suppress(OSError):
                self.path.rmdir()

    # --- reading ------------------------------------------------------------------------------------------------------

    def newest(self, check: Callable[[Backup], None] | None = None) -> Backup | None:
        """Returns the newest backup that is good, or `None` if there is no backup. Reads all of its files.

        Args:
            check: Is called with it, and raises `StateError` if it is another model's or another feed's. That is no
                reason to take an older one: the error is the caller's.

        Raises:
            StateError: There are backups and none is good, or the folder can't be read.
        """
        for _ in range(_MAX_OVERTAKEN):
            with contextlib.suppress(_ReplacedError):
                backup = self._newest_good()
                break
            # A network file system may show for a while what was there before.
            time.sleep(0.05)
        else:
            raise StateError(f"{self.path}: the backup was replaced {_MAX_OVERTAKEN} times while it was read")
        if backup is not None and check is not None:
            check(backup)
        return backup

    def peek(self) -> Backup | None:
        """Returns the newest backup whose manifest is good, unread, or `None`: for whoever can do without."""
        for serial in sorted(self._serials(), reverse=True):
            with contextlib.suppress(StateError):
                return self._open_backup(serial)
        return None

    def _newest_good(self) -> Backup | None:
        problems = []
        for serial in sorted(self._serials(), reverse=True):
            try:
                backup = self._open_backup(serial)
                backup.verify()
            except _ReplacedError:
                raise
            except StateError as error:
                self._damaged.add(serial)
                problems.append(str(error))
                continue
            for problem in problems:
                _LOG.warning("a damaged backup: %s. The one before it is used: %s", problem, backup.path)
            return backup
        if problems:
            raise StateError(
                "\n  ".join([f"{self.path}: no backup is good:", *problems])
                + "\nTo start from scratch, remove them or give another folder"
            )
        for path in self._entries(_ASIDE):
            _LOG.warning("%s: no complete backup, only %s, left by a writer that died", self.path, path.name)
        return None

    def _open_backup(self, serial: int) -> Backup:
        path = self.path / f"backup-{serial}"
        with _opened(path, MANIFEST) as file:
            data = file.read()
        try:
            return _decode_manifest(path, serial, data)
        except StateError as error:
            raise StateError(f"{path / MANIFEST}: {error}") from error

    def _entries(self, pattern: re.Pattern[str]) -> list[Path]:
        try:
            return [self.path / name for name in os.listdir(self.path) if pattern.fullmatch(name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StateError(f"{self.path}: the backups can't be read: {error}") from error

    def _serials(self) -> set[int]:
        return {int(path.name.removeprefix("backup-")) for path in self._entries(_BACKUP)}


_holders: weakref.WeakSet[BackupFolder] = weakref.WeakSet()


def _forget_locks() -> None:
    """In a forked child: its copy of the lock file would hold the lock after the death of the writer."""
    for folder in list(_holders):
        folder._mutex = threading.RLock()
        folder.unlock()


os.register_at_fork(after_in_child=_forget_locks)


def _has_name(file: io.FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _flock(file: io.FileIO, path: Path) -> bool:
    """Returns whether the lock is held; `False` where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            holder = json.loads(file.read())
            who = f"process {holder['pid']} on host {holder['host']}"
        except (ValueError, TypeError, KeyError):
            who = "a process that did not say its name"
        raise StateError(
            f"{path.parent}: must have one writer. Received a second one, process {os.getpid()} on host "
            f"{socket.gethostname()}, while {who} holds {path.name}. Give each job a folder of its own"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
            raise
        _LOG.warning("%s: can't be locked (%s): nothing keeps a second job from writing here", path, error)
        return False
    return True


@contextlib.contextmanager
def _opened(folder: Path, name: str) -> Iterator[io.BufferedReader]:
    """A file of a backup, open for reading. Tells a file that is missing from a backup that has gone as a whole."""
    try:
        with open(folder / name, "rb") as file:
            yield file
    except OSError as error:
        if not os.path.lexists(folder):
            raise _ReplacedError(f"{folder}: was replaced or removed while it was read") from error
        what = "is missing" if isinstance(error, FileNotFoundError) else f"can't be read: {error.strerror}"
        raise StateError(f"{folder / name}: {what}") from error


def _make_folder(path: Path) -> None:
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def _write_file(path: Path, part: Part) -> StoredFile:
    with open(path, "x+b") as file:
        if isinstance(part, bytes):
            file.write(part)
        else:
            part(file)
            if file.closed:
                raise ValueError(f"{path.name}: the function that writes this part must not close its file")
        file.flush()
        os.fsync(file.fileno())
        # Read back, as a function may have written in any order.
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return StoredFile(file.tell(), digest)


def sync_folder(path: Path) -> None:
    """Has the names in a folder on the disk, not only in memory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems can't, and need not.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1, allow_nan=False).encode() + b"\n"


def _encode_manifest(serial: int, info: Any, files: Mapping[str, StoredFile]) -> bytes:
    content = {
        "format": FORMAT,
        "serial": serial,
        "info": info,
        "files": {name: dataclasses.asdict(file) for name, file in files.items()},
    }
    return _canonical({**content, "checksum": hashlib.sha256(_canonical(content)).hexdigest()})


def _decode_manifest(path: Path, serial: int, data: bytes) -> Backup:
    try:
        content = json.loads(data)
        # The checksum is over this one way to write the values, so each byte of the file is covered.
        if not isinstance(content, dict) or _canonical(content) != data:
            raise StateError("not as it was written: damaged")
        checksum = content.pop("checksum", None)
        expected = hashlib.sha256(_canonical(content)).hexdigest()
        if checksum != expected:
            raise StateError(f"its checksum must be {expected}. Received: {checksum}")
        if content["format"] != FORMAT:
            raise StateError(f"this release of kerasfeed reads format {FORMAT}. Received: {content['format']!r}")
        if content["serial"] != serial:
            raise StateError(f"its serial must be {serial}, as in the folder's name. Received: {content['serial']!r}")
        files = {name: StoredFile(file["size"], file["sha256"]) for name, file in content["files"].items()}
        for name in files:
            if not _NAME.fullmatch(name):
                raise StateError(f"names a file {name!r}")
        return Backup(path, serial, content["info"], files)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"not a manifest: {error}") from error
    except KeyError as error:
        raise StateError(f"not a manifest: {error} is missing") from error
