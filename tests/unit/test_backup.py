"""A backup is whole or not there: after damage, a full disk, a kill at any line, and with others at the same folder."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import logging
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasfeed import backup as backup_module
from kerasfeed.backup import Backup, BackupFolder
from kerasfeed.errors import StateError

pytestmark = pytest.mark.once

PARTS = {"feed.state": b"\x00state\r\n" * 8, "weights.bin": bytes(range(40))}


def run_python(code, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True, **options
    ).stdout


def start_python(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def names_in(path):
    return sorted(os.listdir(path))


def write_many(path, count, keep=1):
    """Leaves backups whose part "n" and whose info hold the number of the write."""
    with BackupFolder(path, keep=keep).lock() as folder:
        for number in range(1, count + 1):
            folder.write({"n": b"%d" % number, "more": bytes(20)}, {"n": number})


def assert_whole(backup):
    assert backup.read("n") == b"%d" % backup.info["n"]
    assert backup.read("more") == bytes(20)


@pytest.fixture
def no_fsync(monkeypatch):
    """For tests with many writes and no power failure."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# --- round trip -------------------------------------------------------------------------------------------------------


def test_a_backup_comes_back_as_it_was(tmp_path):
    written = BackupFolder(tmp_path / "a" / "b").write(PARTS, {"epoch": 3, "loss": 0.1, "names": ["é", None]})
    backup = BackupFolder(tmp_path / "a" / "b").newest()
    assert backup == written
    assert backup.path == tmp_path / "a" / "b" / "backup-1"
    assert backup.serial == 1
    assert backup.info == {"epoch": 3, "loss": 0.1, "names": ["é", None]}
    assert backup.names == ("feed.state", "weights.bin")
    assert {name: backup.read(name) for name in backup.names} == PARTS
    assert (backup.path / "weights.bin").read_bytes() == PARTS["weights.bin"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    parts=st.dictionaries(st.from_regex(r"[a-z0-9_][A-Za-z0-9_.-]{0,9}", fullmatch=True), st.binary(), max_size=3),
    info=st.dictionaries(st.text(), json_values, max_size=3),
)
def test_any_parts_and_info_come_back(tmp_path_factory, parts, info):
    path = tmp_path_factory.mktemp("backups")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        BackupFolder(path).write(parts, info)
    backup = BackupFolder(path).newest()
    assert {name: backup.read(name) for name in backup.names} == parts
    assert backup.info == info
    shutil.rmtree(path)


def test_a_function_may_write_a_part_in_any_order(tmp_path):
    def write(file):
        file.write(b"?" * 10)
        file.seek(3)
        file.write(b"abc")

    backup = BackupFolder(tmp_path).write({"part": write}, {})
    assert backup.read("part") == b"???abc????"
    assert BackupFolder(tmp_path).newest() == backup


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "manifest.json", ".hidden", "a" * 201, "a\n", 3])
def test_a_name_that_is_no_plain_file_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="part's name must be"):
        BackupFolder(tmp_path / "new").write({name: b""}, {})
    assert not (tmp_path / "new").exists()


def test_what_can_not_be_stored_is_refused_before_anything_is_written(tmp_path):
    folder = BackupFolder(tmp_path / "new")
    with pytest.raises(TypeError, match=r"part 'a' must be bytes or a function. Received: 'text'"):
        folder.write({"a": "text"}, {})
    with pytest.raises(TypeError, match="not JSON serializable"):
        folder.write({}, {"a": object()})
    with pytest.raises(ValueError, match="not JSON compliant"):
        folder.write({}, {"a": float("nan")})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("keep", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), ("2", TypeError)])
def test_keep_is_checked(tmp_path, keep, error):
    with pytest.raises(error, match=f"keep must be .* Received: {keep!r}"):
        BackupFolder(tmp_path, keep=keep)


def test_a_name_that_the_backup_does_not_have_is_a_key_error(tmp_path):
    with pytest.raises(KeyError, match=r"no file 'other'. It has: 'feed.state', 'weights.bin'"):
        BackupFolder(tmp_path).write(PARTS, {}).read("other")


def test_a_backup_can_not_be_changed(tmp_path):
    with pytest.raises(dataclasses.FrozenInstanceError):
        BackupFolder(tmp_path).write({}, {}).serial = 3


