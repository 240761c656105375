"""Several ranks: each element reaches one of them, all see the same number of steps, and none waits for ever."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import tensorflow as tf
from helpers import Script, by_value, collect, lines_of, numbers, together, wait_until

import kerasfeed
from kerasfeed.producer.window import Seek, Window
from kerasfeed.schedule import Position

by_value(__name__)

SOON = 20.0


def errors_of(outcomes) -> list[str]:
    """Returns the ranks' errors, all of which have to be `RankError`s."""
    for outcome in outcomes:
        assert isinstance(outcome.error, kerasfeed.RankError), repr(outcome)
    return [str(outcome.error) for outcome in outcomes]


# ---- Who gets what ----


@pytest.mark.parametrize("size", [2, 3])
def test_round_robin_gives_each_element_to_one_rank_and_all_ranks_the_same_steps(make_ranks, size):
    count = 3 * size + size - 1
    producer = size - 1

    def dataset_fn(ctx):
        assert ctx.num_replicas_in_sync == size
        return tf.data.Dataset.range(count)

    feeders = make_ranks(size, dataset_fn, producer=producer)

    def consume(feeder):
        assert int(feeder.cardinality()) == 3
        return [numbers(feeder), numbers(feeder.map(lambda x: x))]

    outcomes = together(*(lambda f=feeder: consume(f) for feeder in feeders))
    for rank, outcome in enumerate(outcomes):
        expected = [rank, size + rank, 2 * size + rank]
        assert outcome.result() == [expected, expected]
    for feeder in feeders:
        feeder.close()
    assert [f.session.producer_pid is None for f in feeders][:producer] == [True] * producer
    for statistics in feeders[producer].statistics()[:2]:
        assert (statistics.elements, statistics.steps, statistics.dropped) == (count, 3, size - 1)
        assert statistics.complete
        assert statistics.trained == dict.fromkeys(range(size), 3)


def test_epochs_with_fewer_elements_than_ranks_have_no_step(make_ranks):
    feeders = make_ranks(3, lambda: tf.data.Dataset.range(2))
    outcomes = together(*(lambda f=feeder: (int(f.cardinality()), numbers(f), numbers(f)) for feeder in feeders))
    assert [outcome.result() for outcome in outcomes] == [(0, [], [])] * 3
    for feeder in feeders:
        feeder.close()
    first = feeders[0].statistics()[0]
    assert (first.elements, first.steps, first.dropped) == (2, 0, 2)


def test_steps_per_epoch_joins_passes_over_all_ranks(make_ranks):
    feeders = make_ranks(2, lambda: tf.data.Dataset.range(5), steps_per_epoch=4)
    outcomes = together(*(lambda f=feeder: numbers(f) + numbers(f) for feeder in feeders))
    stream = [k % 5 for k in range(16)]
    assert [outcome.result() for outcome in outcomes] == [stream[0::2], stream[1::2]]


def test_ranks_in_processes_of_their_own(tmp_path):
    source = f"""
    import sys
    import tensorflow as tf
    import kerasfeed

    rank = int(sys.argv[1])
    topology = kerasfeed.Topology(rank, 2, meeting_dir={str(tmp_path / "meeting")!r})

    def dataset_fn():
        return tf.data.Dataset.range(21).shuffle(21)

    feeder = kerasfeed.DataFeeder(dataset_fn, topology=topology, producer=1, seed=5)
    for epoch in range(2):
        print("epoch", epoch, *(int(x) for x in feeder))
    if rank == 1:
        feeder.close()
        print(feeder.statistics()[0])
    """
    folders = [tmp_path / str(rank) for rank in range(2)]
    scripts = []
    try:
        for rank, folder in enumerate(folders):
            folder.mkdir()
            scripts.append(Script(folder, source, rank, env={"KERASFEED_TOKEN": "0123456789abcdef"}))
        codes = [script.wait(90) for script in scripts]
        assert codes == [0, 0], "\n".join(script.text for script in scripts)
        epochs = []
        for epoch in range(2):
            lines = [next(x for x in s.text.splitlines() if x.startswith(f"epoch {epoch}")) for s in scripts]
            ids = [[int(word) for word in line.split()[2:]] for line in lines]
            assert [len(mine) for mine in ids] == [10, 10]
            assert len({*ids[0], *ids[1]}) == 20
            epochs.append(ids)
        assert epochs[0] != epochs[1]
        assert "elements=21, steps=10, dropped=1, complete=True, trained={0: 10, 1: 10}" in scripts[1].text
    finally:
        for script in scripts:
            script.__exit__()


