"""Log-probabilities as Chat Completions tells them, and as Completions does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sessionkv.client import AsyncClient, StreamEvent
from sessionkv.client.results import Logprobs
from sessionkv.gateway.pieces import Pieces
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


class StreamedLogprobs:
    """Of one streamed answer: all pieces together are what the whole answer would have.

    What ends a reply, an end token or a stop string, is sampled before it is known to be no part
    of it. So a token is told once all of its bytes are in the text, the rest with the result.
    """

    def __init__(self) -> None:
        """Start before the answer."""
        self._held: list[tuple[TokenLogprob, ...]] = []
        self._num_told = 0
        self._num_bytes = 0  # of the text, less those of the tokens that were told

    async def next(self, event: StreamEvent, pieces: Pieces, client: AsyncClient) -> Logprobs:
        """What can be told with an event; O(tokens held and new).

        Raises:
            SessionKVError: The engine cannot say what its tokens stand for.
        """
        if event.result is not None:
            return tuple((event.result.logprobs or ())[self._num_told :])
        self._held += event.logprobs or ()
        # A replaced byte is at least one: what cannot be read is told too late, never too early.
        self._num_bytes += len(event.text.encode()) - 2 * event.text.count("\ufffd")
        known = await pieces.of(client, (token[0].token_id for token in self._held))
        told = 0
        for token in self._held:
            size = len(known[token[0].token_id])
            if size > self._num_bytes:
                break
            self._num_bytes -= size
            told += 1
        settled, self._held = tuple(self._held[:told]), self._held[told:]
        self._num_told += told
        return settled


class CompletionLogprobs:
    """Of one answer of Completions; offsets go on from piece to piece."""

    def __init__(self) -> None:
        """Start before the answer."""
        self._offset = 0

    def of(
        self,
        entries: Logprobs,
        pieces: Mapping[int, bytes],
        *,
        tops: int,
        first: str | None = None,
    ) -> dict[str, Any]:
        """The field ``logprobs`` of a choice, for the next tokens.

        Args:
            entries: For each token: itself, then the likeliest ones.
            pieces: Bytes of every id in them.
            tops: How many of the likeliest ones were asked for.
            first: Text of a token before these of which nothing is known: a prompt's first.
        """
        unknown = [] if first is None else [None]
        tokens = [
            *([] if first is None else [first]),
            *(_text(item[0], pieces) for item in entries),
        ]
        offsets = []
        for text in tokens:
            offsets.append(self._offset)
            self._offset += len(text)
        likeliest = [*unknown, *(_tops(item[1 : tops + 1], pieces) for item in entries)]
        return {
            "tokens": tokens,
            "token_logprobs": [*unknown, *(max(item[0].logprob, LEAST) for item in entries)],
            "top_logprobs": likeliest if tops else None,
            "text_offset": offsets,
        }


def joined(pieces: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Those of all pieces of an answer as one; None where none has any."""
    whole: dict[str, Any] | None = None
    for piece in filter(None, pieces):
        whole = whole or dict.fromkeys(piece)
        for name, value in piece.items():
            whole[name] = value if whole[name] is None else whole[name] + value
    return whole


def _tops(entries: Sequence[TokenLogprob], pieces: Mapping[int, bytes]) -> dict[str, float]:
    return {_text(entry, pieces): max(entry.logprob, LEAST) for entry in reversed(entries)}


def _text(entry: TokenLogprob, pieces: Mapping[int, bytes]) -> str:
    """A token's text; of one that is no whole characters its bytes, as the hosted API writes it."""
    piece = pieces[entry.token_id]
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _entry(entry: TokenLogprob, pieces: Mapping[int, bytes]) -> dict[str, Any]:
    piece = pieces[entry.token_id]
    return {
        "token": piece.decode(errors="replace"),
        "logprob": max(entry.logprob, LEAST),
        "bytes": list(piece),
    }
