"""Why a turn computed what its conversation had computed before."""

from __future__ import annotations

from sessionkv.cache.chain import TokenChain
from sessionkv.engine.active_turn import ActiveTurn
from sessionkv.engine.parts import CoreParts
from sessionkv.engine.scheduler.sequence import Sequence
from sessionkv.types import BlockHash, MissReason, MissReport
from sessionkv.types.portable import LOCAL_TENANT


def note_absent(turn: ActiveTurn, parts: CoreParts) -> None:
    """Remember why the history ends where it was no longer found.

    To be asked when the turn's sequence starts and its step has not run: later the blocks are there
    again and the cause is forgotten.
    """
    if turn.sequence is None or turn.chain is None:
        return
    found, known = turn.sequence.found_tokens, _known_tokens(turn, parts)
    if found < known:
        turn.absent[found] = _reason(turn, turn.sequence, parts, found, known)


def explain_misses(turn: ActiveTurn, parts: CoreParts) -> tuple[MissReport, dict[str, int]]:
    """The first position of the known history that this turn computed and why; tokens by reason.

    The last prompt token never counts.
    """
    if turn.sequence is None or turn.chain is None:
        return MissReport(), {}
    known = _known_tokens(turn, parts)
    first: MissReport | None = None
    missed: dict[str, int] = {}
    for part in turn.sequence.accounting.computed:
        count = min(part.end, known) - part.start
        if count <= 0:
            continue
        reason = part.reason or _why_absent(turn, part.start)
        missed[reason.value] = missed.get(reason.value, 0) + count
        if first is None:
            first = MissReport(reason, token=part.start, turn=_turn_at(turn, parts, part.start))
    if first is None:
        first = _hint(turn) or MissReport(MissReason.NONE if known else MissReason.FIRST_TURN)
    return first, missed


def _why_absent(turn: ActiveTurn, position: int) -> MissReason:
    """The reason noted last at or before a position."""
    noted = [at for at in turn.absent if at <= position]
    return turn.absent[max(noted)] if noted else MissReason.NOT_STORED


def _hint(turn: ActiveTurn) -> MissReport | None:
    """Where the front saw the prompt leave the stored history."""
    return None if turn.rendered is None else turn.rendered.known_miss


def _known_tokens(turn: ActiveTurn, parts: CoreParts) -> int:
    """Leading tokens of the prompt whose KV was there once.

    Those of the turn that it follows, and past them what it shares with the turns that it leaves.
    A request that bypasses the cache is told so, whatever it repeats.
    """
    if turn.sequence is None:
        return 0
    most = turn.sequence.num_prompt_tokens - 1
    if not turn.ask.reads_cache:
        return most
    hint, size = _hint(turn), parts.kv.block_size
    shared = hint.token if hint is not None and hint.token is not None else 0
    return min(most, max(turn.known_tokens, shared // size * size))


def _reason(
    turn: ActiveTurn, sequence: Sequence, parts: CoreParts, found: int, known: int
) -> MissReason:
    if not parts.config.cache.prefix_cache:
        return MissReason.CACHE_OFF
    if not turn.ask.reads_cache:
        return MissReason.BYPASSED
    key = _key_at(turn, parts, found, known)
    if parts.kv.was_corrupt(key):
        return MissReason.CORRUPT
    if _identity_changed(turn, parts):
        return _whose_chain(turn, parts)
    if parts.kv.was_evicted(key):
        lapsed = parts.tree.retention.pin_lapsed(key)
        return MissReason.EXPIRED if lapsed else MissReason.EVICTED
    if parts.kv.tiers_of(key) or sequence.disk_was_late:
        return MissReason.NOT_MATCHED
    return MissReason.NOT_STORED


def _key_at(turn: ActiveTurn, parts: CoreParts, position: int, known: int) -> BlockHash:
    """Key of the block that should have held ``position``: a full one, or the history's tail."""
    chain = turn.chain
    if chain is None:
        raise ValueError("the turn has no chain")
    block = position // parts.kv.block_size
    tail = chain.tail_record(known)
    if tail is not None and block == known // parts.kv.block_size:
        return tail.key
    return chain.hashes[block]


def _identity_changed(turn: ActiveTurn, parts: CoreParts) -> bool:
    """Whether the parent turn was journalled under another chain: other weights or geometry."""
    if turn.chain is None or turn.ask.session is None:
        return False
    record = parts.tree.record(turn.parent_id)
    num_blocks = parts.tree.num_tokens(turn.parent_id) // parts.kv.block_size
    if num_blocks == 0 or not record.chain_hash:
        return False
    return turn.chain.hashes[num_blocks - 1] != record.chain_hash


def _whose_chain(turn: ActiveTurn, parts: CoreParts) -> MissReason:
    """Whether the parent's chain is that of another tenant, whose session this was. O(log).

    Each tenant that has a key is tried, and the one of engines without keys.
    """
    chain = turn.chain
    if chain is None:
        return MissReason.IDENTITY_CHANGED
    written = parts.tree.record(turn.parent_id).chain_hash
    log = chain.token_ids[: parts.tree.num_tokens(turn.parent_id)]
    for tenant in {LOCAL_TENANT, *parts.tenants.tenants} - {chain.tenant}:
        public = parts.tree.retention.quotas.public
        other = TokenChain(
            chain.root, chain.block_size, tenant=tenant, public=public, token_ids=log
        )
        if other.hashes[-1] == written:
            return MissReason.TENANT
    return MissReason.IDENTITY_CHANGED


def _turn_at(turn: ActiveTurn, parts: CoreParts, position: int) -> int | None:
    """Number of the turn whose tokens ``position`` is among. O(turns)."""
    if turn.ask.session is None:
        return None
    for number, record in enumerate(parts.tree.path(turn.parent_id)):
        if position < parts.tree.num_tokens(record.node_id):
            return number
    return None
