"""Lines that a person types at a terminal: editing, history over chats, pasted text as one message.

Imported where a terminal is known to be there. Knows nothing of sessions or commands.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from sessionkv.cli import output

MOST_KEPT = 1_000
"""Messages in the file of earlier ones; it is cut to so many when a chat begins."""


def typed_lines(prompt: Callable[[], str], history: Path | None) -> Iterator[str]:
    """One message after the other, until Ctrl-D, or Ctrl-C where nothing is typed.

    Enter sends, also where a pasted text has several lines; Alt-Enter begins a new line. Ctrl-C,
    or SIGINT at whatever instant, takes back what is being typed.

    Args:
        prompt: What stands before the text, asked anew for each message.
        history: A file of earlier messages, mode 0600, written with each message; None keeps
            them for this run alone.
    """
    session: PromptSession[str] = PromptSession(
        history=_history(history), key_bindings=_enter_sends(), multiline=True
    )
    while True:
        try:
            yield session.prompt(prompt())
        except EOFError:
            return
        except KeyboardInterrupt:
            if not session.default_buffer.text:
                return


def _enter_sends() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history(path: Path | None) -> History:
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut(path)
    except OSError as error:
        _not_kept(error)
        return InMemoryHistory()
    return _ForgivingHistory(path)


def _cut(path: Path) -> None:
    """Leave the last messages, for their user alone; the file is there afterwards."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    path.chmod(0o600)
    latest = list(islice(FileHistory(path).load_history_strings(), MOST_KEPT + 1))
    if len(latest) <= MOST_KEPT:
        return
    shorter = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        os.close(os.open(shorter, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        for text in reversed(latest[:MOST_KEPT]):
            FileHistory(shorter).store_string(text)
        shorter.replace(path)
    finally:
        shorter.unlink(missing_ok=True)


class _ForgivingHistory(FileHistory):
    """A disk that fills up costs what was typed from then on, and no message."""

    _writes = True

    def store_string(self, string: str) -> None:
        """Append one message to the file; the first failure is the last try."""
        if not self._writes:
            return
        try:
            super().store_string(string)
        except OSError as error:
            self._writes = False
            _not_kept(error)


def _not_kept(error: OSError) -> None:
    words = f"what you type is not kept for the next chat: {error}"
    output.stderr().print(words, style="dim", markup=False)
