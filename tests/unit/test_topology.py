"""The place of this process: checked when it is given, found from Horovod, never guessed from a launcher."""

from __future__ import annotations

import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasfeed import topology
from kerasfeed.topology import Topology

LAUNCHERS = [
    ("HOROVOD_SIZE", "HOROVOD_RANK", "horovodrun"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "Open MPI"),
    ("PMI_SIZE", "PMI_RANK", "MPI"),
]


@pytest.fixture
def alone(monkeypatch):
    """A process that no launcher started, in which Horovod is not initialised."""
    for size_name, rank_name, _ in LAUNCHERS:
        monkeypatch.delenv(size_name, raising=False)
        monkeypatch.delenv(rank_name, raising=False)
    monkeypatch.setattr(topology, "initialized_horovod", lambda: None)
    return monkeypatch


def fake_horovod(initialized=True, **place):
    functions = {name: (lambda value=value: value) for name, value in place.items()}
    return types.SimpleNamespace(is_initialized=lambda: initialized, **functions)


@given(size=st.integers(1, 100), data=st.data())
def test_any_rank_of_any_size_is_accepted(size, data):
    rank = data.draw(st.integers(0, size - 1))
    local_size = data.draw(st.integers(1, size))
    local_rank = data.draw(st.integers(0, local_size - 1))
    place = Topology(rank, size, local_rank, local_size)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (rank, size, local_rank, local_size)
    assert place.one_host == (local_size == size)


def test_all_ranks_are_on_one_host_unless_told_otherwise():
    place = Topology(rank=1, size=3)
    assert (place.local_rank, place.local_size, place.one_host) == (1, 3, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size must be at least 1. Received: 0"),
        ({"size": -2}, "size must be at least 1. Received: -2"),
        ({"rank": 2, "size": 2}, r"rank must be from 0 to 1 \(size - 1\). Received: 2"),
        ({"rank": -1, "size": 2}, r"rank must be from 0 to 1 \(size - 1\). Received: -1"),
        ({"rank": 0, "size": 2, "local_size": 3}, r"local_size must be from 1 to 2 \(size\). Received: 3"),
        ({"rank": 0, "size": 2, "local_size": 0}, r"local_size must be from 1 to 2 \(size\). Received: 0"),
        ({"rank": 0, "size": 3, "local_rank": 2, "local_size": 2}, r"local_rank must be from 0 to 1 .*Received: 2"),
        ({"rank": 0, "size": 2, "local_rank": -1}, r"local_rank must be from 0 to 1 .*Received: -1"),
        ({"rank": "0"}, "rank must be an int. Received: '0'"),
        ({"size": 2.0}, r"size must be an int. Received: 2\.0"),
        ({"rank": True, "size": 2}, "rank must be an int. Received: True"),
        ({"rank": 0, "size": 2, "local_rank": 0.0}, r"local_rank must be an int. Received: 0\.0"),
    ],
)
def test_a_wrong_place_is_refused_with_its_value_and_bound(arguments, message):
    with pytest.raises(ValueError, match=f"Topology: {message}"):
        Topology(**arguments)


def test_without_horovod_and_launcher_it_is_one_process(alone):
    found = Topology.detect()
    assert (found.rank, found.size, found.source) == (0, 1, "one process")


@pytest.mark.parametrize(("size_name", "rank_name", "launcher"), LAUNCHERS)
def test_a_launcher_without_init_is_an_error_that_names_it(alone, size_name, rank_name, launcher):
    alone.setenv(size_name, "2")
    alone.setenv(rank_name, "1")
    with pytest.raises(RuntimeError, match=rf"^{launcher} started 2 .*{size_name}=2.*\(rank 1\)\. Call hvd\.init\(\)"):
        Topology.detect()


@pytest.mark.parametrize(("size_name", "rank_name", "launcher"), LAUNCHERS)
def test_a_launcher_of_one_process_needs_no_init(alone, size_name, rank_name, launcher):
    alone.setenv(size_name, "1")
    alone.setenv(rank_name, "0")
    assert Topology.detect().size == 1


def test_a_size_without_a_rank_is_no_launcher(alone):
    alone.setenv("HOROVOD_SIZE", "2")
    assert Topology.detect().size == 1


def test_an_initialised_horovod_says_the_place_whatever_the_environment(alone):
    alone.setenv("HOROVOD_SIZE", "2")
    alone.setenv("HOROVOD_RANK", "0")
    hvd = fake_horovod(rank=3, size=4, local_rank=1, local_size=2)
    alone.setattr(topology, "initialized_horovod", lambda: hvd)
    found = Topology.detect()
    assert found == Topology(3, 4, 1, 2)
    assert (found.source, found.one_host) == ("Horovod", False)


def test_only_an_imported_and_initialised_horovod_counts(monkeypatch):
    for name in ("horovod.tensorflow", "horovod.torch", "horovod.mxnet"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert topology.initialized_horovod() is None
    assert "horovod.tensorflow" not in sys.modules
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", fake_horovod(initialized=False))
    assert topology.initialized_horovod() is None
    ready = fake_horovod()
    monkeypatch.setitem(sys.modules, "horovod.torch", ready)
    assert topology.initialized_horovod() is ready
