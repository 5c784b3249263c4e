"""Prompt ids for a conversation that the client sent whole.

The model sees what the template writes for the incoming messages. But where the template writes a
reply that was sampled here, the sampled ids are taken instead of encoding its text again, which may
give others and so lose the cache. That is done only where the ids spell the template's text at that
very place, control tokens included, so no other text can slip in. Two things are forgiven, because
clients change them without meaning to: whitespace at either end of a reply, and how values of tool
calls are written; there the model sees what it saw before. Thoughts that a client left out of a
stored reply are put back before the template decides about them, where the template reads them out
of a reply's text.

Of a reply whose thoughts the template then leaves out, the rest is encoded anew: its KV behind
other words has to be computed in any case, and the next turn finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sessionkv.text.history import StoredMessage, match_history, thoughts_of
from sessionkv.text.messages import Message
from sessionkv.text.model import TextModel
from sessionkv.text.parting import Before, first_miss
from sessionkv.text.reply_memory import ReplyMemory
from sessionkv.text.root import RootText
from sessionkv.text.spoken import same_spoken
from sessionkv.text.tagged import tagged_calls
from sessionkv.types import MissReport

_LOOKAHEAD = 8  # replies a client may have left out in one place


@dataclass(frozen=True, slots=True)
class Followed:
    """The prompt, and how it compares with what was stored.

    Attributes:
        ids: The prompt's token ids.
        raw: Its raw text: what :meth:`ReplyMemory.put` wants when the reply is there.
        messages: Those that were rendered: what was sent, with what was put back.
        num_reused_replies: Replies whose sampled ids were taken, wholly or in part.
        miss: Where the prompt first differs from the stored log; reason NONE where it does not.
    """

    ids: tuple[int, ...]
    raw: str
    messages: tuple[Message, ...]
    num_reused_replies: int
    miss: MissReport


def follow_ids(
    text: TextModel,
    root: RootText,
    messages: Sequence[Message],
    *,
    stored: Sequence[StoredMessage] = (),
    log: Sequence[int] = (),
    stored_root: RootText | None = None,
    memory: ReplyMemory | None = None,
    tenant: str = "",
) -> Followed:
    """Build the prompt. O(conversation), once a turn.

    Args:
        text: The model's.
        root: The session's, or ``RootText(None, tools_json, now_s)`` without one.
        messages: Everything the client sent, the new messages included; without ``root.messages``.
        stored: The stored conversation's messages without ``root.messages``, its replies with ids.
        log: The stored conversation's ids, to report where the prompt leaves it.
        stored_root: Its system prompt and tools where they are others than ``root``'s.
        memory: Replies of late, for those that the stored conversation does not have.
        tenant: Whose memory.

    Raises:
        TemplateRefused: With the template's own words.
    """
    rendered = _as_stored(text, stored, messages)
    raw = text.raw(root, rendered)
    places = _places(raw, text.renderer.habits.opening)
    remembered: Sequence[tuple[int, ...]] = [()] * len(places)
    if memory is not None:
        remembered = list(memory.take(tenant, raw, places))
    known = [item.reply_ids for item in stored if item.reply_ids]
    ids, num_reused = _build(text, raw, _assign(text, raw, places, known, remembered))
    before = Before(root if stored_root is None else stored_root, stored, log)
    miss = first_miss(text, root, messages, ids, before=before)
    return Followed(ids, raw, tuple(rendered), num_reused, miss)


def _as_stored(
    text: TextModel, stored: Sequence[StoredMessage], messages: Sequence[Message]
) -> Sequence[Message]:
    """What agrees with stored messages with what clients lose of them: thoughts, spelling of calls.

    Thoughts are put back where the template reads them out of a reply's text, so that its own rule
    decides which of them the model sees.
    """
    has_thoughts = text.renderer.habits.reads_thoughts
    if not has_thoughts and not any(message.tool_calls for message in messages):
        return messages
    count = match_history(stored, messages).num_matching
    same = [_restored(text, new, old) for old, new in zip(stored, messages[:count], strict=False)]
    return (*same, *messages[count:])


def _restored(text: TextModel, new: Message, old: StoredMessage) -> Message:
    """A message that agrees with the stored one: its thoughts are the same, or left out."""
    if old.message.tool_calls and new.tool_calls:
        new = replace(new, tool_calls=old.message.tool_calls)
    if old.reply_ids is None:
        return new
    thoughts = thoughts_of(old.message)
    said = (old.message.content or "")[len(thoughts) :]
    if new.tool_calls and not old.message.tool_calls and _is_plain_tags(text, said):
        new = replace(new, content=thoughts_of(new) + said, tool_calls=())
    if not thoughts or not text.renderer.habits.reads_thoughts or thoughts_of(new):
        return new
    shown = (new.content or "").lstrip()
    space = said[: len(said) - len(said.lstrip())] if shown else "\n"
    return replace(new, content=f"{thoughts}{space}{shown}", reasoning=None)


def _is_plain_tags(text: TextModel, said: str) -> bool:
    """Whether a reply has its calls in tags, none of which is a control token.

    Templates write values in tags in more than one way, and what they write has no types by which
    it could be compared; so the call goes back as the model wrote it.
    """
    return any(tagged_calls(said)) and text.renderer.marks.mark(said) == said


def _places(raw: str, opening: str) -> list[int]:
    """Where replies begin: behind each opening, the last (the one to be generated) left out."""
    places: list[int] = []
    at = raw.find(opening) if opening else -1
    while at >= 0 and at + len(opening) < len(raw):
        places.append(at + len(opening))
        at = raw.find(opening, at + 1)
    return places


def _assign(
    text: TextModel,
    raw: str,
    places: Sequence[int],
    known: Sequence[tuple[int, ...]],
    remembered: Sequence[tuple[int, ...]],
) -> list[tuple[int, tuple[int, ...]]]:
    """Give each place one of the next stored replies that is there.

    Else the one that is remembered to have followed the same words, else the stored one of its
    number, of which the beginning may be there.
    """
    assigned: list[tuple[int, tuple[int, ...]]] = []
    following = 0
    for number, place in enumerate(places):
        for index in range(following, min(len(known), following + _LOOKAHEAD)):
            if _size_of_whole(text, known[index], raw, place) is not None:
                assigned.append((place, known[index]))
                following = index + 1
                break
        else:
            if remembered[number]:
                assigned.append((place, remembered[number]))
            elif following <= number < len(known):
                assigned.append((place, known[number]))
    return assigned


def _build(
    text: TextModel, raw: str, replies: Sequence[tuple[int, tuple[int, ...]]]
) -> tuple[tuple[int, ...], int]:
    """Encode what lies between the replies, and take as much of each as spells the text there."""
    ids: list[int] = []
    end = num_reused = 0
    for place, reply in replies:
        count, size = len(reply), _size_of_whole(text, reply, raw, place)
        if size is None:
            count, size = text.speller.common(reply, raw, place)
        if not count or place < end:
            continue
        ids += text.encoder.encode_behind(raw[end:place], ids)
        ids += reply[:count]
        end = place + size
        num_reused += 1
    ids += text.encoder.encode_behind(raw[end:], ids)
    return tuple(ids), num_reused


def _size_of_whole(text: TextModel, reply: Sequence[int], raw: str, place: int) -> int | None:
    """Length of what a reply stands for at a place, but for whitespace at its ends; or None."""
    spelled = text.speller.spell(reply)
    if text.speller.stands_at(spelled, raw, place):
        return len(spelled)
    habits = text.renderer.habits
    end = raw.find(habits.closing_token, place) if habits.closing_token else -1
    closed = reply[-1:] == (text.closing_id,)
    body = spelled.removesuffix(habits.closing_token) if closed else spelled
    if end < 0 or not _same_reply(raw[place:end], body, habits.calling):
        return None
    if closed:
        return end + len(habits.closing_token) - place
    spaces = len(habits.closing) - len(habits.closing_token)  # they belong to what follows
    return max(end - spaces - place, 0)


def _same_reply(rendered: str, said: str, calling: str) -> bool:
    """Whether the template wrote what was said, but for white space and the JSON of calls."""
    if rendered.strip() == said.strip():
        return True
    return bool(calling) and calling in rendered and same_spoken(rendered, said)