def test_a_folder_stays_the_same_when_the_process_changes_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = BackupFolder("backups")
    folder.write(PARTS, {})
    monkeypatch.chdir("/")
    assert folder.newest().path == tmp_path / "backups" / "backup-1"


# --- which one --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_ones_stay_and_the_newest_is_given(tmp_path, keep, no_fsync):
    write_many(tmp_path, 12, keep)
    assert names_in(tmp_path) == sorted(["kerasfeed.lock", *(f"backup-{n}" for n in range(13 - keep, 13))])
    assert BackupFolder(tmp_path).newest().serial == 12


def test_there_is_no_backup_where_nothing_was_written(tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.h5").write_bytes(b"mine")
    (tmp_path / "foreign" / "backup-x").mkdir()
    for name in ("missing", "foreign"):
        assert BackupFolder(tmp_path / name).newest() is None
    assert BackupFolder(tmp_path).newest() is None
    assert not (tmp_path / "missing").exists()


def test_a_first_backup_that_was_never_finished_is_said(tmp_path, caplog):
    (tmp_path / "kerasfeed-incomplete-1-0123456789abcdef").mkdir()
    assert BackupFolder(tmp_path).newest() is None
    assert "no complete backup, only kerasfeed-incomplete-1-0123456789abcdef" in caplog.text


def test_what_is_not_ours_is_never_deleted(tmp_path, no_fsync):
    foreign = {"model.h5", "backup-x", "backup-03", "kerasfeed-incomplete-mine", "backup-5.old"}
    for name in foreign:
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "backup-2").mkdir()
    (tmp_path / "backup-2" / "notes.txt").write_bytes(b"mine")
    write_many(tmp_path, 3)
    assert BackupFolder(tmp_path).newest().serial == 5
    BackupFolder(tmp_path).delete()
    assert set(names_in(tmp_path)) == {*foreign, "backup-2"}
    assert names_in(tmp_path / "backup-2") == ["notes.txt"]


def test_the_check_gets_the_newest_and_its_error_is_no_reason_to_take_an_older_one(tmp_path):
    write_many(tmp_path, 2, keep=2)
    seen = []

    def check(backup):
        seen.append(backup.info["n"])
        raise StateError("the backup of another model")

    with pytest.raises(StateError, match=r"^the backup of another model$"):
        BackupFolder(tmp_path).newest(check)
    assert seen == [2]
    assert BackupFolder(tmp_path / "missing").newest(check) is None
    assert seen == [2]


# --- damage -----------------------------------------------------------------------------------------------------------


def flips(data):
    """The bytes with one bit of one byte flipped, each byte once."""
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << (place % 8)
        yield bytes(damaged)


def cuts(data):
    for length in range(len(data)):
        yield data[:length]


def test_more_than_a_thousand_damaged_backups_are_all_found(tmp_path):
    backup = BackupFolder(tmp_path).write(PARTS, {"epoch": 3, "lr": 0.5})
    folder = BackupFolder(tmp_path)
    count = 0
    for name in ("manifest.json", *PARTS):
        path = backup.path / name
        data = path.read_bytes()
        for damaged in (*cuts(data), *flips(data), data + b"\n", data + data):
            path.write_bytes(damaged)
            with pytest.raises(StateError, match=f"no backup is good:\n  {re.escape(str(path))}: "):
                folder.newest()
            count += 1
        path.write_bytes(data)
    assert count > 1000
    assert folder.newest() == backup


def test_after_damage_the_backup_before_is_used_and_it_is_said(tmp_path, caplog):
    write_many(tmp_path, 2, keep=2)
    for name in ("manifest.json", "n"):
        path = tmp_path / "backup-2" / name
        data = path.read_bytes()
        for damaged in (*cuts(data), *list(flips(data))[::20]):
            path.write_bytes(damaged)
            caplog.clear()
            backup = BackupFolder(tmp_path).newest()
            assert backup.serial == 1
            assert_whole(backup)
            (record,) = caplog.records
            assert (record.name, record.levelno) == ("kerasfeed", logging.WARNING)
            assert str(path) in record.getMessage()
            assert f"used: {tmp_path / 'backup-1'}" in record.getMessage()
        path.write_bytes(data)
    assert BackupFolder(tmp_path).newest().serial == 2


