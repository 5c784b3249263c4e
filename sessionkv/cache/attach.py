"""Tells the tree which blocks hold a session's log, once it came in from the journal.

The only place where the tree of turns and the hash chain meet besides a turn's own end.
"""

from __future__ import annotations

from sessionkv.cache.chain import TokenChain
from sessionkv.cache.tree import TurnTree
from sessionkv.types import BlockHash, HeadRecord


def attach_session(tree: TurnTree, head: HeadRecord, root: BlockHash, block_size: int) -> None:
    """Attach hashes to the turns of a session that lack them; afterwards retention is exact.

    What it shares with sessions in memory is not hashed again. A few microseconds a block.

    Args:
        tree: With the session in memory.
        head: The session.
        root: Root of the chain: the KV identity.
        block_size: Tokens a block.
    """
    node_id = head.node_id
    known = tree.hashes_of(node_id)
    chain = TokenChain(
        root,
        block_size,
        tenant=head.tenant,
        public=tree.retention.quotas.public,
        token_ids=tree.tokens_of(node_id),
        hashes=known,
    )
    unwritten = tree.record(node_id).num_unwritten_tokens
    tail = chain.tail_record(max(len(chain) - unwritten, 0))
    tree.attach_hashes(node_id, chain.hashes, None if tail is None else tail.key)
