"""From a judged turn to what is journalled of it: its node, its key, blocks to write again.

Core thread only.
"""

from __future__ import annotations

from sessionkv.cache.turns import NewNode
from sessionkv.engine.active_turn import ActiveTurn
from sessionkv.engine.commits import PendingCommit
from sessionkv.engine.messages import TurnCommitted, Verdict
from sessionkv.engine.parts import CoreParts
from sessionkv.errors import TurnFailed
from sessionkv.types import BlockHash, KeyRecord


def commit_of(turn: ActiveTurn, verdict: Verdict, parts: CoreParts, wall: float) -> PendingCommit:
    """End the sequence of a turn that is kept and apply the turn to the tree.

    Returns:
        What the journal is to be handed.

    Raises:
        SessionKVError: The tree refuses the turn, or it never ran.
    """
    tree, ask, claim = parts.tree, turn.ask, turn.ask.claim
    key = None
    if claim is not None:
        key = KeyRecord(ask.tenant, claim.key, claim.request_digest, verdict.response_blob, wall)
    again = _recomputed(turn, parts) if ask.session is not None else ()
    new = _new_node(turn, verdict, parts)
    done = TurnCommitted(ask.turn_id)
    if ask.session is not None:
        change = tree.append_turn(
            ask.tenant,
            ask.session,
            new,
            base_id=turn.base_id,
            now=wall,
            parent_id=turn.parent_id,
            node_id=turn.node_id,
            key=key,
        )
        return PendingCommit(change, done, turn_id=ask.turn_id, recomputed=again)
    assert key is not None  # kept without a session: for its key alone
    return PendingCommit(tree.record_key(key, now=wall), done, turn_id=ask.turn_id)


def _recomputed(turn: ActiveTurn, parts: CoreParts) -> tuple[BlockHash, ...]:
    """Full blocks of the history before the turn that were computed again."""
    if turn.sequence is None or turn.chain is None:
        return ()
    size, hashes = parts.kv.block_size, turn.chain.hashes
    end = parts.tree.num_tokens(turn.parent_id) // size
    blocks: dict[BlockHash, None] = {}
    for part in turn.sequence.accounting.computed:
        blocks.update(dict.fromkeys(hashes[part.start // size : min(-(-part.end // size), end)]))
    return tuple(blocks)


def _new_node(turn: ActiveTurn, verdict: Verdict, parts: CoreParts) -> NewNode:
    """The node a finished turn becomes; its sequence ends here.

    ::

        | parent's log | delta | kept output | replacement |
                               ^ num_prompt  ^ kept
        | KV written ............... kept_written |
    """
    ask, chain, sequence = turn.ask, turn.chain, turn.sequence
    if chain is None or sequence is None:
        raise TurnFailed("the turn has no sequence")
    num_prompt = sequence.num_prompt_tokens
    kept = num_prompt + verdict.keep_tokens
    # A preempted turn has written more than it holds now.
    kept_written = min(kept, max(sequence.num_computed, sequence.computed_before))
    tail = chain.tail_record(kept_written)
    parts.scheduler.release(ask.turn_id, kept)
    turn.sequence = None
    chain.truncate(kept)
    chain.extend(verdict.replacement_ids)
    rendered = turn.rendered
    num_before = parts.tree.num_tokens(turn.parent_id) if ask.session is not None else 0
    return NewNode(
        kind="raw" if ask.token_ids is not None else "chat",
        token_ids=chain.token_ids[num_before:],
        num_incoming_tokens=num_prompt - num_before,
        hashes=chain.hashes,
        tail_key=tail.key if tail is not None else None,
        num_messages=(rendered.num_messages if rendered else ask.num_messages) + 1,
        incoming_blob=rendered.incoming_blob if rendered else ask.incoming_blob,
        reply_blob=verdict.reply_blob,
        finish_reason=verdict.finish_reason.value,
        closed=verdict.closed,
        sampling_blob=ask.sampling_blob,
        tokenizer_digest=parts.tokenizer_digest,
        template_digest=parts.template_digest,
        num_unwritten_tokens=len(chain) - kept_written,
    )
