"""Every argument of a feeder is checked at once; what is not supported yet is refused by name."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math

import pytest
import tensorflow as tf

from kerasfeed import DataFeeder, Topology
from kerasfeed.options import DEFAULT_MAX_BUFFER_BYTES, DEFAULT_PREFETCH, FeedOptions


def dataset_fn():
    return tf.data.Dataset.range(3)


@pytest.fixture(params=["options", "feeder"])
def make(request):
    """What is refused by the options is refused by the feeder that is given them."""
    if request.param == "options":
        return FeedOptions
    return lambda **arguments: DataFeeder(dataset_fn, **arguments)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("policy", "split"),
        ("policy", "broadcast"),
        ("policy", "dynamic"),
        ("policy", None),
        ("remainder", "pad"),
        ("remainder", "keep"),
        ("transport", "rdma"),
    ],
)
def test_what_is_not_supported_yet_is_refused_by_name(make, argument, value):
    with pytest.raises(ValueError, match=rf"{argument}={value!r} is not supported. Supported: '"):
        make(**{argument: value})


@pytest.mark.parametrize(
    ("argument", "value", "bound"),
    [
        ("producer", -1, "at least 0"),
        ("steps_per_epoch", 0, "at least 1"),
        ("steps_per_epoch", -4, "at least 1"),
        ("prefetch", 0, "at least 1"),
        ("max_buffer_bytes", 0, "at least 1"),
        ("port", -1, "from 0 to 65535"),
        ("port", 65536, "from 0 to 65535"),
        ("seed", -1, "from 0 to 2147483647"),
        ("seed", 2**31, "from 0 to 2147483647"),
    ],
)
def test_a_number_out_of_range_is_refused_with_its_value_and_bound(make, argument, value, bound):
    with pytest.raises(ValueError, match=f"{argument} must be {bound}. Received: {value}"):
        make(**{argument: value})


@pytest.mark.parametrize("argument", ["producer", "steps_per_epoch", "prefetch", "max_buffer_bytes", "port", "seed"])
@pytest.mark.parametrize("value", [1.0, "1", True, math.nan, [1]])
def test_what_is_no_whole_number_is_refused_by_type(make, argument, value):
    with pytest.raises(TypeError, match=f"{argument} must be an int"):
        make(**{argument: value})


@pytest.mark.parametrize("argument", ["max_buffer_bytes", "port"])
def test_none_is_refused_where_there_is_nothing_to_leave_open(make, argument):
    with pytest.raises(TypeError, match=f"{argument} must be an int. Received: None"):
        make(**{argument: None})


@pytest.mark.parametrize("value", ["", 3, None, b"train"])
def test_a_feed_needs_a_name(make, value):
    with pytest.raises(ValueError, match=r"name must be a string of at least one character. Received: "):
        make(name=value)


@pytest.mark.parametrize("argument", ["deterministic", "check_replay"])
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_a_question_is_answered_by_true_or_false(make, argument, value):
    with pytest.raises(TypeError, match=rf"{argument} must be True or False. Received: "):
        make(**{argument: value})


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "600", None, True])
def test_start_timeout_is_a_positive_number_of_seconds(make, value):
    with pytest.raises(ValueError, match=r"start_timeout must be seconds, more than 0. Received: "):
        make(start_timeout=value)


def test_an_unknown_argument_is_refused_by_name(make):
    with pytest.raises(TypeError, match="shard"):
        make(shard=True)


def test_every_argument_of_a_feeder_is_an_option_that_is_checked():
    arguments = set(inspect.signature(DataFeeder.__init__).parameters) - {"self", "dataset", "topology"}
    assert arguments == {field.name for field in dataclasses.fields(FeedOptions)}


def test_defaults_of_feeder_and_options_are_the_same():
    parameters = inspect.signature(DataFeeder.__init__).parameters
    for field in dataclasses.fields(FeedOptions):
        assert parameters[field.name].default == field.default, field.name


def test_all_supported_values_are_accepted(make):
    make(
        name="val",
        producer=0,
        policy="round_robin",
        remainder="drop",
        steps_per_epoch=10,
        seed=2**31 - 1,
        deterministic=True,
        prefetch=1,
        max_buffer_bytes=1,
        check_replay=False,
        transport="grpc",
        port=65535,
        start_timeout=0.5,
    )


# ---- What None means ----


def test_what_is_left_open_has_a_default_and_can_be_told_from_it():
    left_open = FeedOptions()
    assert (left_open.producer, left_open.prefetch) == (None, None)
    assert (left_open.producer_rank, left_open.prefetch_steps) == (0, DEFAULT_PREFETCH)
    assert FeedOptions(producer=0, prefetch=DEFAULT_PREFETCH) != left_open


def test_the_prefetch_is_at_least_two_steps():
    assert FeedOptions(prefetch=1).prefetch_steps == 2
    assert FeedOptions(prefetch=5).prefetch_steps == 5


def test_ranks_agree_on_the_producer_whether_it_is_left_open_or_said():
    assert FeedOptions().agreed() == FeedOptions(producer=0).agreed()
    assert FeedOptions().agreed() != FeedOptions(producer=1).agreed()


def test_ranks_need_not_agree_on_whether_the_pipeline_is_checked():
    assert FeedOptions(check_replay=False).agreed() == FeedOptions().agreed()


@pytest.mark.parametrize(
    "difference", [{"name": "val"}, {"producer": 1}, {"steps_per_epoch": 3}, {"seed": 4}, {"deterministic": True}]
)
def test_ranks_that_differ_in_what_the_data_depends_on_do_not_agree(difference):
    assert FeedOptions(**difference).agreed() != FeedOptions().agreed()


def test_a_callback_sets_only_what_was_left_open():
    feeder = DataFeeder(dataset_fn, producer=0)
    feeder.session.configure(producer=None, prefetch=3)
    assert (feeder.session.options.producer, feeder.session.options.prefetch) == (0, 3)
    feeder.session.configure(producer=0, prefetch=3)
    with pytest.raises(ValueError, match=r"producer is 0 already, given to DataFeeder. Received: 1"):
        feeder.session.configure(producer=1)


def test_what_a_callback_sets_is_checked_too():
    with pytest.raises(ValueError, match=r"prefetch must be at least 1. Received: 0"):
        DataFeeder(dataset_fn).session.configure(prefetch=0)


# ---- The value itself ----


def test_options_travel_as_json():
    options = FeedOptions(name="väl", producer=2, seed=5, prefetch=3, start_timeout=1.5)
    assert FeedOptions(**json.loads(json.dumps(options.to_json()))) == options
    assert FeedOptions().max_buffer_bytes == DEFAULT_MAX_BUFFER_BYTES


def test_options_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FeedOptions().prefetch = 3


# ---- dataset and topology ----


@pytest.mark.parametrize("address", ["host:1", b"host:1"])
def test_the_address_of_a_producer_is_refused_as_not_supported_yet(address):
    with pytest.raises(ValueError, match=r"the address of a producer .* is not supported yet. Received: .*host:1"):
        DataFeeder(address)


@pytest.mark.parametrize("dataset", [None, 3, [1, 2], tf.constant([1])])
def test_what_is_neither_function_nor_dataset_is_refused_by_type(dataset):
    with pytest.raises(
        TypeError, match=f"must be a function .* or a tf.data.Dataset. Received: {type(dataset).__name__}"
    ):
        DataFeeder(dataset)


def test_a_function_with_two_required_arguments_is_refused_before_it_travels():
    with pytest.raises(TypeError, match="required arguments ctx, files"):
        DataFeeder(lambda ctx, files: None)


def test_a_topology_must_be_one():
    with pytest.raises(TypeError, match=r"topology must be a kerasfeed.Topology. Received: \(0, 1\)"):
        DataFeeder(dataset_fn, topology=(0, 1))


def test_a_producer_that_is_no_rank_of_the_job_is_refused():
    with pytest.raises(ValueError, match=r"feed 'train': producer must be a rank from 0 to 0. Received: 3"):
        DataFeeder(dataset_fn, producer=3, topology=Topology())


def test_a_feeder_that_is_only_built_starts_nothing():
    feeder = DataFeeder(dataset_fn, topology=Topology())
    assert not feeder.session.started
    assert not feeder.session.running
