"""A turn that began on another state of the session can never be committed over it."""

from functools import partial

import pytest

from sessionkv.errors import SessionBusy, SessionNotFound
from sessionkv.types import StepPlan
from tests.builders.doors import Door, Hold, Later, open_door
from tests.builders.engine import GREEDY, StepGate, engine_config, greedy, oracle
from tests.builders.tree import TENANT, Sessions, new_turn, snapshot


def test_of_two_turns_on_one_node_only_the_first_is_committed():
    s = Sessions()
    s.open("a")
    base = s.turn("a", [1, 2]).node_id
    s.commit(s.tree.append_turn(TENANT, "a", new_turn([1, 2], [3]), base_id=base, now=3.0))
    before = snapshot(s.tree)
    for late in ([4], [5]):
        with pytest.raises(SessionBusy):
            s.tree.append_turn(TENANT, "a", new_turn([1, 2], late), base_id=base, now=4.0)
    assert snapshot(s.tree) == before
    assert s.tokens("a") == [1, 2, 3]


def test_a_turn_of_a_session_that_was_deleted_and_made_anew_is_refused():
    s = Sessions()
    s.open("a")
    base = s.turn("a", [1, 2]).node_id
    s.commit(s.tree.delete(TENANT, "a"))
    with pytest.raises(SessionNotFound):
        s.tree.append_turn(TENANT, "a", new_turn([1, 2], [3]), base_id=base, now=3.0)
    s.open("a")
    with pytest.raises(SessionBusy):
        s.tree.append_turn(TENANT, "a", new_turn([1, 2], [3]), base_id=base, now=3.0)
    assert s.tokens("a") == []


def test_of_overlapping_turns_all_but_the_first_are_treated_alike():
    hold = Hold()
    config = engine_config(blocks=16_384)
    with open_door("engine", config, gate=hold.gate, runner={"script": hold.script}) as door:
        session = door.client.open("a")
        running = Later(lambda: session.turn(tokens=[1], sampling=greedy(None, ignore_eos=False)))
        hold.wait_going()
        for _ in range(3):
            with pytest.raises(SessionBusy):
                session.turn(tokens=[2], sampling=GREEDY)
        hold.release()
        log = [1, *running.result().tokens]
        assert door.log("a") == log
        assert list(session.turn(tokens=[3], sampling=GREEDY).tokens) == oracle([*log, 3])
        door.assert_ledger()


def test_no_step_computes_two_turns_of_one_session():
    gate = StepGate()
    most = 0

    def watch(plan: StepPlan) -> None:
        nonlocal most
        most = max(most, len(plan.steps))
        gate(plan)

    with open_door("engine", gate=watch) as door:
        session = door.client.open("a")
        turns = [Later(partial(ask, door, 0))]
        gate.reached()
        turns += [Later(partial(ask, door, i)) for i in range(1, 6)]
        door.engine.await_messages(5)  # all six overlap
        gate.open()
        assert all(turn.result().tokens for turn in turns)
        assert most == 1
        assert session.info().turns == 6
        door.assert_ledger()


def ask(door: Door, token_id: int):
    return door.client.session("a").turn(tokens=[token_id], sampling=GREEDY, when_busy="queue")
