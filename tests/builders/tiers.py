"""Device, host and disk of a few blocks, with the real mover and the real store between them."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

from sessionkv.engine.copy_lanes import CopiesStarted
from sessionkv.engine.device_memory import DeviceMemory, HostPool
from sessionkv.engine.movers import HostArena, Mover
from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.store.worker import LookedUp, StoreAnswer, StoreWorker
from sessionkv.types import BlockMove, BlockRecord, MoveOutcome, Tier, Transfer, TransferResult
from tests.builders.store import IDENTITY, Gates, geometry, query

BLOCK = 4096


class Pool:
    """The part of a runner that movers use."""

    def __init__(self, num_blocks: int) -> None:
        self.bytes = bytearray(b"\xff" * (num_blocks * BLOCK))
        self.num_blocks = num_blocks

    def block_view(self, block_id: int) -> memoryview:
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(block_id)
        return memoryview(self.bytes)[block_id * BLOCK : (block_id + 1) * BLOCK]

    @property
    def memory(self) -> HostPool:
        return HostPool(self.block_view)


class TierAnswers(SimpleQueue[StoreAnswer]):
    """Answers; what is told of fetches before these is kept beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[CopiesStarted] = []

    def put(self, item: StoreAnswer | CopiesStarted, *_: Any, **__: Any) -> None:
        if isinstance(item, CopiesStarted):
            self.started.append(item)
        else:
            super().put(item)


class Tiers:
    """Device and host of ``num_blocks``, a disk, and the mover between them.

    The device is ``memory``, or else a :class:`Pool` in host memory.
    """

    def __init__(
        self,
        path: Path,
        *shut: str,
        num_blocks: int = 4,
        memory: DeviceMemory | None = None,
        staging_blocks: int = 4,
        disk: bool = True,
    ) -> None:
        self.directory = StoreDirectory.open(path)
        self.answers = TierAnswers()
        self.gates = Gates(*shut)
        self.pool: Any = Pool(num_blocks)
        self.host = HostArena(num_blocks, BLOCK)
        blocks = None
        if disk:
            blocks = BlockStore(
                self.directory, IDENTITY, geometry(BLOCK), cap_bytes=2**24, gates=self.gates
            )
        self.store = StoreWorker(Journal(self.directory), blocks, self.answers)
        self.mover = Mover(
            memory or self.pool.memory,
            self.host,
            self.store,
            self.answers,
            staging_bytes=staging_blocks * BLOCK,
            gates=self.gates,
        )
        self.number = 0

    def submit(self, src: Tier, dst: Tier, *moves: tuple[BlockRecord, int, int]) -> int:
        self.number += 1
        self.mover.submit(
            Transfer(self.number, src, dst, tuple(BlockMove(*move) for move in moves))
        )
        return self.number

    def result(self) -> tuple[int, tuple[MoveOutcome, ...]]:
        answer = self.answers.get(timeout=30)
        assert isinstance(answer, TransferResult)
        return answer.transfer_id, answer.outcomes

    def find(self, record: BlockRecord) -> int:
        self.store.lookup(0, query(list(record.token_ids), root=record.parent))
        answer = self.answers.get(timeout=30)
        assert isinstance(answer, LookedUp)
        assert answer.receipt is not None
        return answer.receipt.blocks[0].slot

    def close(self) -> None:
        self.mover.close(5)
        self.store.close(5)
        self.directory.close()
