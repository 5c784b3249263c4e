"""Token ids to text, one token at a time.

A character is given out when its last byte is there, never in halves; bytes that cannot become
UTF-8 come out as U+FFFD as soon as that is certain. Whatever the pieces, their concatenation with
:meth:`Detokenizer.finish` is the decoding of the whole. Knows nothing of stop strings or turns.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental decoder of one reply. O(new bytes) per call; one thread.

    Args:
        token_bytes: id -> bytes, from :class:`~sessionkv.text.vocabulary.Vocabulary`.
        strip_space: Drop one space at the very start.
        before: Bytes of an unfinished character that the prompt ended in (see
            :func:`unfinished`); the reply's first bytes may finish it.
    """

    __slots__ = ("_bytes", "_strip", "_utf8")

    def __init__(
        self, token_bytes: Mapping[int, bytes], *, strip_space: bool = False, before: bytes = b""
    ) -> None:
        """Start before the first token."""
        self._bytes = token_bytes
        self._strip = strip_space
        self._utf8 = _Utf8("replace")
        self._utf8.decode(before)

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished character are held."""
        return bool(self._utf8.getstate()[0])

    def push(self, ids: Iterable[int]) -> str:
        """Text that became certain with these ids; may be empty."""
        return self._text(b"".join([self._bytes[i] for i in ids]), final=False)

    def push_one(self, token_id: int) -> str:
        """As :meth:`push` for one id."""
        text = self._utf8.decode(self._bytes[token_id])
        return self._stripped(text) if self._strip and text else text

    def finish(self) -> str:
        """What is still held: U+FFFD for a character that was never finished, or nothing."""
        return self._text(b"", final=True)

    def _text(self, data: bytes, *, final: bool) -> str:
        text = self._utf8.decode(data, final)
        return self._stripped(text) if self._strip and text else text

    def _stripped(self, text: str) -> str:
        self._strip = False
        return text.removeprefix(" ")


def unfinished(data: bytes) -> bytes:
    """The bytes at the end of ``data`` that begin a character without finishing it.

    Only the last three bytes matter.
    """
    for size in range(1, min(3, len(data)) + 1):
        lead = data[-size]
        if lead >= 0xC0:
            needed = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return data[-size:] if needed > size else b""
        if lead < 0x80:
            break
    return b""
