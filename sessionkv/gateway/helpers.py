"""Which requests only serve another conversation: titles, summaries, suggestions, tags.

Chat apps and agents send them beside the conversation, each once; kept, they would fill the disk
with what is never continued and push out what is. A request is a helper's where

* it says so: the header ``x-sessionkv-helper: true`` or ``metadata.sessionkv_helper``; ``false``
  there says that it is none, whatever it looks like;
* or it is the first of its conversation, has no tools, and asks in words that known clients use
  for a title, tags, follow-up questions, a commit message or a summary of another conversation:
  where much may be answered, only a system prompt that begins so tells it from what people ask.

A summary of a long conversation, as made by compaction, is not one by itself: its prefix is the
conversation's, and finds its cache either way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sessionkv.gateway.transcript import Transcript, text_of

HEADER = "x-sessionkv-helper"
METADATA = "sessionkv_helper"
_SHOWN_CHARS = 2000
_BEGINNING_CHARS = 400
_ASKS = re.compile(
    r"\b(?:generate|create|write|produce|suggest|provide|come up with|summari[sz]e)\b[^.\n]{0,80}"
    r"\b(?:title|headline|tags?\b|topic|follow-up questions|commit message|branch name)"
    r"|\btitle generator\b|\bconversation title\b|\bisNewTopic\b"
    r"|\bnaming (?:a|the|this) [^.\n]{0,30}\b(?:session|conversation|chat|thread)\b"
    r"|\bcontext summari[sz]ation\b|\bsummari[sz]ing conversations\b",
    re.IGNORECASE,
)
_SMALL_TOKENS = 256


def is_helper(
    transcript: Transcript,
    *,
    headers: Mapping[str, str],
    metadata: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> bool:
    """Whether nothing is to be kept of a request.

    Args:
        transcript: Its conversation.
        headers: Of the request; case does not matter.
        metadata: As the client sent it.
        max_tokens: What the client allows the answer. Where that is much, a system prompt has to
            say what the request is for.
    """
    said = says_helper(headers, metadata)
    if said is not None:
        return said
    if transcript.tools or any(
        message.get("role") == "assistant" for message in transcript.messages
    ):
        return False
    system = transcript.system or ""
    if max_tokens is not None and max_tokens > _SMALL_TOKENS:
        return _ASKS.search(system[:_BEGINNING_CHARS]) is not None
    places = (system, *map(text_of, transcript.messages[-1:]))
    return any(_ASKS.search(_ends(text)) for text in places)


def says_helper(headers: Mapping[str, str], metadata: Mapping[str, Any] | None) -> bool | None:
    """Whether a request says that it is a helper's, or that it is none; None where it does not."""
    said = headers.get(HEADER, (metadata or {}).get(METADATA))
    return None if said is None else str(said).strip().lower() in ("true", "1", "yes")


def _ends(text: str) -> str:
    """Instructions stand at either end of a long text."""
    if len(text) <= 2 * _SHOWN_CHARS:
        return text
    return f"{text[:_SHOWN_CHARS]}\n{text[-_SHOWN_CHARS:]}"
