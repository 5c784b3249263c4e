"""The block store against a small model: chains, tails, leases, deletes, restarts, a cap."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory, disk_bytes
from sessionkv.types import BlockHash, BlockRecord, DiskReceipt, MoveOutcome
from tests.builders.store import IDENTITY, chain, geometry, payload, query

BLOCK = 65_536
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
CAPS = st.sampled_from([600_000, 1_000_000, 2_000_000])


class BlockStoreMachine(RuleBasedStateMachine):
    """``known`` is what may be on disk: written, and neither deleted nor told as evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.directory = StoreDirectory.open(self.path / "store")
        self.cap = 1_000_000
        self.known: dict[BlockHash, BlockRecord] = {}
        self.receipts: list[DiskReceipt] = []
        self.store = self.opened()

    def opened(self) -> BlockStore:
        return BlockStore(self.directory, IDENTITY, geometry(BLOCK), cap_bytes=self.cap)

    def take_evicted(self) -> None:
        for key in self.store.evicted():
            del self.known[key]

    @rule(tokens=TOKENS)
    def write(self, tokens: list[int]) -> None:
        records = chain(tokens)
        outcomes = self.store.write_many([(r, memoryview(payload(r, BLOCK))) for r in records])
        self.known.update(
            (r.key, r) for r, o in zip(records, outcomes, strict=True) if o is MoveOutcome.OK
        )
        if not self.receipts:
            assert set(outcomes) == {MoveOutcome.OK}
        self.take_evicted()

    @rule(tokens=TOKENS)
    def lookup(self, tokens: list[int]) -> None:
        receipt = self.store.lookup(query(tokens))
        full = [r for r in chain(tokens) if r.fill == 4]
        reached = 0
        while reached < len(full) and full[reached].key in self.known:
            reached += 1
        assert [found.record for found in receipt.blocks] == full[:reached]
        parent = full[reached - 1].key if reached else query(tokens).parent
        rest = tokens[4 * reached :]
        shares = [
            shared(record.token_ids, rest)
            for record in self.known.values()
            if record.parent == parent
        ]
        best = max(shares, default=0)
        assert (shared(receipt.tail.record.token_ids, rest) if receipt.tail else 0) == best
        self.receipts.append(receipt)

    @precondition(lambda self: self.receipts)
    @rule(data=st.data())
    def read_and_release(self, data: st.DataObject) -> None:
        receipt = self.receipts.pop(data.draw(st.integers(0, len(self.receipts) - 1)))
        # Deleted, superseded or not: what a receipt leases is there until it is released.
        for found in (*receipt.blocks, *([receipt.tail] if receipt.tail else [])):
            into = bytearray(BLOCK)
            assert self.store.read(found, memoryview(into)) is MoveOutcome.OK
            assert into == payload(found.record, BLOCK)
        self.store.release(receipt.receipt_id)

    @rule(tokens=TOKENS)
    def delete(self, tokens: list[int]) -> None:
        keys = [record.key for record in chain(tokens)]
        self.store.delete(keys)
        for key in keys:
            self.known.pop(key, None)

    @rule(cap=CAPS)
    def restart(self, cap: int) -> None:
        self.store.close()
        self.receipts.clear()
        self.cap = cap
        self.store = self.opened()
        self.take_evicted()
        assert self.store.verify() == (len(self.known), 0)

    @invariant()
    def bytes_and_blocks_are_as_reported(self) -> None:
        stats = self.store.stats()
        assert stats.blocks == len(self.known)
        assert stats.used_bytes == disk_bytes(self.directory.blocks_path) <= self.cap
        assert stats.enabled
        assert stats.corrupt_blocks == stats.missing_blocks == 0
        if not self.receipts:
            assert stats.leased_slots == 0

    def teardown(self) -> None:
        self.store.close()
        self.directory.close()
        shutil.rmtree(self.path)


def shared(left: tuple[int, ...], right: list[int]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


BlockStoreMachine.TestCase.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None
)
TestBlockStore = BlockStoreMachine.TestCase
