"""Requests that wait until the sessions they name are in memory, or for the journal's answer.

Requests that name the same session are served in the order they came in, whatever each of them
waits for. Most of the time all is in memory: then nothing is asked and a request is ready at once.
Core thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from sessionkv.cache.attach import attach_session
from sessionkv.cache.tree import TurnTree
from sessionkv.cache.turns import HeadId
from sessionkv.errors import SessionKVError
from sessionkv.store.questions import FindSession, Question, Reply
from sessionkv.store.worker import Answered, StoreWorker
from sessionkv.types import BlockHash, StoredSession


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that has all it waited for.

    Attributes:
        item: What was submitted.
        reply: The journal's, where the request came with a question.
        error: Why it cannot be served; then nothing else is to be relied on.
    """

    item: object
    reply: Reply = None
    error: SessionKVError | None = None


@dataclass(slots=True, eq=False)
class _Waiting:
    item: object
    names: tuple[HeadId, ...]
    question: Question | None
    is_asked: bool = False
    is_ready: bool = False
    reply: Reply = None
    error: SessionKVError | None = None


@dataclass(slots=True)
class Loader:
    """Has sessions looked up and taken in."""

    tree: TurnTree
    store: StoreWorker
    root: BlockHash
    block_size: int
    _lines: dict[HeadId, deque[_Waiting]] = field(default_factory=dict)
    _looked_up: dict[HeadId, int] = field(default_factory=dict)
    _asked: dict[int, HeadId | _Waiting] = field(default_factory=dict)
    _ready: deque[_Waiting] = field(default_factory=deque)
    _served: _Waiting | None = None
    _next_ticket: int = 1

    def __len__(self) -> int:
        """Questions under way."""
        return len(self._asked)

    def submit(
        self, item: object, names: Iterable[HeadId] = (), question: Question | None = None
    ) -> None:
        """Have ``item`` come out of :meth:`next_ready`: sessions known, question answered.

        The question is asked when everything before it that names the same sessions was served.
        """
        waiting = _Waiting(item, tuple(dict.fromkeys(names)), question)
        for head_id in waiting.names:
            self._lines.setdefault(head_id, deque()).append(waiting)
        self._advance(waiting)

    def waiting_names(self, tenant: str) -> tuple[HeadId, ...]:
        """Sessions of a tenant that requests wait for."""
        return tuple(head_id for head_id in self._lines if head_id[0] == tenant)

    def is_awaited(self, head_id: HeadId) -> bool:
        """Whether a request waits that names the session."""
        return head_id in self._lines

    def answered(self, message: Answered) -> None:
        """The journal has answered."""
        asked = self._asked.pop(message.ticket)
        if isinstance(asked, _Waiting):
            asked.reply, asked.error = message.reply, message.error
            asked.question = None
            self._advance(asked)
            return
        del self._looked_up[asked]
        line = self._lines.get(asked)
        if message.error is None:
            found = message.reply if isinstance(message.reply, StoredSession) else None
            if self.tree.take_in(asked, found):
                head = self.tree.head(*asked)
                attach_session(self.tree, head, self.root, self.block_size)
        elif line:
            line[0].error = message.error
        if line:
            self._advance(line[0])

    def next_ready(self) -> Ready | None:
        """What is to be served now, None when nothing is. Whatever came before has been served."""
        served, self._served = self._served, None
        if served is not None:
            self._leave(served)
        if not self._ready:
            return None
        self._served = self._ready.popleft()
        return Ready(self._served.item, self._served.reply, self._served.error)

    # Private ---------------------------------------------------------------------------------

    def _advance(self, waiting: _Waiting) -> None:
        """Ask for the next thing that a request lacks, or make it ready."""
        if waiting.is_ready or any(self._lines[n][0] is not waiting for n in waiting.names):
            return
        if waiting.error is None:
            try:
                if self._ask_for(waiting):
                    return
            except SessionKVError as error:
                waiting.error = error
        waiting.is_ready = True
        self._ready.append(waiting)

    def _leave(self, served: _Waiting) -> None:
        """A request was served: it is the turn of those behind it."""
        behind: dict[_Waiting, None] = {}
        for head_id in served.names:
            self.tree.used(head_id)
            line = self._lines[head_id]
            line.popleft()
            if line:
                behind[line[0]] = None
            else:
                del self._lines[head_id]
        for waiting in behind:
            self._advance(waiting)

    def _ask_for(self, waiting: _Waiting) -> bool:
        """Whether something is still lacking; it is on its way."""
        unknown = [head_id for head_id in waiting.names if not self.tree.knows(head_id)]
        for head_id in unknown:
            if head_id not in self._looked_up:
                self._looked_up[head_id] = self._ask(FindSession(*head_id), head_id)
        if unknown:
            return True
        if waiting.question is not None and not waiting.is_asked:
            self._ask(waiting.question, waiting)
            waiting.is_asked = True
        return waiting.question is not None

    def _ask(self, question: Question, about: HeadId | _Waiting) -> int:
        ticket = self._next_ticket
        self._next_ticket += 1
        self.store.ask(ticket, question)
        self._asked[ticket] = about
        return ticket
