"""What the front is told of a session when it is to render a turn's messages.

Core thread only.
"""

from __future__ import annotations

from sessionkv.cache.turns import HeadId
from sessionkv.engine.messages import NodeText, RenderTurn
from sessionkv.engine.parts import CoreParts
from sessionkv.errors import SessionDamaged, SessionNotFound, TurnKind
from sessionkv.types import HeadRecord, NodeRecord, unpack_tokens


def render_request(
    parts: CoreParts,
    turn_id: int,
    head_id: HeadId,
    *,
    with_path: bool,
    changed_from: str | None = None,
) -> RenderTurn:
    """The question for the ids that a turn adds to its session's head. O(path).

    Args:
        parts: The engine's.
        turn_id: The turn's, or that of the call that only counts them.
        head_id: The session.
        with_path: Also what the session consists of.
        changed_from: The session of the conversation that a new one was, where it was another.

    Raises:
        SessionNotFound: There is none.
    """
    head = parts.tree.head(*head_id)
    path = parts.tree.path(head.node_id)
    return RenderTurn(
        turn_id=turn_id,
        root_id=path[0].node_id,
        root_blob=path[0].incoming_blob,
        node_id=head.node_id,
        num_turns=len(path) - 1,
        closed=path[-1].closed,
        history=head.history,
        created_s=path[0].created_s,
        path=tuple(map(_node_text, path)) if with_path else (),
        foreign=is_foreign(parts, head.node_id),
        changed_from=_changed_from(parts, head, changed_from) if len(path) == 1 else (),
    )


def _changed_from(parts: CoreParts, head: HeadRecord, name: str | None) -> tuple[NodeText, ...]:
    """The path of the conversation that a new one was; none where it cannot be compared with."""
    if name is None or head.history != "follow":
        return ()
    try:
        node_id = parts.tree.head(head.tenant, name).node_id
        path = parts.tree.path(node_id)
    except (SessionNotFound, SessionDamaged):
        return ()
    return () if is_foreign(parts, node_id) else tuple(map(_node_text, path))


def check_kind(parts: CoreParts, node_id: int, *, raw: bool) -> None:
    """See whether a turn of this kind may follow a node.

    Raises:
        TurnKind: It may not.
    """
    tree = parts.tree
    tree.check_kind(node_id, "raw" if raw else "chat")
    if not raw:
        return
    if tree.record(node_id).kind == "root" and tree.record(node_id).num_messages:
        raise TurnKind("the session has a system prompt or tools; raw turns go without")
    if is_foreign(parts, node_id):
        raise TurnKind(
            "the session's raw tokens are of another tokenizer and cannot be encoded anew"
        )


def is_foreign(parts: CoreParts, node_id: int) -> bool:
    """Whether the log's ids are of another tokenizer than the model's."""
    digest = parts.tree.record(node_id).tokenizer_digest
    return parts.tree.num_turns(node_id) > 0 and digest != parts.tokenizer_digest


def _node_text(node: NodeRecord) -> NodeText:
    return NodeText(
        node_id=node.node_id,
        kind=node.kind,
        incoming_blob=node.incoming_blob,
        reply_blob=node.reply_blob,
        token_ids=unpack_tokens(node.token_ids),
        num_incoming_tokens=node.num_incoming_tokens,
        closed=node.closed,
    )
