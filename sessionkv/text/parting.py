"""Where a prompt leaves a conversation that was stored, and what of the request is to blame.

The first position at which the ids differ is one thing, which part of the request makes them differ
another: a template may write tools and system prompt in any order and anywhere, and rewrite old
messages by itself. So a changed system prompt or changed tools are blamed only where they alone
would part the ids at this very place, and the template where the messages up to it are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sessionkv.errors import TemplateRefused
from sessionkv.text.history import StoredMessage, match_history
from sessionkv.text.messages import Message
from sessionkv.text.model import TextModel
from sessionkv.text.root import RootText
from sessionkv.types import MissReason, MissReport

_SHOWN_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Before:
    """A conversation as it is stored.

    Attributes:
        root: Its system prompt and tools.
        messages: Those behind the system prompt.
        log: Its ids.
    """

    root: RootText
    messages: Sequence[StoredMessage]
    log: Sequence[int]


def first_miss(
    text: TextModel,
    root: RootText,
    messages: Sequence[Message],
    ids: Sequence[int],
    *,
    before: Before,
) -> MissReport:
    """Compare a prompt with a stored conversation. O(both); some renderings where the roots differ.

    Args:
        text: The model's.
        root: The prompt's system prompt and tools.
        messages: Its messages behind the system prompt.
        ids: What they became.
        before: What was stored.

    Returns:
        Reason NONE where the prompt begins with the whole log, or there is none. Messages are
        counted without those of the root.
    """
    log = before.log
    if not before.messages or not log:
        return MissReport()
    at = _parting(ids, log)
    if at == len(log):
        return MissReport()
    shown = slice(at, at + _SHOWN_TOKENS)
    found = MissReport(
        MissReason.HISTORY_EDITED,
        token=at,
        expected=text.decode(log[shown], continues=True, special=True),
        found=text.decode(ids[shown], continues=True, special=True),
    )
    part = _changed_part(text, root, before.root, messages, at)
    if part == "tools":
        return replace(found, part=part, turn=0)
    if part == "system":
        return replace(found, part=part, turn=0, message=None if root.system is None else 0)
    reason, index = _blamed(text, before.messages, messages, at)
    turn = before.messages[index].turn
    return replace(found, reason=reason, part="message", turn=turn, message=index)


def _parting(one: Sequence[int], other: Sequence[int]) -> int:
    shared = min(len(one), len(other))
    return next((i for i in range(shared) if one[i] != other[i]), shared)


def _blamed(
    text: TextModel, stored: Sequence[StoredMessage], messages: Sequence[Message], at: int
) -> tuple[MissReason, int]:
    """Whether the client or the template changed what stands at a place, and which message it is.

    Of what came in together only the end is known, so a place among it is the client's where any of
    it differs.
    """
    same = match_history(stored, messages).num_matching
    if same == len(stored) or at < _begin(text, stored, same):
        index = next((i for i, item in enumerate(stored) if at < item.end_token), len(stored) - 1)
        return MissReason.TEMPLATE_REWROTE, index
    return MissReason.HISTORY_EDITED, same


def _begin(text: TextModel, stored: Sequence[StoredMessage], index: int) -> int:
    """Where what came in together with a message begins; a reply, where its opening begins.

    The opening came in with the message before, but says that a reply follows: where another
    message stands there instead, the ids part within it.
    """
    ends = [item.end_token for item in stored[:index]]
    if stored[index].reply_ids is not None:
        opening = text.encoder.encode(text.renderer.habits.opening)
        return max(0, ends[-1] - len(opening)) if ends else 0
    return max((end for end in ends if end != stored[index].end_token), default=0)


def _changed_part(
    text: TextModel,
    new: RootText,
    old: RootText,
    messages: Sequence[Message],
    at: int,
) -> str | None:
    """What of the root makes the ids differ at a place; None where it does not."""
    if (new.system, new.tools_json) == (old.system, old.tools_json):
        return None
    said = messages[:1]
    try:
        ids = text.full(old, said)
        for part, changed in (
            ("tools", replace(old, tools_json=new.tools_json)),
            ("system", replace(old, system=new.system)),
        ):
            if changed != old and _parting(text.full(changed, said), ids) == at:
                return part
    except TemplateRefused:
        return "system" if new.system != old.system else "tools"
    return "system" if _parting(text.full(new, said), ids) == at else None  # only both together
