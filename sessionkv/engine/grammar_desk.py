"""Compiles the grammars of turns on a thread of its own, beside their loading and rendering.

The core thread asks; answers come to its inbox as :class:`GrammarReady`, one for each question, in
any order with other things. The thread is there from the first grammar on, and so are the library
and the model's vocabulary, which take a second: engines without grammars have none of it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sessionkv.engine.inbox import Inbox
from sessionkv.engine.scheduler.sequence import Constraint
from sessionkv.errors import Overloaded, SessionKVError, TurnFailed
from sessionkv.text.folder import TextFiles
from sessionkv.types import SamplingParams

if TYPE_CHECKING:
    from sessionkv.engine.grammar import GrammarCompiler

_log = logging.getLogger(__name__)

_STACK_BYTES = 256 * 1024**2
"""Compiling goes as deep as grammars are nested, rule by rule, and a stack that ends ends the
process: the longest grammars that are taken need some 30 MB. Only what is used takes memory."""
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """A turn's grammar is compiled, or why it cannot be."""

    turn_id: int
    grammar: Constraint | None = None
    error: SessionKVError | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    turn_id: int
    sampling: SamplingParams
    stop_token_ids: Set[int]


class GrammarDesk:
    """One engine's. The core thread only, but for its own thread."""

    def __init__(
        self,
        text: Path | TextFiles,
        vocab_size: int,
        inbox: Inbox[object],
        *,
        max_waiting: int,
    ) -> None:
        """No thread yet.

        Args:
            text: The model's text folder, or what one would hold.
            vocab_size: Of its logits.
            inbox: Gets the answers.
            max_waiting: Most grammars that wait to be compiled.
        """
        self._text, self._vocab_size = text, vocab_size
        self._inbox = inbox
        self._max_waiting = max_waiting
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._compiler: GrammarCompiler | None = None  # the thread's own

    def compile(self, turn_id: int, sampling: SamplingParams, stop_token_ids: Set[int]) -> None:
        """Have a turn's grammar compiled.

        Raises:
            Overloaded: Too many wait for that.
        """
        waiting = self._asked.qsize()
        if waiting >= self._max_waiting:
            raise Overloaded(f"{waiting} grammars wait to be compiled", queued=waiting)
        self._asked.put(_Asked(turn_id, sampling, stop_token_ids))
        if self._thread is None:
            self._thread = _start(self._run)

    def close(self) -> None:
        """End the thread behind what it compiles now; what waits is not answered."""
        if self._thread is not None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._asked.get_nowait()
            self._asked.put(None)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            self._inbox.put(self._answer(asked))

    def _answer(self, asked: _Asked) -> GrammarReady:
        try:
            grammar = self._grammars().start(asked.sampling, asked.stop_token_ids)
        except SessionKVError as error:
            return GrammarReady(asked.turn_id, error=error)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the turn has to end
            _log.exception("a grammar could not be compiled")
            broken = TurnFailed(f"the grammar could not be compiled ({type(failure).__name__})")
            return GrammarReady(asked.turn_id, error=broken)
        return GrammarReady(asked.turn_id, grammar)

    def _grammars(self) -> GrammarCompiler:
        if self._compiler is None:
            from sessionkv.engine.grammar import GrammarCompiler

            self._compiler = GrammarCompiler(self._text, self._vocab_size)
        return self._compiler


def _start(run: Callable[[], None]) -> threading.Thread:
    """A thread with a large stack. It may be in the middle of something when the process ends."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name="grammars", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
