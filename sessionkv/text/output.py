"""The text of one reply as it is sampled: detokenising and stop strings together."""

from __future__ import annotations

from typing import NamedTuple

from sessionkv.text.detokenizer import Detokenizer
from sessionkv.text.stops import StopChecker, StopMatch


class Piece(NamedTuple):
    """What one token brought.

    Attributes:
        text: Text that may be shown now; may lag behind the tokens, and may be empty.
        stop: The stop string that this token completed, or None.
    """

    text: str
    stop: StopMatch | None


class ReplyStream:
    """Turns sampled ids into shown text. One thread; a few microseconds a token.

    Made by :meth:`sessionkv.text.model.TextModel.reply_stream`. Tokens pushed after a stop string
    was found give nothing.
    """

    __slots__ = ("_detokenizer", "_parts", "_stops")

    def __init__(self, detokenizer: Detokenizer, stops: StopChecker | None) -> None:
        """Start before the first token; ``stops`` is None where there are no stop strings."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._parts: list[str] = []

    @property
    def stop(self) -> StopMatch | None:
        """The stop string found so far."""
        return self._stops.match if self._stops is not None else None

    @property
    def text(self) -> str:
        """All text given out so far. O(length)."""
        return "".join(self._parts)

    def push(self, token_id: int) -> Piece:
        """Take the next sampled id."""
        return self._take(self._detokenizer.push_one(token_id), is_last=False)

    def finish(self) -> Piece:
        """End of the reply for any other reason than a stop string: what was held back."""
        return self._take(self._detokenizer.finish(), is_last=True)

    def _take(self, text: str, *, is_last: bool) -> Piece:
        stops = self._stops
        if stops is not None:
            if stops.match is not None:
                return Piece("", None)
            text = stops.finish(text) if is_last else stops.push(text)
        self._parts.append(text)
        return Piece(text, self.stop)