# ---- Ranks that do not fit together ----


def test_ranks_that_build_different_feeders_are_told_the_difference(make_ranks):
    own = [
        {"steps_per_epoch": 3, "seed": 1, "deterministic": False},
        {"steps_per_epoch": 4, "seed": 2, "deterministic": True},
    ]
    feeders = make_ranks(2, lambda: tf.data.Dataset.range(20), own, start_timeout=SOON)
    outcomes = together(*(lambda f=feeder: numbers(f) for feeder in feeders))
    for message in errors_of(outcomes):
        for option, value in own[1].items():
            assert f"{option}={value}" in message
    assert max(outcome.seconds for outcome in outcomes) < SOON / 2


def test_a_rank_that_never_comes_is_named_on_the_others(make_ranks):
    # Rank 0 starts the producer, and its patience counts there; rank 2 has to wait until that process is up.
    patience = [{"start_timeout": seconds} for seconds in (3, SOON, SOON)]
    feeders = make_ranks(3, lambda: tf.data.Dataset.range(20), patience)
    outcomes = together(*(lambda f=feeder: numbers(f) for feeder in (feeders[0], feeders[2])))
    for message in errors_of(outcomes):
        assert "rank 1 of 3 did not come within 3 s" in message
        assert "present: ranks 0, 2" in message
    assert max(outcome.seconds for outcome in outcomes) < SOON


def test_a_producers_rank_that_never_comes_is_named(make_ranks):
    feeders = make_ranks(2, lambda: tf.data.Dataset.range(20), producer=1, start_timeout=1)
    (outcome,) = together(lambda: numbers(feeders[0]))
    (message,) = errors_of([outcome])
    assert "rank 1 has not started the producer within 1 s" in message


def test_an_exception_of_dataset_fn_reaches_all_ranks(make_ranks):
    feeders = make_ranks(2, lambda: 1 / 0, producer=1)
    outcomes = together(*(lambda f=feeder: numbers(f) for feeder in feeders))
    for outcome in outcomes:
        assert isinstance(outcome.error, kerasfeed.ProducerError)
        assert "ZeroDivisionError" in str(outcome.error)


def test_a_dataset_fn_that_cannot_be_sent_is_an_error_on_all_ranks(make_ranks):
    lock = threading.Lock()
    feeders = make_ranks(2, lambda: lock and None)
    outcomes = together(*(lambda f=feeder: numbers(f) for feeder in feeders))
    assert isinstance(outcomes[0].error, TypeError)
    assert isinstance(outcomes[1].error, kerasfeed.ProducerError)
    for outcome in outcomes:
        assert "lock" in str(outcome.error)


def test_an_exception_in_an_element_comes_at_the_same_step_on_all_ranks(make_ranks):
    def dataset_fn():
        def check(i):
            with tf.control_dependencies([tf.debugging.assert_less(i, tf.constant(37, tf.int64), "it broke")]):
                return tf.identity(i)

        return tf.data.Dataset.range(100).map(check)

    def consume(feeder):
        got = []
        with pytest.raises(kerasfeed.ProducerError, match=r"element 37(.|\n)*it broke"):
            collect(feeder, got)
        return got

    feeders = make_ranks(2, dataset_fn)
    outcomes = together(*(lambda f=feeder: consume(f) for feeder in feeders))
    # Element 36 makes no complete step.
    assert [outcome.result() for outcome in outcomes] == [list(range(0, 36, 2)), list(range(1, 36, 2))]


# ---- Ranks on different passes ----


