"""The committed protobuf code is what feed.proto generates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kerasfeed

ROOT = Path(kerasfeed.__file__).resolve().parent.parent
pytest.importorskip("grpc_tools", reason="grpc_tools pins protobuf 4; checked in keras2")


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The folder into which protoc has just generated everything."""
    out = tmp_path_factory.mktemp("proto")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={out}", f"--pyi_out={out}"]
    subprocess.run([*command, "kerasfeed/proto/feed.proto"], cwd=ROOT, check=True, timeout=60)
    return out / "kerasfeed" / "proto"


@pytest.mark.parametrize("name", ["feed_pb2.py", "feed_pb2.pyi"])
def test_the_committed_code_is_what_feed_proto_generates(generated, name):
    committed = (ROOT / "kerasfeed" / "proto" / name).read_text()
    assert committed == (generated / name).read_text(), "feed.proto has changed: run `make proto`"
