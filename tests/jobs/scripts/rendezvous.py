"""How ranks find the producer: before Horovod is initialised, by its store, and without a store by its broadcast."""

from __future__ import annotations

import lean  # noqa: F401 (before TensorFlow)

# isort: split

import http.client
import os

import horovod.tensorflow as hvd
import psutil
import tensorflow as tf
from reporting import RANK, error_of, meet, report

import kerasfeed
from kerasfeed import rendezvous

TOKEN = "a token that was set for all ranks"


def numbers():
    return tf.data.Dataset.range(10)


def elements(feeder) -> list[int]:
    return [int(element) for element in feeder]


def addresses_of(pid: int) -> list[str]:
    """Returns the addresses that a process and its children listen on."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    connections = [c for process in processes for c in process.net_connections(kind="inet")]
    return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]


def in_store(scope: str, key: str) -> str | None:
    host, port = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    connection = http.client.HTTPConnection(host, port, timeout=10)
    connection.request("GET", f"/{scope}/{key}")
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return body.decode() if response.status == 200 else None


def uninitialised() -> None:
    try:
        elements(kerasfeed.DataFeeder(numbers, name="early"))
    except Exception as error:
        report("uninitialised", **error_of(error))


def token_for_all() -> None:
    os.environ["KERASFEED_TOKEN"] = TOKEN
    feeder = kerasfeed.DataFeeder(numbers, name="given")
    report("given token", elements=elements(feeder))
    meet("given token")
    del os.environ["KERASFEED_TOKEN"]


def by_store() -> None:
    feeder = kerasfeed.DataFeeder(numbers, name="store")
    report("store", elements=elements(feeder))
    token = rendezvous.job_token(feeder.topology)
    stored = {name: in_store("kerasfeed", f"{name}.0.1") for name in ("given", "store")}
    report("stored", token=token.hex(), stored=stored)
    if RANK == 0:
        report("listens", addresses=addresses_of(feeder.session.producer_pid))
    meet("store")


def by_broadcast() -> None:
    """Where there is no store, the ranks meet in the constructor, and again where the feed starts again."""
    del os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    feeders = [kerasfeed.DataFeeder(numbers, name=f"broadcast{i}", producer=i) for i in range(2)]
    started = [feeder.session.started for feeder in feeders]
    report("broadcast", started=started, elements=[elements(feeder) for feeder in feeders])
    for feeder in feeders:
        feeder.close()
    report("broadcast again", elements=[elements(feeder) for feeder in feeders])
    if RANK == 1:
        report("listens", addresses=addresses_of(feeders[1].session.producer_pid))
    meet("broadcast")


if __name__ == "__main__":
    uninitialised()
    hvd.init()
    token_for_all()
    by_store()
    by_broadcast()
