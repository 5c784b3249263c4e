"""Log-probabilities as Chat Completions tells them: each token with its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sessionkv.client.results import Logprobs
from sessionkv.types import TokenLogprob

LEAST = -9999.0
"""What stands for impossible, since JSON has no infinity."""


def chat_logprobs(entries: Logprobs, pieces: Mapping[int, bytes], *, tops: int) -> dict[str, Any]:
    """The field ``logprobs`` of a choice.

    Args:
        entries: For each token: itself, then the likeliest ones.
        pieces: Bytes of every id in them.
        tops: How many of the likeliest ones were asked for.
    """
    content = [
        {
            **_entry(token[0], pieces),
            "top_logprobs": [_entry(entry, pieces) for entry in token[1 : tops + 1]],
        }
        for token in entries
    ]
    return {"content": content, "refusal": None}


def _entry(entry: TokenLogprob, pieces: Mapping[int, bytes]) -> dict[str, Any]:
    piece = pieces[entry.token_id]
    return {
        "token": piece.decode(errors="replace"),
        "logprob": max(entry.logprob, LEAST),
        "bytes": list(piece),
    }