def test_ranks_that_all_peek_go_on_together(make_ranks):
    def consume(feeder):
        first = [int(x) for x in feeder.take(1)]
        return first, numbers(feeder), numbers(feeder)

    outcomes = together(*(lambda f=f: consume(f) for f in make_ranks(2, lambda: tf.data.Dataset.range(40))))
    for rank, outcome in enumerate(outcomes):
        whole = list(range(rank, 40, 2))
        assert outcome.result() == ([rank], whole, whole)


def arrived(feeder):
    """Returns how many steps and ends a rank has got and not pulled."""
    connection = feeder.session.connection()
    stream = connection.stream
    if stream is None:
        return len(connection._reader.items)
    # Over a Unix socket it is fetched by whoever waits.
    stream.sync(SOON)
    return stream.queued


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_ranks_that_all_break_off_near_an_epochs_end_go_on_together(make_ranks, stop):
    # The end of the epoch has been sent to them by then, but they did not ask for it.
    feeders = make_ranks(2, lambda: tf.data.Dataset.range(10))
    sent = threading.Barrier(2)

    def consume(feeder):
        epochs = []
        for _ in range(3):
            got = []
            for value in feeder:
                got.append(int(value))
                if len(got) == stop:
                    break
            wait_until(lambda: arrived(feeder) == 5 - stop + 1, what="the epoch's end")
            epochs.append(got)
            sent.wait(SOON)
        return epochs

    outcomes = together(*(lambda f=f: consume(f) for f in feeders))
    for rank, outcome in enumerate(outcomes):
        assert outcome.result() == [list(range(rank, 10, 2))[:stop]] * 3


@pytest.mark.once("keras2")
def test_a_rank_that_peeks_alone_gets_an_error_that_names_both(make_ranks):
    feeders = make_ranks(2, lambda: tf.data.Dataset.range(40), prefetch=2)

    left = threading.Event()

    def peek():
        next(iter(feeders[0]))
        iterator = iter(feeders[0])
        next(iterator)
        left.set()
        return list(iterator), numbers(feeders[0])

    def consume():
        # One that is at its end before the other leaves anything is not wrong yet.
        first = iter(feeders[1])
        next(first)
        assert left.wait(SOON)
        return list(first), numbers(feeders[1])

    outcomes = together(peek, consume, timeout=90)
    # Rank 0 may be at its end before rank 1 shows that they differ: then it hears of it when it asks again.
    with pytest.raises(kerasfeed.RankError) as asked_again:
        numbers(feeders[0])
    for message in (*errors_of(outcomes[1:]), str(asked_again.value)):
        assert "different epochs" in message
        assert "rank 0" in message
        assert "rank 1" in message


# ---- Flow ----


def test_a_slow_rank_bounds_what_is_produced_and_misses_nothing(make_ranks, tmp_path):
    count = 60
    log = tmp_path / "produced"
    path = str(log)

    def dataset_fn():
        def note(i):
            with open(path, "a") as file:
                file.write(f"{int(i)}\n")
            return i

        ids = tf.data.Dataset.range(count).map(lambda i: tf.ensure_shape(tf.py_function(note, [i], tf.int64), []))
        return ids.map(lambda i: tf.fill([10_000], i))

    feeders = make_ranks(2, dataset_fn, prefetch=2, max_buffer_bytes=1)
    ahead = threading.Event()

    def fast():
        got = []
        for value in feeders[0]:
            got.append(int(value[0]))
            if len(got) == 2:
                ahead.set()
        ahead.set()
        return got

    produced = []

    def slow():
        assert feeders[1].element_spec is not None
        assert ahead.wait(SOON)
        got = []
        for value in feeders[1]:
            got.append(int(value[0]))
            produced.append(len(lines_of(log)))
        return got

    outcomes = together(fast, slow)
    # Sent and not pulled (2 steps), kept ready (2), in the making (1): all that may be ahead of the slow rank.
    for pulled, elements in enumerate(produced, start=1):
        assert elements <= 2 * (pulled + 5)
    assert [outcome.result() for outcome in outcomes] == [list(range(0, count, 2)), list(range(1, count, 2))]


