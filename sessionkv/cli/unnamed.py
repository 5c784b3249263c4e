"""Remarks on conversations without a name of their own, which are listed only when asked for.

HTTP makes one for each answer. Their names begin with ``~``, and they run out by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sessionkv.cli import output

if TYPE_CHECKING:
    from sessionkv.client import Client

PREFIX = "~"
_MOST_COUNTED = 1000
"""One page of a list: who has more is told so, and no list waits for a count of 100,000."""


def tell_unlisted(client: Client) -> None:
    """Say on standard error how many a list leaves out, where there are any. One request."""
    if words := _some(client):
        _tell(f"and {words}: `sessionkv sessions ls '~'`")


def tell_not_exported(client: Client) -> None:
    """The same of an export of all sessions of a running engine."""
    if words := _some(client):
        _tell_left_out(words)


def tell_not_exported_of(number: int) -> None:
    """The same where they are counted."""
    if number:
        _tell_left_out(_words(number))


def _some(client: Client) -> str:
    page = client.session_page(PREFIX, limit=_MOST_COUNTED)
    return _words(len(page.sessions), has_more=page.next is not None) if page.sessions else ""


def _words(number: int, *, has_more: bool = False) -> str:
    are = ("more than " if has_more else "") + output.count(number, "conversation")
    own, them = ("its own", "it") if number == 1 else ("their own", "them")
    return f"{are} without a name of {own}, as HTTP makes {them}"


def _tell_left_out(words: str) -> None:
    _tell(
        f"left out: {words}; `sessionkv sessions ls '~'` lists them, one is exported by its name "
        "and imported under another with --as"
    )


def _tell(text: str) -> None:
    output.stderr().print(text, style="dim", markup=False)
