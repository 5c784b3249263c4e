"""Turns from submission to commit: who waits for which head, what each turn became.

A head runs one turn at a time; others wait in its line or are refused. A turn leaves
:attr:`TurnDesk.active` only through :meth:`TurnDesk._leave`, which says how it ended and starts the
next in line, so each turn is answered exactly once. Core thread only; times are arguments
(``now`` monotonic, ``wall`` wall-clock seconds).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from sessionkv.cache.chain import TokenChain
from sessionkv.cache.turns import HeadId
from sessionkv.engine.active_turn import ActiveTurn, Phase
from sessionkv.engine.cache_reports import CacheReports
from sessionkv.engine.commits import Commits
from sessionkv.engine.grammar_desk import GrammarReady
from sessionkv.engine.loading import Ready
from sessionkv.engine.messages import (
    CancelTurn,
    CoreMessage,
    StepTokens,
    StopAt,
    SubmitTurn,
    TurnCommitted,
    TurnDropped,
    TurnFinished,
    TurnRefused,
    TurnRendered,
    TurnReplayed,
    TurnTokens,
    Verdict,
)
from sessionkv.engine.misses import explain_misses, note_absent
from sessionkv.engine.parts import CoreParts
from sessionkv.engine.progress import ProgressDesk
from sessionkv.engine.rendering import check_kind, is_foreign, render_request
from sessionkv.engine.scheduler.sequence import Sequence, SequenceEvent
from sessionkv.engine.turn_commit import commit_of
from sessionkv.errors import (
    DeadlineExceeded,
    EngineClosed,
    IdempotencyConflict,
    InvalidRequest,
    NodeNotFound,
    Overloaded,
    SessionBusy,
    SessionKVError,
    TurnCancelled,
    TurnFailed,
)
from sessionkv.types import FinishReason, KeyRecord


@dataclass(slots=True)
class _Line:
    running: ActiveTurn
    waiting: deque[ActiveTurn] = field(default_factory=deque)


class TurnDesk:
    """All turns of one engine.

    Attributes:
        out: Messages for the front, oldest first; the core empties it.
        active: Turns by id.
        last_cache: Cache reports by node, of the last turns since the start.
    """

    def __init__(self, parts: CoreParts, commits: Commits) -> None:
        self._parts = parts
        self._commits = commits
        self._limits = parts.config.limits
        self._lines: dict[HeadId, _Line] = {}
        self.out: list[CoreMessage] = []
        self.active: dict[int, ActiveTurn] = {}
        self.last_cache = CacheReports()
        self.draining = False
        self._progress = ProgressDesk(parts.kv.block_size)

    def is_running(self, head: HeadId) -> bool:
        """Whether a turn of the session is under way."""
        return head in self._lines

    def num_in_line(self, head: HeadId) -> int:
        """Turns that wait behind the running one."""
        line = self._lines.get(head)
        return len(line.waiting) if line else 0

    def num_of(self, tenant: str) -> int:
        """Turns of a tenant that run or wait. O(turns)."""
        return sum(turn.ask.tenant == tenant for turn in self.active.values())

    def num_computing(self, tenant: str) -> int:
        """Those of them that have been admitted. O(turns)."""
        return sum(
            turn.ask.tenant == tenant and turn.sequence is not None and turn.sequence.holds_blocks
            for turn in self.active.values()
        )

    # From the front --------------------------------------------------------------------------

    def submit(self, ask: SubmitTurn, now: float) -> None:
        """Take a turn; :meth:`start` begins it once its session is in memory."""
        deadline_s = None if ask.deadline_s is None else now + ask.deadline_s
        turn = ActiveTurn(ask, now, deadline_s)
        limit = self._parts.tree.retention.quotas.limits(ask.tenant).turns
        full = limit is not None and self.num_of(ask.tenant) >= limit
        self.active[ask.turn_id] = turn
        if full:
            error = Overloaded(f"{limit} turns of yours run or wait: your quota", queued=limit)
            self._leave(turn, TurnDropped(ask.turn_id, error), now)
        elif ask.sampling.grammar is not None:
            turn.awaits_grammar = True
            try:
                self._parts.grammars.compile(
                    ask.turn_id, ask.tenant, ask.sampling, ask.stop_token_ids
                )
            except SessionKVError as error:
                self._leave(turn, TurnDropped(ask.turn_id, error), now)

    def start(self, ready: Ready, now: float, wall: float) -> None:
        """Begin a turn, replay it, or refuse it. One that has ended meanwhile is passed over."""
        ask = ready.item
        turn = self.active.get(ask.turn_id) if isinstance(ask, SubmitTurn) else None
        if turn is None:
            return
        try:
            if ready.error is not None:
                raise ready.error
            if isinstance(ready.reply, KeyRecord) and self._replay(turn, ready.reply, now, wall):
                return
            if self.draining:
                raise EngineClosed("the engine is shutting down")
            if turn.head is None:
                self._run(turn, None, turn.ask.token_ids or (), now)
            else:
                self._join_line(turn, turn.head, now)
        except SessionKVError as error:
            self._leave(turn, TurnDropped(turn.ask.turn_id, error), now)

    def _replay(self, turn: ActiveTurn, known: KeyRecord, now: float, wall: float) -> bool:
        claim = turn.ask.claim
        if claim is None or known.created_s + self._limits.idempotency_ttl_s <= wall:
            return False
        if known.request_digest != claim.request_digest:
            raise IdempotencyConflict(
                "the idempotency key was used for another request", key=claim.key
            )
        self._leave(turn, TurnReplayed(turn.ask.turn_id, known.response_blob), now)
        return True

    def _join_line(self, turn: ActiveTurn, head: HeadId, now: float) -> None:
        self._parts.tree.head(*head)  # SessionNotFound
        line = self._lines.get(head)
        if line is None:
            self._lines[head] = _Line(turn)
            turn.phase = Phase.IN_LINE
            self._begin(turn, now)
            return
        if not turn.ask.queue_when_busy:
            raise SessionBusy("a turn of this session is running", session=head[1])
        limit = self._limits.queued_turns_per_session
        if len(line.waiting) >= limit:
            raise Overloaded(f"{limit} turns of this session are waiting", queued=limit)
        line.waiting.append(turn)
        turn.phase = Phase.IN_LINE

    def _begin(self, turn: ActiveTurn, now: float) -> None:
        """The head is this turn's: run raw ids as they are, have messages rendered."""
        tree, ask = self._parts.tree, turn.ask
        head = tree.head(ask.tenant, ask.session or "")
        turn.base_id = turn.parent_id = head.node_id
        check_kind(self._parts, head.node_id, raw=ask.token_ids is not None)
        self._parts.returns.turn_began((head.tenant, head.name), now)
        if ask.token_ids is not None:
            self._run(turn, head.node_id, ask.token_ids, now)
            return
        turn.phase = Phase.RENDERING
        with_path = head.history == "follow" or is_foreign(self._parts, head.node_id)
        self._ask_to_render(turn, with_path=with_path)

    def _ask_to_render(self, turn: ActiveTurn, *, with_path: bool) -> None:
        ask = turn.ask
        head_id = (ask.tenant, ask.session or "")
        asked = render_request(
            self._parts, ask.turn_id, head_id, with_path=with_path, changed_from=ask.changed_from
        )
        self.out.append(asked)

    def send_path(self, turn_id: int) -> None:
        """The front needs the whole path to render."""
        turn = self.active.get(turn_id)
        if turn is not None and turn.phase is Phase.RENDERING:
            self._ask_to_render(turn, with_path=True)

    def rendered(self, message: TurnRendered, now: float) -> None:
        """The front has the ids: run them."""
        turn = self.active.get(message.turn_id)
        if turn is None or turn.phase is not Phase.RENDERING:
            return
        turn.rendered = message
        turn.parent_id = message.base_node_id
        try:
            self._run(turn, message.base_node_id, message.token_ids, now)
        except SessionKVError as error:
            self._leave(turn, TurnDropped(message.turn_id, error), now)

    def refused(self, message: TurnRefused, now: float) -> None:
        """The front cannot render the messages."""
        turn = self.active.get(message.turn_id)
        if turn is not None and turn.phase is Phase.RENDERING:
            self._leave(turn, TurnDropped(message.turn_id, message.error), now)

    def _run(
        self, turn: ActiveTurn, parent_id: int | None, delta: Iterable[int], now: float
    ) -> None:
        """Hand the whole prompt to the scheduler."""
        parts, ask = self._parts, turn.ask
        prompt: list[int] = [] if parent_id is None else parts.tree.tokens_of(parent_id)
        num_before = len(prompt)
        prompt += delta
        if not prompt:
            raise InvalidRequest("tokens", [], "at least one token")
        hashes = () if parent_id is None else parts.tree.hashes_of(parent_id)
        turn.chain = TokenChain(
            parts.root,
            parts.kv.block_size,
            tenant=ask.tenant,
            public=parts.tree.retention.quotas.public,
            token_ids=prompt,
            hashes=hashes,
        )
        if parent_id is not None:
            unwritten = parts.tree.record(parent_id).num_unwritten_tokens
            turn.known_tokens = max(0, num_before - unwritten)
        turn.sequence = Sequence(
            ask.turn_id,
            turn.chain,
            ask.sampling,
            stop_token_ids=ask.stop_token_ids,
            priority=ask.priority,
            deadline=turn.deadline_s,
            group=(ask.tenant, ask.session or ""),
            use_cache=ask.use_cache,
            wants_prompt_logprobs=ask.prompt_logprobs,
        )
        if turn.awaits_grammar:
            turn.phase = Phase.COMPILING
        else:
            self._add(turn, turn.sequence, now)

    def _add(self, turn: ActiveTurn, sequence: Sequence, now: float) -> None:
        sequence.constraint = turn.grammar
        self._parts.scheduler.add(sequence, now)
        sequence.accounting.added_at = turn.arrived_s
        if turn.ask.wants_progress:
            self._progress.watch(sequence)
        turn.phase = Phase.RUNNING

    def compiled(self, message: GrammarReady, now: float) -> None:
        """A turn's grammar is there, or cannot be had."""
        turn = self.active.get(message.turn_id)
        if turn is None:
            return
        turn.awaits_grammar, turn.grammar = False, message.grammar
        try:
            if message.error is not None:
                raise message.error
            if turn.phase is Phase.COMPILING and turn.sequence is not None:
                self._add(turn, turn.sequence, now)
        except SessionKVError as error:
            self._leave(turn, TurnDropped(message.turn_id, error), now)

    def stop_at(self, message: StopAt, now: float) -> None:
        """A stop string was found."""
        turn = self.active.get(message.turn_id)
        if turn is None or turn.phase is not Phase.RUNNING:
            return
        event = self._parts.scheduler.cancel_at(message.turn_id, message.num_output_tokens)
        if event is not None:
            self._finish(turn, event, now)

    def cancel(self, message: CancelTurn, now: float) -> None:
        """End a turn early; what is already being committed stays."""
        turn = self.active.get(message.turn_id)
        if turn is None or turn.phase is Phase.COMMITTING:
            return
        sequence = turn.sequence
        if message.keep and turn.phase is Phase.JUDGING:
            return
        if message.keep and sequence is not None and sequence.num_output_tokens:
            event = self._parts.scheduler.cancel_at(
                message.turn_id, sequence.num_output_tokens, FinishReason.CANCELLED
            )
            if event is not None:
                self._finish(turn, event, now)
            return
        error = message.error or TurnCancelled("the turn was cancelled")
        self._leave(turn, TurnDropped(message.turn_id, error), now)

    def verdict(self, message: Verdict, now: float, wall: float) -> None:
        """The front has said what the log keeps: journal it."""
        turn = self.active.get(message.turn_id)
        if turn is None or turn.phase is not Phase.JUDGING:
            return
        try:
            self._commits.submit(commit_of(turn, message, self._parts, wall))
        except SessionKVError as error:
            self._leave(turn, TurnDropped(message.turn_id, error), now)
            return
        turn.phase = Phase.COMMITTING
        turn.calls_tool = message.calls_tool

    # From the step loop ----------------------------------------------------------------------

    def started(self, seq_id: int) -> None:
        """The sequence joins the batch: what its admission missed can be told now."""
        turn = self.active.get(seq_id)
        if turn is not None:
            note_absent(turn, self._parts)

    def tell_progress(self, now: float) -> None:
        """Say how far prompts are to those who asked; before what the planned step samples."""
        self.out += self._progress.due(now)

    def take_events(self, events: list[SequenceEvent], now: float) -> None:
        """Pass on what a step sampled, and end what it ended."""
        sampled: list[TurnTokens] = []
        ended: list[SequenceEvent] = []
        for event in events:
            seq_id, token, num_tokens, finish, stop_token_id, error = event
            if token is not None:
                token_id, logprobs = token
                entries = (logprobs,) if logprobs else ()
                ends_turn = stop_token_id is not None
                sampled.append(TurnTokens(seq_id, num_tokens - 1, (token_id,), entries, ends_turn))
            if finish is not None or error is not None:
                ended.append(event)
        if sampled:
            self.out.append(StepTokens(tuple(sampled)))
        for event in ended:
            turn = self.active[event.seq_id]
            if event.error is not None:
                turn.sequence = None
                self._leave(turn, TurnDropped(event.seq_id, event.error), now)
            else:
                self._finish(turn, event, now)

    def _finish(self, turn: ActiveTurn, event: SequenceEvent, now: float) -> None:
        sequence, tree = turn.sequence, self._parts.tree
        if sequence is None or event.finish is None:
            raise TurnFailed("the turn has no sequence")
        if turn.ask.session is not None:
            turn.node_id = tree.reserve_node_id(turn.ask.tenant)
        miss, missed = explain_misses(turn, self._parts)
        cache = replace(sequence.report(), miss=miss, miss_tokens=missed)
        turn.phase = Phase.JUDGING
        turn.judge_by_s = now + self._limits.verdict_timeout_s
        turn.finished = TurnFinished(
            turn_id=turn.ask.turn_id,
            num_output_tokens=event.num_output_tokens,
            reason=event.finish,
            stop_token_id=event.stop_token_id,
            node_id=turn.node_id,
            num_prompt_tokens=sequence.num_prompt_tokens,
            cache=cache,
            prompt_logprobs=sequence.prompt_logprobs,
        )
        self.out.append(turn.finished)
        if not turn.ask.is_kept:
            self._parts.scheduler.release(
                turn.ask.turn_id, sequence.num_prompt_tokens + event.num_output_tokens
            )
            turn.sequence = None
            self._leave(turn, TurnCommitted(turn.ask.turn_id), now)

    def durable(self, turn_id: int, now: float) -> None:
        """The journal has the turn."""
        turn = self.active.get(turn_id)
        if turn is not None:
            self._leave(turn, TurnCommitted(turn_id), now)

    def tick(self, now: float) -> None:
        """End what has run out of time."""
        late = [
            turn
            for turn in self.active.values()
            if turn.deadline_s is not None
            and turn.deadline_s <= now
            and turn.phase not in (Phase.JUDGING, Phase.COMMITTING)
        ]
        for turn in late:
            asked = turn.ask.deadline_s
            error = DeadlineExceeded(f"the turn did not end within {asked} s", deadline_s=asked)
            self._leave(turn, TurnDropped(turn.ask.turn_id, error), now)
        for turn in [t for t in self.active.values() if t.phase is Phase.JUDGING]:
            if turn.judge_by_s <= now:
                unjudged = TurnFailed("the text of the reply was not ready in time")
                self._leave(turn, TurnDropped(turn.ask.turn_id, unjudged), now)

    def drop(self, turn_id: int, error: SessionKVError, now: float) -> None:
        """End one turn, whatever it is doing."""
        turn = self.active.get(turn_id)
        if turn is not None:
            self._leave(turn, TurnDropped(turn_id, error), now)

    def drop_session(self, head: HeadId, error: SessionKVError, now: float) -> None:
        """End the running turn of a session and those in line, but not what is being committed."""
        line = self._lines.get(head)
        if line is None:
            return
        for turn in (*line.waiting, line.running):
            if turn.phase is not Phase.COMMITTING:
                self._leave(turn, TurnDropped(turn.ask.turn_id, error), now)

    def drop_all(self, error: SessionKVError, now: float) -> None:
        """End every turn that is not being committed."""
        for turn in list(self.active.values()):
            if turn.phase is not Phase.COMMITTING and turn.ask.turn_id in self.active:
                self._leave(turn, TurnDropped(turn.ask.turn_id, error), now)

    # The one way out -------------------------------------------------------------------------

    def _leave(
        self, turn: ActiveTurn, answer: TurnCommitted | TurnReplayed | TurnDropped, now: float
    ) -> None:
        if self.active.pop(turn.ask.turn_id, None) is None:
            return
        self._forget_grammar(turn)
        if turn.sequence is not None:
            self._parts.scheduler.cancel(turn.ask.turn_id)
            turn.sequence = None
        self.out.append(answer)
        self._count(turn, answer, now)
        head = turn.head
        line = self._lines.get(head) if head is not None else None
        if line is None or head is None or turn.phase is Phase.LOADING:
            return
        if line.running is not turn:
            line.waiting.remove(turn)
            return
        if isinstance(answer, TurnCommitted) and turn.finished and turn.node_id is not None:
            self.last_cache.put(turn.node_id, turn.finished.cache)
            self._use(turn.node_id, turn.ask.tenant)
        self._expect(turn, head, isinstance(answer, TurnCommitted), now)
        del self._lines[head]
        self._next_in_line(line, head, now)

    def _use(self, node_id: int, tenant: str) -> None:
        """A session is the last used of its tenant, where that has a quota."""
        tree = self._parts.tree
        if tree.retention.quotas.limits(tenant).is_empty:
            return
        with suppress(NodeNotFound):  # deleted while its turn was on its way to the journal
            tree.retention.used(tree.parts_of(node_id), tenant=tenant)

    def _forget_grammar(self, turn: ActiveTurn) -> None:
        if turn.awaits_grammar:
            self._parts.grammars.withdraw(turn.ask.turn_id)

    def _expect(self, turn: ActiveTurn, head: HeadId, committed: bool, now: float) -> None:
        """Whether the session is likely to be back soon is known from how its turn ended."""
        returns, tree = self._parts.returns, self._parts.tree
        if not (committed and turn.calls_tool and turn.node_id is not None):
            returns.forget(head)
            return
        try:
            keys = tree.keys_of(turn.node_id)
            hashes = tree.kept_hashes_of(turn.node_id)
        except NodeNotFound:  # deleted while its turn was on its way to the journal
            returns.forget(head)
            return
        is_tail = keys and (not hashes or keys[-1] != hashes[-1])
        returns.called(head, hashes, keys[-1] if is_tail else None, now)

    def _next_in_line(self, line: _Line, head: HeadId, now: float) -> None:
        while line.waiting:
            turn = line.waiting.popleft()
            self._lines[head] = _Line(turn, line.waiting)
            try:
                self._begin(turn, now)
            except SessionKVError as error:
                del self._lines[head]
                del self.active[turn.ask.turn_id]
                self._forget_grammar(turn)
                self.out.append(TurnDropped(turn.ask.turn_id, error))
                continue
            return

    def _count(
        self, turn: ActiveTurn, answer: TurnCommitted | TurnReplayed | TurnDropped, now: float
    ) -> None:
        metrics, tenants = self._parts.metrics, self._parts.tenants
        if isinstance(answer, TurnCommitted) and turn.finished is not None:
            metrics.turn_finished(turn.finished, now - turn.arrived_s)
            tenants.turn_finished(turn.ask.tenant, turn.finished, now - turn.arrived_s)
        elif isinstance(answer, TurnDropped):
            metrics.turn_dropped(answer.error.code)
            tenants.turn_dropped(turn.ask.tenant, answer.error.code)