def test_a_rank_that_pulls_far_ahead_does_not_hang(make_ranks):
    feeders = make_ranks(2, lambda: tf.data.Dataset.range(60), prefetch=2)
    far_ahead = threading.Event()

    def eager():
        iterator = iter(feeders[0])
        got = [int(next(iterator)) for _ in range(16)]
        far_ahead.set()
        return got + [int(value) for value in iterator]

    def late():
        assert feeders[1].element_spec is not None
        assert far_ahead.wait(SOON)
        return numbers(feeders[1])

    outcomes = together(eager, late)
    assert [outcome.result() for outcome in outcomes] == [list(range(0, 60, 2)), list(range(1, 60, 2))]


def test_a_rank_that_leaves_early_does_not_hold_up_the_others(make_ranks):
    feeders = make_ranks(2, lambda: tf.data.Dataset.range(200), prefetch=2, max_buffer_bytes=1)

    def leaver():
        iterator = iter(feeders[1])
        got = [int(next(iterator)) for _ in range(2)]
        feeders[1].close()
        with pytest.raises(kerasfeed.FeedClosedError):
            next(iterator)
        return got

    outcomes = together(lambda: numbers(feeders[0]), leaver)
    assert outcomes[0].result() == list(range(0, 200, 2))
    assert outcomes[1].result() == [1, 3]
    feeders[0].close()
    wait_until(lambda: feeders[0].session.producer_pid is None, what="the producer to end when all have left")


@pytest.mark.once("keras2")
def test_a_rank_whose_leave_was_lost_with_the_producer_tells_the_next_one(make_ranks):
    feeders = make_ranks(2, lambda: tf.data.Dataset.range(60))

    def consume():
        iterator = iter(feeders[0])
        got = [int(next(iterator)) for _ in range(5)]
        assert left_unheard.wait(SOON)
        return got + [int(value) for value in iterator]

    def leave():
        got = numbers(feeders[1])
        producer, connection = feeders[0].session.producer_pid, feeders[1].session.connection()
        os.kill(producer, signal.SIGSTOP)
        closer = threading.Thread(target=feeders[1].close, name="closer")
        closer.start()
        wait_until(lambda: connection._leaving, what="the rank to say that it leaves")
        os.kill(producer, signal.SIGKILL)
        left_unheard.set()
        # Whoever closes it again waits, too: a script must not end before this rank has left.
        feeders[1].close()
        assert connection.left
        closer.join()
        return got

    left_unheard = threading.Event()
    outcomes = together(consume, leave)
    assert [outcome.result() for outcome in outcomes] == [list(range(0, 60, 2)), list(range(1, 60, 2))]
    feeders[0].close()
    wait_until(lambda: feeders[0].session.producer_pid is None, what="the producer to end when all have left")


def test_a_restarted_producer_starts_at_the_smallest_step_that_a_rank_wants():
    # What happens after a kill, whichever rank comes back first: rank 1 wants step 0, rank 0 is 12 steps ahead.
    first_wanted = {0: Position(0, 12), 1: Position(0, 0)}
    for order in ((0, 1), (1, 0)):
        window = Window(size=2, prefetch=2, max_bytes=1 << 20)
        for rank in order:
            window.attend(rank, Position(0, 0), None)
        seeks = []
        for rank in order:
            window.read(rank, 1, first_wanted[rank], False, 2, 1 << 20)
            # The pump is at work between any two messages.
            if isinstance(work := window.wait_for_work(), Seek):
                seeks.append(work.element)
        assert seeks[-1] == 0, f"ranks {order} came back in this order, and the pump went to elements {seeks}"


def test_ranks_survive_a_killed_producer(make_ranks):
    def dataset_fn():
        return tf.data.Dataset.range(60).shuffle(60, seed=1)

    feeders = make_ranks(2, dataset_fn)

    def consume(feeder, kill):
        got = []
        for value in feeder:
            got.append(int(value))
            if kill and len(got) == 12:
                os.kill(feeder.session.producer_pid, signal.SIGKILL)
        return got

    began = time.monotonic()
    outcomes = together(lambda: consume(feeders[0], True), lambda: consume(feeders[1], False))
    got = [outcome.result() for outcome in outcomes]
    assert [len(mine) for mine in got] == [30, 30]
    assert sorted(got[0] + got[1]) == list(range(60))
    assert time.monotonic() - began < 60
