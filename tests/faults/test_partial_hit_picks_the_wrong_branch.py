"""With several branches cached, the longest verified prefix of the asked one is chosen."""

from __future__ import annotations

import pytest

from tests.builders.kv_world import B, T, World

TURN = 7
TRUNK = T(6 * TURN)


def branch(turns: int, mark: int) -> list[int]:
    """The trunk up to the end of a turn, then another continuation."""
    return [*TRUNK[: turns * TURN], *[mark] * TURN]


@pytest.mark.parametrize("host", [0, 64])
def test_each_branch_goes_on_from_its_own_end(host: int) -> None:
    world = World(device_blocks=40 if not host else 14, host_blocks=host)
    world.turn(TRUNK)
    branches = [branch(1, 1), branch(3, 2), branch(5, 3), branch(3, 4)]
    for log in branches:
        world.turn(log)
    for log in [*branches, TRUNK, *branches]:
        run = world.turn([*log, 99])
        assert run.admission.cached_tokens >= len(log) - (B - 1)
    world.assert_idle()


def test_a_branch_reuses_the_trunk_to_the_token_where_it_left() -> None:
    world = World(device_blocks=40)
    world.turn(TRUNK)
    for turns in (1, 3, 5):
        run = world.turn(branch(turns, turns))
        assert run.admission.cached_tokens == turns * TURN
        assert run.admission.device_tokens == turns * TURN


def test_of_two_tails_the_one_with_more_in_common_is_used() -> None:
    world = World(device_blocks=16)
    world.turn([*T(8), 1, 2])
    world.turn([*T(8), 1, 3, 4])
    run = world.admit(world.chain([*T(8), 1, 3, 5, 6]))
    assert run is not None
    assert run.admission.cached_tokens == 10