def test_damage_says_what_is_wrong(tmp_path):
    backup = BackupFolder(tmp_path).write(PARTS, {})
    part = backup.path / "weights.bin"
    part.write_bytes(bytes(39))
    with pytest.raises(StateError, match=r"weights.bin: must have 40 bytes. Received: 39"):
        BackupFolder(tmp_path).newest()
    part.write_bytes(bytes(40))
    with pytest.raises(StateError, match=r"weights.bin: its SHA-256 must be [0-9a-f]{64}. Received: [0-9a-f]{64}"):
        BackupFolder(tmp_path).newest()
    part.unlink()
    with pytest.raises(StateError, match=r"weights.bin: is missing"):
        BackupFolder(tmp_path).newest()
    part.mkdir()
    with pytest.raises(StateError, match=r"weights.bin: can't be read: Is a directory"):
        BackupFolder(tmp_path).newest()
    (backup.path / "manifest.json").unlink()
    with pytest.raises(StateError, match=r"manifest.json: is missing"):
        BackupFolder(tmp_path).newest()


def test_a_file_that_is_damaged_after_newest_is_found_when_it_is_read(tmp_path):
    BackupFolder(tmp_path).write(PARTS, {})
    backup = BackupFolder(tmp_path).newest()
    (backup.path / "weights.bin").write_bytes(bytes(40))
    with pytest.raises(StateError, match="its SHA-256 must be"):
        backup.read("weights.bin")
    assert backup.read("feed.state") == PARTS["feed.state"]


def test_if_none_is_good_each_one_is_named(tmp_path):
    write_many(tmp_path, 2, keep=2)
    (tmp_path / "backup-2" / "n").unlink()
    (tmp_path / "backup-1" / "more").write_bytes(b"")
    (tmp_path / "backup-7").mkdir()
    (tmp_path / "backup-8").write_bytes(b"a file")
    (tmp_path / "backup-9").symlink_to("nowhere")
    with pytest.raises(StateError) as raised:
        BackupFolder(tmp_path).newest()
    problems = [
        "backup-9/manifest.json: is missing",
        "backup-8/manifest.json: can't be read: Not a directory",
        "backup-7/manifest.json: is missing",
        "backup-2/n: is missing",
        "backup-1/more: must have 20 bytes. Received: 0",
    ]
    lines = [f"  {tmp_path}/{problem}" for problem in problems]
    assert str(raised.value).splitlines()[1:-1] == lines


def test_a_backup_under_another_number_is_damaged(tmp_path):
    write_many(tmp_path, 2)
    (tmp_path / "backup-2").rename(tmp_path / "backup-9")
    with pytest.raises(StateError, match=r"its serial must be 9, as in the folder's name. Received: 2"):
        BackupFolder(tmp_path).newest()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"format": 2}, "reads format 1. Received: 2"),
        ({"files": {"../up": {"size": 1, "sha256": ""}}}, "names a file '../up'"),
        ({"files": {"a": 3}}, "not a manifest"),
        ({"files": {"a": {}}}, "not a manifest: 'size' is missing"),
        ({"files": []}, "not a manifest"),
    ],
)
def test_a_manifest_of_another_program_is_refused(tmp_path, content, message):
    backup = BackupFolder(tmp_path).write({}, {})
    manifest = json.loads((backup.path / "manifest.json").read_bytes())
    del manifest["checksum"]
    manifest.update(content)
    checksum = backup_module.hashlib.sha256(backup_module._canonical(manifest)).hexdigest()
    (backup.path / "manifest.json").write_bytes(backup_module._canonical({**manifest, "checksum": checksum}))
    with pytest.raises(StateError, match=message):
        BackupFolder(tmp_path).newest()


@pytest.mark.parametrize("data", [b"[" * 100_000, b"\xff", b"[]\n", b"1e999\n", b"{}\n", b"9" * 5000])
def test_a_manifest_that_is_no_manifest_is_damaged(tmp_path, data):
    backup = BackupFolder(tmp_path).write({}, {})
    (backup.path / "manifest.json").write_bytes(data)
    with pytest.raises(StateError, match=r"manifest.json: "):
        BackupFolder(tmp_path).newest()


