"""The step loop: schedule, launch, collect, commit, emit.

Where the runner computes elsewhere, the step after the one in flight is planned and launched before
that one is collected, so that the device never waits for core; see :meth:`Core._step`.

One thread owns everything below it (index, pools, tree, scheduler, runner); everyone else speaks to
it through its inbox: front, journal, block store, movers. Nothing here waits but for the inbox, and
only when there is nothing to compute. This is the actor's one boundary: what escapes from a step
ends that step's turns, and what escapes from the loop ends the engine with every turn answered.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from sessionkv.cache.invariants import InvariantBroken
from sessionkv.engine.access import apply_access, declare_public
from sessionkv.engine.arrivals import Arrivals
from sessionkv.engine.calls import CallDesk, sessions_named
from sessionkv.engine.commits import Commits, PendingCommit
from sessionkv.engine.copy_lanes import CopiesStarted
from sessionkv.engine.draining import Drainer
from sessionkv.engine.durability import DurabilityDesk
from sessionkv.engine.grammar_desk import GrammarReady
from sessionkv.engine.housekeeping import Chore, Housekeeping
from sessionkv.engine.inbox import Inbox
from sessionkv.engine.loading import Loader, Ready
from sessionkv.engine.messages import (
    Call,
    CallDone,
    CancelTurn,
    CoreMessage,
    CoreStopped,
    Drain,
    ImportSessions,
    NewAccess,
    OpenSession,
    PathWanted,
    PublicPrefixes,
    StopAt,
    SubmitTurn,
    TurnRefused,
    TurnRendered,
    Verdict,
)
from sessionkv.engine.parts import CoreParts
from sessionkv.engine.promised_loads import PromisedLoads
from sessionkv.engine.steps import Steps
from sessionkv.engine.turns import TurnDesk
from sessionkv.errors import (
    EngineClosed,
    SessionKVError,
    StoreUnavailable,
    TurnFailed,
)
from sessionkv.ipc.messages import List
from sessionkv.store.questions import FindKey, ListSessions, Question, SessionPage
from sessionkv.store.worker import (
    Answered,
    Checked,
    Committed,
    DiskEvicted,
    DiskLost,
    Held,
    LookedUp,
)
from sessionkv.types import MoveOutcome, Tier, Transfer, TransferResult

_log = logging.getLogger(__name__)

_TICK_S = 0.1
"""How often deadlines and expiries are looked at."""
_COMPANY_S = 0.004
"""Most time for which turns are taken in beside a new step before the next is planned."""
_QUIET_S = 5.0
"""Time without a step after which the books are checked: nobody is likely to wait then."""
_HOUSEKEEPING_S = 1.0
"""How often pins, keys and the cache's books are looked at."""


class FrontSink(Protocol):
    """Where core's messages go."""

    def put(self, messages: list[CoreMessage]) -> None:
        """Hand over a batch, in order. Any thread; may wait while the front is far behind."""
        ...


