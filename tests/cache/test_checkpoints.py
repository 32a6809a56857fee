"""Which saved state goes first, who pays for it, and where its bytes may lie."""

import numpy as np

from freetoken.cache.checkpoints import RECENT_GROUPS, Checkpoints

from .model import World


def saved(world: World, tokens, positions, group: str = "") -> None:
    """Run one request and save its state at the given positions."""
    player = world.arrive(tuple(tokens), group)
    for position in positions:
        world.compute(player, position - player.done)
        world.save(player, group)
        world.mover.advance(99)
    world.compute(player, 99)
    world.finish(player, donate=False)
    world.check()


def marks(world: World) -> set[tuple[int, ...]]:
    return {path[:m] for path, at in world.paths() for m in at}


def world(slots: int) -> World:
    return World(page=4, pages=200, working=3, slots=slots)


def test_the_one_that_saves_fewest_tokens_goes_first():
    w = world(slots=3)
    saved(w, range(30), [10, 12, 28])
    saved(w, range(100, 130), [20])
    assert marks(w) == {tuple(range(10)), tuple(range(28)), tuple(range(100, 120))}


def test_a_checkpoint_is_worth_more_once_the_one_before_it_is_gone():
    w = world(slots=3)
    saved(w, range(40), [10, 12, 14])
    saved(w, range(100, 130), [20])
    saved(w, range(200, 230), [20])
    assert tuple(range(10)) in marks(w) or tuple(range(14)) in marks(w)
    assert len(marks(w)) == 3


def test_what_is_used_again_outlives_what_is_not():
    w = world(slots=4)
    saved(w, range(30), [20])
    for i in range(1, 12):
        saved(w, range(100 * i, 100 * i + 30), [20])
        player = w.arrive(tuple(range(25)))
        assert player.done == 20
        w.finish(player, donate=False)


def test_a_conversation_in_use_keeps_its_share_from_others():
    w = world(slots=6)
    saved(w, range(30), [8, 16, 24], "session")
    for i in range(1, 20):
        saved(w, range(100 * i, 100 * i + 40), [36], "flood")
    assert len([m for m in marks(w) if m[0] == 0]) == 3
    saved(w, range(9000, 9040), [12, 24, 36], "third")
    assert len([m for m in marks(w) if m[0] == 9000]) >= 2, "a newcomer gets its share from the largest"


def test_conversations_that_nobody_continues_protect_nothing():
    w = world(slots=4)
    saved(w, range(30), [8, 16, 24], "old")
    for i in range(1, RECENT_GROUPS + 3):
        saved(w, range(100 * i, 100 * i + 40), [36], f"g{i}")
    assert not [m for m in marks(w) if m[0] == 0]


def test_host_memory_is_never_exceeded():
    w = world(slots=5)
    for i in range(60):
        saved(w, range(50 * i, 50 * i + 30), [10, 20, 28], f"g{i % 7}")
        assert w.checkpoints.slots.num_used <= 5 and len(w.mover.slot) <= 5


def test_without_host_memory_the_device_alone_keeps_a_few():
    w = world(slots=0)
    for i in range(10):
        saved(w, range(50 * i, 50 * i + 30), [20])
    assert 0 < len(marks(w)) == w.checkpoints.num_units
    player = w.arrive(tuple(range(450, 475)))
    assert player.done == 20
    w.finish(player, donate=False)


def test_requests_get_back_the_units_that_checkpoints_borrowed():
    w = World(page=4, pages=200, working=1, slots=20)
    for i in range(8):
        saved(w, range(50 * i, 50 * i + 30), [10, 20])
    assert w.checkpoints.num_units > 1
    players = [w.arrive(tuple(range(5000 + 50 * i, 5010 + 50 * i))) for i in range(6)]
    assert None not in players
    w.check()


def test_a_state_is_never_read_from_a_place_that_changed_hands():
    w = world(slots=4)
    saved(w, range(30), [20])
    checkpoints: Checkpoints = w.checkpoints
    (checkpoint,) = checkpoints._slot_of.values()
    del checkpoints._slot_of[checkpoint.slot]
    checkpoints._unit_of.pop(checkpoint.unit, None)
    assert w.cache.match(np.arange(25, dtype=np.int32), 24).num_tokens == 0
