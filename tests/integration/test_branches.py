"""Branches of one beginning: a fork copies nothing, and what is shared is stored once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.checksum import tokens
from tests.builders.engine import (
    BLOCK_SIZE,
    CheckedEngine,
    engine_config,
    greedy,
    open_engine,
    oracle,
)

SHORT = greedy(3)
BRANCHES = [f"b{i:02}" for i in range(64)]
PROMPT = tokens(98)  # with three tokens of reply, of which the last has no KV, 25 full blocks


def grow(engine: CheckedEngine, name: str, ids: list[int]) -> list[int]:
    return list(engine.session(name).turn(tokens=ids, sampling=SHORT).tokens)


def make_branches(engine: CheckedEngine) -> dict[str, list[int]]:
    """64 sessions of one beginning with a turn of their own each; their logs."""
    engine.open("stem")
    stem = [*PROMPT, *grow(engine, "stem", PROMPT)]
    logs = {"stem": stem}
    for i, name in enumerate(BRANCHES):
        engine.session("stem").fork(name)
        own = [100 + i] * 6
        logs[name] = [*stem, *own, *grow(engine, name, own)]
    engine.flush()
    return logs


def blocks_of(logs: dict[str, list[int]]) -> int:
    """Blocks of all logs, shared ones once; of each log all tokens but the last have KV."""
    held = {
        tuple(log[: min(start + BLOCK_SIZE, len(log) - 1)])
        for log in logs.values()
        for start in range(0, len(log) - 1, BLOCK_SIZE)
    }
    return len(held)


def on_disk(engine: CheckedEngine) -> int:
    return int(engine.stats()["store"]["blocks"]["blocks"])


def await_on_disk(engine: CheckedEngine, count: int) -> None:
    found = -1
    for _ in range(20_000):  # the store's thread renews its figures when it is idle
        found = on_disk(engine)
        if found == count:
            return
    raise AssertionError(f"{found} blocks are on disk, not {count}")


def retained(engine: CheckedEngine) -> int:
    return int(engine.parts.tree.retention.num_keys)


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_a_beginning_that_64_share_is_stored_once(tmp_path: Path, host_blocks: int) -> None:
    config = engine_config(tmp_path, blocks=64, host_blocks=host_blocks, disk_bytes=50_000_000)
    with open_engine(config) as engine:
        logs = make_branches(engine)
        assert retained(engine) == blocks_of(logs)
        await_on_disk(engine, blocks_of(logs))
        info = engine.session("b07").info()
        assert info.tokens == len(logs["b07"])
        # Closing one keeps the others, wherever their blocks are.
        for name in BRANCHES[1:]:
            engine.delete(name)
            del logs[name]
        assert retained(engine) == blocks_of(logs)
        assert grow(engine, "b00", [5]) == oracle([*logs["b00"], 5], SHORT)
        engine.delete("stem")
        assert grow(engine, "b00", [6])
        engine.session("b00").rewind(2)
        engine.delete("b00")
        assert retained(engine) == 0
        engine.assert_ledger()
        assert engine.sessions() == []
        assert engine.stats()["store"]["nodes"] == 0


def test_the_space_comes_back_when_the_last_owner_goes(tmp_path: Path) -> None:
    """Also where nobody else is in memory."""
    config = engine_config(tmp_path, blocks=256, disk_bytes=50_000_000)
    with open_engine(config) as engine:
        logs = make_branches(engine)
        await_on_disk(engine, blocks_of(logs))
    for names in (BRANCHES[:20], BRANCHES[20:63], ["stem"]):
        with open_engine(config) as engine:
            for name in names:
                engine.delete(name)
                del logs[name]
            await_on_disk(engine, blocks_of(logs))
            left = min(logs)
            result = engine.session(left).turn(tokens=[9], sampling=SHORT)
            assert list(result.tokens) == oracle([*logs[left], 9], SHORT)
            assert result.cache.disk_tokens == len(logs[left]) - 1
            logs[left] += [9, *result.tokens]
            engine.flush()
    with open_engine(config) as engine:
        engine.delete("b63")
        await_on_disk(engine, 0)
        assert engine.stats()["store"]["nodes"] == 0
        engine.assert_ledger()


def test_a_fork_copies_no_block_in_any_tier(tmp_path: Path) -> None:
    config = engine_config(tmp_path, blocks=64, host_blocks=64, disk_bytes=50_000_000)
    with open_engine(config) as engine:
        engine.open("stem")
        grow(engine, "stem", PROMPT)
        engine.flush()
        before = engine.parts.kv.ledger(), on_disk(engine), retained(engine)
        moved = engine.stats()["store"]["nodes"]
        for name in BRANCHES:
            engine.session("stem").fork(name)
        assert (engine.parts.kv.ledger(), on_disk(engine), retained(engine)) == before
        assert engine.stats()["store"]["nodes"] == moved
        sizes = engine.session("b00").info().bytes["device"]
        assert (sizes.exclusive, sizes.shared > 0) == (0, True)
        engine.assert_ledger()
