"""Every operation on sessions, through the embedded engine, the client and the asyncio client."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sessionkv import MissReason
from sessionkv.errors import (
    EngineClosed,
    InvalidRequest,
    NodeNotFound,
    Overloaded,
    PinRefused,
    RewindBeyondRoot,
    SessionBusy,
    SessionDiffers,
    SessionExists,
    SessionNotFound,
    TurnCancelled,
    TurnKind,
)
from sessionkv.text.builtin import IM_END
from tests.builders.checksum import tokens
from tests.builders.doors import KINDS, Door, Hold, Later, open_door
from tests.builders.engine import GREEDY, engine_config, greedy, oracle

ON_AND_ON = greedy(None, ignore_eos=False)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def door(kind: str) -> Iterator[Door]:
    with open_door(kind, engine_config(blocks=512)) as door:
        yield door
        door.assert_ledger()


@pytest.fixture
def hold() -> Iterator[Hold]:
    hold = Hold()
    yield hold
    hold.release()


@pytest.fixture
def held(kind: str, hold: Hold) -> Iterator[Door]:
    """An engine whose turns go on until ``hold`` is released."""
    config = engine_config(blocks=16_384)
    with open_door(kind, config, gate=hold.gate, runner={"script": hold.script}) as door:
        yield door
        hold.release()
        door.assert_ledger()


# Open ------------------------------------------------------------------------------------------


def test_open_creates_and_resumes(door: Door) -> None:
    door.client.open("a", system="Be brief.", tools=[TOOL], history="follow")
    again = door.client.open("a")
    assert door.client.open("a", system="Be brief.", tools=[TOOL], history="follow").name == "a"
    info = again.info(history=True)
    assert (info.name, info.kind, info.turns, info.tokens) == ("a", "root", 0, 0)
    assert info.history == "follow"
    assert list(info.messages) == [{"role": "system", "content": "Be brief."}]
    assert [s.name for s in door.client.sessions()] == ["a"]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("system", {"system": "Be long."}),
        ("system", {"system": ""}),
        ("tools", {"tools": []}),
        ("tools", {"tools": [TOOL, TOOL]}),
        ("history", {"history": "follow"}),
    ],
)
def test_open_with_another_value_is_refused(door: Door, field: str, fields: dict) -> None:
    door.client.open("a", system="Be brief.", tools=[TOOL])
    with pytest.raises(SessionDiffers) as caught:
        door.client.open("a", **fields)
    assert caught.value.details["field"] == field
    assert door.client.session("a").info().turns == 0


def test_a_plain_session_differs_from_one_with_a_system_prompt(door: Door) -> None:
    door.client.open("a")
    with pytest.raises(SessionDiffers):
        door.client.open("a", system="Be brief.")


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 4097, "\ud83d", "~n-1"])
def test_names_that_are_not_allowed(door: Door, name: str) -> None:
    with pytest.raises(InvalidRequest):
        door.client.open(name)
    assert door.client.sessions() == []


@pytest.mark.parametrize("name", ["x", "ü" * 2048, "a/b\n\U0001f600"])
def test_names_that_are(door: Door, name: str) -> None:
    door.client.open(name).turn(tokens=[1], sampling=greedy(1))
    assert [s.name for s in door.client.sessions()] == [name]


def test_a_session_without_a_name_in_the_store_is_not_found(door: Door) -> None:
    missing = door.client.session("nope")
    for call in (
        missing.info, missing.rewind, missing.pin, missing.unpin,
        lambda: missing.turn("x"), lambda: missing.fork("b"), lambda: door.client.delete("nope"),
        lambda: list(missing.stream("x")), lambda: missing.close(keep=False), missing.close,
    ):  # fmt: skip
        with pytest.raises(SessionNotFound):
            call()


# Turns -----------------------------------------------------------------------------------------


def test_text_is_one_user_message(door: Door) -> None:
    one = door.client.open("a", system="Be brief.")
    two = door.client.open("b", system="Be brief.")
    first = one.turn("Hi", sampling=GREEDY)
    second = two.turn(messages=[{"role": "user", "content": "Hi"}], sampling=GREEDY)
    assert first.tokens == second.tokens
    assert door.log("a") == door.log("b")
    assert first.tokens == tuple(oracle(door.log("a")[: -len(first.tokens)]))


def test_chat_turns_continue_the_log(door: Door) -> None:
    session = door.client.open("a")
    results = [session.turn(f"question {i}", sampling=GREEDY) for i in range(4)]
    log = door.log("a")
    end = 0
    for result in results:
        start = end + result.usage.prompt_tokens - end
        end = start + len(result.tokens)
        assert list(result.tokens) == log[start:end] == oracle(log[:start])
    assert end == len(log)
    assert results[0].cache.miss.reason is MissReason.FIRST_TURN
    assert [r.cache.miss.reason for r in results[1:]] == [MissReason.NONE] * 3
    messages = session.info(history=True).messages
    assert [m["role"] for m in messages] == ["user", "assistant"] * 4
    assert [m["content"] for m in messages[1::2]] == [r.text for r in results]


def test_tokens_are_appended_as_they_are(door: Door) -> None:
    session = door.client.open("a")
    first = session.turn(tokens=[256, 7, 258], sampling=GREEDY)
    second = session.turn(tokens=[1], sampling=GREEDY)
    log = [256, 7, 258, *first.tokens, 1, *second.tokens]
    assert door.log("a") == log
    assert list(second.tokens) == oracle([256, 7, 258, *first.tokens, 1])
    info = session.info()
    assert (info.kind, info.turns, info.tokens) == ("raw", 2, len(log))
    assert info.node == second.node != first.node


def test_kinds_are_not_mixed(door: Door) -> None:
    raw, chat = door.client.open("raw"), door.client.open("chat")
    raw.turn(tokens=[1], sampling=GREEDY)
    chat.turn("x", sampling=GREEDY)
    for call in (
        lambda: raw.turn("x"),
        lambda: raw.turn(messages=[{"role": "user", "content": "x"}]),
        lambda: chat.turn(tokens=[1]),
        lambda: door.client.open("system", system="s").turn(tokens=[1]),
    ):
        with pytest.raises(TurnKind):
            call()
    assert raw.turn(tokens=[2], sampling=GREEDY).usage.prompt_tokens == 10
    assert chat.turn("y", sampling=GREEDY).cache.miss.reason is MissReason.NONE


def test_exactly_one_of_text_messages_tokens(door: Door) -> None:
    session = door.client.open("a")
    for fields in ({}, {"text": "x", "tokens": [1]}, {"messages": [], "text": "x"}):
        with pytest.raises(InvalidRequest, match="exactly one"):
            session.turn(**fields)


def test_ids_outside_the_vocabulary_are_named_by_position(door: Door) -> None:
    session = door.client.open("a")
    for call in (session.turn, door.client.generate):
        with pytest.raises(InvalidRequest) as caught:
            call(tokens=[1, 2, 259, 300])
        assert caught.value.details["field"] == "tokens[2]"
        with pytest.raises(InvalidRequest):
            call(tokens=[])
    assert session.info().turns == 0


# While a turn runs -----------------------------------------------------------------------------


def test_a_second_turn_is_busy_and_changes_nothing(held: Door, hold: Hold) -> None:
    session = held.client.open("a")
    first = Later(lambda: session.turn(tokens=tokens(5), sampling=ON_AND_ON))
    hold.wait_going()
    for _ in range(2):
        with pytest.raises(SessionBusy) as caught:
            held.client.session("a").turn(tokens=[1], sampling=GREEDY)
        assert caught.value.retryable
    with pytest.raises(SessionBusy):
        session.rewind()
    assert session.info().running
    hold.release()
    result = first.result()
    assert set(result.tokens) == {0, IM_END}
    assert held.log("a") == tokens(5) + list(result.tokens)


def test_queued_turns_run_in_order_from_what_the_head_then_is(held: Door, hold: Hold) -> None:
    session = held.client.open("a")
    first = Later(lambda: session.turn(tokens=[200], sampling=ON_AND_ON))
    hold.wait_going()
    waiting = []
    for i in range(8):
        turn = held.client.session("a").turn
        waiting.append(
            Later(lambda t=turn, i=i: t(tokens=[i], sampling=greedy(2), when_busy="queue"))
        )
        held.wait_queued("a", i + 1)
    with pytest.raises(Overloaded):
        session.turn(tokens=[9], sampling=GREEDY, when_busy="queue")
    hold.release()
    log = [200, *first.result().tokens]
    for i, turn in enumerate(waiting):
        log.append(i)
        expected = oracle(log, greedy(2))
        assert list(turn.result().tokens) == expected
        log += expected
    assert held.log("a") == log
    assert not session.info().running


def test_a_queued_turn_that_fails_lets_the_next_go(held: Door, hold: Hold) -> None:
    session = held.client.open("a")
    first = Later(lambda: session.turn("one", sampling=ON_AND_ON))
    hold.wait_going()
    raw = Later(lambda: session.turn(tokens=[1], when_busy="queue"))
    held.wait_queued("a", 1)
    chat = Later(lambda: session.turn("two", sampling=greedy(2), when_busy="queue"))
    held.wait_queued("a", 2)
    hold.release()
    assert set(first.result().text) == {"\0"}
    assert isinstance(raw.error(), TurnKind)
    assert chat.result().cache.miss.reason is MissReason.NONE


# Rewind ----------------------------------------------------------------------------------------


def test_regenerate_is_rewind_and_the_same_turn(door: Door) -> None:
    session = door.client.open("a")
    session.turn("one", sampling=GREEDY)
    second = session.turn("two", sampling=GREEDY)
    info = session.rewind()
    assert info.turns == 1
    again = session.turn("two", sampling=GREEDY)
    assert again.tokens == second.tokens
    assert again.cache.computed_tokens == 1
    other = session.rewind()
    assert other.node == info.node


def test_edit_is_rewind_and_another_turn(door: Door) -> None:
    session = door.client.open("a")
    first = session.turn(tokens=tokens(9), sampling=GREEDY)
    session.turn(tokens=[1], sampling=GREEDY)
    session.turn(tokens=[2], sampling=GREEDY)
    assert session.rewind(2).turns == 1
    edited = session.turn(tokens=[3], sampling=GREEDY)
    log = [*tokens(9), *first.tokens, 3]
    assert list(edited.tokens) == oracle(log)
    assert door.log("a") == [*log, *edited.tokens]


def test_rewind_beyond_the_root_moves_nothing(door: Door) -> None:
    session = door.client.open("a")
    with pytest.raises(RewindBeyondRoot):
        session.rewind()
    session.turn("one", sampling=GREEDY)
    with pytest.raises(RewindBeyondRoot):
        session.rewind(2)
    assert session.info().turns == 1
    info = session.rewind()
    assert (info.turns, info.kind, info.tokens) == (0, "root", 0)
    assert session.turn(tokens=[1], sampling=GREEDY).usage.prompt_tokens == 1


# Fork ------------------------------------------------------------------------------------------


def test_fork_shares_the_past_and_nothing_else(door: Door) -> None:
    session = door.client.open("a")
    session.turn(tokens=tokens(9), sampling=GREEDY)
    session.pin(tier="device")
    fork = session.fork("b")
    log = door.log("a")
    mine, theirs = session.turn(tokens=[1], sampling=GREEDY), fork.turn(tokens=[2], sampling=GREEDY)
    assert list(mine.tokens) == oracle([*log, 1])
    assert list(theirs.tokens) == oracle([*log, 2])
    assert theirs.cache.computed_tokens == 1
    assert fork.info().pin is None
    with pytest.raises(SessionExists):
        session.fork("b")
    with pytest.raises(SessionExists):
        session.fork("a")
    assert fork.info().turns == 2


def test_rename_keeps_everything_but_the_name(door: Door) -> None:
    session = door.client.open("a")
    session.turn(tokens=tokens(9), sampling=GREEDY)
    session.pin(tier="device")
    door.client.open("taken")
    with pytest.raises(SessionExists):
        session.rename("taken")
    before, log = session.info(), door.log("a")
    named = session.rename("b")
    assert (session.name, named.name) == ("b", "b")
    assert (named.node, named.turns, named.pin) == (before.node, before.turns, before.pin)
    with pytest.raises(SessionNotFound):
        door.client.session("a").info()
    answer = session.turn(tokens=[1], sampling=GREEDY)
    assert list(answer.tokens) == oracle([*log, 1])
    assert answer.cache.computed_tokens == 2  # the last token of a reply has no KV yet
    door.client.open("a")  # the name is free


def test_rename_while_a_turn_runs_is_refused(held: Door, hold: Hold) -> None:
    session = held.client.open("a")
    stream = session.stream("x", sampling=greedy(None))
    next(stream)
    with pytest.raises(SessionBusy):
        session.rename("b")
    assert session.name == "a"
    hold.release()
    stream.cancel()
    assert session.rename("b").turns == 0


def test_fork_while_a_turn_runs_is_on_the_last_completed_one(held: Door, hold: Hold) -> None:
    session = held.client.open("a")
    running = Later(lambda: session.turn(tokens=tokens(5), sampling=ON_AND_ON))
    hold.wait_going()
    fork = session.fork("b")
    assert fork.info().turns == 0
    hold.release()
    running.result()
    assert list(fork.turn(tokens=[1], sampling=GREEDY).tokens) == oracle([1])


def test_fork_from_an_earlier_turn(door: Door) -> None:
    session = door.client.open("a")
    first = session.turn(tokens=tokens(9), sampling=GREEDY)
    session.turn(tokens=[1], sampling=GREEDY)
    fork = session.fork("b", node=first.node)
    assert fork.info().node == first.node
    result = fork.turn(tokens=[2], sampling=GREEDY)
    assert list(result.tokens) == oracle([*tokens(9), *first.tokens, 2])
    for node, error in (
        ("n-99", NodeNotFound),
        ("99", InvalidRequest),
        (result.node, NodeNotFound),
    ):
        with pytest.raises(error):
            session.fork("c", node=node)
    assert [s.name for s in door.client.sessions()] == ["a", "b"]


# Close -----------------------------------------------------------------------------------------


def test_close_keeps_the_session_and_ends_the_handle(door: Door) -> None:
    with door.client.open("a") as session:
        session.turn(tokens=tokens(5), sampling=GREEDY)
    session.close()
    with pytest.raises(EngineClosed, match="closed"):
        session.turn(tokens=[1])
    result = door.client.open("a").turn(tokens=[1], sampling=GREEDY)
    assert result.cache.device_tokens == len(tokens(5)) + 7


@pytest.mark.parametrize("keep", [True, False])
def test_close_cancels_what_runs_and_what_is_in_line(held: Door, hold: Hold, keep: bool) -> None:
    session = held.client.open("a")
    running = Later(lambda: session.turn(tokens=tokens(5), sampling=ON_AND_ON))
    hold.wait_going()
    queued = Later(lambda: session.turn(tokens=[1], sampling=GREEDY, when_busy="queue"))
    held.wait_queued("a", 1)
    session.close(keep=keep)
    session.close(keep=keep)
    assert isinstance(running.error(), TurnCancelled)
    assert isinstance(queued.error(), TurnCancelled)
    hold.release()
    if keep:
        assert held.log("a") == []
        assert list(held.client.session("a").turn(tokens=[2], sampling=GREEDY).tokens) == oracle(
            [2]
        )
    else:
        with pytest.raises(SessionNotFound):
            held.client.session("a").info()
        assert held.client.open("a").info().turns == 0


def test_deleting_frees_what_no_other_session_reaches(door: Door) -> None:
    session = door.client.open("a")
    session.turn(tokens=tokens(8), sampling=GREEDY)
    fork = session.fork("b")
    fork.turn(tokens=[1], sampling=GREEDY)
    door.client.delete("b")
    assert session.info().bytes["device"].shared == 0
    assert session.turn(tokens=[2], sampling=GREEDY).cache.miss.reason is MissReason.NONE
    door.client.delete("a")
    door.client.flush()
    assert door.parts.kv.resident_keys() == ()
    with pytest.raises(SessionNotFound):
        door.client.delete("a")


# Pins ------------------------------------------------------------------------------------------


def test_pin_and_unpin(door: Door) -> None:
    session = door.client.open("a")
    session.turn(tokens=tokens(9), sampling=GREEDY)
    pin = session.pin(tier="device", ttl_s=60.0, priority=70).pin
    assert (pin.tier, pin.priority) == ("device", 70)
    assert session.info().pin == pin
    assert session.unpin().pin is None
    assert session.unpin().pin is None
    for fields in ({"tier": "moon"}, {"ttl_s": 0}, {"priority": 101}):
        with pytest.raises(InvalidRequest):
            session.pin(**fields)


def test_a_pin_falls_off_in_time(door: Door) -> None:
    session = door.client.open("a")
    session.pin(tier="device", ttl_s=0.05)
    for _ in range(1_000_000):
        if session.info().pin is None:
            break
    assert session.info().pin is None
    assert session.turn(tokens=[1], sampling=GREEDY).tokens


def test_a_pin_over_most_of_the_tier_is_refused_with_both_numbers(kind: str) -> None:
    with open_door(kind, engine_config(blocks=10)) as door:
        session = door.client.open("a")
        session.turn(tokens=tokens(30), sampling=greedy(7))
        with pytest.raises(PinRefused) as caught:
            session.pin(tier="device")
        assert any(isinstance(v, int) and v > 0 for v in caught.value.details.values())
        assert session.info().pin is None
        door.assert_ledger()


# Lists, counts ---------------------------------------------------------------------------------


def test_list_pages_through_all_sessions_by_name(door: Door) -> None:
    names = sorted(f"{prefix}{i:04d}" for prefix in "ab" for i in range(503))
    with ThreadPoolExecutor(32) as pool:  # many share one write of the journal
        list(pool.map(door.client.open, names))
    assert [s.name for s in door.client.sessions()] == names
    assert [s.name for s in door.client.sessions("b")] == names[503:]
    assert door.client.sessions("c") == []


def test_info_while_a_turn_runs(held: Door, hold: Hold) -> None:
    session = held.client.open("a")
    later = Later(lambda: session.turn(tokens=[1], sampling=ON_AND_ON))
    hold.wait_going()
    info = session.info()
    assert (info.running, info.turns, info.last_cache) == (True, 0, None)
    hold.release()
    result = later.result()
    info = session.info()
    assert (info.running, info.queued, info.node) == (False, 0, result.node)
    assert info.last_cache == result.cache
    num_blocks = -(-(info.tokens - 1) // 4)  # the last token has no KV
    assert info.bytes["device"].exclusive == num_blocks * held.parts.runner.geometry.block_bytes


def test_flush_returns_when_all_is_on_disk(kind: str, tmp_path) -> None:
    with open_door(kind, engine_config(tmp_path, disk_bytes=50_000_000)) as door:
        session = door.client.open("a")
        session.turn(tokens=tokens(21), sampling=GREEDY)
        assert door.client.flush() == {"dirty_blocks": 0}
        info = session.info()
        assert info.bytes["disk"] == info.bytes["device"]
        assert info.bytes["disk"].exclusive == 7 * door.parts.runner.geometry.block_bytes
        assert door.client.stats()["book_errors"] == 0


# Generations -----------------------------------------------------------------------------------


def test_generate_from_prompt_messages_and_tokens(door: Door) -> None:
    prompt = door.client.generate("héllo", sampling=GREEDY)
    ids = list("héllo".encode())
    assert list(prompt.tokens) == oracle(ids)
    assert prompt.node is None
    raw = door.client.generate(tokens=ids, sampling=GREEDY)
    assert raw.tokens == prompt.tokens
    assert raw.cache.device_tokens == len(ids) - 1
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    chat = door.client.generate(messages=messages, sampling=GREEDY)
    session = door.client.open("a", system="s").turn("u", sampling=GREEDY)
    assert session.tokens == chat.tokens
    assert session.cache.computed_tokens == 1
    assert [s.name for s in door.client.sessions()] == ["a"]


def test_generate_without_cache_neither_reads_nor_leaves_any(door: Door) -> None:
    first = door.client.generate(tokens=tokens(9), sampling=GREEDY, cache=False)
    assert door.parts.kv.resident_keys() == ()
    door.client.generate(tokens=tokens(9), sampling=GREEDY)
    third = door.client.generate(tokens=tokens(9), sampling=GREEDY, cache=False)
    assert third.tokens == first.tokens
    assert third.cache.computed_tokens == 9
    assert third.cache.miss.reason in (MissReason.BYPASSED, MissReason.FIRST_TURN)


def test_an_empty_prompt_is_refused_by_name(door: Door) -> None:
    with pytest.raises(InvalidRequest) as caught:
        door.client.generate("")
    assert caught.value.details["field"] == "prompt"
    with pytest.raises(InvalidRequest) as caught:
        door.client.generate(messages=[])
    assert caught.value.details["field"] == "messages"
