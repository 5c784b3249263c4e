"""Tells a loaded tree which blocks hold its sessions' logs, by hashing each log once.

The only place where the tree of turns and the hash chain meet besides a turn's own end.
"""

from __future__ import annotations

from sessionkv.cache.chain import TokenChain
from sessionkv.cache.tree import TurnTree
from sessionkv.types import BlockHash


def attach_loaded(tree: TurnTree, root: BlockHash, block_size: int) -> int:
    """Attach hashes to every session that lacks them; returns how many sessions that were.

    What branches share is hashed once. A few microseconds a block; afterwards retention is exact.

    Args:
        tree: As loaded, or any later.
        root: Root of the chain: the KV identity.
        block_size: Tokens a block.
    """
    attached = 0
    for head in tree.unattached():
        node_id = head.node_id
        known = tree.hashes_of(node_id)
        chain = TokenChain(
            root, block_size, tenant=head.tenant, token_ids=tree.tokens_of(node_id), hashes=known
        )
        unwritten = tree.record(node_id).num_unwritten_tokens
        tail = chain.tail_record(max(len(chain) - unwritten, 0))
        tree.attach_hashes(node_id, chain.hashes, None if tail is None else tail.key)
        attached += 1
    return attached
