"""Blocks that went through the tiers leave nothing behind in this process's memory."""

from __future__ import annotations

import os
from pathlib import Path

from sessionkv.engine.movers import HostArena
from sessionkv.types import MoveOutcome, Tier
from tests.builders.store import ROOT, block, payload
from tests.builders.tiers import Tiers

MIB = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_an_arena_takes_memory_only_as_it_is_used() -> None:
    before = resident_bytes()
    arena = HostArena(1024, MIB)
    assert resident_bytes() - before < 16 * MIB
    for block_id in range(64):
        arena.view(block_id)[:] = b"\x01" * MIB
    assert 56 * MIB < resident_bytes() - before < 96 * MIB


def test_two_thousand_spills_and_restores_of_eight_blocks(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path / "store", num_blocks=8)
    records = [block(ROOT, [i] * 4) for i in range(8)]
    for i, record in enumerate(records):
        tiers.pool.block_view(i)[:] = payload(record)
    ok = (MoveOutcome.OK,) * 8

    def cycle(number: int) -> None:
        tiers.submit(Tier.DEVICE, Tier.HOST, *((r, i, i) for i, r in enumerate(records)))
        assert tiers.result()[1] == ok
        if number % 20 == 0:
            tiers.submit(Tier.HOST, Tier.DISK, *((r, i, -1) for i, r in enumerate(records)))
            assert tiers.result()[1] == ok
            tiers.store.delete([r.key for r in records])
        tiers.submit(Tier.HOST, Tier.DEVICE, *((r, i, i) for i, r in enumerate(records)))
        assert tiers.result()[1] == ok

    for number in range(200):
        cycle(number)
    warm = resident_bytes()
    for number in range(200, 2000):
        cycle(number)
    assert resident_bytes() < warm * 1.05
    assert [bytes(tiers.pool.block_view(i)) for i in range(8)] == [
        bytes(payload(r)) for r in records
    ]
    tiers.close()
