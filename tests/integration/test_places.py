"""Where a session's blocks are, as told over the wire."""

import asyncio
from pathlib import Path

import pytest

from sessionkv.client import AsyncClient, Places, SessionPage
from sessionkv.engine.places import runs
from sessionkv.errors import Overloaded, SessionNotFound
from sessionkv.store.answers import Held
from tests.builders.engine import BLOCK_SIZE, engine_config, greedy, open_engine, socket_engine

MIB = 2**20


def ids(seed: int, count: int) -> list[int]:
    return [(seed * 7 + i * 3) % 250 + 1 for i in range(count)]


def test_blocks_are_followed_through_the_tiers(tmp_path: Path) -> None:
    config = engine_config(tmp_path / "store", blocks=16, host_blocks=8, disk_bytes=4 * MIB)
    with open_engine(config) as engine:
        session = engine.open("a")
        session.turn(tokens=ids(1, 20), sampling=greedy(4))
        assert session.places().runs == (("device", 6),)

        # A second session takes the device and then some of the host.
        engine.open("b").turn(tokens=ids(2, 52), sampling=greedy(4))
        pressed = session.places()
        assert pressed.blocks == sum(pressed.counts.values()) == 6
        assert pressed.counts.get("device", 0) < 6
        assert "nowhere" not in pressed.counts

        engine.flush()
        engine.open("c").turn(tokens=ids(3, 52), sampling=greedy(4))
        engine.open("d").turn(tokens=ids(4, 52), sampling=greedy(4))
        engine.flush()
        assert session.places().counts == {"disk": 6}

        session.turn(tokens=ids(5, 1), sampling=greedy(2))
        assert set(session.places().counts) == {"device"}
        engine.assert_ledger()


def test_after_a_restart_the_disk_says_what_it_has(tmp_path: Path) -> None:
    config = engine_config(tmp_path / "store", disk_bytes=4 * MIB)
    with open_engine(config) as engine:
        engine.open("a").turn(tokens=ids(1, 20), sampling=greedy(4))
        engine.flush()
        fork = engine.session("a").fork("b")
        assert fork.places() == engine.session("a").places()
    with open_engine(config) as engine:
        found = engine.session("a").places()
        assert found.runs == (("disk", 6),)
        assert found.block_tokens == BLOCK_SIZE
        engine.assert_ledger()


def test_without_lower_tiers_what_is_pressed_out_is_nowhere(tmp_path: Path) -> None:
    with open_engine(engine_config(blocks=16)) as engine:
        engine.open("a").turn(tokens=ids(1, 20), sampling=greedy(4))
        engine.open("b").turn(tokens=ids(2, 60), sampling=greedy(3))
        assert engine.session("a").places().counts == {"nowhere": 6}


def test_a_session_without_turns_has_no_blocks() -> None:
    with open_engine() as engine:
        found = engine.open("a", system="S").places()
        assert (found.blocks, found.counts, found.runs) == (0, {}, ())
        with pytest.raises(SessionNotFound):
            engine.session("none").places()


def test_the_asyncio_client_says_the_same(tmp_path: Path) -> None:
    async def ask(endpoint: str) -> tuple[Places, tuple[str, ...], SessionPage]:
        async with AsyncClient(endpoint) as client:
            session = client.session("a")
            page = await client.session_page(limit=1)
            return await session.places(), await session.path(), page

    with socket_engine(tmp_path) as engine, engine.client() as client:
        session = client.open("a")
        turn = session.turn("hello", sampling=greedy(4))
        client.open("b")
        places, path, page = asyncio.run(ask(engine.endpoint))
        assert places == session.places()
        assert path == session.path()
        assert path[-1] == turn.node
        assert page == client.session_page(limit=1)
        assert ([s.name for s in page.sessions], page.next) == (["a"], "a")
        assert client.session_page(after="a").sessions[0].name == "b"


def test_a_store_that_cannot_tell_says_so(tmp_path: Path) -> None:
    with open_engine(engine_config(tmp_path / "store", disk_bytes=4 * MIB)) as engine:
        session = engine.open("a")
        session.turn(tokens=ids(1, 20), sampling=greedy(4))
        store = engine.parts.store
        search, store.search = store.search, lambda ticket, _: store._inbox.put(Held(ticket, None))
        with pytest.raises(Overloaded):
            session.places()
        store.search = search
        assert session.places().counts == {"device": 6}


def test_messages_come_with_their_turns() -> None:
    with open_engine() as engine:
        session = engine.open("a", system="S")
        first = session.turn("one", sampling=greedy(2))
        second = session.turn("two", sampling=greedy(2))
        root = session.path()[0]
        told = session.info(history=True)
        assert [m["role"] for m in told.messages] == [
            "system", "user", "assistant", "user", "assistant",
        ]  # fmt: skip
        assert told.message_nodes == (root, *[first.node] * 2, *[second.node] * 2)


def test_runs_are_merged_and_bounded() -> None:
    assert runs([]) == []
    assert runs(["device", "device", "disk", "device"]) == [
        ("device", 2),
        ("disk", 1),
        ("device", 1),
    ]
    mixed = ["device", "host", "host"] * 4
    assert runs(mixed, most=12) == [("device", 1), ("host", 2)] * 4
    bounded = runs(mixed, most=4)
    assert bounded == [("host", 12)]
    assert sum(count for _, count in runs(["disk", "host"] * 501, most=256)) == 1002
    assert len(runs(["disk", "host"] * 501, most=256)) <= 256
