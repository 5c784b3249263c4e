"""Compiles the grammars of turns on a thread of its own, beside their loading and rendering.

The core thread asks; answers come to its inbox as :class:`GrammarReady`, one for each question that
is not withdrawn, tenants by turns, in any order with other things. The thread is there from the
first grammar on, and so are the library and the model's vocabulary, which take a second: engines
without grammars have none of it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sessionkv.engine.inbox import Inbox
from sessionkv.engine.scheduler.sequence import Constraint
from sessionkv.errors import Overloaded, SessionKVError, TurnFailed
from sessionkv.text.folder import TextFiles
from sessionkv.types import SamplingParams
from sessionkv.types.holdings import Holdings

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
    tenant: str
    sampling: SamplingParams
    stop_token_ids: Set[int]


class _Waiting:
    """Grammars to be compiled: tenants by turns, each one's in its order. Under a lock."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, dict[int, _Asked]] = OrderedDict()
        self._tenants: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def num_of(self, tenant: str) -> int:
        return len(self._by_tenant.get(tenant, ()))

    def has_room(self, tenant: str, limit: int) -> bool:
        held = Holdings({of: len(theirs) for of, theirs in self._by_tenant.items()})
        return held.has_room(tenant, limit)

    def add(self, asked: _Asked) -> None:
        self._by_tenant.setdefault(asked.tenant, {})[asked.turn_id] = asked
        self._tenants[asked.turn_id] = asked.tenant

    def remove(self, turn_id: int) -> None:
        """Take one out; most are not there any more."""
        tenant = self._tenants.pop(turn_id, None)
        if tenant is not None:
            del self._by_tenant[tenant][turn_id]
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]

    def take(self) -> _Asked:
        """The next one; there is one."""
        tenant, theirs = next(iter(self._by_tenant.items()))
        asked = next(iter(theirs.values()))
        self._by_tenant.move_to_end(tenant)
        self.remove(asked.turn_id)
        return asked

    def clear(self) -> None:
        self._by_tenant.clear()
        self._tenants.clear()


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
            max_waiting: Most grammars that wait to be compiled, shared by tenants.
        """
        self._text, self._vocab_size = text, vocab_size
        self._inbox = inbox
        self._max_waiting = max_waiting
        self._changed = threading.Condition()  # guards the next two
        self._waiting = _Waiting()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._compiler: GrammarCompiler | None = None  # the thread's own

    def compile(
        self, turn_id: int, tenant: str, sampling: SamplingParams, stop_token_ids: Set[int]
    ) -> None:
        """Have a turn's grammar compiled.

        Raises:
            Overloaded: Too many wait for that, and the tenant has its share of them.
        """
        with self._changed:
            if not self._waiting.has_room(tenant, self._max_waiting):
                waiting = self._waiting.num_of(tenant)
                raise Overloaded(f"{waiting} grammars wait to be compiled", queued=waiting)
            self._waiting.add(_Asked(turn_id, tenant, sampling, stop_token_ids))
            self._changed.notify()
        if self._thread is None:
            self._thread = _start(self._run)

    def withdraw(self, turn_id: int) -> None:
        """The turn is over; where its grammar is being compiled the answer comes all the same."""
        with self._changed:
            self._waiting.remove(turn_id)

    def close(self) -> None:
        """End the thread behind what it compiles now; what waits is not answered."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (asked := self._next()) is not None:
            self._inbox.put(self._answer(asked))

    def _next(self) -> _Asked | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._waiting) > 0)
            return None if self._is_closed else self._waiting.take()

    def _answer(self, asked: _Asked) -> GrammarReady:
        try:
            grammar = self._grammars().start(asked.sampling, asked.stop_token_ids)
        except SessionKVError as error:
            return GrammarReady(asked.turn_id, error=error)
        except BaseException as failure:  # noqa: BLE001 - the library's panics are no Exceptions
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