class Core:
    """One engine's core. :meth:`run` is its thread's body.

    Attributes:
        inbox: For everybody who has something to say to core.
        ready: Set when the loop begins, or has failed before.
        start_failure: What it failed of before it began; set before :attr:`ready` is.
    """

    def __init__(
        self,
        parts: CoreParts,
        inbox: Inbox[object],
        front: FrontSink,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.inbox = inbox
        self.ready = threading.Event()
        self.start_failure: Exception | None = None
        self._parts = parts
        self._front = front
        self._clock = clock
        self._wall = wall
        self._arrivals = Arrivals(inbox.drain, clock)
        self._commits = Commits(parts.tree, parts.store)
        self._turns = TurnDesk(parts, self._commits)
        self._calls = CallDesk(parts, self._commits, self._turns)
        self._loader = Loader(parts.tree, parts.store, parts.root, parts.kv.block_size)
        self._chores = Housekeeping(parts, self._commits, self._turns, self._loader)
        self._tick_at = self._housekeeping_at = clock()
        self._writes = DurabilityDesk(parts, self._turns)
        self._drainer = Drainer(parts, self._turns, self._commits, self._writes)
        self._steps = Steps(parts, clock)
        self._computing = False
        self._moves: dict[int, Transfer] = {}
        self._promised = PromisedLoads(parts.scheduler)
        self._unchecked_since: float | None = None

    @property
    def num_turns(self) -> int:
        """Turns that run or wait now. Any thread."""
        return len(self._turns.active)

    def run(self) -> None:
        """Loop until drained; answers every turn that is decided before it returns."""
        error: SessionKVError | None = None
        try:
            self._prepare()
            while not self._drainer.is_done(self._clock()):
                self._take_in()
                self._step()
                self._emit()
            while self._steps:
                self._collect()
        except Exception as failure:  # noqa: BLE001 - the actor's one boundary
            _log.exception("the engine's core failed")
            error = TurnFailed(f"the engine failed ({type(failure).__name__})")
        self._turns.drop_all(error or EngineClosed("the engine is closed"), self._clock())
        # What is being committed may be durable by now, or become so after all.
        undecided = (*self._turns.active, *self._commits.call_ids)
        self._turns.out.append(CoreStopped(error, self._drainer.report, undecided))
        self._emit()

    def _prepare(self) -> None:
        try:
            self._parts.runner.prepare_thread()
        except Exception as failure:
            self.start_failure = failure
            raise
        finally:
            self.ready.set()

    # One round -------------------------------------------------------------------------------

    def _step(self) -> None:
        """Launch what can be launched, then collect the oldest step.

        ::

            device   | step n                | step n+1                        | step n+2
            core       plan n+1 | wait for n | commit n | plan n+2 | wait for n+1 | ...

        Moves are handed out before anything is launched, so that they do not wait for it; those
        that are begun beside a step after it, since the threads that carry them out hold up a
        launch. Turns seldom come alone: who comes soon after the first is not to wait for two
        steps. Turns that load their history are admitted and go on loading beside a step, a bounded
        part of it each time, so that whoever decodes does not wait for them.
        """
        scheduler, steps = self._parts.scheduler, self._steps
        plan = None if steps else scheduler.schedule(self._clock())
        self._start_moves()
        self._turns.tell_progress(self._clock())
        if plan is not None:
            for start in plan.starts:
                self._turns.started(start.seq_id)
            began = self._clock()
            steps.launch(plan, is_held=bool(self._promised))
        self._computing = bool(steps)
        if not steps:
            return
        self._unchecked_since = self._clock()
        if steps.may_go_on:
            until_s = 0.0
            if plan is not None:
                # What one token takes is left for planning.
                until_s = began + self._parts.planner.rates.added_s(plan.num_tokens)
                self._take_turns(until_s)
            self._load_beside(until_s)
            ahead = scheduler.schedule_ahead(self._clock())
            if ahead is not None:
                steps.launch(ahead)
            self._submit(scheduler.take_ready())
        self._collect()

    def _load_beside(self, until_s: float) -> None:
        """Bring on those that load their histories, a part of each, and more until some time."""
        scheduler = self._parts.scheduler
        while True:
            scheduler.load_beside(self._clock())
            if not scheduler.has_more or self._clock() >= until_s:
                return
            self._submit(scheduler.take_ready())

    def _collect(self) -> None:
        events = self._steps.collect()
        self._turns.take_events(events, self._clock())

    def _emit(self) -> None:
        if self._turns.out:
            self._front.put(self._turns.out)
            self._turns.out = []

    def _start_moves(self) -> None:
        parts = self._parts
        self._submit(parts.scheduler.take_ready())  # the bus is not to wait for what follows
        for seq_id, query in parts.scheduler.take_lookups():
            parts.store.lookup(seq_id, query)
        self._submit(parts.scheduler.take_transfers())
        for receipt_id in parts.scheduler.take_receipts():
            parts.store.release(receipt_id)
        stale = parts.kv.take_stale()
        if stale:
            parts.store.delete(stale)
        fallen = parts.kv.take_fallen()
        if fallen:
            parts.store.ranks_fell(fallen)
        self._calls.finish_flushes()

    def _submit(self, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            self._moves[transfer.transfer_id] = transfer
            self._parts.mover.submit(transfer)

    # What comes in ---------------------------------------------------------------------------

    def _take_in(self) -> None:
        for message in self._arrivals.take(self._patience_s()):
            self._guarded(self._handle, message, message)
            self._serve_ready()
        now = self._clock()
        if now >= self._tick_at:
            self._tick_at = now + _TICK_S
            self._tick(now)
            self._serve_ready()

    def _take_turns(self, until_s: float) -> None:
        """Take in turns while a step is new and the device has work for longer."""
        for turn in self._arrivals.turns_until(min(until_s, self._clock() + _COMPANY_S)):
            self._guarded(self._handle, turn, turn)
            self._serve_ready()

    def _serve_ready(self) -> None:
        """Serve the requests whose sessions are in memory by now."""
        while (ready := self._loader.next_ready()) is not None:
            self._guarded(self._serve, ready, ready.item)

    def _guarded(self, handle: Callable[..., None], what: object, message: object) -> None:
        now = self._clock()
        try:
            handle(what, now, self._wall())
        except Exception as failure:  # noqa: BLE001 - the actor's one boundary
            _log.exception("a %s could not be handled", type(message).__name__)
            self._give_up(message, failure, now)

    def _give_up(self, message: object, failure: Exception, now: float) -> None:
        """End what a message was about; the others go on."""
        error = TurnFailed(f"the engine could not do this ({type(failure).__name__})")
        if isinstance(message, Call | OpenSession | ImportSessions):
            self._turns.out.append(CallDone(message.call_id, error=error))
            return
        turn_id = getattr(message, "turn_id", None)
        if turn_id is None:
            raise failure  # the cache or the journal: nobody's request, so nobody's to fail
        self._turns.drop(turn_id, error, now)

    def _patience_s(self) -> float:
        """How long to sleep for the inbox when there is nothing to do."""
        if self._computing or self._parts.scheduler.has_more:
            return 0.0
        is_busy = self._turns.active or self._drainer.begun
        wakes = [self._tick_at + (0.0 if is_busy else _HOUSEKEEPING_S)]
        if (wake := self._parts.scheduler.next_wake()) is not None:
            wakes.append(wake)
        return max(0.0, min(wakes) - self._clock())

    def _handle(self, message: object, now: float, wall: float) -> None:
        turns = self._turns
        if isinstance(message, SubmitTurn):
            turns.submit(message, now)
            self._load(message)
        elif isinstance(message, Call | OpenSession | ImportSessions):
            self._load(message)
        elif isinstance(message, TurnRendered):
            turns.rendered(message, now)
        elif isinstance(message, Verdict):
            turns.verdict(message, now, wall)
        elif isinstance(message, Committed):
            self._committed(message, now)
        elif isinstance(message, Answered):
            self._loader.answered(message)
        elif isinstance(message, TransferResult):
            self._moved(message, now)
        elif isinstance(message, GrammarReady):
            turns.compiled(message, now)
        elif isinstance(message, CopiesStarted):
            self._promised.started(message)
        elif isinstance(message, LookedUp):
            self._parts.scheduler.on_receipt(message.ticket, message.receipt)
        elif isinstance(message, StopAt):
            turns.stop_at(message, now)
        elif isinstance(message, CancelTurn):
            turns.cancel(message, now)
        elif isinstance(message, PathWanted):
            turns.send_path(message.turn_id)
        elif isinstance(message, TurnRefused):
            turns.refused(message, now)
        elif isinstance(message, DiskEvicted):
            self._parts.kv.on_disk_evicted(message.keys)
        elif isinstance(message, DiskLost):
            self._parts.kv.on_disk_lost()
        elif isinstance(message, Held):
            self._calls.placed(message)
        elif isinstance(message, Checked):
            self._calls.flush(message)
        elif isinstance(message, PublicPrefixes):
            declare_public(self._parts, message)
        elif isinstance(message, NewAccess):
            apply_access(self._parts, message.access)
            turns.out.append(message)
        elif isinstance(message, Drain):
            self._drainer.begin(message, now)

    def _load(self, message: SubmitTurn | Call | OpenSession | ImportSessions) -> None:
        """Have a request wait for what it needs of the journal."""
        names = sessions_named(message)
        question: Question | None = None
        if isinstance(message, SubmitTurn) and message.claim is not None:
            question = FindKey(message.tenant, message.claim.key)
        elif isinstance(message, Call) and isinstance(message.request, List):
            asked = message.request
            question = ListSessions(message.tenant, asked.prefix, asked.after, asked.limit)
            names = self._loader.waiting_names(message.tenant)
        self._loader.submit(message, names, question)

    def _serve(self, ready: Ready, now: float, wall: float) -> None:
        item, reply = ready.item, ready.reply
        if isinstance(item, SubmitTurn):
            self._turns.start(ready, now, wall)
        elif isinstance(item, Call | OpenSession | ImportSessions):
            if ready.error is not None:
                self._turns.out.append(CallDone(item.call_id, error=ready.error))
            elif isinstance(item, OpenSession):
                self._calls.open(item, wall)
            elif isinstance(item, ImportSessions):
                self._calls.take_in(item)
            elif isinstance(reply, SessionPage):
                self._calls.list(item.call_id, reply)
            else:
                self._calls.call(item, now, wall)
        elif isinstance(item, Chore):
            self._chores.serve(item, ready, wall)

    def _committed(self, message: Committed, now: float) -> None:
        if message.error is None:
            commit = self._commits.durable(message.ticket)
            if commit is not None:
                self._now_durable(commit, now)
            return
        error: SessionKVError = message.error
        if not isinstance(error, StoreUnavailable):  # which says all there is to say
            error = StoreUnavailable(f"the journal could not be written: {error}")
        for commit in self._commits.refused(message.ticket):
            if commit.turn_id is not None:
                self._turns.drop(commit.turn_id, error, now)
            elif commit.call_id is not None:
                self._turns.out.append(CallDone(commit.call_id, error=error))

    def _now_durable(self, commit: PendingCommit, now: float) -> None:
        parts, change = self._parts, commit.change
        # A turn journalled meanwhile may own some of them again.
        freed = [key for key in change.freed_keys if not parts.tree.retention.owners(key)]
        if freed:
            parts.store.delete(parts.kv.forget(freed))
        for node_id in change.freed_node_ids:
            self._turns.last_cache.pop(node_id)
        if commit.turn_id is None:
            self._turns.out.append(commit.reply)
            return
        self._writes.journalled(commit, now)

    def _moved(self, result: TransferResult, now: float) -> None:
        parts = self._parts
        transfer = self._moves.pop(result.transfer_id)
        self._promised.settle(result)
        parts.scheduler.on_transfer(result, now)
        self._count_move(transfer, result)
        if self._writes and transfer.dst is Tier.DISK:
            self._writes.answer_written(now)

    def _count_move(self, transfer: Transfer, result: TransferResult) -> None:
        num_bytes = len(transfer.moves) * self._parts.runner.geometry.block_bytes
        self._parts.metrics.transfer(transfer, result, num_bytes)
        arrived = result.outcomes.count(MoveOutcome.OK)
        if transfer.dst is Tier.DEVICE and arrived == len(transfer.moves):
            self._parts.planner.rates.observe_load(
                transfer.src, arrived, num_bytes, result.elapsed_s
            )

    # Time ------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        self._turns.tick(now)
        self._writes.answer_written(now)
        self._chores.tidy()
        if now < self._housekeeping_at:
            return
        self._housekeeping_at = now + _HOUSEKEEPING_S
        self._parts.returns.expire(now)
        self._chores.expire(self._wall())
        line = self._parts.metrics.log_line(now)
        if line is not None:
            _log.info(line)
        worked_at = self._unchecked_since
        if worked_at is not None and now - worked_at >= _QUIET_S and not self._moves:
            self._check_books()

    def _check_books(self) -> None:
        """Once after each busy time; a turn that comes meanwhile waits until all is recounted.

        A mismatch is logged and counted, not fatal.
        """
        self._unchecked_since = None
        try:
            self._parts.kv.check()
        except InvariantBroken as failure:
            _log.error("the KV cache's books do not balance: %s", failure)
            self._parts.metrics.count_book_error()
