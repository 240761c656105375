"""Bad days of one rank: each ends with a clear message, soon, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import pathlib
import queue
import re
import signal
import socket
import threading
import time

import grpc
import psutil
import pytest
import tensorflow as tf
from helpers import Script, by_value, collect, free_port, id_batches, is_gone, lines_of, make_model, numbers, wait_until
from tensorflow import keras

import kerasfeed
from kerasfeed import auth, wire
from kerasfeed.callbacks import FeedCallback
from kerasfeed.proto import feed_pb2

by_value(__name__)

SOON = 20.0


@pytest.fixture(scope="module")
def shared_model():
    return make_model()


@pytest.fixture
def model(shared_model):
    """A model that is compiled once for all tests, with nothing noted."""
    for notes in vars(shared_model.notes).values():
        notes.take()
    return shared_model


def failing_at(index: int, rows: int = 2):
    """Returns a `dataset_fn` of batches whose element at `index` raises."""

    def dataset_fn():
        def element(i):
            with tf.control_dependencies([tf.debugging.assert_less(i, tf.constant(index, tf.int64), "it broke")]):
                return tf.fill([rows, 1], tf.cast(i, tf.float32)), tf.zeros([rows, 1])

        return tf.data.Dataset.range(100).map(element)

    return dataset_fn


# ---- The pipeline raises ----


def test_an_exception_of_dataset_fn_arrives_with_its_traceback(make_feeder, model):
    def dataset_fn():
        def deep_inside():
            raise KeyError("no such column")

        return deep_inside()

    feeder = make_feeder(dataset_fn)
    for use in (lambda: list(feeder), lambda: feeder.element_spec, lambda: model.fit(feeder, verbose=0)):
        began = time.monotonic()
        with pytest.raises(kerasfeed.ProducerError, match=r"feed 'train'(.|\n)*deep_inside(.|\n)*no such column"):
            use()
        assert time.monotonic() - began < SOON


def test_whatever_a_dataset_fn_raises_arrives(make_feeder):
    def dataset_fn():
        raise KeyboardInterrupt("not the user's")

    feeder = make_feeder(dataset_fn)
    began = time.monotonic()
    with pytest.raises(kerasfeed.ProducerError, match=r"KeyboardInterrupt: not the user's"):
        list(feeder)
    assert time.monotonic() - began < SOON


def test_a_pipeline_that_ends_its_process_in_peace_has_died_all_the_same(make_feeder, caplog):
    def dataset_fn():
        import os

        os._exit(0)

    feeder = make_feeder(dataset_fn)
    with pytest.raises(kerasfeed.ProducerError, match=r"died 3 times before the first element \(exit code 0"):
        list(feeder)


def test_a_producer_that_has_no_folder_for_its_files_says_so_at_once(make_feeder, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere/at/all")
    feeder = make_feeder(lambda: tf.data.Dataset.range(3))
    began = time.monotonic()
    with pytest.raises(kerasfeed.ProducerError, match=r"can't be started: .*/nowhere/at/all"):
        list(feeder)
    assert time.monotonic() - began < SOON


def test_a_dataset_fn_that_returns_something_else_is_told_so(make_feeder):
    feeder = make_feeder(lambda: [1, 2, 3])
    with pytest.raises(kerasfeed.ProducerError, match=r"must return a tf\.data\.Dataset\. Received: list"):
        list(feeder)


def test_a_file_that_does_not_exist_is_named(make_feeder, tmp_path):
    path = str(tmp_path / "missing.tfrecord")
    feeder = make_feeder(lambda: tf.data.TFRecordDataset([path]))
    with pytest.raises(kerasfeed.ProducerError, match=re.escape(path)):
        list(feeder)


def test_an_exception_in_an_element_comes_after_all_good_steps_and_stays(make_feeder):
    feeder = make_feeder(failing_at(37))
    got = []
    with pytest.raises(kerasfeed.ProducerError) as caught:
        collect(feeder, got)
    assert got == list(range(37))
    message = str(caught.value)
    assert "feed 'train'" in message
    assert "element 37" in message
    assert "Traceback" in message
    assert "it broke" in message
    # Whoever asks again gets the error again, at once: the pass must not seem to be over.
    began = time.monotonic()
    iterator = iter(feeder)
    for _ in range(2):
        with pytest.raises(kerasfeed.ProducerError, match="element 37"):
            next(iterator)
    with pytest.raises(kerasfeed.ProducerError, match="element 37"):
        list(feeder)
    assert time.monotonic() - began < SOON


def test_an_exception_in_an_element_reaches_fit_as_a_producer_error(make_feeder, model):
    feeder = make_feeder(failing_at(37))
    began = time.monotonic()
    with pytest.raises(kerasfeed.ProducerError, match=r"element 37(.|\n)*it broke"):
        model.fit(feeder, epochs=2, callbacks=[FeedCallback(feeder)], verbose=0)
    assert model.notes.trained.take() == list(range(37))
    wait_until(lambda: feeder.session.producer_pid is None, what="the producer to end after the error")
    assert time.monotonic() - began < SOON
    assert "translating" not in repr(model.train_function)


def test_an_error_of_the_validation_feeder_reaches_fit_as_a_producer_error(make_feeder, model):
    feeder, validation = make_feeder(id_batches(3)), make_feeder(failing_at(2), name="validation")
    with pytest.raises(kerasfeed.ProducerError, match=r"feed 'validation'(.|\n)*it broke"):
        model.fit(feeder, epochs=2, callbacks=[FeedCallback(feeder)], validation_data=validation, verbose=0)
    assert model.notes.trained.take() == [0, 1, 2]
    wait_until(lambda: feeder.session.producer_pid is None, what="the producer to end after the error")
    began = time.monotonic()
    with pytest.raises(kerasfeed.ProducerError, match="it broke"):
        model.evaluate(validation, callbacks=[FeedCallback(validation)], verbose=0)
    assert time.monotonic() - began < SOON


def test_what_cannot_be_pickled_is_named(make_feeder):
    lock = threading.Lock()
    feeder = make_feeder(lambda: tf.data.Dataset.range(1 if lock else 2))
    with pytest.raises(TypeError, match=r"can't be sent to the producer.*captures: .*lock"):
        list(feeder)
    assert feeder.session.producer_pid is None


# ---- The network ----


def test_a_port_that_is_taken_is_named(make_feeder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        feeder = make_feeder(lambda: tf.data.Dataset.range(3), port=port)
        with pytest.raises(kerasfeed.ProducerError, match=rf"{port}.*taken"):
            list(feeder)


class _Stranger:
    """A gRPC client that talks to a producer without being a rank."""

    def __init__(self, port: int):
        self._requests: queue.SimpleQueue = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=wire.CHANNEL_OPTIONS)
        attend = self._channel.stream_stream(
            f"/{wire.SERVICE}/{wire.METHOD}",
            request_serializer=feed_pb2.RankMessage.SerializeToString,
            response_deserializer=feed_pb2.ProducerMessage.FromString,
        )
        self._call = attend(iter(self._requests.get, None), timeout=SOON)

    def say(self, **kind):
        self._requests.put(feed_pb2.RankMessage(**kind))

    def hear(self):
        return next(self._call)

    def hear_all(self):
        """Returns everything that still comes, until the producer hangs up."""
        self._requests.put(None)
        found = []
        try:
            found.extend(iter(self._call))
        except grpc.RpcError:
            # Hanging up is fine, and only that: not that we had to wait for it to the end.
            if self._call.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        return found

    def close(self):
        self._requests.put(None)
        self._channel.close()


def test_strangers_get_no_data_and_do_no_harm(make_feeder, tmp_path):
    port, go_on = free_port(), str(tmp_path / "go on")

    def dataset_fn():
        def wait(i):
            import time

            while i >= 4 and not os.path.exists(go_on):
                time.sleep(0.02)
            return i

        return tf.data.Dataset.range(40).map(lambda i: tf.ensure_shape(tf.py_function(wait, [i], tf.int64), []))

    feeder = make_feeder(dataset_fn, port=port)
    iterator = iter(feeder)
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]

    read = feed_pb2.Read(reader=1, position=feed_pb2.Position(), credit_steps=10, credit_bytes=1 << 20)
    nonce = auth.new_nonce()
    hello = feed_pb2.Hello(protocol=wire.PROTOCOL, feed="train", rank=0, nonce=nonce)

    # With another token: the producer proves that it knows its own, sees that we don't, and hangs up.
    wrong = _Stranger(port)
    wrong.say(hello=hello)
    challenge = wrong.hear().challenge
    conversation = ("train", 0, nonce, challenge.nonce)
    assert not auth.proven(auth.prove(b"another token", "producer", *conversation), challenge.proof)
    proof = auth.prove(b"another token", "rank", *conversation)
    wrong.say(proof=feed_pb2.Proof(proof=proof, options="{}"))
    wrong.say(read=read)
    answers = wrong.hear_all()
    assert [m.WhichOneof("kind") for m in answers] == ["failure"]
    assert answers[0].failure.kind == feed_pb2.Failure.REFUSED
    assert "token" in answers[0].failure.message

    # The producer's own proof is no rank's proof.
    echo = _Stranger(port)
    echo.say(hello=hello)
    echo.say(proof=feed_pb2.Proof(proof=echo.hear().challenge.proof, options="{}"))
    assert [m.WhichOneof("kind") for m in echo.hear_all()] == ["failure"]

    # Out of turn, of another feed, of a rank that there is not, of another version.
    for first in (
        {"read": read},
        {"proof": feed_pb2.Proof(options="{}")},
        {"hello": feed_pb2.Hello(protocol=wire.PROTOCOL, feed="other", rank=0, nonce=nonce)},
        {"hello": feed_pb2.Hello(protocol=wire.PROTOCOL, feed="train", rank=7, nonce=nonce)},
        {"hello": feed_pb2.Hello(protocol=99, feed="train", rank=0, nonce=nonce)},
        {"hello": feed_pb2.Hello(protocol=wire.PROTOCOL, feed="train", rank=0, nonce=b"")},
    ):
        stranger = _Stranger(port)
        stranger.say(**first)
        assert {m.WhichOneof("kind") for m in stranger.hear_all()} <= {"failure"}
        stranger.close()

    # Half-open and garbage connections stay while the rank goes on.
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    silent[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    silent[1].sendall(os.urandom(4096))
    silent[2].sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    hanging = [_Stranger(port) for _ in range(4)]
    hanging[0].say(hello=hello)
    pathlib.Path(go_on).touch()
    assert [int(value) for value in iterator] == list(range(3, 40))
    assert numbers(feeder) == list(range(40))
    for each in (*silent, *hanging, wrong, echo):
        each.close()


# ---- The producer dies ----


def test_a_killed_producer_loses_nothing(make_feeder, caplog):
    def dataset_fn():
        # So large that the rank has not got all of them when it kills the producer.
        return tf.data.Dataset.range(40).shuffle(40).map(lambda i: (i, tf.random.uniform([20_000])))

    feeder = make_feeder(dataset_fn, seed=4)
    got = [(int(i), float(r[-1])) for i, r in feeder]
    for number, (i, r) in enumerate(feeder):
        got.append((int(i), float(r[-1])))
        if number == 15:
            os.kill(feeder.session.producer_pid, signal.SIGKILL)
    assert "died" in caplog.text
    assert "SIGKILL" in caplog.text
    undisturbed = make_feeder(dataset_fn, seed=4)
    assert got == [(int(i), float(r[-1])) for _ in range(2) for i, r in undisturbed]


def control_port(feeder: kerasfeed.DataFeeder) -> int:
    """Returns where the producer listens, but for elements."""
    return feeder.session._meeting.locate().port


@pytest.mark.once
def test_a_producer_is_restarted_whoever_has_the_port_next_to_its_own(make_feeder):
    feeder = make_feeder(lambda: tf.data.Dataset.range(40), prefetch=2, max_buffer_bytes=1)
    iterator = iter(feeder)
    got = [int(next(iterator)) for _ in range(3)]
    with socket.socket() as neighbour:
        with contextlib.suppress(OSError):  # somebody has it already
            neighbour.bind(("127.0.0.1", control_port(feeder) + 1))
            neighbour.listen()
        os.kill(feeder.session.producer_pid, signal.SIGKILL)
        got += [int(value) for value in iterator]
    assert got == list(range(40))


def test_a_killed_producer_loses_nothing_in_fit(make_feeder, model):
    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if len(killed) == 0 and batch == 3:
                killed.append(feeder.session.producer_pid)
                os.kill(killed[0], signal.SIGKILL)

    killed = []
    # So little room that the producer has not made the whole epoch when it is killed.
    feeder = make_feeder(id_batches(8), prefetch=2, max_buffer_bytes=1)
    model.fit(feeder, epochs=3, callbacks=[Kill(), FeedCallback(feeder)], verbose=0)
    assert len(killed) == 1
    assert model.notes.trained.take() == list(range(8)) * 3
    assert [(s.elements, s.steps, s.trained) for s in feeder.statistics()] == [(8, 8, {0: 8})] * 3


@pytest.mark.once("keras2")
def test_a_producer_that_dies_three_times_at_the_same_place_is_given_up(make_feeder):
    def dataset_fn():
        def die(i):
            import os
            import signal

            if i == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return i

        return tf.data.Dataset.range(9).map(lambda i: tf.ensure_shape(tf.py_function(die, [i], tf.int64), []))

    feeder = make_feeder(dataset_fn)
    got = []
    with pytest.raises(kerasfeed.ProducerError, match=r"feed 'train'.*died 3 times.*element \d of pass 0.*SIGKILL"):
        collect(feeder, got)
    assert got == list(range(len(got)))
    assert len(got) <= 5
    with pytest.raises(kerasfeed.ProducerError, match="died 3 times"):
        list(feeder)


# ---- The rank's script goes wrong, or ends ----


def test_an_exception_in_another_callback_ends_the_producer_with_the_fit(make_feeder, model):
    class Broken(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise ZeroDivisionError("in a hook")

    feeder = make_feeder(id_batches(8))
    with pytest.raises(ZeroDivisionError):
        model.fit(feeder, callbacks=[FeedCallback(feeder, keep=True), Broken()], verbose=0)
    wait_until(lambda: feeder.session.producer_pid is None, what="the producer to end after the exception")
    # The batch before the exception was trained.
    assert model.notes.trained.take() == [0]
    model.fit(feeder, callbacks=[FeedCallback(feeder)], verbose=0)
    assert model.notes.trained.take() == list(range(1, 8))


_SLOW = """
import os, sys, time
import tensorflow as tf
from tensorflow import keras
import kerasfeed

