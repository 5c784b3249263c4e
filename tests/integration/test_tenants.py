"""Keys say whose sessions these are; no request of one tenant shows or touches another's."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sessionkv import Client, SessionKVError
from sessionkv.client.portable import export_trees, import_tree
from sessionkv.errors import (
    Forbidden,
    NodeNotFound,
    Overloaded,
    PinRefused,
    SessionNotFound,
    Unauthorized,
)
from sessionkv.ipc import messages as wire
from sessionkv.types import MissReason, NodeRecord
from sessionkv.types.portable import PortableSession
from sessionkv.types.portable_tree import PortableTree
from tests.builders.checksum import tokens
from tests.builders.doors import Later
from tests.builders.engine import GREEDY, StepGate, engine_config, greedy, oracle, socket_engine
from tests.builders.tenants import KEYS, access, entry, tenants

LOG = tokens(24)


@pytest.mark.parametrize("key", [None, "", "key-of-nobody", "key-of-alic", "key-of-alice "])
def test_without_a_known_key_nothing_is_served(tmp_path: Path, key: str | None) -> None:
    with socket_engine(tmp_path, access=access()) as engine, engine.client(key or None) as client:
        asked: list[Callable[[], object]] = [
            lambda: client.open("a"),
            lambda: client.generate(tokens=LOG, sampling=GREEDY),
            client.sessions,
            client.stats,
            client.flush,
        ]
        for ask in asked:
            with pytest.raises(Unauthorized) as raised:
                ask()
            assert not raised.value.retryable
        assert not engine.parts.tree.num_sessions


def test_without_keys_everybody_is_the_engines_user(tmp_path: Path) -> None:
    with socket_engine(tmp_path) as engine, engine.client("any-key") as client:
        client.open("a")
        assert "kv" in client.stats()
        assert [head for head, _ in engine.parts.tree._state.heads] == ["local"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Client]]:
    """Alice has a session "hers" with a turn and one "both"; bob has his own "both"."""
    folder = tmp_path_factory.mktemp("e")
    with tenants(folder, engine_config(blocks=128), access=access()) as (_, alice, bob):
        alice.open("hers").turn(tokens=LOG, sampling=GREEDY, idempotency_key="k")
        alice.open("both").turn(tokens=LOG, sampling=GREEDY)
        bob.open("both")
        yield alice, bob


def refused(code: type[SessionKVError], ask: Callable[[], object]) -> dict[str, object]:
    with pytest.raises(code) as raised:
        ask()
    return raised.value.to_wire()


@pytest.mark.parametrize(
    "ask",
    [
        lambda session: session.info(),
        lambda session: session.info(history=True),
        lambda session: session.node(),
        lambda session: session.places(),
        lambda session: session.path(),
        lambda session: session.turn(tokens=[1], sampling=GREEDY),
        lambda session: session.turn("hi", sampling=GREEDY),
        lambda session: session.fork("copy"),
        lambda session: session.rewind(),
        lambda session: session.pin(),
        lambda session: session.unpin(),
        lambda session: session.close(),
        lambda session: session.close(keep=False),
    ],
)
def test_anothers_session_is_as_one_that_does_not_exist(two, ask) -> None:
    alice, bob = two
    theirs = refused(SessionNotFound, lambda: ask(bob.session("hers")))
    missing = refused(SessionNotFound, lambda: ask(bob.session("nope")))
    assert json.dumps(theirs).replace("hers", "nope") == json.dumps(missing)
    assert alice.session("hers").info().turns == 1


def test_export_of_anothers_session_is_not_found(two) -> None:
    alice, bob = two
    refused(SessionNotFound, lambda: list(export_trees(bob, ["hers"])))
    assert list(export_trees(alice, ["hers"]))


def test_lists_names_and_replays_are_each_tenants_own(two) -> None:
    alice, bob = two
    assert [info.name for info in alice.sessions()] == ["both", "hers"]
    assert [info.name for info in bob.sessions()] == ["both"]
    assert alice.session("both").info().turns == 1
    assert bob.session("both").info().turns == 0
    again = bob.session("both").turn(tokens=LOG, sampling=GREEDY, idempotency_key="k")
    assert not again.replayed
    assert again.cache.cached_tokens == 0
    bob.session("both").rewind()


def test_a_node_of_anothers_session_is_not_found(two) -> None:
    alice, bob = two
    node = alice.session("both").info().node
    theirs = refused(NodeNotFound, lambda: bob.session("both").fork("x", node=node))
    missing = refused(NodeNotFound, lambda: bob.session("both").fork("x", node="n-999999"))
    assert json.dumps(theirs).replace(node, "n-999999") == json.dumps(missing)


def test_ids_of_turns_count_the_tenants_own(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    for start in range(2):
        config = engine_config(store, disk_bytes=50_000_000)
        with tenants(tmp_path, config, access=access()) as (_, alice, bob):
            for i in range(5):
                alice.open(f"{start}{i}").turn(tokens=[i], sampling=GREEDY)
            session = bob.open("s")
            assert session.turn(tokens=[5], sampling=GREEDY).node == f"n-{2 + start}"
            assert session.path() == ("n-1", "n-2", "n-3")[: 2 + start]
    with tenants(tmp_path, config, access=access()) as (_, alice, bob):
        session = bob.session("s")
        assert session.fork("t", node="n-2").info().node == "n-2"
        assert session.node("n-3").parent == "n-2"
        assert [item.node_id for item in export_trees(bob, ["s"])] == [1, 2, 3, 3]


def test_names_may_be_taken_whatever_others_have(two) -> None:
    alice, bob = two
    bob.open("hers").close(keep=False)
    assert alice.session("hers").info().turns == 1


def test_figures_are_the_tenants_own(two) -> None:
    alice, bob = two
    shown = bob.stats()
    assert shown["tenant"] == "bob"
    text = json.dumps(shown)
    assert "alice" not in text
    assert "kv" not in shown
    assert "ledger" not in shown
    assert alice.stats()["prompt_tokens"] >= 2 * len(LOG)


def test_an_operator_sees_all_and_acts_for_any(tmp_path: Path) -> None:
    with tenants(tmp_path, access=access()) as (engine, alice, _):
        alice.open("hers").turn(tokens=LOG, sampling=GREEDY)
        with engine.client(KEYS["root"]) as root:
            stats = root.stats()
            assert stats["tenants"]["alice"]["prompt_tokens"] == len(LOG)
            assert stats["tenants"]["bob"]["prompt_tokens"] == 0
            assert stats["kv"]["device"]["used_bytes"] > 0
            assert root.sessions() == []
        with engine.client(KEYS["root"], tenant="alice") as for_alice:
            assert [info.name for info in for_alice.sessions()] == ["hers"]
        with engine.client(KEYS["bob"], tenant="alice") as pretender:
            refused(Forbidden, pretender.sessions)
        with engine.client(KEYS["bob"], tenant="bob") as himself:
            assert himself.sessions() == []


def test_blocks_are_never_shared_between_tenants(tmp_path: Path) -> None:
    config = engine_config(tmp_path / "store", blocks=24, host_blocks=24, disk_bytes=50_000_000)
    (tmp_path / "store").mkdir()
    with (
        tenants(tmp_path, config, access=access()) as (engine, alice, bob),
        engine.client(KEYS["root"]) as root,
    ):
        for client in (alice, bob):
            cold = client.generate(tokens=LOG, sampling=GREEDY)
            assert cold.cache.cached_tokens == 0
            assert cold.cache.miss.reason is MissReason.FIRST_TURN
            assert list(cold.tokens) == oracle(LOG)
            warm = client.generate(tokens=LOG, sampling=GREEDY)
            assert warm.cache.cached_tokens == len(LOG) - 1
            root.flush()
        # In no tier: pushed down by other prompts, alice finds hers and bob none of them.
        prompts = [tokens(60, start=start) for start in (300, 400, 500)]
        for prompt in prompts:
            alice.generate(tokens=prompt, sampling=greedy(1))
        root.flush()
        for prompt in prompts:
            assert bob.generate(tokens=prompt, sampling=greedy(1)).cache.cached_tokens == 0
        lower = alice.generate(tokens=LOG, sampling=GREEDY).cache
        assert lower.host_tokens + lower.disk_tokens > 0


SYSTEM = "You are helpful, and everybody may know it. "


def test_two_tenants_share_exactly_the_blocks_of_a_public_prompt(tmp_path: Path) -> None:
    with tenants(tmp_path, engine_config(blocks=256), access=access(public=(SYSTEM,))) as (
        _,
        alice,
        bob,
    ):
        first = alice.open("s", system=SYSTEM).turn("one and the same", sampling=GREEDY)
        second = bob.open("s", system=SYSTEM).turn("one and the same", sampling=GREEDY)
        assert first.cache.cached_tokens == 0
        shared = second.cache.cached_tokens
        assert shared % 4 == 0
        other = bob.open("t", system=SYSTEM).turn("another", sampling=GREEDY)
        assert other.cache.cached_tokens >= shared
        raw = [alice.generate(prompt=SYSTEM + "x" * 40, sampling=GREEDY) for _ in range(2)]
        theirs = bob.generate(prompt=SYSTEM + "x" * 40, sampling=GREEDY)
        assert raw[0].cache.cached_tokens == 0
        assert raw[1].cache.cached_tokens == raw[1].usage.prompt_tokens - 1
        num_bytes = len(SYSTEM.encode()) + (raw[0].usage.prompt_tokens - len(SYSTEM) - 40)
        assert theirs.cache.cached_tokens == num_bytes // 4 * 4
        assert theirs.tokens == raw[0].tokens
        # The system prompt with what the template puts around it, and nothing of the user's.
        whole = second.usage.prompt_tokens
        assert whole - len("one and the same") - 40 < shared < whole - len("one and the same")


def test_what_public_blocks_others_hold_is_not_to_be_seen(tmp_path: Path) -> None:
    with tenants(tmp_path, engine_config(blocks=256), access=access(public=(SYSTEM,))) as (
        _,
        alice,
        bob,
    ):
        his = bob.open("s", system=SYSTEM)
        his.turn("hello", sampling=GREEDY)
        before = his.info().bytes
        alice.open("s", system=SYSTEM).turn("hello", sampling=GREEDY)
        assert his.info().bytes == before


def test_a_session_that_moves_to_another_tenant_says_so_of_its_misses(tmp_path: Path) -> None:
    with tenants(tmp_path, access=access()) as (_, alice, bob):
        alice.open("s").turn(tokens=LOG, sampling=GREEDY)
        found = list(export_trees(alice, ["s"]))
        nodes = [item for item in found if isinstance(item, NodeRecord)]
        sessions = [item for item in found if isinstance(item, PortableSession)]
        import_tree(bob, PortableTree.of(nodes, sessions))
        moved = bob.session("s").turn(tokens=[5, 6], sampling=GREEDY)
        assert moved.cache.cached_tokens == 0
        assert moved.cache.miss.reason is MissReason.TENANT


def test_a_tenant_has_so_many_turns_and_others_go_on(tmp_path: Path) -> None:
    gate = StepGate()
    allowed = access(alice={"turns": 2})
    with tenants(tmp_path, access=allowed, gate=gate) as (_, alice, bob):
        # What one client asks is taken in the order it was sent.
        prompts = [tokens(9), tokens(9, start=50), LOG]
        asked = [
            alice._core.submit(wire.Generate, {"tokens": prompt, "sampling": GREEDY})
            for prompt in prompts
        ]
        gate.reached()
        his = Later(lambda: bob.generate(tokens=LOG, sampling=GREEDY))
        gate.open()
        with pytest.raises(Overloaded) as refusal:
            alice._finish(asked[2], alice._core.abandon)
        assert refusal.value.details["queued"] == 2
        assert list(his.result().tokens) == oracle(LOG)
        for prompt, turn in zip(prompts[:2], asked[:2], strict=True):
            assert list(alice._finish(turn, alice._core.abandon).tokens) == oracle(prompt)
        assert alice.generate(tokens=LOG, sampling=GREEDY).tokens


def test_pins_stay_within_the_quota(tmp_path: Path) -> None:
    config = engine_config(blocks=64)
    with tenants(tmp_path, config, access=access()) as (engine, _, bob):
        block_bytes = engine.parts.runner.geometry.block_bytes
        quota = access(bob={"device_bytes": 8 * block_bytes})
        engine.host.renew_access(quota)
        his = bob.open("s")
        his.turn(tokens=tokens(20), sampling=GREEDY)
        his.pin(tier="device")
        more = bob.open("t")
        more.turn(tokens=tokens(20, start=100), sampling=GREEDY)
        error = refused(PinRefused, lambda: more.pin(tier="device"))
        assert error["details"] == {
            "tier": "device",
            "needed_bytes": 16 * block_bytes,
            "allowed_bytes": 8 * block_bytes,
        }


def test_a_flood_does_not_evict_who_is_within_its_quota(tmp_path: Path) -> None:
    """The positive control is the same flood without quotas."""
    found = {}
    for has_quota in (True, False):
        folder = tmp_path / str(has_quota)
        folder.mkdir()
        config = engine_config(blocks=40)
        with tenants(folder, config, access=access()) as (engine, alice, bob):
            if has_quota:
                size = 12 * engine.parts.runner.geometry.block_bytes
                both = {"alice": {"device_bytes": size}, "bob": {"device_bytes": size}}
                engine.host.renew_access(access(**both))
            bob.stats()
            victim = bob.open("v")
            victim.turn(tokens=LOG, sampling=GREEDY)
            for i in range(12):
                alice.open(f"f{i}").turn(tokens=tokens(24, start=100 + 40 * i), sampling=GREEDY)
            again = victim.turn(tokens=[9, 9], sampling=GREEDY)
            found[has_quota] = again.cache.cached_tokens
            assert engine.parts.kv.check() is None
    assert found == {True: len(LOG) + 7, False: 0}


def test_a_key_that_is_taken_back_ends_its_connections(tmp_path: Path) -> None:
    with tenants(tmp_path, access=access()) as (engine, alice, bob):
        alice.open("a")
        bob.open("b")
        left = replace(access(), keys=(entry("bob"), entry("root")))
        engine.host.renew_access(left)
        assert bob.session("b").info().turns == 0
        with pytest.raises(SessionKVError):
            alice.sessions()
        with pytest.raises(Unauthorized):  # a keyed request waits for the new connection
            alice.generate(tokens=LOG, sampling=GREEDY, idempotency_key="k")


def test_flush_of_a_tenant_writes_its_own(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    config = engine_config(tmp_path / "store", disk_bytes=50_000_000, durability="off")
    with tenants(tmp_path, config, access=access()) as (engine, alice, bob):
        alice.open("a").turn(tokens=LOG, sampling=GREEDY)
        bob.open("b").turn(tokens=LOG, sampling=GREEDY)
        bob.flush()
        assert engine.parts.store.stats().blocks == 8
        with engine.client(KEYS["root"]) as root:
            root.flush()
        assert engine.parts.store.stats().blocks == 16
