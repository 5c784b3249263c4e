"""``sessionkv chat``: a conversation in the terminal, by name, so that it can be gone on with.

Replies go to standard output as they come; the cache line and remarks go to standard error when
standard output is not a terminal, so that ``sessionkv chat < questions > answers`` is clean.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from sessionkv.cli import output
from sessionkv.cli.chat_commands import BANNER, ChatQuit, Commands
from sessionkv.cli.connect import connect
from sessionkv.cli.settings import ENGINE_FLAGS, config_from
from sessionkv.cli.usage import WrongUsage
from sessionkv.config import user_cache_dir
from sessionkv.errors import ConnectionLost, EngineClosed, RequestError, TurnError
from sessionkv.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from sessionkv.client import Client, TurnStream


def run(args: argparse.Namespace) -> int:
    """Chat until end of input, ``/quit`` or Ctrl-C at an empty prompt.

    Returns 1 when lines came from no terminal and one of them failed: nobody saw it.
    """
    if not args.session:
        raise WrongUsage("the name of the session is empty")
    sampling = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed
    )
    with ExitStack() as stack:
        client = _client(args, stack)
        chat = Chat(client, sampling, keep_history=not args.no_history)
        chat.commands.switch(args.session, system=args.system)
        stack.callback(chat.commands.leave)
        return 0 if chat.loop() else 1


def _client(args: argparse.Namespace, stack: ExitStack) -> Client:
    """The running engine's client, else one of a private engine on the same store."""
    remarks = output.stderr()
    if args.model is None:
        try:
            client = stack.enter_context(connect(args))
        except ConnectionLost:
            if args.endpoint:
                raise
        else:
            _check_engine_flags(args)
            return client
    from sessionkv.cli.progress import StartProgress
    from sessionkv.client.launch import launch

    config = config_from(args)
    remarks.print(f"starting a private engine with {config.model}", style="dim")
    with StartProgress() as progress:
        engine = launch(config=config, on_progress=progress.update)
    stack.enter_context(engine)
    return engine.client()


def _check_engine_flags(args: argparse.Namespace) -> None:
    """A running engine takes no flags: one that chose other conversations is an error.

    Raises:
        WrongUsage: A store is named.
    """
    from sessionkv.ipc.endpoint import default_endpoint
    from sessionkv.ipc.starting import serving_pid

    engine = f"the running engine (pid {serving_pid(args.endpoint or default_endpoint())})"
    if args.store is not None:
        raise WrongUsage(
            f"--store is not for {engine}, which has its own; leave it out, stop that engine, or "
            "give --model too for a private one"
        )
    ignored = [f"--{name.replace('_', '-')}" for name in ENGINE_FLAGS if getattr(args, name)]
    if ignored:
        words = f"{engine} keeps its settings; ignored: {', '.join(ignored)}"
        output.stderr().print(words, style="dim", markup=False)


class Chat:
    """Reads lines, sends turns, shows replies. One session at a time, held by ``commands``."""

    def __init__(
        self, client: Client, sampling: SamplingParams, *, keep_history: bool = True
    ) -> None:
        self._sampling = sampling
        self._keep_history = keep_history
        self._at_line_start = True
        self._out = output.stdout()
        self._remarks = self._out if self._out.is_terminal else output.stderr()
        self._is_interactive = sys.stdin.isatty() and self._out.is_terminal
        self.commands = Commands(client, self._remarks, recalls=self._is_interactive)

    def loop(self) -> bool:
        """Answer line after line; False when one failed that nobody typed.

        Errors of one line are shown, and the next one is read.
        """
        all_well = True
        interactive = self._is_interactive
        lines = self._typed_lines() if interactive else iter(sys.stdin)
        if interactive:
            self._remarks.print(BANNER, style="dim")
        for line in lines:
            text = line.strip()
            if not text:
                continue
            try:
                if text.startswith("/"):
                    self.commands.run(text)
                else:
                    self._turn(text)
            except ChatQuit:
                break
            except WrongUsage as error:
                self._remarks.print(f"usage: {error.message}", style="red", markup=False)
                all_well = interactive
            except (RequestError, TurnError) as error:
                self._remarks.print(error.message, style="red", markup=False)
                all_well = interactive
        return all_well

    def _typed_lines(self) -> Iterator[str]:
        from sessionkv.cli.typed_lines import typed_lines

        path = user_cache_dir() / "chat_history" if self._keep_history else None
        return typed_lines(lambda: f"{output.one_line(self.commands.session.name)}> ", path)

    def _turn(self, text: str) -> None:
        stream = self.commands.session.stream(text, sampling=self._sampling)
        try:
            with _interrupt_cancels(stream):
                shown = self._show(stream)
        except (ConnectionLost, EngineClosed) as error:
            if not self._at_line_start:
                self._out.print()
            error.message += "; the unfinished turn was not kept"
            error.details["in_turn"] = True
            raise
        reply = stream.result
        if reply is None:
            self._remarks.print("\n(stopped)", style="dim")
            return
        # A cancel takes the last events itself: what it took is in the result.
        self._out.print(reply.text[shown:], markup=False)
        if reply.finish_reason is FinishReason.CANCELLED:
            self._remarks.print("(stopped; the conversation keeps what you saw)", style="dim")
        self._remarks.print(str(reply.cache), style="dim", markup=False)

    def _show(self, stream: TurnStream) -> int:
        """Print the events as they come; how many characters of the reply they were."""
        shown = 0
        self._at_line_start = True
        for event in stream:
            if event.restarted:
                self._remarks.print("\n(the engine came back; the reply starts anew)", style="dim")
                shown = 0
            self._out.print(event.text, end="", markup=False)
            shown += len(event.text)
            if event.text:
                self._at_line_start = event.text.endswith("\n")
        return shown


@contextmanager
def _interrupt_cancels(stream: TurnStream) -> Iterator[None]:
    """Ctrl-C ends the reply where it is; a second one ends the chat.

    The request to cancel is sent from another thread: a signal handler runs between two steps of
    whatever the client is doing, and must not enter it again.
    """
    canceller = threading.Thread(target=stream.cancel, kwargs={"keep": True}, daemon=True)

    def handler(_signal: int, _frame: FrameType | None) -> None:
        if canceller.ident is not None:
            raise KeyboardInterrupt
        canceller.start()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
        if canceller.ident is not None:
            canceller.join()
    finally:
        signal.signal(signal.SIGINT, before)
