"""Ranks on two hosts, played by two network namespaces with a cable (veth) between them."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest
from horovod_job import BIN, SCRIPTS, Job

pytestmark = pytest.mark.once("keras2")

ADDRESSES = ("10.213.7.1", "10.213.7.2")
PULLED_SECONDS = 5.0
TOKEN = "what both of the hosts know"


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces; yields the names of the interfaces between them."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip (iproute2), which is not in PATH")
    names = [f"kf{os.getpid()}{side}" for side in "ab"]
    try:
        try:
            for name in names:
                run("ip", "netns", "add", name)
            run("ip", "link", "add", names[0], "netns", names[0], "type", "veth", "peer", names[1], "netns", names[1])
            for name, address in zip(names, ADDRESSES, strict=True):
                run("ip", "-n", name, "address", "add", f"{address}/24", "dev", name)
                run("ip", "-n", name, "link", "set", name, "up")
                run("ip", "-n", name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"this kernel, or this user, can't have network namespaces: {error}")
        yield names
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "delete", name), capture_output=True, check=False)


def test_producer_listens_on_the_interface_between_the_hosts(hosts: list[str], tmp_path: pathlib.Path) -> None:
    script = [str(BIN / "python"), str(SCRIPTS / "two_hosts.py")]
    commands = [["ip", "netns", "exec", host, *script] for host in hosts]
    common = {"KERASFEED_TEST_SIZE": "2", "KERASFEED_TOKEN": TOKEN}
    env = [{**common, "KERASFEED_TEST_RANK": str(rank), "HOROVOD_GLOO_IFACE": host} for rank, host in enumerate(hosts)]
    job = Job(commands, tmp_path, env)
    try:
        job.succeed()
    finally:
        job.end()
    (host,) = job.reports("host")
    assert host["address"] == ADDRESSES[0]
    for producer in range(2):
        (listens,) = job.reports(f"listens {producer}")
        assert listens["rank"] == producer
        assert {address.removeprefix("::ffff:") for address in listens["addresses"]} == {ADDRESSES[producer]}
        for rank, report in enumerate(job.by_rank(f"stream {producer}", 2)):
            assert report["elements"] == list(range(rank, 100, 2))
            # They share no memory, though a rank and its producer do.
            assert report["way"] == ("shared memory" if rank == producer else "TCP")


def test_a_cable_that_is_pulled_for_a_while_costs_time_and_nothing_else(
    hosts: list[str], tmp_path: pathlib.Path
) -> None:
    script = [str(BIN / "python"), str(SCRIPTS / "pulled_cable.py")]
    named = [["unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh", *script] for host in hosts]
    common = {"KERASFEED_TEST_SIZE": "2", "KERASFEED_TOKEN": TOKEN}
    env = [{**common, "KERASFEED_TEST_RANK": str(rank), "HOROVOD_GLOO_IFACE": host} for rank, host in enumerate(hosts)]
    commands = [["ip", "netns", "exec", host, *command] for host, command in zip(hosts, named, strict=True)]
    job = Job(commands, tmp_path, env)
    try:
        job.wait_for("before", 2)
        run("ip", "-n", hosts[0], "link", "set", hosts[0], "down")
        (tmp_path / "told-pulled").touch()
        time.sleep(PULLED_SECONDS)
        run("ip", "-n", hosts[0], "link", "set", hosts[0], "up")
        job.succeed()
    finally:
        job.end()
    names = {report["host"] for report in job.by_rank("before", 2)}
    assert names == set(hosts)
    near, far = job.by_rank("stream", 2)
    assert (near["way"], far["way"]) == ("shared memory", "TCP")
    assert (near["elements"], far["elements"]) == (list(range(0, 100, 2)), list(range(1, 100, 2)))
    # It was in need of what could not come.
    assert far["longest"] >= PULLED_SECONDS / 2
