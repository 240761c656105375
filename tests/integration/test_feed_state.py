"""A feed's state brings it back in another job, or says why not."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest
import tensorflow as tf
from helpers import by_value, collect, numbers, wait_until

import kerasfeed

pytestmark = pytest.mark.once

by_value(__name__)


def through_bytes(state):
    return kerasfeed.FeedState.from_bytes(state.to_bytes())


def take(iterator, count):
    return [int(next(iterator)) for _ in range(count)]


def random_numbers():
    def draw(i):
        import os

        return int.from_bytes(os.urandom(4), "little")

    return tf.data.Dataset.range(30).map(lambda i: tf.ensure_shape(tf.numpy_function(draw, [i], tf.int64), []))


def test_a_restored_feed_goes_on_inside_the_pass_and_with_later_passes_as_it_would_have(make_feeder, capfd):
    def dataset_fn():
        return tf.data.Dataset.range(40).shuffle(40).map(lambda i: (i, tf.random.uniform([])))

    def values(feeder):
        return [(int(i), float(r)) for i, r in feeder]

    undisturbed = make_feeder(dataset_fn, name="s", seed=3)
    expected = [values(undisturbed) for _ in range(3)]
    undisturbed.close()
    feeder = make_feeder(dataset_fn, name="s", seed=3)
    values(feeder)
    iterator = iter(feeder)
    for _ in range(11):
        next(iterator)
    state = through_bytes(feeder.state())
    assert (state.pass_, state.element, state.epoch, state.step, state.way) == (1, 10, 1, 10, "replay")
    assert len(state.to_bytes()) < 4096
    feeder.close()
    restored = make_feeder(dataset_fn, name="s")
    restored.restore(state)
    assert values(restored) == expected[1][10:]
    assert values(restored) == expected[2]
    assert int(restored.cardinality()) == 40
    # The same feeder can go back, too.
    restored.restore(state)
    assert values(restored) == expected[1][10:]


def test_a_snapshot_brings_a_feed_back_and_is_left_aside_where_the_user_wants_replay(make_feeder):
    def dataset_fn():
        return tf.data.Dataset.range(60).shuffle(60).map(lambda i: i * 3)

    undisturbed = make_feeder(dataset_fn, name="s", seed=3)
    expected = [numbers(undisturbed) for _ in range(3)]
    undisturbed.close()
    # Room for a few elements: the producer has not passed the tenth when it is told that it will be asked for.
    feeder = make_feeder(dataset_fn, name="s", seed=3, prefetch=2, max_buffer_bytes=1)
    iterator = iter(feeder)
    take(iterator, 1)
    feeder.state(again_after=10)
    take(iterator, 40)
    state = through_bytes(feeder.state(again_after=10))
    assert state.way == "snapshot"
    assert 0 < int(state.parts["element"]) <= state.element == 40
    feeder.close()
    restored = make_feeder(dataset_fn, name="s")
    restored.restore(state)
    assert numbers(restored) == expected[0][40:]
    assert numbers(restored) == expected[1]
    replayed = make_feeder(dataset_fn, name="s", resume="replay")
    replayed.restore(state)
    assert numbers(replayed) == expected[0][40:]


def at_its_time():
    return tf.data.Dataset.range(30).map(lambda i: tf.stack([tf.cast(i, tf.float64), tf.timestamp()]))


def test_what_was_produced_too_early_comes_again_as_it_was(make_feeder):
    feeder = make_feeder(at_its_time, name="s", resume="window", prefetch=4)
    iterator = iter(feeder)
    for _ in range(11):
        next(iterator)
    # Of the last one nobody knows yet whether it was trained.
    state = through_bytes(feeder.state())
    assert (state.way, state.element) == ("window", 10)
    after = [next(iterator).numpy().tolist() for _ in range(2)]
    feeder.close()
    restored = make_feeder(at_its_time, name="s", resume="window")
    restored.restore(state)
    rest = [value.numpy().tolist() for value in restored]
    assert [int(number) for number, _ in rest] == list(range(10, 30))
    assert rest[1:3] == after


@pytest.mark.parametrize("again_after", [0, 2])
def test_a_feed_that_is_left_soon_after_it_was_restored_loses_nothing(make_feeder, again_after):
    def dataset_fn():
        return tf.data.Dataset.range(200).map(lambda i: tf.stack([tf.cast(i, tf.float64), tf.timestamp()]))

    def begin(prefetch, state=None):
        feeder = make_feeder(dataset_fn, name="s", resume="window", prefetch=prefetch)
        if state is not None:
            feeder.restore(state)
        return feeder, iter(feeder)

    def leave(feeder, iterator):
        feeder.state(again_after=again_after)
        trained.extend(int(next(iterator)[0]) for _ in range(3))
        state = through_bytes(feeder.state(again_after=again_after))
        # Of the last one nobody knows yet whether it was trained.
        trained.pop()
        feeder.close()
        return state

    trained = []
    feeder, iterator = begin(prefetch=20)
    trained.append(int(next(iterator)[0]))
    wait_until(lambda: feeder.statistics()[0].elements >= 20)
    state = leave(feeder, iterator)
    # What is ahead is more than comes out before the next state is asked for.
    for _ in range(2):
        state = leave(*begin(2, state))
    _, rest = begin(2, state)
    assert trained + [int(value[0]) for value in rest] == list(range(200))


def test_auto_chooses_the_window_where_the_order_may_differ(make_feeder, capfd):
    def dataset_fn():
        return tf.data.Dataset.range(40).map(lambda i: i, num_parallel_calls=2, deterministic=False)

    feeder = make_feeder(dataset_fn, name="s")
    iterator = iter(feeder)
    trained = set(take(iterator, 9)[:-1])
    state = through_bytes(feeder.state(again_after=100))
    assert state.way == "window"
    feeder.close()
    restored = make_feeder(dataset_fn, name="s")
    restored.restore(state)
    rest = numbers(restored)
    assert (len(rest), trained | set(rest)) == (32, set(range(40)))
    said = [line for line in capfd.readouterr().err.splitlines() if "brought back" in line]
    assert len(said) == 1
    assert "the elements that it is ahead: a parallel map with deterministic=False" in said[0]


def test_a_state_whose_parts_are_strange_is_replayed(make_feeder, capfd):
    def dataset_fn():
        return tf.data.Dataset.range(20).shuffle(20)

    feeder = make_feeder(dataset_fn, name="s", resume="window")
    iterator = iter(feeder)
    trained = take(iterator, 5)[:-1]
    state = feeder.state()
    feeder.close()
    restored = make_feeder(dataset_fn, name="s")
    restored.restore(dataclasses.replace(state, parts={"element": b"4", "iterator": b"", "ahead": b"{}"}))
    assert sorted(trained + numbers(restored)) == list(range(20))
    assert "can't be read, the pipeline is replayed" in capfd.readouterr().err


def test_what_is_skipped_on_the_way_from_a_snapshot_is_compared(make_feeder):
    feeder = make_feeder(at_its_time, name="s", resume="snapshot", prefetch=2, max_buffer_bytes=1)
    iterator = iter(feeder)
    next(iterator)
    feeder.state(again_after=10)
    for _ in range(16):
        next(iterator)
    state = through_bytes(feeder.state(again_after=10))
    assert (state.way, state.parts["element"], state.element) == ("snapshot", b"10", 16)
    feeder.close()
    restored = make_feeder(at_its_time, name="s")
    restored.restore(state)
    with pytest.raises(kerasfeed.ReplayMismatchError, match="elements 10 to 15 of pass 0, which were trained"):
        list(restored)


def test_a_pipeline_that_does_not_repeat_itself_is_caught_when_it_is_restored(make_feeder):
    feeder = make_feeder(random_numbers, name="s")
    take(iter(feeder), 6)
    state = through_bytes(feeder.state())
    feeder.close()
    restored = make_feeder(random_numbers, name="s")
    restored.restore(state)
    with pytest.raises(kerasfeed.ReplayMismatchError, match="feed 's': elements 0 to 4 of pass 0, which were trained"):
        list(restored)
    warned = make_feeder(random_numbers, name="s", verify="warn")
    warned.restore(state)
    assert len(list(warned)) == 25


def test_a_pipeline_that_does_not_repeat_itself_is_caught_when_the_producer_dies(make_feeder):
    feeder = make_feeder(random_numbers, name="s", prefetch=2, max_buffer_bytes=1)
    iterator, got = iter(feeder), []
    take(iterator, 3)
    os.kill(feeder.session.producer_pid, signal.SIGKILL)
    with pytest.raises(kerasfeed.ReplayMismatchError, match="element 0 of pass 0 was produced again"):
        collect(iterator, got)
    assert len(got) < 27


def test_a_state_of_another_feed_or_pipeline_is_refused_with_what_differs(make_feeder):
    feeder = make_feeder(lambda: tf.data.Dataset.range(9).batch(3), name="s", seed=3)
    state = feeder.state()
    feeder.close()
    other = make_feeder(lambda: tf.data.Dataset.range(9).batch(3), name="other")
    with pytest.raises(kerasfeed.StateError, match="feed: the state has 's', the feed has 'other'"):
        other.restore(state)
    seeded = make_feeder(lambda: tf.data.Dataset.range(9).batch(3), name="s", seed=4)
    with pytest.raises(kerasfeed.StateError, match="seed: the state has 3, the feed has 4"):
        seeded.restore(state)
    changed = make_feeder(lambda: tf.data.Dataset.range(9).batch(2), name="s")
    changed.restore(state)
    with pytest.raises(kerasfeed.StateError, match="fingerprint: the state has"):
        collect(changed, [])