def test_a_damaged_backup_gives_way_to_good_ones(tmp_path, no_fsync):
    write_many(tmp_path, 3, keep=2)
    (tmp_path / "backup-3" / "n").write_bytes(b"4")
    folder = BackupFolder(tmp_path, keep=2)
    assert folder.newest().serial == 2
    assert folder.write({"n": b"5", "more": bytes(20)}, {"n": 5}).serial == 4
    assert names_in(tmp_path) == ["backup-2", "backup-4", "kerasfeed.lock"]


def test_a_backup_folder_that_can_not_be_read_is_no_empty_one(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateError, match=r"the backups can't be read: .*Not a directory"):
        BackupFolder(tmp_path / "file").newest()
    with pytest.raises(StateError, match=r"the backups can't be read: .*Not a directory"):
        BackupFolder(tmp_path / "file" / "below").newest()


# --- the file system refuses ------------------------------------------------------------------------------------------


def refuse(monkeypatch, function, number):
    """Lets the `number`th call of a function fail as on a full disk. Returns how often it was called, in a list."""
    module = backup_module if function == "open" else os
    real = getattr(module, function, open)
    calls = []

    def refused(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, function, refused, raising=False)
    return calls


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("function", ["fsync", "open", "rename", "mkdir"])
def test_after_a_refused_call_the_last_backup_is_there_and_no_litter(tmp_path, keep, function):
    number = 0
    while True:
        number += 1
        path = tmp_path / str(number)
        write_many(path, 2, keep)
        old = names_in(path)
        folder = BackupFolder(path, keep=keep)
        with pytest.MonkeyPatch.context() as patch:
            calls = refuse(patch, function, number)
            try:
                folder.write({"n": b"3", "more": bytes(20)}, {"n": 3})
            except OSError as error:
                failed = error.errno
            else:
                failed = None
        assert failed in (errno.ENOSPC, None)
        backup = folder.newest()
        assert_whole(backup)
        if failed and backup.serial == 2:
            assert names_in(path) == old
        else:
            assert backup.serial == 3
        assert not [name for name in names_in(path) if not re.fullmatch(r"backup-\d+|kerasfeed.lock", name)]
        folder.write({"n": b"4", "more": bytes(20)}, {"n": 4})
        assert names_in(path)[-keep - 1 : -1] == [name for name in names_in(path) if name.startswith("backup-")]
        assert_whole(folder.newest())
        folder.unlock()
        if len(calls) < number:
            break
    assert number > {"rename": 2, "mkdir": 1}.get(function, 3)


