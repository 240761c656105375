"""A feeder is a dataset: iterated eagerly or compiled, transformed, broken off and started again."""

from __future__ import annotations

import itertools
import json
import os

import numpy as np
import pytest
import tensorflow as tf
from helpers import Script, by_value, end_sessions, lines_of, numbers, wait_until

import kerasfeed

by_value(__name__)

COUNT = 12


@pytest.fixture(scope="module")
def feeder():
    """One feeder of 0..11 for all tests that only iterate: each iterator is one more pass over the same elements."""
    built = kerasfeed.DataFeeder(lambda: tf.data.Dataset.range(12), name="numbers")
    assert built.element_spec == tf.TensorSpec([], tf.int64)
    yield built
    end_sessions([built.session])


# ---- Loops ----


def test_an_eager_loop_gets_every_element_in_order_each_time(feeder):
    assert numbers(feeder) == list(range(COUNT))
    assert numbers(feeder) == list(range(COUNT))


def test_a_compiled_loop_gets_every_element(feeder):
    @tf.function
    def captured():
        text = tf.constant("")
        for value in feeder:
            text = tf.strings.join([text, tf.strings.as_string(value)], " ")
        return text

    @tf.function
    def passed(dataset):
        total = tf.constant(0, tf.int64)
        for value in dataset:
            total += value
        return total

    expected = " ".join(map(str, range(COUNT)))
    assert captured().numpy().decode().strip() == expected
    assert captured().numpy().decode().strip() == expected
    assert int(passed(feeder)) == sum(range(COUNT))


def test_a_loop_that_breaks_off_starts_again_at_the_beginning(feeder):
    for value in feeder:
        if int(value) == 4:
            break
    assert numbers(feeder) == list(range(COUNT))
    iterator = iter(feeder)
    assert int(next(iterator)) == 0
    del iterator
    assert numbers(feeder) == list(range(COUNT))


def test_an_iterator_at_its_end_stays_there(feeder):
    iterator = iter(feeder)
    assert len(list(iterator)) == COUNT
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)


def test_transformations_of_a_feeder_are_those_of_a_dataset(feeder):
    plain = tf.data.Dataset.range(COUNT)
    other = tf.data.Dataset.range(100, 100 + COUNT)
    for transform in (
        lambda d: d.map(lambda x: x * 2, num_parallel_calls=2),
        lambda d: d.prefetch(4),
        lambda d: d.prefetch(tf.data.AUTOTUNE).take(5),
        lambda d: d.repeat(2),
        lambda d: d.skip(3).filter(lambda x: x % 2 == 0),
        lambda d: d.batch(5).unbatch(),
        lambda d: d.batch(5).map(tf.reduce_sum),
        lambda d: tf.data.Dataset.zip((d, other)).map(lambda a, b: a + b),
        lambda d: d.concatenate(other),
        lambda d: d.enumerate().map(lambda n, x: n * x),
    ):
        assert numbers(transform(feeder)) == numbers(transform(plain))
    assert sorted(numbers(feeder.shuffle(16))) == list(range(COUNT))
    assert numbers(feeder.take(3)) == [0, 1, 2]
    assert numbers(feeder) == list(range(COUNT))


def test_two_iterators_at_once_are_refused_in_clear_words(feeder):
    first, second = iter(feeder), iter(feeder)
    assert int(next(first)) == 0
    assert int(next(second)) == 0
    with pytest.raises(kerasfeed.FeedClosedError, match=r"feed 'numbers'.*iterated twice at the same time"):
        next(first)
    assert [int(value) for value in second] == list(range(1, COUNT))


def test_a_temporary_feeder_lives_as_long_as_its_loop():
    pids = set()
    values = []
    for value in kerasfeed.DataFeeder(lambda: tf.data.Dataset.range(5), name="temporary"):
        values.append(int(value))
        pids |= {s.producer_pid for s in kerasfeed.session._open_sessions if s.name == "temporary"}
    assert values == list(range(5))
    assert len(pids) == 1
    # Nobody holds it any more: it closes itself.
    wait_until(
        lambda: all(s.producer_pid is None for s in kerasfeed.session._open_sessions if s.name == "temporary"),
        what="the producer of the temporary feeder to end",
    )


# ---- What is known before the first element ----


