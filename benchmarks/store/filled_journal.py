"""A journal of many sessions, written in bulk: what an engine would have left behind."""

from __future__ import annotations

from collections.abc import Iterator

from sessionkv.store.journal import Journal
from sessionkv.types import (
    BlockHash,
    HeadRecord,
    JournalOp,
    NodeRecord,
    PutHead,
    PutNode,
    pack_tokens,
)

TENANT = "local"
_SESSIONS_A_BATCH = 2_000
_TEXT = b"m" * 400


def session_name(number: int) -> str:
    """Name of a session of :func:`fill`."""
    return f"session-{number:07}"


def tokens_of_turn(number: int, turn: int, num_tokens: int) -> list[int]:
    """Tokens of one turn of a session of :func:`fill`."""
    start = number * 31 + turn * 7
    return [(start + i) % 200 for i in range(num_tokens)]


def fill(journal: Journal, num_sessions: int, *, turns: int = 3, tokens: int = 200) -> None:
    """Add sessions, each a root and ``turns`` turns of ``tokens`` tokens."""
    batch: list[JournalOp] = []
    first_id = journal.summary().next_node_id
    for number in range(num_sessions):
        node_id = first_id + number * (turns + 1)
        batch += _session(number, node_id, turns, tokens)
        if number % _SESSIONS_A_BATCH == _SESSIONS_A_BATCH - 1:
            journal.commit([batch])
            batch = []
    journal.commit([batch])


def _session(number: int, first_id: int, turns: int, tokens: int) -> Iterator[JournalOp]:
    for turn in range(turns + 1):
        delta = tokens_of_turn(number, turn, tokens) if turn else []
        yield PutNode(
            NodeRecord(
                node_id=first_id + turn,
                parent_id=first_id + turn - 1 if turn else None,
                kind="raw" if turn else "root",
                token_ids=pack_tokens(delta),
                num_incoming_tokens=len(delta) // 2,
                num_messages=1 if turn else 0,
                incoming_blob=_TEXT if turn else b"",
                reply_blob=_TEXT if turn else b"",
                finish_reason="length" if turn else "",
                closed=False,
                sampling_blob=b"",
                tokenizer_digest="t" * 64,
                template_digest="",
                chain_hash=BlockHash(b""),
                created_s=float(number),
                num_unwritten_tokens=1 if turn else 0,
            )
        )
    name = session_name(number)
    node_id = first_id + turns
    yield PutHead(HeadRecord(TENANT, name, node_id, "", None, 0, "keep", 1.0, float(number)))