def test_a_file_that_grows_too_large_leaves_the_last_backup(tmp_path):
    folder = BackupFolder(tmp_path)
    folder.write(PARTS, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (10_000, 3_000_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
        try:
            with pytest.raises(OSError, match="File too large") as raised:
                folder.write({"a": b"small", "b": lambda file, size=size: file.write(bytes(size))}, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert f"while writing {tmp_path / 'backup-2'}" in raised.value.__notes__[0]
        assert names_in(tmp_path) == ["backup-1", "kerasfeed.lock"]
    assert {name: folder.newest().read(name) for name in PARTS} == PARTS


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_part_that_raises_leaves_the_last_backup(tmp_path, error):
    def write(file):
        file.write(b"half")
        raise error("no")

    folder = BackupFolder(tmp_path)
    folder.write(PARTS, {})
    with pytest.raises(error, match="no"):
        folder.write({"a": write}, {})
    with pytest.raises(ValueError, match="a: the function that writes this part must not close its file"):
        folder.write({"a": lambda file: file.close()}, {})
    assert names_in(tmp_path) == ["backup-1", "kerasfeed.lock"]
    assert folder.newest().serial == 1


def test_a_folder_that_can_not_be_made_or_written_to_is_an_os_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        BackupFolder(tmp_path / "file" / "below").write(PARTS, {})
    write_many(tmp_path, 1)
    real = os.open

    def read_only(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(OSError, match="Read-only file system"):
        BackupFolder(tmp_path).write(PARTS, {})
    assert BackupFolder(tmp_path).newest().serial == 1


def test_a_superfluous_backup_that_can_not_be_removed_is_a_warning(tmp_path, monkeypatch, caplog):
    folder = BackupFolder(tmp_path)
    folder.write(PARTS, {})

    def fail(path, **kwargs):
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(shutil, "rmtree", fail)
    assert folder.write(PARTS, {}).serial == 2
    assert "can't remove a superfluous backup" in caplog.text
    monkeypatch.undo()
    folder.write(PARTS, {})
    assert names_in(tmp_path) == ["backup-3", "kerasfeed.lock"]


def test_nothing_is_renamed_or_removed_before_it_is_on_the_disk(tmp_path, monkeypatch):
    BackupFolder(tmp_path / "new" / "backups").write({"a": b"1", "b": b"2"}, {})
    log = []

    def note(module, function, describe):
        real = getattr(module, function)

        def noted(*args, **kwargs):
            log.append((function, describe(*args)))
            return real(*args, **kwargs)

        monkeypatch.setattr(module, function, noted)

    def short(path):
        return re.sub(r"kerasfeed-(\w+)-.*?(/|$)", r"\1\2", os.path.relpath(path, tmp_path))

    note(os, "fsync", lambda descriptor: short(os.readlink(f"/proc/self/fd/{descriptor}")))
    note(os, "rename", lambda source, target, *_: (short(source), short(target)))
    note(shutil, "rmtree", lambda path, *_: short(path))
    BackupFolder(tmp_path / "new" / "backups").write({"a": b"1", "b": b"2"}, {})
    assert log == [
        ("fsync", "new/backups/incomplete/a"),
        ("fsync", "new/backups/incomplete/b"),
        ("fsync", "new/backups/incomplete/manifest.json"),
        ("fsync", "new/backups/incomplete"),
        ("rename", ("new/backups/incomplete", "new/backups/backup-2")),
        ("fsync", "new/backups"),
        ("rename", ("new/backups/backup-1", "new/backups/removed")),
        ("rmtree", "new/backups/removed"),
    ]
    log.clear()
    BackupFolder(tmp_path / "other" / "backups").write({}, {})
    assert sorted(log[:2]) == [("fsync", "."), ("fsync", "other")]


# --- killed -----------------------------------------------------------------------------------------------------------

# Kills a forked child at its nth line, for every n, of what this package and shutil execute. Python's own buffers die
# with it, as under kill -9.
KILL_AT_EACH_LINE = """
import json, os, re, shutil, sys
from kerasfeed import backup
from kerasfeed.backup import BackupFolder

path, action, before, keep = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
os.fsync = lambda descriptor: None
files = {backup.__file__, shutil.__file__, "<string>"}

def in_two_pieces(file):
    file.write(bytes(10))
    file.flush()
    file.write(bytes(10))

def write(folder, number):
    folder.write({"n": b"%d" % number, "more": in_two_pieces}, {"n": number})

def act(folder):
    if action == "write":
        write(folder, before + 1)
    else:
        folder.delete()

def die_at(line):
    left = line
    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if not left:
                os._exit(137)
        return trace
    sys.settrace(trace)

outcomes = []
while True:
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(path)
    with BackupFolder(path, keep=keep) as folder:
        for number in range(1, before + 1):
            write(folder, number)
    child = os.fork()
    if not child:
        folder = BackupFolder(path, keep=keep)
        die_at(len(outcomes) + 1)
        act(folder)
        sys.settrace(None)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 137), code
    folder = BackupFolder(path, keep=keep)
    newest = folder.newest()
    if newest:
        assert newest.read("n") == b"%d" % newest.info["n"] and newest.read("more") == bytes(20)
    outcomes.append(newest.info["n"] if newest else None)
    # The next writer is kept out by no lock, and clears up.
    write(folder, 99)
    folder.unlock()
    strange = [name for name in os.listdir(path) if not re.fullmatch(r"backup-[0-9]+|kerasfeed.lock", name)]
    assert not strange, strange
    assert len(os.listdir(path)) <= keep + 1, os.listdir(path)
    assert folder.newest().info["n"] == 99
    if code == 0:
        break
print(json.dumps(outcomes))
"""


@pytest.mark.parametrize(("before", "keep"), [(0, 1), (1, 1), (3, 2)])
def test_a_writer_killed_at_any_line_leaves_the_old_backup_or_the_new_one(tmp_path, before, keep):
    outcomes = json.loads(run_python(KILL_AT_EACH_LINE, tmp_path / "b", "write", before, keep, timeout=120))
    old, new = before or None, before + 1
    split = outcomes.index(new)
    assert set(outcomes[:split]) == {old}
    assert set(outcomes[split:]) == {new}
    assert split > 100


def test_a_delete_killed_at_any_line_leaves_the_newest_backup_or_none(tmp_path):
    outcomes = json.loads(run_python(KILL_AT_EACH_LINE, tmp_path / "b", "delete", 3, 2, timeout=120))
    split = outcomes.index(None)
    assert set(outcomes[:split]) == {3}
    assert set(outcomes[split:]) == {None}
    assert split > 30


WRITE_FOR_EVER = """
import itertools, sys
from kerasfeed.backup import BackupFolder

with BackupFolder(sys.argv[1]) as folder:
    for number in itertools.count(1):
        folder.write({"n": b"%d" % number, "more": bytes(20)}, {"n": number})
        print(number, flush=True)
"""


def test_after_kill_9_the_newest_backup_is_whole_and_the_lock_is_free(tmp_path):
    for round_ in range(4):
        with start_python(WRITE_FOR_EVER, tmp_path) as writer:
            for _ in range(3):
                said = int(writer.stdout.readline())
            time.sleep(0.003 * round_)
            writer.send_signal(signal.SIGKILL)
            said = [said, *map(int, writer.stdout)][-1]
        backup = BackupFolder(tmp_path).newest()
        assert_whole(backup)
        assert backup.info["n"] in (said, said + 1)
        with BackupFolder(tmp_path) as folder:
            folder.write({"n": b"0", "more": bytes(20)}, {"n": 0})
        assert len(names_in(tmp_path)) == 2


# --- several processes ------------------------------------------------------------------------------------------------

HOLD = """
import sys
from kerasfeed.backup import BackupFolder

with BackupFolder(sys.argv[1]).lock():
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_writer_is_refused_and_told_who_the_first_one_is(tmp_path):
    write_many(tmp_path, 1)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout.readline() == b"locked\n"
        folder = BackupFolder(tmp_path)
        for act in (folder.lock, folder.delete, lambda: folder.write(PARTS, {})):
            with pytest.raises(
                StateError, match=f"one writer.*process {holder.pid} on host {re.escape(socket.gethostname())} holds"
            ):
                act()
        # A reader needs no lock.
        assert folder.newest().serial == 1
        holder.kill()
    assert folder.write(PARTS, {}).serial == 2


def test_a_folder_keeps_out_another_writer_of_the_same_process(tmp_path):
    first, second = BackupFolder(tmp_path), BackupFolder(tmp_path)
    first.write(PARTS, {})
    with pytest.raises(StateError, match=f"process {os.getpid()} on host .* holds"):
        second.write(PARTS, {})
    first.unlock()
    first.unlock()
    second.write(PARTS, {})
    with pytest.raises(StateError, match="one writer"):
        first.lock()


def test_a_holder_that_did_not_say_its_name_still_holds(tmp_path):
    with open(tmp_path / "kerasfeed.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StateError, match="a process that did not say its name holds"):
            BackupFolder(tmp_path).lock()


def test_a_lock_that_is_deleted_before_it_is_taken_is_taken_anew(tmp_path, monkeypatch):
    real, deleted = fcntl.flock, []

    def flock(file, how):
        if not deleted:
            deleted.append((tmp_path / "kerasfeed.lock").unlink())
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with BackupFolder(tmp_path), pytest.raises(StateError, match="one writer"):
        BackupFolder(tmp_path).lock()


def test_a_forked_child_does_not_inherit_the_lock(tmp_path):
    code = """
import os, sys, time
from kerasfeed.backup import BackupFolder

folder = BackupFolder(sys.argv[1]).lock()
if not os.fork():
    print(os.getpid(), flush=True)
time.sleep(60)
"""
    with start_python(code, tmp_path) as writer:
        child = int(writer.stdout.readline())
        try:
            with pytest.raises(StateError, match=f"process {writer.pid} on host"):
                BackupFolder(tmp_path).lock()
            writer.kill()
            writer.wait()
            BackupFolder(tmp_path).lock()
        finally:
            writer.kill()
            os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_is_a_warning_and_others_files_stay(tmp_path, monkeypatch, caplog):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    aside = tmp_path / "kerasfeed-incomplete-1-0123456789abcdef"
    aside.mkdir()
    BackupFolder(tmp_path).write(PARTS, {})
    assert "can't be locked" in caplog.text
    assert aside.exists()


def test_a_reader_is_not_disturbed_by_a_hundred_replacements(tmp_path):
    write_many(tmp_path, 1)
    code = """
import sys
from kerasfeed.backup import BackupFolder

with BackupFolder(sys.argv[1]) as folder:
    for number in range(2, 102):
        folder.write({"n": b"%d" % number, "more": bytes(20)}, {"n": number})
"""
    seen, whole, problems = [], 0, set()
    with start_python(code, tmp_path) as writer:
        while writer.poll() is None:
            backup = BackupFolder(tmp_path).newest()
            seen.append(backup.info["n"])
            try:
                assert_whole(backup)
                whole += 1
            except StateError as error:
                problems.add(re.sub(r"backup-\d+: ", "", os.path.relpath(str(error), tmp_path)))
        assert writer.returncode == 0
    assert problems <= {"was replaced or removed while it was read"}
    assert seen == sorted(seen)
    assert len(set(seen)) > 10
    assert whole > len(seen) // 2
    assert BackupFolder(tmp_path).newest().info["n"] == 101


def test_a_backup_replaced_while_it_is_read_is_left_for_the_newer_one(tmp_path, monkeypatch):
    write_many(tmp_path, 1)
    writer = BackupFolder(tmp_path)
    verify, replaced = Backup.verify, []

    def overtaken(backup):
        if len(replaced) < 5:
            replaced.append(writer.write({"n": b"2", "more": bytes(20)}, {"n": 2}))
        verify(backup)

    monkeypatch.setattr(Backup, "verify", overtaken)
    assert BackupFolder(tmp_path).newest() == replaced[-1]
    assert len(replaced) == 5


def test_a_reader_that_is_always_overtaken_gives_up(tmp_path, monkeypatch, no_fsync):
    write_many(tmp_path, 1)
    writer = BackupFolder(tmp_path)
    verify = Backup.verify
    monkeypatch.setattr(Backup, "verify", lambda backup: (writer.write({"n": b"1"}, {}), verify(backup)))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(StateError, match="was replaced 100 times while it was read"):
        BackupFolder(tmp_path).newest()


def test_threads_that_share_a_folder_write_one_after_the_other(tmp_path, no_fsync):
    folder = BackupFolder(tmp_path)
    threads = [threading.Thread(target=folder.write, args=({"a": bytes(9)}, {"n": n})) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folder.newest().serial == 8


# --- delete -----------------------------------------------------------------------------------------------------------


def test_delete_leaves_nothing_of_ours(tmp_path):
    path = tmp_path / "backups"
    write_many(path, 3, keep=3)
    (path / "backup-2" / "n").unlink()
    (path / "kerasfeed-incomplete-1-0123456789abcdef").mkdir()
    BackupFolder(path).delete()
    assert not path.exists()
    BackupFolder(path).delete()
    assert not path.exists()


def test_after_delete_a_folder_starts_anew(tmp_path, caplog):
    folder = BackupFolder(tmp_path / "backups", keep=2)
    folder.write(PARTS, {})
    folder.delete()
    assert folder.newest() is None
    assert not caplog.records
    assert folder.write(PARTS, {}).serial == 1
    assert folder.newest().serial == 1


def test_delete_says_what_it_leaves(tmp_path, caplog):
    write_many(tmp_path, 1)
    (tmp_path / "backup-7").mkdir()
    BackupFolder(tmp_path).delete()
    assert names_in(tmp_path) == ["backup-7"]
    assert f"{tmp_path / 'backup-7'}: not removed" in caplog.text


def test_a_folder_that_somebody_removed_is_made_again(tmp_path):
    folder = BackupFolder(tmp_path / "backups")
    folder.write(PARTS, {})
    shutil.rmtree(tmp_path / "backups")
    assert folder.write(PARTS, {}).serial == 1
    with pytest.raises(StateError, match="one writer"):
        BackupFolder(tmp_path / "backups").lock()


def test_the_lock_ends_with_its_block_whatever_happens(tmp_path):
    with pytest.raises(ZeroDivisionError), BackupFolder(tmp_path):
        raise ZeroDivisionError
    BackupFolder(tmp_path).lock()