def test_repr_starts_nothing(make_feeder):
    unused = make_feeder(lambda: 1 / 0, name="unused")
    assert "unused" in repr(unused)
    assert "unused" in str(unused)
    assert bool(unused)
    assert not unused.session.started
    assert unused.statistics() == []
    unused.close()


def test_a_known_cardinality_is_answered_by_method_op_and_derived_datasets(feeder):
    assert int(feeder.cardinality()) == COUNT
    assert int(tf.data.experimental.cardinality(feeder)) == COUNT
    assert int(feeder.map(lambda x: x).cardinality()) == COUNT
    assert int(tf.data.experimental.cardinality(feeder.map(lambda x: x).batch(5))) == 3
    assert len(feeder) == COUNT


def test_an_unknown_cardinality_is_answered_as_unknown(make_feeder):
    feeder = make_feeder(lambda: tf.data.Dataset.range(9).filter(lambda x: x % 2 == 0))
    assert int(feeder.cardinality()) == tf.data.UNKNOWN_CARDINALITY
    assert int(tf.data.experimental.cardinality(feeder)) == tf.data.UNKNOWN_CARDINALITY
    assert int(feeder.map(lambda x: x).cardinality()) == tf.data.UNKNOWN_CARDINALITY
    assert numbers(feeder) == numbers(feeder.map(lambda x: x)) == [0, 2, 4, 6, 8]


def test_an_endless_dataset_is_infinite_and_starts_again(make_feeder):
    feeder = make_feeder(lambda: tf.data.Dataset.range(3).repeat())
    assert int(feeder.cardinality()) == tf.data.INFINITE_CARDINALITY
    assert int(tf.data.experimental.cardinality(feeder)) == tf.data.INFINITE_CARDINALITY
    assert int(feeder.map(lambda x: x).cardinality()) == tf.data.INFINITE_CARDINALITY
    assert numbers(feeder.take(7)) == [0, 1, 2, 0, 1, 2, 0]
    assert numbers(feeder.map(lambda x: x).take(4)) == [0, 1, 2, 0]


def test_steps_per_epoch_cuts_one_stream_out_of_all_passes(make_feeder):
    feeder = make_feeder(lambda: tf.data.Dataset.range(5), steps_per_epoch=7)
    assert int(feeder.cardinality()) == 7
    assert int(tf.data.experimental.cardinality(feeder)) == 7
    assert numbers(feeder) == [0, 1, 2, 3, 4, 0, 1]
    assert numbers(feeder.map(lambda x: x)) == [2, 3, 4, 0, 1, 2, 3]
    assert numbers(feeder) == [4, 0, 1, 2, 3, 4, 0]


# ---- What a function may be ----


def test_every_pass_is_what_the_plain_dataset_gives_under_the_producers_seed(make_feeder, tmp_path):
    path = str(tmp_path / "seed")

    def dataset():
        return tf.data.Dataset.range(20).shuffle(20).map(lambda x: x + 1).shuffle(5, seed=3)

    def dataset_fn():
        from tensorflow.python.eager import context

        with open(path, "w") as file:
            file.write(str(context.global_seed()))
        return dataset()

    feeder = make_feeder(dataset_fn, seed=11)
    passes = [numbers(feeder)]
    iterator = iter(feeder)
    passes.append([int(next(iterator)) for _ in range(4)])  # broken off
    passes.append(numbers(feeder))
    tf.random.set_seed(int(lines_of(tmp_path / "seed")[0]))
    try:
        plain = dataset()
        expected = [numbers(plain), numbers(plain)[:4], numbers(plain)]
    finally:
        tf.random.set_seed(None)
    assert passes == expected
    assert len({tuple(p[:4]) for p in passes}) == 3


def test_a_function_gets_the_input_context_if_it_wants_it(make_feeder):
    offset = 40

    def with_context(ctx):
        assert isinstance(ctx, tf.distribute.InputContext)
        values = [ctx.num_replicas_in_sync, ctx.num_input_pipelines, ctx.input_pipeline_id, offset]
        return tf.data.Dataset.from_tensor_slices(values)

    assert numbers(make_feeder(with_context)) == [1, 1, 0, 40]


