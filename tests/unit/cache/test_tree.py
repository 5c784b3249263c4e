from dataclasses import replace

import pytest

from sessionkv.cache.turns import NewNode, Opening, format_node_id, parse_node_id
from sessionkv.config import LimitsConfig
from sessionkv.errors import (
    InvalidRequest,
    NodeNotFound,
    Overloaded,
    PinRefused,
    RewindBeyondRoot,
    SessionBusy,
    SessionDiffers,
    SessionExists,
    SessionNotFound,
    TurnKind,
)
from sessionkv.types import (
    DeleteHead,
    DeleteNode,
    ForgetKeys,
    KeepIds,
    PutHead,
    PutKey,
    PutNode,
    Tier,
)
from tests.builders.tree import (
    ROOT,
    TENANT,
    Sessions,
    full_hashes,
    key_record,
    new_turn,
    snapshot,
    tail_key,
)


def kinds(change):
    return [type(op) for op in change.ops]


def test_open_makes_root_and_head_in_one_transaction():
    s = Sessions()
    change = s.open("a", system=b"digest")
    assert kinds(change) == [PutNode, PutHead]
    assert change.node_id == 1
    assert change.head == s.tree.head(TENANT, "a")
    assert s.tree.num_turns(1) == 0
    assert s.tree.path(1)[0].kind == "root"


def test_resume_writes_nothing_and_inherits_what_is_not_said():
    s = Sessions()
    s.open("a", system=b"S", tools=b"T", history="follow")
    for said in ({}, {"system": b"S"}, {"tools": b"T"}, {"history": "follow"}):
        change = s.open("a", now=9.0, **said)
        assert change.ops == ()
        assert change.head.node_id == 1


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"system": b"X"}, "system"),
        ({"system": b""}, "system"),
        ({"tools": b"X"}, "tools"),
        ({"system": b"ST", "tools": b""}, "system"),
        ({"history": "keep"}, "history"),
    ],
)
def test_resume_with_something_else_is_refused(said, field):
    s = Sessions()
    s.open("a", system=b"S", tools=b"T", history="follow")
    before = snapshot(s.tree)
    with pytest.raises(SessionDiffers) as error:
        s.open("a", **said)
    assert error.value.details == {"field": field}
    assert snapshot(s.tree) == before


def test_turn_is_node_head_and_key_in_one_transaction():
    s = Sessions()
    s.open("a")
    key = key_record("k", 2.0)
    change = s.turn("a", [1, 2, 3, 4, 5, 6], key=key)
    assert kinds(change) == [PutNode, PutHead, PutKey, ForgetKeys]
    assert change.head.node_id == change.node_id == 2
    assert s.tokens("a") == [1, 2, 3, 4, 5, 6]
    assert s.tree.hashes_of(2) == full_hashes([1, 2, 3, 4, 5, 6])
    assert s.tree.record(2).chain_hash == full_hashes([1, 2, 3, 4, 5, 6])[0]
    assert s.journal.keys == {(TENANT, "k"): key}


def test_a_grown_tail_is_freed_unless_another_head_is_on_it():
    s = Sessions()
    s.open("a")
    s.turn("a", [1, 2, 3, 4, 5, 6])
    tail = tail_key([1, 2, 3, 4, 5, 6])
    s.commit(s.tree.fork(TENANT, "a", "b", now=3.0))
    assert s.turn("a", [7, 8, 9]).freed_keys == ()
    assert s.turn("b", [7, 7]).freed_keys == (tail,)
    assert s.tree.retention.rank(tail, Tier.DEVICE) == 0


def test_a_block_is_owned_by_the_node_it_ends_in():
    s = Sessions()
    s.open("a")
    s.turn("a", [1, 2, 3])
    s.turn("a", [4, 5])
    hashes = full_hashes([1, 2, 3, 4, 5])
    assert s.tree.keys_of(2) == ()
    # The last token has no KV yet, so the tail ends before it: nothing of block 1 is written.
    assert s.tree.keys_of(3) == (hashes[0],)


def test_turn_with_too_few_hashes_is_a_programming_error():
    s = Sessions()
    s.open("a")
    with pytest.raises(ValueError, match="0 hashes for a log of 1 full blocks"):
        s.tree.append_turn(TENANT, "a", NewNode("raw", range(4), 4, ()), base_id=1, now=2.0)
    assert s.tree.num_nodes == 1


