"""Where states are saved: at the edges of blocks, few but where edits come."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken.cache.anchors import MAX_GAP, MIN_GAP, choose, positions_to_save


def test_neighbours_are_one_and_the_earlier_stays():
    assert positions_to_save([10, 11, 13, 20, 40, 43], 0, 48, 16) == [10, 20, 40]


def test_a_prompt_without_anchors_gets_its_last_page_boundary():
    assert positions_to_save([], 0, 50, 16) == [48]
    assert positions_to_save([], 0, 49, 16) == [48]
    assert positions_to_save([], 0, 48, 16) == [32]
    assert positions_to_save([], 40, 48, 16) == []


def test_an_anchor_near_the_end_makes_the_boundary_needless():
    assert positions_to_save([45], 0, 50, 16) == [45]
    assert positions_to_save([20], 0, 50, 16) == [20, 48]


def test_long_blocks_get_states_inside():
    found = positions_to_save([100, 9000], 0, 9010, 16)
    assert found == [100, 100 + MAX_GAP, 100 + 2 * MAX_GAP, 9000]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.sets(st.integers(0, 500)), st.integers(0, 400), st.integers(1, 100))
def test_positions_ascend_within_the_prompt_and_keep_their_distance(anchors, start, length):
    end = start + length
    found = positions_to_save(anchors, start, end, 16)
    assert found == sorted(set(found)) and all(start < p < end for p in found)
    for anchor in anchors:
        if start + MIN_GAP <= anchor < end:
            assert any(anchor - MIN_GAP < p <= anchor for p in found), (
                "each anchor has one at or just before it"
            )


@given(st.sets(st.integers(11, 499)).map(sorted), st.integers(0, 12))
def test_a_choice_is_part_of_the_whole_and_keeps_the_last(positions, count):
    kept = choose(positions, 10, 500, count)
    assert len(kept) == min(count, len(positions)) and set(kept) <= set(positions)
    if kept:
        assert kept[-1] == positions[-1]


def test_a_choice_is_denser_at_both_ends():
    kept = choose(range(100, 10000, 100), 0, 10000, 8)
    assert kept[0] <= 300 and kept[-2] >= 9600
