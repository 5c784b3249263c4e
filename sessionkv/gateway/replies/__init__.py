"""What a model's reply says: text, reasoning and tool calls, taken apart while it comes."""

from sessionkv.gateway.replies.events import (
    CallArguments,
    CallBegins,
    CallEnds,
    Reasoning,
    ReplyEvent,
    Text,
    joined,
)
from sessionkv.gateway.replies.parser import ReplyParser, new_call_id
from sessionkv.types.reply_style import ReplyStyle

__all__ = [
    "CallArguments",
    "CallBegins",
    "CallEnds",
    "Reasoning",
    "ReplyEvent",
    "ReplyParser",
    "ReplyStyle",
    "Text",
    "joined",
    "new_call_id",
]