folder, how = sys.argv[1], sys.argv[2]

def dataset_fn():
    import subprocess
    helper = subprocess.Popen(["sleep", "1000"])
    with open(folder + "/pids", "w") as file:
        file.write(f"{os.getpid()} {helper.pid} .")

    def slow(i):
        if i == 3:
            open(folder + "/slow", "w").close()
            time.sleep(1000)
        return i

    ids = tf.data.Dataset.range(9).map(lambda i: tf.ensure_shape(tf.py_function(slow, [i], tf.int64), []))
    return ids.map(lambda i: (tf.fill([2, 1], i), tf.zeros([2, 1])))

feeder = kerasfeed.DataFeeder(dataset_fn)
if how == "loop":
    for x, y in feeder:
        print("got", int(x[0, 0]))
else:
    class Say(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            print("got", batch)

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(feeder, callbacks=[kerasfeed.callbacks.FeedCallback(feeder), Say()], verbose=0)
"""


def _wait_for_slow_element(script: Script, folder: pathlib.Path) -> list[int]:
    """Returns the ids of the producer and of the process that it started, once the rank waits for element 3."""
    script.wait_for("got 2")
    wait_until((folder / "slow").exists, what="the producer to reach the slow element")
    pids = (folder / "pids").read_text().split()
    assert pids.pop() == "."
    return [int(pid) for pid in pids]


@pytest.mark.parametrize("how", ["loop", "fit"])
def test_control_c_while_waiting_for_data_ends_everything(tmp_path, how):
    with Script(tmp_path, _SLOW, tmp_path, how) as script:
        pids = _wait_for_slow_element(script, tmp_path)
        # As a terminal does: to all processes of the foreground group.
        os.killpg(script.process.pid, signal.SIGINT)
        assert script.wait(SOON) != 0
        assert "KeyboardInterrupt" in script.text.splitlines()[-1], script.text
        wait_until(lambda: all(map(is_gone, pids)), what=f"the producer and what it started to end: {pids}")


def test_a_killed_rank_takes_its_producer_and_what_that_started_along(tmp_path):
    with Script(tmp_path, _SLOW, tmp_path, "loop") as script:
        pids = _wait_for_slow_element(script, tmp_path)
        assert len(pids) == 2
        script.process.kill()
        script.wait()
        wait_until(lambda: all(map(is_gone, pids)), what=f"the producer and what it started to end: {pids}")


_ENDS = """
import os, sys, time
import tensorflow as tf
import kerasfeed

folder, ways = sys.argv[1], sys.argv[2:]

# Importing TensorFlow is what takes long: that is done once. Nothing of it runs before the processes part.
for way in ways:
    pid = os.fork()
    if pid == 0:
        output = os.open(f"{folder}/{way}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        break
    with open(f"{folder}/pids", "a") as file:
        file.write(f"{way} {pid}\\n")
else:
    for way in ways:
        pid, status = os.wait()
        with open(f"{folder}/codes", "a") as file:
            file.write(f"{pid} {os.waitstatus_to_exitcode(status)} {time.time()}\\n")
    sys.exit()

feeder = kerasfeed.DataFeeder(lambda: tf.data.Dataset.range(10_000).map(lambda i: tf.fill([100], i)))
dataset = feeder.prefetch(4) if way.startswith("prefetch") else feeder
iterator = iter(dataset)
for _ in range(3):
    next(iterator)
print(f"END {time.time()}", flush=True)
if way.endswith("raise"):
    raise ValueError("the script's own error")
"""


def test_scripts_that_end_with_a_live_iterator_exit(tmp_path):
    # An iterator that is alive while Python is torn down hangs one run in eight, so once is not enough.
    ways = ["plain-1", "prefetch-2", "plain-3", "prefetch-4", "plain-5", "prefetch-raise"]
    with Script(tmp_path, _ENDS, tmp_path, *ways) as script:
        assert script.wait(120) == 0, script.text
    pids = dict(line.split() for line in lines_of(tmp_path / "pids"))
    ends = {pid: (int(code), float(ended)) for pid, code, ended in map(str.split, lines_of(tmp_path / "codes"))}
    for way in ways:
        text = (tmp_path / way).read_text()
        code, ended = ends[pids[way]]
        assert code == (1 if way.endswith("raise") else 0), text
        began = float(re.search(r"END ([\d.]+)", text)[1])
        assert ended - began < 60, f"{way} took {ended - began} s to exit"
        if way.endswith("raise"):
            assert "ValueError: the script's own error" in text.splitlines()[-1]
        else:
            assert "Traceback" not in text, text


def test_an_exception_in_fit_ends_the_script_with_code_1(tmp_path):
    source = """
    import time
    import tensorflow as tf
    from tensorflow import keras
    import kerasfeed

    class Broken(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            print(f"END {time.time()}")
            raise ZeroDivisionError("in a hook")

    batches = lambda: tf.data.Dataset.range(50).map(lambda i: (tf.fill([2, 1], i), tf.zeros([2, 1])))
    feeder = kerasfeed.DataFeeder(batches)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(feeder, callbacks=[kerasfeed.callbacks.FeedCallback(feeder), Broken()], verbose=0)
    """
    with Script(tmp_path, source) as script:
        assert script.wait() == 1, script.text
        assert time.time() - float(re.search(r"END ([\d.]+)", script.text)[1]) < SOON
        assert "ZeroDivisionError: in a hook" in script.text


def test_nothing_is_left_in_tmp_and_shared_memory(make_feeder, tmp_path, monkeypatch):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    shared = set(os.listdir("/dev/shm"))
    feeder = make_feeder(lambda: tf.data.Dataset.range(10).map(lambda i: tf.fill([1 << 16], i)))
    for number, _ in enumerate(feeder):
        if number == 3:
            os.kill(feeder.session.producer_pid, signal.SIGKILL)
    assert len(list(feeder)) == 10
    process = psutil.Process(feeder.session.producer_pid)
    feeder.close()
    wait_until(lambda: not process.is_running(), what="the producer to end")
    # The supervisor tidies up after it has seen the producer's end.
    wait_until(lambda: list(folder.iterdir()) == [], what=lambda: f"{list(folder.iterdir())} to go")
    assert {name for name in os.listdir("/dev/shm") if "kerasfeed" in name} <= shared
    assert lines_of(folder / "none") == []
