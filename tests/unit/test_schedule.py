"""Which element is trained where: each element once, equal steps on all ranks, whatever the numbers."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasfeed.schedule import Place, Position, Segment, dropped_in, element_at, place_of, resumed_step, steps_in

sizes = st.integers(1, 17)
firsts = st.integers(0, 500)
lengths = st.integers(0, 300)
huge = st.integers(0, 2**62)


@given(element=huge, size=st.integers(1, 10_000), first=huge)
def test_element_at_gives_back_the_element_of_a_place(element, size, first):
    place = place_of(first + element, size, first)
    assert 0 <= place.rank < size
    assert place.step >= 0
    assert element_at(place.step, place.rank, size, first) == first + element


@given(data=st.data(), size=st.integers(1, 10_000), step=huge, first=huge)
def test_place_of_gives_back_the_place_of_an_element(data, size, step, first):
    rank = data.draw(st.integers(0, size - 1))
    assert place_of(element_at(step, rank, size, first), size, first) == Place(step, rank)


@given(elements=lengths, size=sizes, first=firsts)
def test_each_element_that_is_not_dropped_has_exactly_one_place(elements, size, first):
    steps, dropped = steps_in(elements, size, first), dropped_in(elements, size, first)
    trained = collections.Counter(element_at(s, r, size, first) for s in range(steps) for r in range(size))
    assert set(trained.values()) <= {1}
    assert sorted(trained) == list(range(first, max(first, elements) - dropped))


@given(elements=lengths, size=sizes, first=firsts)
def test_all_ranks_have_equal_steps(elements, size, first):
    steps = steps_in(elements, size, first)
    kept = range(first, max(first, elements) - dropped_in(elements, size, first))
    by_rank = collections.Counter(place_of(element, size, first).rank for element in kept)
    assert [by_rank[rank] for rank in range(size)] == [steps] * size


@given(elements=lengths, size=sizes, first=firsts)
def test_trained_and_dropped_elements_add_up(elements, size, first):
    steps, dropped = steps_in(elements, size, first), dropped_in(elements, size, first)
    assert 0 <= dropped < size
    assert steps * size + dropped == max(0, elements - first)


def test_places_of_a_small_epoch():
    assert [place_of(k, size=2) for k in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert place_of(7, size=3, first=4) == Place(step=1, rank=0)
    assert (steps_in(7, 2), dropped_in(7, 2)) == (3, 1)
    assert (steps_in(3, 2, first=5), dropped_in(3, 2, first=5)) == (0, 0)


@given(st.tuples(huge, huge), st.tuples(huge, huge))
def test_positions_are_ordered_by_epoch_then_step(a, b):
    assert (Position(*a) < Position(*b)) == (a < b)


def test_a_position_says_where_it_is():
    assert str(Position(3, 4)) == "epoch 3, step 4"


# ---- Segments ----


@given(
    epoch=st.integers(0, 50), first_epoch=st.integers(0, 50), origin_pass=firsts, origin=firsts, step=firsts, size=sizes
)
def test_in_pass_mode_each_epoch_is_the_next_pass(epoch, first_epoch, origin_pass, origin, step, size):
    segment = Segment(first_epoch, origin_pass, origin)
    first = origin if epoch == 0 else 0
    assert segment.locate(Position(first_epoch + epoch, step), size) == (
        origin_pass + epoch,
        element_at(step, 0, size, first),
    )


@given(
    epoch=st.integers(0, 50),
    first_epoch=st.integers(0, 50),
    origin_pass=firsts,
    origin=firsts,
    steps=st.integers(1, 100),
    size=sizes,
)
def test_in_joined_mode_epochs_follow_each_other_without_a_gap(epoch, first_epoch, origin_pass, origin, steps, size):
    segment = Segment(first_epoch, origin_pass, origin, steps)
    at = [segment.locate(Position(first_epoch + epoch, step), size) for step in range(steps)]
    at.append(segment.locate(Position(first_epoch + epoch + 1, 0), size))
    start = origin + epoch * steps * size
    assert at == [(origin_pass, start + i * size) for i in range(steps + 1)]


@pytest.mark.parametrize("field", ["first_epoch", "origin_pass", "origin_element"])
def test_a_negative_start_of_a_segment_is_refused_with_its_value(field):
    with pytest.raises(ValueError, match=f"{field} must be at least 0. Received: -7"):
        Segment(**{field: -7})


@pytest.mark.parametrize("steps", [0, -3])
def test_an_epoch_without_steps_is_refused_with_its_value(steps):
    with pytest.raises(ValueError, match=f"steps_per_epoch must be at least 1 or None. Received: {steps}"):
        Segment(steps_per_epoch=steps)


@pytest.mark.parametrize("steps", [None, 5])
def test_a_position_before_the_segment_is_refused_with_both_epochs(steps):
    with pytest.raises(ValueError, match="epoch 2, step 1 lies before this segment, which starts at epoch 3"):
        Segment(first_epoch=3, steps_per_epoch=steps).locate(Position(2, 1), size=2)


@given(
    element=st.integers(0, 500),
    elements=st.integers(1, 500),
    size=st.integers(1, 9),
    steps=st.none() | st.integers(1, 40),
    epoch=st.integers(0, 5),
)
def test_a_restored_segment_starts_with_its_element_and_later_epochs_are_whole(element, elements, size, steps, epoch):
    element = min(element, elements)
    step = resumed_step(element, 7, elements, size, steps, same_size=False)
    segment = Segment(epoch, 3, element, steps, step)
    assert segment.start == Position(epoch, step)
    assert segment.locate(segment.start, size) == (3, element)
    assert segment.locate(Position(epoch, step + 2), size) == (3, element + 2 * size)
    if steps is None:
        # The resumed epoch ends with the same number of steps as every other.
        assert step + steps_in(elements, size, element) == steps_in(elements, size)
        assert segment.locate(Position(epoch + 1, 2), size) == (4, 2 * size)
    else:
        assert step == 7
    if step:
        with pytest.raises(ValueError, match="before this segment"):
            segment.locate(Position(epoch, step - 1), size)


def test_a_step_keeps_its_number_where_the_number_of_ranks_is_the_same():
    assert resumed_step(14, 7, 41, 2, None, same_size=True) == 7
    # 41 elements make 13 steps of 3 ranks; 27 of them are left, which make 9.
    assert resumed_step(14, 7, 41, 3, None, same_size=False) == 4
    assert resumed_step(14, 7, -2, 3, None, same_size=False) == 4
