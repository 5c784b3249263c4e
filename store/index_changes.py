"""What a block store asks of its index and changes in it, each within a transaction of the caller.

Every change is repeatable. Must not know of payloads, leases or caps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import lmdb

from sessionkv.store.block_index import BlockIndex
from sessionkv.store.index_entry import Entry
from sessionkv.store.record import shared_tokens
from sessionkv.types import (
    BlockHash,
    BlockRecord,
    DiskBlock,
    DiskQuery,
    pack_tokens,
    unpack_tokens,
)

Stored = Sequence[tuple[BlockRecord, int]]
"""Records, and the slots they are in."""


def find_chain(
    txn: lmdb.Transaction, index: BlockIndex, query: DiskQuery, blocks: list[DiskBlock]
) -> DiskBlock | None:
    """How far a chain reaches; about 8 us a block.

    Args:
        txn: Of the index.
        index: Where.
        query: Asks for the chain.
        blocks: Takes the blocks as they are found, those in memory passed over.

    Returns:
        The block after the last one that shares most leading tokens with what follows, if any does.
    """
    size = index.block_size
    parent, length = query.parent, 0
    for number, key in enumerate(query.keys):
        # Packed block by block: all at once is a call that keeps the interpreter, 15 us for 1,000.
        tokens = query.token_ids[size * number : size * (number + 1)]
        slot = index.slot_of(txn, key, parent, pack_tokens(tokens))
        if slot is not None:
            blocks.append(DiskBlock(BlockRecord(key, parent, tokens), slot))
        elif key not in query.in_memory:
            break
        parent, length = key, number + 1
    rest = query.token_ids[size * length : size * (length + 1)]
    return _best_child(txn, index, parent, pack_tokens(rest))


def disk_block(entry: Entry) -> DiskBlock:
    """The block of an entry."""
    token_ids = tuple(unpack_tokens(entry.tokens))
    record = BlockRecord(BlockHash(entry.key), BlockHash(entry.parent), token_ids)
    return DiskBlock(record, entry.slot)


def _best_child(
    txn: lmdb.Transaction, index: BlockIndex, parent: BlockHash, tokens: bytes
) -> DiskBlock | None:
    """The block after ``parent`` that shares most leading tokens, at least one."""
    best: Entry | None = None
    best_shared = 0
    for child in index.children(txn, parent):
        shared = shared_tokens(child.tokens, tokens)
        if shared > best_shared:
            best, best_shared = child, shared
    return None if best is None else disk_block(best)


def name_records(
    txn: lmdb.Transaction, index: BlockIndex, stored: Stored, rank_of: Callable[[bytes], int]
) -> list[Entry]:
    """Name the slots; the shorter partial blocks that this made useless, which are gone."""
    dropped: list[Entry] = []
    for record, slot in stored:
        tokens = pack_tokens(record.token_ids)
        for child in list(index.children(txn, record.parent, full=False)):
            if len(child.tokens) < len(tokens) and tokens.startswith(child.tokens):
                index.remove(txn, child.key)
                dropped.append(child)
        rank = rank_of(record.key)
        index.put(txn, Entry(record.key, record.parent, tokens, slot, rank=rank))
    return dropped


def check_named(txn: lmdb.Transaction, index: BlockIndex, stored: Stored) -> None:
    """What was just named is found; about 8 us a block.

    Raises:
        lmdb.CorruptedError: It is not: damage to the index loses what is written to it.
    """
    for record, slot in stored:
        tokens = pack_tokens(record.token_ids)
        if index.slot_of(txn, record.key, record.parent, tokens) != slot:
            raise lmdb.CorruptedError("the index does not hold what was written to it")


def remove_keys(
    txn: lmdb.Transaction, index: BlockIndex, keys: Sequence[BlockHash]
) -> list[Entry | None]:
    """Remove blocks; what was known of each."""
    return [index.remove(txn, key) for key in keys]


def remove_ends(
    txn: lmdb.Transaction, index: BlockIndex, keys: Sequence[BlockHash]
) -> list[Entry | None]:
    """Remove those that nothing continues but others of ``keys``."""
    going = set(keys)
    found = True
    while found:  # once more only where a chain was named from its start
        found = False
        for key in keys:
            if key in going and any(child.key not in going for child in index.children(txn, key)):
                going.discard(key)
                found = True
    return [index.remove(txn, key) for key in keys if key in going]