def test_a_function_may_use_keras_which_the_producer_does_not_import_by_itself(make_feeder):
    def dataset_fn():
        import sys

        before = [name for name in sys.modules if name.split(".")[0] in ("keras", "tf_keras")]
        layer = tf.keras.layers.Rescaling(0.5)
        from tensorflow import keras

        one_hot = keras.utils.to_categorical([1, 0])
        assert type(tf.keras.optimizers.Adam(0.1)).__name__ == "Adam"
        dataset = tf.data.Dataset.range(4).map(lambda i: (layer(tf.cast([i], tf.float32))[0], one_hot, len(before)))
        return dataset

    values = list(make_feeder(dataset_fn))
    assert [float(x) for x, _, _ in values] == [0.0, 0.5, 1.0, 1.5]
    assert [y.numpy().tolist() for _, y, _ in values] == [[[0.0, 1.0], [1.0, 0.0]]] * 4
    assert {int(found) for _, _, found in values} == {0}


def test_a_function_with_two_arguments_is_refused_at_once():
    with pytest.raises(TypeError, match="one argument"):
        kerasfeed.DataFeeder(lambda a, b: None)


def test_autograph_works_in_functions_of_a_script(tmp_path):
    source = """
    import tensorflow as tf
    import kerasfeed

    LIMIT = 3

    def clip(x):
        if x > LIMIT:  # a tensor
            return x * 100
        else:
            for _ in tf.range(2):
                x = x - 1
            return x

    def dataset_fn():
        return tf.data.Dataset.range(6).map(clip).map(lambda x: x if x > 0 else x * 10)

    if __name__ == "__main__":
        print([int(x) for x in kerasfeed.DataFeeder(dataset_fn)])
    """
    with Script(tmp_path, source) as script:
        assert script.wait() == 0, script.text
        assert "[-20, -10, 0, 1, 400, 500]" in script.text
        assert "AutoGraph could not transform" not in script.text


