"""Turns whose whole conversation has to be rendered: resent histories, templates that rewrite.

The prompt is what the template says; it may leave the head's log at some point. The turn then
follows the deepest node whose log and messages the prompt still shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sessionkv.engine.messages import NodeText, RenderTurn, TurnRendered
from sessionkv.text.embedded import answers_in
from sessionkv.text.follow import follow_ids
from sessionkv.text.history import StoredMessage, match_history
from sessionkv.text.messages import Message, dump_messages
from sessionkv.text.model import TextModel
from sessionkv.text.parting import Before, first_miss
from sessionkv.text.reply_memory import ReplyMemory
from sessionkv.text.root import RootText
from sessionkv.text.stored import read_messages, read_reply, read_root
from sessionkv.types import MissReason, MissReport


@dataclass(frozen=True, slots=True)
class StoredPath:
    """A session's path as messages and ids.

    Attributes:
        messages: All but the root's.
        log: Token ids from the root to the head.
        ends: For each node, root first: id, position after its last token, messages up to it.
    """

    messages: tuple[StoredMessage, ...]
    log: tuple[int, ...]
    ends: tuple[tuple[int, int, int], ...]


def read_path(text: TextModel, path: Sequence[NodeText]) -> StoredPath:
    """Unpack what core sent. O(history).

    Replies of earlier turns may stand among what came in with a later one, where the template wrote
    anew what was before it: they have their ids there.

    Raises:
        SessionDamaged: A turn's messages cannot be read.
    """
    messages: list[StoredMessage] = []
    log: list[int] = []
    ends: list[tuple[int, int, int]] = []
    for turn, node in enumerate(path):
        start = len(log)
        log += node.token_ids
        if node.kind == "chat":
            messages += _incoming(text, node, turn, start)
            reply = read_reply(node.node_id, node.reply_blob)
            reply_ids = tuple(node.token_ids[node.num_incoming_tokens :])
            messages.append(StoredMessage(reply, turn, len(log), reply_ids))
        ends.append((node.node_id, len(log), len(messages)))
    return StoredPath(tuple(messages), tuple(log), tuple(ends))


def _incoming(text: TextModel, node: NodeText, turn: int, start: int) -> Iterator[StoredMessage]:
    """What came in with a turn; answers among it with the ids that they have in the log."""
    messages = read_messages(node.node_id, node.incoming_blob)
    end = start + node.num_incoming_tokens
    num_answers = sum(message.role == "assistant" for message in messages)
    answers = answers_in(text, node.token_ids[: node.num_incoming_tokens]) if num_answers else []
    following = iter(answers if len(answers) == num_answers else ())
    answer = next(following, None)
    for message in messages:
        if answer is None:
            yield StoredMessage(message, turn, end)
        elif message.role == "assistant":
            yield StoredMessage(message, turn, start + answer.end, answer.ids)
            answer = next(following, None)
        else:
            yield StoredMessage(message, turn, start + answer.start)


def render_history(
    text: TextModel,
    root: RootText,
    ask: RenderTurn,
    incoming: tuple[Message, ...],
    *,
    memory: ReplyMemory,
    tenant: str,
) -> tuple[TurnRendered, str]:
    """Ids of a turn whose conversation is rendered whole, and their raw text.

    Args:
        text: The model's.
        root: The session's.
        ask: With the path, unless the session has no turns.
        incoming: With history ``follow`` the whole conversation, else the new messages only.
        memory: Replies of late.
        tenant: Whose.

    Raises:
        TemplateRefused: With the template's own words.
        SessionDamaged: A stored turn cannot be read.
    """
    stored = read_path(text, ask.path)
    stored_root = root
    root, messages = _conversation(root, ask, stored, incoming)
    if ask.foreign:
        return _encode_anew(text, root, ask, messages), ""
    followed = follow_ids(
        text,
        root,
        messages,
        stored=stored.messages,
        log=stored.log,
        stored_root=stored_root,
        memory=memory,
        tenant=tenant,
    )
    miss = followed.miss
    if ask.changed_from:
        before = _before(text, ask.changed_from, root.now_s)
        miss = first_miss(text, root, messages, followed.ids, before=before)
    if miss.part == "message" and miss.message is not None and incoming[0].role == "system":
        miss = replace(miss, message=miss.message + 1)  # as the client counts them
    num_matching = match_history(stored.messages, messages).num_matching
    base_id, base_end, base_messages = _deepest_shared(
        stored, followed.ids, num_matching, ask.root_id
    )
    new = followed.messages[base_messages:]
    rendered = TurnRendered(
        ask.turn_id,
        followed.ids[base_end:],
        base_id,
        dump_messages(new),
        len(new),
        None if miss.reason is MissReason.NONE else miss,
    )
    return rendered, followed.raw


def _conversation(
    root: RootText, ask: RenderTurn, stored: StoredPath, incoming: tuple[Message, ...]
) -> tuple[RootText, tuple[Message, ...]]:
    """The root and everything behind it; another root where the client sent another system."""
    if ask.history != "follow":
        return root, (*(item.message for item in stored.messages), *incoming)
    if incoming[0].role != "system":
        return root, incoming
    if incoming[0].content != root.system:
        root = RootText(incoming[0].content, root.tools_json, root.now_s)
    return root, incoming[1:]


def _before(text: TextModel, path: Sequence[NodeText], now_s: float) -> Before:
    """The conversation that a new one was, before its client changed it."""
    stored = read_path(text, path)
    system, tools_json = read_root(path[0].node_id, path[0].incoming_blob)
    return Before(RootText(system, tools_json, now_s), stored.messages, stored.log)


def _encode_anew(
    text: TextModel, root: RootText, ask: RenderTurn, messages: tuple[Message, ...]
) -> TurnRendered:
    """The log is of another tokenizer: its messages become one turn behind the root."""
    return TurnRendered(
        ask.turn_id,
        text.full(root, messages),
        ask.root_id,
        dump_messages(messages),
        len(messages),
        MissReport(MissReason.IDENTITY_CHANGED, token=0),
    )


def _deepest_shared(
    stored: StoredPath, ids: Sequence[int], num_matching: int, root_id: int
) -> tuple[int, int, int]:
    """The last node whose whole log is a proper prefix of ``ids`` and whose messages match."""
    limit = min(len(ids) - 1, len(stored.log))
    shared = next((i for i in range(limit) if ids[i] != stored.log[i]), limit)
    found = (root_id, 0, 0)
    for node_id, end, num_messages in stored.ends:
        if end <= shared and num_messages <= num_matching:
            found = (node_id, end, num_messages)
    return found
