"""The chat's slash commands, and the session they and the turns go to."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rich.console import Console

from sessionkv.cli import output
from sessionkv.cli.chat_history import history_lines, last_exchange
from sessionkv.cli.sessions import TIERS, print_info, sessions_table
from sessionkv.cli.usage import WrongUsage
from sessionkv.errors import InvalidRequest, SessionKVError, SessionNotFound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sessionkv.client import Client, Session

BANNER = "/help lists the commands"
HELP = """\
/info            this session: turns, tokens, bytes in each tier
/history         what was said in this session
/fork NAME       go on under another name; this conversation stays as it is
/rewind [N]      take the last N turns back (1)
/pin [TIER]      keep its KV in device, host or disk as long as possible (host)
/unpin           take the pin off
/sessions        list sessions
/switch NAME     open or resume another session
/help, /quit     this list; the end (also Ctrl-D)
Alt-Enter begins a new line; a pasted text is one message
Ctrl-C stops a reply, clears what is being typed, and ends the chat at an empty prompt"""


class ChatQuit(Exception):
    """The user has had enough."""


class Commands:
    """Runs one command at a time on the current session."""

    def __init__(self, client: Client, console: Console, *, recalls: bool = False) -> None:
        """Work on ``console``; ``recalls`` shows the last exchange of a session that is resumed."""
        self._client = client
        self._recalls = recalls
        self._console = console
        self._session: Session | None = None
        self._is_made_here = False

    @property
    def session(self) -> Session:
        """The session that turns go to.

        Raises:
            InvalidRequest: None was opened yet.
        """
        if self._session is None:
            raise InvalidRequest("session", None, "an open session")
        return self._session

    def switch(self, name: str, *, system: str | None = None, say_new: bool = False) -> None:
        """Open or resume a session, make it the current one, and say what was resumed."""
        if self._session is not None and self._session.name == name:
            return
        is_new = not self._exists(name)
        session = self._client.open(name, system=system)  # where that fails, this one goes on
        self.leave()
        self._session, self._is_made_here = session, is_new
        info = self._session.info(history=self._recalls)
        if info.turns:
            self._say(f"resumed {output.one_line(name)} after {output.count(info.turns, 'turn')}")
            if self._recalls:
                self._say_lines(last_exchange(info.messages))
        elif say_new:
            self._say(f"new session {output.one_line(name)}")

    def leave(self) -> None:
        """Let go of the session; one that was made here and never used is removed."""
        session, self._session = self._session, None
        if session is None or not self._is_made_here:
            return
        with contextlib.suppress(SessionKVError):  # it may be gone, and so may the engine
            info = session.info()
            if not (info.turns or info.running or info.queued):  # others may use it too
                session.close(keep=False)

    def _exists(self, name: str) -> bool:
        try:
            self._client.session(name).info()
        except SessionNotFound:
            return False
        return True

    def run(self, line: str) -> None:
        """Carry out ``/command argument``.

        Raises:
            ChatQuit: On ``/quit``.
            WrongUsage: An argument is missing or not a number.
            SessionKVError: As the engine answers.
        """
        command, _, argument = line[1:].partition(" ")
        argument = argument.strip()
        match command:
            case "help":
                self._say(HELP)
            case "quit" | "exit" | "q":
                raise ChatQuit
            case "info":
                print_info(self._console, self.session.info())
            case "history":
                self._say_lines(history_lines(self.session.info(history=True).messages))
            case "fork":
                forked = self.session.fork(_required(argument, "/fork NAME"))
                self.leave()
                self._session, self._is_made_here = forked, False
                self._say(f"now in {output.one_line(argument)}")
            case "rewind":
                left = self.session.rewind(turns=_count(argument)).turns
                self._say(f"{output.count(left, 'turn')} left")
            case "pin":
                tier = argument or "host"
                if tier not in TIERS:
                    raise WrongUsage(f"/pin {'|'.join(TIERS)}")
                self.session.pin(tier=tier)
                self._say(f"pinned to {tier}")
            case "unpin":
                self.session.unpin()
                self._say("no longer pinned")
            case "sessions":
                self._console.print(sessions_table(self._client.sessions()))
            case "switch":
                self.switch(_required(argument, "/switch NAME"), say_new=True)
            case _:
                self._say(f"no command /{output.one_line(command)}; /help lists them")

    def _say_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._say(line)

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)


def _required(argument: str, usage: str) -> str:
    if not argument:
        raise WrongUsage(usage)
    return argument


def _count(argument: str) -> int:
    try:
        return int(argument or "1")
    except ValueError:
        raise WrongUsage("/rewind N, a number") from None
