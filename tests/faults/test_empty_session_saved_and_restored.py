"""A session without turns survives a restart; a name that is not there harms no other session."""

import pytest

from sessionkv.errors import SessionExists, SessionNotFound
from sessionkv.types import DeleteHead, MissReason
from tests.builders.engine import GREEDY, engine_config, open_engine, oracle
from tests.builders.tree import TENANT, Sessions, snapshot


def test_session_without_turns_is_there_after_a_restart():
    s = Sessions()
    s.open("empty", system=b"S")
    s.restart()
    head = s.tree.head(TENANT, "empty")
    assert s.tree.num_turns(head.node_id) == 0
    assert s.tokens("empty") == []
    assert s.open("empty", system=b"S").ops == ()
    s.turn("empty", [1, 2, 3])
    assert s.tokens("empty") == [1, 2, 3]


@pytest.mark.parametrize("operation", ["fork", "rewind", "pin", "delete", "turn"])
def test_unknown_name_is_not_found_and_a_live_session_keeps_its_blocks(operation):
    s = Sessions()
    s.open("live")
    s.turn("live", range(9))
    before = snapshot(s.tree)
    with pytest.raises(SessionNotFound):
        {
            "fork": lambda: s.tree.fork(TENANT, "nope", "live2", now=3.0),
            "rewind": lambda: s.tree.rewind(TENANT, "nope", 1, now=3.0),
            "pin": lambda: s.tree.pin(TENANT, "nope", tier="host", now=3.0),
            "delete": lambda: s.tree.delete(TENANT, "nope"),
            "turn": lambda: s.begin_turn("nope", [1]),
        }[operation]()
    assert snapshot(s.tree) == before


def test_an_engine_keeps_an_empty_session_over_a_restart(tmp_path):
    config = engine_config(tmp_path, disk_bytes=2**24)
    with open_engine(config) as engine:
        engine.open("empty", system="S")
        engine.flush()
    with open_engine(config) as engine:
        session = engine.open("empty", system="S")
        assert session.info().turns == 0
        assert session.turn("x", sampling=GREEDY).cache.miss.reason is MissReason.FIRST_TURN
        assert session.info().turns == 1
        engine.assert_ledger()


def test_names_an_engine_does_not_know_take_nothing_from_a_live_session():
    with open_engine() as engine:
        live = engine.open("live")
        log = [*range(9), *live.turn(tokens=range(9), sampling=GREEDY).tokens]
        nobody = engine.session("nope")
        for ask in (
            lambda: nobody.turn(tokens=[1]),
            lambda: nobody.fork("live2"),
            nobody.rewind,
            nobody.info,
            lambda: nobody.pin(tier="host"),
            lambda: engine.delete("nope"),
        ):
            with pytest.raises(SessionNotFound):
                ask()
        with pytest.raises(SessionExists):
            engine.open("other").fork("live")
        result = live.turn(tokens=[9], sampling=GREEDY)
        assert list(result.tokens) == oracle([*log, 9])
        assert result.cache.device_tokens == len(log) - 1
        engine.assert_ledger()


def test_deleting_an_empty_session_frees_its_root_alone():
    s = Sessions()
    s.open("empty")
    s.open("other")
    change = s.commit(s.tree.delete(TENANT, "empty"))
    assert change.ops[0] == DeleteHead(TENANT, "empty")
    assert (change.freed_node_ids, change.freed_keys) == ((1,), ())