def test_autograph_works_in_local_functions_of_an_imported_module(make_feeder, tmp_path, monkeypatch, capfd):
    (tmp_path / "data_of_a_test.py").write_text(
        "import tensorflow as tf\n\n"
        "def make(limit):\n"
        "    def clip(x):\n"
        "        if x > limit:\n"
        "            return x * 100\n"
        "        return x\n\n"
        "    return lambda: tf.data.Dataset.range(6).map(clip).map(lambda x: x if x > 1 else x * 10)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import data_of_a_test

    assert numbers(make_feeder(data_of_a_test.make(3))) == [0, 10, 2, 3, 400, 500]
    assert "AutoGraph could not transform" not in capfd.readouterr().err


# ---- A dataset instead of a function ----


def test_the_graph_of_a_dataset_travels_and_repeats_with_the_seed(make_feeder):
    words = tf.constant(["a", "b", "c"])
    plain = tf.data.Dataset.range(30).shuffle(30).map(lambda x: (x, {"w": words[x % 3]}, tf.random.uniform([])))

    def passes_of(feeder):
        return [[(int(x), d["w"].numpy().decode(), float(r)) for x, d, r in feeder] for _ in range(2)]

    feeder = make_feeder(plain, seed=4)
    assert feeder.element_spec == plain.element_spec
    assert int(feeder.cardinality()) == 30
    passes = passes_of(feeder)
    for elements in passes:
        assert sorted((x, w) for x, w, _ in elements) == [(x, "abc"[x % 3]) for x in range(30)]
        assert len({r for _, _, r in elements}) == 30
    assert [x for x, _, _ in passes[0]] != [x for x, _, _ in passes[1]]
    assert {r for _, _, r in passes[0]} != {r for _, _, r in passes[1]}
    assert passes_of(make_feeder(plain, seed=4)) == passes


def test_a_dataset_that_cannot_travel_says_why(make_feeder):
    variable = tf.Variable(1, dtype=tf.int64)
    generator = tf.random.Generator.from_seed(1)
    numbers_ = tf.data.Dataset.range(3)
    for dataset, reason in (
        (numbers_.map(lambda x: tf.py_function(lambda y: y, [x], tf.int64)), "py_function"),
        (tf.data.Dataset.from_generator(lambda: [1], output_types=tf.int64), "from_generator"),
        (numbers_.map(lambda x: x + variable), "Variable"),
        (numbers_.map(lambda x: generator.uniform([])), "Generator"),
    ):
        refused = make_feeder(dataset, name="refused")
        with pytest.raises(ValueError, match=rf"can't travel(.|\n)*{reason}"):
            list(refused)
        assert refused.session.producer_pid is None


# ---- Seeds ----


def test_random_ops_differ_from_epoch_to_epoch_and_repeat_with_the_seed(make_feeder):
    def dataset_fn():
        image = tf.reshape(tf.range(48, dtype=tf.float32), [4, 4, 3])

        def augment(i):
            flipped = tf.image.random_flip_left_right(image)
            bright = tf.image.random_brightness(flipped, 0.5)
            return i, tf.random.uniform([2]), bright

        return tf.data.Dataset.range(6).shuffle(6).map(augment)

    def passes_of(seed):
        feeder = make_feeder(dataset_fn, seed=seed)
        found = []
        for _ in range(3):
            order, *values = zip(*[(int(i), r.numpy(), b.numpy()) for i, r, b in feeder], strict=True)
            found.append((order, *map(np.stack, values)))
        feeder.close()
        return found

    first, again = passes_of(5), passes_of(5)
    for mine, same in zip(first, again, strict=True):
        assert sorted(mine[0]) == list(range(6))
        assert mine[0] == same[0]
        assert np.array_equal(mine[1], same[1])
        assert np.array_equal(mine[2], same[2])
    for earlier, later in itertools.pairwise(first):
        assert earlier[0] != later[0]
        assert not np.array_equal(earlier[1], later[1])
        assert not np.array_equal(earlier[2], later[2])


def test_a_deterministic_producer_repeats_a_parallel_map(make_feeder):
    def dataset_fn():
        import os
        import random

        import numpy

        python = tf.constant([random.random(), numpy.random.rand(), hash("x") / 2**62, float(os.getpid() > 0)])
        return tf.data.Dataset.range(40).map(lambda i: (tf.random.uniform([]), python), num_parallel_calls=4)

    def stream(seed):
        feeder = make_feeder(dataset_fn, seed=seed, deterministic=True)
        values = [(float(x), tuple(p.numpy())) for _ in range(2) for x, p in feeder]
        feeder.close()
        return values

    first = stream(3)
    assert stream(3) == first
    assert len({x for x, _ in first}) == 80


# ---- The producer's surroundings ----


def test_the_producer_prints_under_its_name_and_sees_neither_gpus_nor_launcher_nor_token(
    make_feeder, monkeypatch, capfd
):
    monkeypatch.setenv("HOROVOD_SOMETHING", "1")
    monkeypatch.setenv("OMPI_SOMETHING", "1")
    monkeypatch.setenv("KERASFEED_TOKEN", "0123456789abcdef-secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("SOME_SETTING", "kept")

    def dataset_fn():
        import json
        import os
        import sys

        print("printed by dataset_fn")
        print("complaint of dataset_fn", file=sys.stderr)
        os.system("echo printed by a child of the producer")
        devices = [d.device_type for d in tf.config.list_physical_devices()]
        found = {"env": dict(os.environ), "devices": devices, "pid": os.getpid(), "stdin": sys.stdin.read()}
        return tf.data.Dataset.from_tensors(json.dumps(found)).map(lambda t: (tf.print("from a tf.print"), t)[1])

    feeder = make_feeder(dataset_fn, name="talker")
    (text,) = list(feeder)
    found = json.loads(text.numpy())
    assert found["pid"] not in (os.getpid(), os.getppid())
    assert found["devices"] == ["CPU"]
    assert found["stdin"] == ""
    env = found["env"]
    assert env["SOME_SETTING"] == "kept"
    assert env["CUDA_VISIBLE_DEVICES"] == "-1"
    assert not [name for name in env if name.startswith(("HOROVOD_", "OMPI_"))]
    assert "KERASFEED_TOKEN" not in env
    assert not [name for name, value in env.items() if "0123456789abcdef-secret" in value]
    feeder.close()
    assert feeder.session._supervisor.wait(20)
    out, err = capfd.readouterr()
    assert "[producer talker] printed by dataset_fn\n" in out
    assert "[producer talker] printed by a child of the producer\n" in out
    assert "[producer talker] complaint of dataset_fn\n" in err
    assert "[producer talker] from a tf.print\n" in err