def test_reserved_ids_are_used_once_and_never_come_back():
    s = Sessions()
    s.open("a")
    reserved = s.tree.reserve_node_id(TENANT)
    s.open("b")
    assert s.turn("a", [1], node_id=reserved).node_id == 2
    with pytest.raises(ValueError, match="node id 2"):
        s.begin_turn("a", [1], node_id=2)
    with pytest.raises(ValueError, match="node id 99"):
        s.begin_turn("a", [1], node_id=99)
    s.commit(s.tree.delete(TENANT, "a"))
    assert s.open("a").node_id == 4
    s.restart()
    assert s.turn("a", [1]).node_id == 5


def test_turn_on_a_head_that_moved_is_refused_and_nothing_moves():
    s = Sessions()
    s.open("a")
    s.turn("a", [1, 2])
    before = snapshot(s.tree)
    with pytest.raises(SessionBusy):
        s.tree.append_turn(TENANT, "a", new_turn([], [9]), base_id=1, now=3.0)
    assert snapshot(s.tree) == before


def test_edited_history_moves_head_in_the_turns_own_transaction():
    s = Sessions()
    s.open("a")
    s.turn("a", [1, 2, 3, 4, 5])
    s.turn("a", [6, 7, 8, 9])
    s.turn("a", [10, 11])
    change = s.turn("a", [20, 21], parent_id=2)
    assert kinds(change) == [PutNode, PutHead, DeleteNode, DeleteNode]
    assert change.freed_node_ids == (4, 3)
    assert s.tokens("a") == [1, 2, 3, 4, 5, 20, 21]
    # The blocks that were edited away are no longer retained, but stay for whoever asks again.
    [_, edited_away] = full_hashes([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert s.tree.retention.rank(edited_away, Tier.HOST) == 0
    assert change.freed_keys == (tail_key([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),)


def test_edit_may_only_follow_an_own_ancestor():
    s = Sessions()
    s.open("a")
    s.open("b")
    s.turn("b", [1])
    with pytest.raises(NodeNotFound):
        s.begin_turn("a", [1], parent_id=3)


@pytest.mark.parametrize(("first", "then"), [("chat", "raw"), ("raw", "chat")])
def test_kinds_do_not_mix_until_rewound_to_the_root(first, then):
    s = Sessions()
    s.open("a")
    s.turn("a", [1], kind=first)
    with pytest.raises(TurnKind):
        s.begin_turn("a", [2], kind=then)
    with pytest.raises(TurnKind):
        s.tree.check_kind(2, then)
    s.commit(s.tree.rewind(TENANT, "a", 1, now=3.0))
    assert s.turn("a", [2], kind=then).node_id == 3


def test_a_root_is_not_a_turn():
    s = Sessions()
    s.open("a")
    with pytest.raises(InvalidRequest, match="kind"):
        s.tree.append_turn(TENANT, "a", ROOT, base_id=1, now=2.0)


def test_fork_is_one_head_and_frees_or_copies_nothing():
    s = Sessions()
    s.open("a", history="follow")
    s.turn("a", range(10))
    s.commit(s.tree.pin(TENANT, "a", tier="host", now=2.0))
    change = s.commit(s.tree.fork(TENANT, "a", "b", now=3.0))
    assert kinds(change) == [PutHead]
    assert (change.head.node_id, change.head.history, change.head.pin_tier) == (2, "follow", "")
    assert s.tokens("b") == s.tokens("a")


def test_rename_is_one_transaction_that_keeps_all_but_the_name():
    s = Sessions()
    s.open("a", history="follow")
    s.turn("a", range(10))
    s.commit(s.tree.pin(TENANT, "a", tier="host", now=2.0))
    before, owned = s.tree.head(TENANT, "a"), s.tree.session_keys(TENANT, "a")
    change = s.commit(s.tree.rename(TENANT, "a", "b", now=3.0))
    assert kinds(change) == [PutHead, DeleteHead]
    assert (change.freed_node_ids, change.freed_keys) == ((), ())
    assert change.head == replace(before, name="b", updated_s=3.0)
    assert s.tree.session_keys(TENANT, "b") == owned
    with pytest.raises(SessionNotFound):
        s.tree.head(TENANT, "a")
    assert s.tree.num_sessions == 1


def test_rename_refusals_move_nothing_and_names_that_run_out_count_apart():
    s = Sessions(LimitsConfig(sessions=2))
    s.open("a")
    s.open("b")
    before = snapshot(s.tree)
    for source, name, error in (
        ("a", "b", SessionExists),
        ("a", "a", SessionExists),
        ("nope", "c", SessionNotFound),
        ("a", "", InvalidRequest),
        ("a", "~n-c", InvalidRequest),
    ):
        with pytest.raises(error):
            s.tree.rename(TENANT, source, name, now=3.0)
    assert snapshot(s.tree) == before
    s.commit(s.tree.rename(TENANT, "a", "c", now=3.0))  # as many as may be, and none more
    s.commit(s.tree.rename(TENANT, "c", "~c", now=4.0))
    assert (s.tree.num_sessions, s.tree.num_unnamed) == (1, 1)
    s.open("d")
    with pytest.raises(Overloaded):
        s.tree.rename(TENANT, "~c", "c", now=5.0)


def test_fork_from_an_earlier_turn():
    s = Sessions()
    s.open("a")
    s.turn("a", [1, 2])
    s.turn("a", [3])
    assert s.tree.fork(TENANT, "a", "b", now=3.0, node_id=2).head.node_id == 2
    assert s.tokens("b") == [1, 2]


def test_fork_refusals_move_nothing():
    s = Sessions()
    s.open("a")
    s.open("b")
    before = snapshot(s.tree)
    for source, name, node_id, error in (
        ("a", "b", None, SessionExists),
        ("nope", "c", None, SessionNotFound),
        ("a", "c", 2, NodeNotFound),
        ("a", "c", 77, NodeNotFound),
        ("a", "", None, InvalidRequest),
        ("a", "~n-c", None, InvalidRequest),
    ):
        with pytest.raises(error):
            s.tree.fork(TENANT, source, name, now=3.0, node_id=node_id)
    assert snapshot(s.tree) == before


def test_rewind_frees_turns_that_no_head_reaches_in_its_transaction():
    s = Sessions()
    s.open("a")
    s.turn("a", [1, 2, 3, 4, 5])
    s.turn("a", [6, 7, 8, 9])
    s.turn("a", [10, 11, 12, 13])
    change = s.commit(s.tree.rewind(TENANT, "a", 2, now=5.0))
    assert kinds(change) == [PutHead, DeleteNode, DeleteNode]
    assert change.freed_node_ids == (4, 3)
    log = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    ranks = [s.tree.retention.rank(key, Tier.HOST) for key in full_hashes(log)]
    assert ranks == [1, 0, 0]
    assert change.freed_keys == ()
    assert s.tokens("a") == [1, 2, 3, 4, 5]


def test_rewind_keeps_turns_that_a_fork_reaches():
    s = Sessions()
    s.open("a")
    s.turn("a", [1, 2, 3, 4, 5])
    s.turn("a", [6, 7, 8, 9, 10, 11])
    s.commit(s.tree.fork(TENANT, "a", "b", now=3.0))
    change = s.commit(s.tree.rewind(TENANT, "a", 1, now=4.0))
    assert (change.freed_node_ids, change.freed_keys) == ((), ())
    assert s.tokens("b") == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("turns", [0, -1, True, 1.0, "1", None])
def test_rewind_wants_a_positive_integer(turns):
    s = Sessions()
    s.open("a")
    with pytest.raises(InvalidRequest, match="turns"):
        s.tree.rewind(TENANT, "a", turns, now=2.0)


def test_rewind_beyond_the_root_moves_nothing():
    s = Sessions()
    s.open("a")
    s.turn("a", [1])
    before = snapshot(s.tree)
    with pytest.raises(RewindBeyondRoot) as error:
        s.tree.rewind(TENANT, "a", 2, now=2.0)
    assert error.value.details == {"turns": 2, "num_turns": 1}
    assert snapshot(s.tree) == before


def test_move_head_goes_up_the_own_path_only():
    s = Sessions()
    s.open("a")
    s.turn("a", [1])
    s.commit(s.tree.fork(TENANT, "a", "b", now=2.0))
    s.turn("b", [2])
    with pytest.raises(NodeNotFound):
        s.tree.move_head(TENANT, "a", 3, now=3.0)
    assert s.commit(s.tree.move_head(TENANT, "b", 2, now=3.0)).freed_node_ids == (3,)
    assert s.commit(s.tree.move_head(TENANT, "b", 2, now=4.0)).freed_node_ids == ()


def test_delete_frees_what_no_other_head_reaches():
    s = Sessions()
    s.open("a")
    s.turn("a", [1, 2, 3, 4, 5])
    s.commit(s.tree.fork(TENANT, "a", "b", now=3.0))
    s.turn("b", [6, 7, 8])
    change = s.commit(s.tree.delete(TENANT, "b"))
    assert kinds(change) == [DeleteHead, DeleteNode]
    assert change.head is None
    log = list(range(1, 9))
    assert change.freed_keys == (tail_key(log), full_hashes(log)[1])
    assert s.commit(s.tree.delete(TENANT, "a")).freed_node_ids == (2, 1)
    assert (s.tree.num_nodes, s.tree.retention.num_keys) == (0, 0)
    with pytest.raises(SessionNotFound):
        s.tree.delete(TENANT, "a")


def test_equal_content_of_two_sessions_is_freed_with_the_last():
    s = Sessions()
    for name in ("a", "b"):
        s.open(name)
        s.turn(name, [1, 2, 3, 4, 5])
    hashes = full_hashes([1, 2, 3, 4, 5])
    assert s.tree.session_keys(TENANT, "a").shared == tuple(hashes)
    assert s.commit(s.tree.delete(TENANT, "a")).freed_keys == ()
    assert s.tree.session_keys(TENANT, "b").exclusive == tuple(hashes)
    assert s.commit(s.tree.delete(TENANT, "b")).freed_keys == tuple(hashes)


def test_tenants_do_not_see_each_other():
    s = Sessions()
    s.open("a")
    s.turn("a", [1])
    with pytest.raises(SessionNotFound):
        s.tree.head("other", "a")
    with pytest.raises(NodeNotFound):
        s.tree.branch("other", 2, now=3.0)
    assert s.tree.num_unnamed == 0
    s.restart()
    with pytest.raises(NodeNotFound):
        s.tree.branch("other", 2, now=3.0)


def test_unnamed_heads_get_names_that_nobody_ever_had_and_are_kept_30_days():
    s = Sessions()
    s.open("a")
    s.turn("a", [1])
    names = [s.commit(s.tree.branch(TENANT, 2, now=10.0 + i)).head.name for i in range(3)]
    assert names == ["~n-2.3", "~n-2.4", "~n-2.5"]
    s.restart()
    change = s.commit(s.tree.fork(TENANT, "a", None, now=13.0))
    assert (change.head.name, kinds(change)) == ("~n-2.6", [PutHead, KeepIds])
    s.turn("~n-2.3", [2, 3], now=20.0)
    assert (s.tree.num_sessions, s.tree.num_unnamed) == (1, 4)
    now = 30 * 86400.0 + 12.0
    due = s.journal.due_unnamed(12.0, 100)
    # Neither one that is not due nor one that is not in memory is taken.
    change = s.commit(s.tree.expire(now, [*due, (TENANT, "~n-2.3"), (TENANT, "~n-9.9")]))
    assert [op.name for op in change.ops if isinstance(op, DeleteHead)] == ["~n-2.4", "~n-2.5"]
    assert s.tree.expire(now, due) is None
    assert s.tokens("~n-2.3") == [1, 2, 3]


def test_oldest_unnamed_heads_make_room_where_there_are_too_many():
    s = Sessions(max_unnamed=2)
    s.open("a")
    s.turn("a", [1])
    for i in range(2):
        s.commit(s.tree.branch(TENANT, 2, now=10.0 + i))
    s.commit(s.tree.touch(TENANT, "~n-2.3", now=15.0))
    assert s.journal.due_unnamed(0.0, 2) == []
    s.commit(s.tree.branch(TENANT, 1, now=16.0))
    change = s.commit(s.tree.expire(16.0, s.journal.due_unnamed(0.0, 2)))
    assert change.ops == (DeleteHead(TENANT, "~n-2.4"),)
    assert (s.tree.num_sessions, s.tree.num_unnamed) == (1, 2)


def test_a_session_that_is_named_as_one_that_runs_out_does():
    s = Sessions(LimitsConfig(sessions=1), max_unnamed=1)
    s.open("a")
    s.turn("a", [1])
    s.commit(s.tree.fork(TENANT, "a", "~r1", now=10.0))
    s.turn("~r1", [2], now=20.0)
    s.open("~r2", now=30.0)
    assert (s.tree.num_sessions, s.tree.num_unnamed) == (1, 2)
    with pytest.raises(Overloaded, match="the oldest are being deleted"):
        s.tree.fork(TENANT, "a", "~r3", now=31.0)
    change = s.commit(s.tree.expire(32.0, s.journal.due_unnamed(0.0, 1)))
    assert [op.name for op in change.ops if isinstance(op, DeleteHead)] == ["~r1"]
    s.restart()
    now = 30 * 86400.0 + 30.0
    s.commit(s.tree.expire(now, s.journal.due_unnamed(30.0, 9)))
    assert (s.tree.num_sessions, s.tree.num_unnamed) == (1, 0)


def test_too_many_sessions_is_overloaded_and_forks_count():
    s = Sessions(LimitsConfig(sessions=2))
    s.open("a")
    s.commit(s.tree.fork(TENANT, "a", "b", now=2.0))
    for make in (
        lambda: s.open("c"),
        lambda: s.tree.fork(TENANT, "a", "c", now=2.0),
    ):
        with pytest.raises(Overloaded) as error:
            make()
        assert error.value.details["sessions"] == 2
    assert s.open("a").ops == ()
    s.commit(s.tree.delete(TENANT, "b"))
    assert s.open("c").node_id == 2


def test_a_key_goes_to_the_journal_with_its_turn_and_the_oldest_go():
    s = Sessions(LimitsConfig(idempotency_keys=2, idempotency_ttl_s=100.0))
    change = s.commit(s.tree.record_key(key_record("k1", 1.0), now=1.0))
    assert change.ops == (PutKey(key_record("k1", 1.0)), ForgetKeys(-99.0, 2))
    s.open("a")
    change = s.turn("a", [1], now=3.0, key=key_record("k2", 3.0))
    assert kinds(change) == [PutNode, PutHead, PutKey, ForgetKeys]
    s.commit(s.tree.record_key(key_record("k3", 4.0), now=4.0))
    assert list(s.journal.keys) == [(TENANT, "k2"), (TENANT, "k3")]
    assert s.commit(s.tree.forget_keys(103.0)).ops == (ForgetKeys(3.0, 2),)
    assert list(s.journal.keys) == [(TENANT, "k3")]


def test_changes_are_taken_back_last_first_and_once():
    s = Sessions(LimitsConfig(idempotency_keys=1))
    s.open("a")
    s.turn("a", [1, 2, 3, 4, 5], key=key_record("k1", 2.0))
    s.commit(s.tree.pin(TENANT, "a", tier="host", now=2.0, ttl_s=5.0))
    before = snapshot(s.tree)
    changes = [
        s.begin_turn("a", [6, 7, 8, 9], key=key_record("k2", 3.0)),
        s.tree.fork(TENANT, "a", "b", now=4.0),
        s.tree.rewind(TENANT, "a", 2, now=4.0),
        s.tree.expire(8.0),
        s.tree.delete(TENANT, "a"),
    ]
    with pytest.raises(ValueError, match="last first"):
        s.tree.revert(changes[0])
    for change in reversed(changes):
        s.tree.revert(change)
    assert snapshot(s.tree) == before
    with pytest.raises(ValueError, match="last first"):
        s.tree.revert(changes[0])
    assert s.turn("a", [6]).node_id == 4


def test_a_loaded_tree_knows_no_hashes_until_attached():
    s = Sessions()
    s.open("a")
    s.turn("a", [1, 2, 3, 4, 5])
    s.turn("a", [6, 7, 8, 9, 10, 11])
    s.commit(s.tree.pin(TENANT, "a", tier="host", now=2.0))
    warm = snapshot(s.tree)
    s.tree = s.whole_tree(attached=False)
    assert [head.name for head in s.tree.unattached()] == ["a"]
    assert s.tree.hashes_of(3) == []
    assert s.tree.retention.num_keys == 0
    log = s.tree.tokens_of(3)
    s.tree.attach_hashes(3, full_hashes(log), tail_key(log))
    assert list(s.tree.unattached()) == []
    assert s.tree.hashes_of(3) == full_hashes(log)
    assert s.tree.hashes_of(2) == full_hashes(log[:5])
    assert s.tree.own_tokens(3) == log[5:]
    assert snapshot(s.tree) == warm
    s.tree.attach_hashes(3, full_hashes(log), None)
    assert s.tree.retention.owners(tail_key(log)) == 0


def test_a_turn_attaches_the_history_it_stands_on():
    s = Sessions()
    s.open("a")
    s.turn("a", [1, 2, 3, 4, 5])
    s.tree = s.whole_tree(attached=False)
    s.turn("a", [6, 7, 8])
    assert s.tree.hashes_of(3) == full_hashes([1, 2, 3, 4, 5, 6, 7, 8])


def test_pin_terms_and_refusals_move_nothing():
    s = Sessions()
    s.open("a")
    s.turn("a", range(4 * 9 + 1))
    before = snapshot(s.tree)
    for terms, field in (
        ({"tier": "gpu"}, "tier"),
        ({"tier": None}, "tier"),
        ({"tier": "host", "ttl_s": 0}, "ttl_s"),
        ({"tier": "host", "ttl_s": float("nan")}, "ttl_s"),
        ({"tier": "host", "ttl_s": True}, "ttl_s"),
        ({"tier": "host", "priority": 101}, "priority"),
        ({"tier": "host", "priority": True}, "priority"),
    ):
        with pytest.raises(InvalidRequest) as error:
            s.tree.pin(TENANT, "a", now=2.0, **terms)
        assert error.value.details["field"] == field
    with pytest.raises(PinRefused) as refused:
        s.tree.pin(TENANT, "a", tier="device", now=2.0)
    assert refused.value.details == {
        "tier": "device",
        "needed_bytes": 900,
        "allowed_bytes": 800,
    }
    assert snapshot(s.tree) == before


def test_node_ids_outside():
    assert format_node_id(42) == "n-42"
    assert parse_node_id("n-42") == 42
    for text in (
        "42",
        "n-",
        "n-0",
        "n-042",
        "n--1",
        "n-1 ",
        "N-1",
        "n-٣",
        None,
        42,
        "n-" + "9" * 19,
    ):
        with pytest.raises(InvalidRequest):
            parse_node_id(text)


def opened(s: Sessions, tenant: str, name: str) -> None:
    """A session of any tenant."""
    s.commit(s.tree.open(tenant, name, root=ROOT, opening=Opening(), now=1.0))


def test_a_tenant_that_has_all_sessions_leaves_others_their_share():
    s = Sessions(LimitsConfig(sessions=6))
    opened_names = [f"f{i}" for i in range(6)]
    for name in opened_names:
        opened(s, "flood", name)
    with pytest.raises(Overloaded) as raised:
        opened(s, "flood", "more")
    assert raised.value.details["sessions"] == 6
    for name in ("a", "b", "c"):
        opened(s, "victim", name)
    with pytest.raises(Overloaded) as raised:
        opened(s, "victim", "d")
    assert raised.value.details["sessions"] == 3  # its own, of which it may know
    s.commit(s.tree.delete("victim", "a"))
    opened(s, "victim", "d")
    s.restart()
    with pytest.raises(Overloaded):
        opened(s, "flood", "more")


def test_unnamed_sessions_of_a_tenant_within_its_share_do_not_make_room():
    s = Sessions(max_unnamed=4)
    for i in range(2):
        opened(s, "victim", f"~v{i}")
    for i in range(6):
        opened(s, "flood", f"~f{i}")
    with pytest.raises(Overloaded) as raised:
        opened(s, "flood", "~f6")
    assert raised.value.details["sessions"] == 6
    opened(s, "victim", "~v2")
    opened(s, "victim", "~v3")
    s.commit(s.tree.delete("victim", "~v3"))
    s.commit(s.tree.delete("victim", "~v2"))
    everybody = [("victim", "~v0"), ("victim", "~v1"), *(("flood", f"~f{i}") for i in range(6))]
    change = s.tree.expire(2.0, everybody)
    assert change is not None
    s.commit(change)
    assert sorted(s.journal.heads) == [
        *(("flood", f"~f{i}") for i in range(4, 6)),
        ("victim", "~v0"),
        ("victim", "~v1"),
    ]
