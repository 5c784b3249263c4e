"""One turn as core sees it, from submission to its answer."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from sessionkv.cache.chain import TokenChain
from sessionkv.cache.turns import HeadId
from sessionkv.engine.messages import SubmitTurn, TurnFinished, TurnRendered
from sessionkv.engine.scheduler.sequence import Constraint, Sequence
from sessionkv.types import MissReason


class Phase(enum.Enum):
    """Where a turn is."""

    LOADING = "loading"
    IN_LINE = "in line"
    RENDERING = "rendering"
    COMPILING = "compiling"
    RUNNING = "running"
    JUDGING = "judging"
    COMMITTING = "committing"


@dataclass(slots=True, eq=False)
class ActiveTurn:
    """One turn that was submitted and not answered.

    Attributes:
        base_id: The head when the turn got it; only there may it be committed.
        parent_id: The node it follows: the head, or an ancestor whose log the prompt shares.
        node_id: Id it will be journalled under, None before it has ended and without session.
        sequence: While it is the scheduler's.
        known_tokens: Leading tokens of the prompt whose KV the parent turn left behind.
        absent: Why the known history was not found past a position, by that position.
        judge_by_s: When the front's verdict must be there.
        calls_tool: Its reply asks for a tool.
        awaits_grammar: Its grammar is being compiled.
        grammar: What decides which tokens it may sample, once that is there.
    """

    ask: SubmitTurn
    arrived_s: float
    deadline_s: float | None
    phase: Phase = Phase.LOADING
    base_id: int = 0
    parent_id: int = 0
    node_id: int | None = None
    rendered: TurnRendered | None = None
    sequence: Sequence | None = None
    chain: TokenChain | None = None
    known_tokens: int = 0
    absent: dict[int, MissReason] = field(default_factory=dict)
    finished: TurnFinished | None = None
    judge_by_s: float = 0.0
    calls_tool: bool = False
    awaits_grammar: bool = False
    grammar: Constraint | None = None

    @property
    def head(self) -> HeadId | None:
        """The session it belongs to."""
        return None if self.ask.session is None else (self.ask.tenant, self.ask.session)
