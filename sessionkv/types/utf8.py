"""Text that can be sent and stored: such as UTF-8 can write."""

from __future__ import annotations

from sessionkv.errors import InvalidRequest


def utf8_bytes(field: str, text: str) -> int:
    """Length of ``text`` in UTF-8.

    Raises:
        InvalidRequest: Naming the field and the lone surrogates that the text holds.
    """
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        lone = text[error.start : error.end]
        raise InvalidRequest(field, lone, "text without lone surrogates") from None
