"""Who computes what in the next step.

One token budget a step: first the sequences that run, then those that wait. Sequences that hold
blocks are ranked by priority, then by admission; one that needs a block and gets none takes it from
the last in rank, so the first in rank always goes on and every request that can fit ends. Pure:
ids and numbers in, plans and events out; no clock, no bytes, no hashes. Used by one thread.

A round of the caller's loop::

    if not launched:
        launched += launch(scheduler.schedule(now))       # unless it is None
    movers.submit(scheduler.take_transfers())             # answers come back through on_transfer
    store.look_up(scheduler.take_lookups())               # answers come back through on_receipt
    store.release(scheduler.take_receipts())
    if launched:
        scheduler.load_beside(now)                        # or never; has moves for the movers
        launched += launch(scheduler.schedule_ahead(now)) # unless it is None, or never
        plan, pending = launched.popleft()
        events = scheduler.commit(plan, pending.result(), now)   # or fail_step(plan, error)

Every sequence that ``add`` took ends by exactly one of: an event with ``finish``, after which the
caller calls ``release``; an event with ``error``; ``cancel``.
"""

from __future__ import annotations

from collections import deque

from sessionkv.config import SchedulerConfig
from sessionkv.engine.scheduler.admission import MOST_BLOCKS, Tried
from sessionkv.engine.scheduler.ahead import continued, num_awaited
from sessionkv.engine.scheduler.batch import Batch, StepBudget
from sessionkv.engine.scheduler.kv import KVCache
from sessionkv.engine.scheduler.landing import Landing
from sessionkv.engine.scheduler.lifecycle import Lifecycle
from sessionkv.engine.scheduler.policy import LoadPolicy, Workload
from sessionkv.engine.scheduler.sequence import (
    UNBOUNDED,
    Sequence,
    SequenceEvent,
    SequenceState,
)
from sessionkv.engine.scheduler.transfers import TransferDesk
from sessionkv.errors import NeverFits, Overloaded, PromptTooLong
from sessionkv.types import (
    DiskQuery,
    DiskReceipt,
    Fetched,
    FinishReason,
    Meeting,
    StepOutput,
    StepPlan,
    Tier,
    Transfer,
    TransferResult,
)

_MAX_PROMPTS_BY_TURNS = 8
"""Prompts, ready or waiting, that are computed by turns rather than together."""
_MAX_HISTORY_BY_TURNS = 8192
"""In tokens. Behind longer ones a prompt's step is mostly attention, and large steps are better at
it."""
_RETRY_STEPS = 16
"""Blocked admissions are tried again this often even if nothing seems to have changed."""


class Scheduler:
    """Continuous batching over a :class:`KVCache`.

    A step costs a few microseconds for each sequence planned, whatever the length of its history;
    an admission costs O(blocks of the prompt).

    Attributes:
        num_preemptions: Sequences that had to give up their blocks so far.
    """

    def __init__(
        self,
        kv: KVCache,
        load_policy: LoadPolicy,
        *,
        config: SchedulerConfig,
        budget: StepBudget,
        max_model_len: int,
        most_blocks: int = MOST_BLOCKS,
    ) -> None:
        """Start empty.

        Args:
            kv: The cache; its leases for running sequences are made and ended here only.
            load_policy: Decides what to load and what to compute of what was found.
            config: Limits and times; ``step_tokens`` of it is not read.
            budget: Most tokens of one plan; also bounds the sequences that run at once.
            max_model_len: Most positions of one sequence.
            most_blocks: See :data:`~sessionkv.engine.scheduler.admission.MOST_BLOCKS`.
        """
        self._kv = kv
        self._policy = load_policy
        self._budget = budget
        self._max_model_len = max_model_len
        self._most_blocks = most_blocks
        self._max_running = budget.most_running(config.max_running)
        self._max_queue = config.max_queue
        self._least_patience_s = config.min_lookup_wait_ms / 1000.0
        self._desk = TransferDesk(kv)
        self._life = Lifecycle(
            kv, desk=self._desk, ageing_s=config.ageing_s, patience_s=self._patience_s
        )
        self._admitter = self._life.admitter
        self._landing = Landing(kv, self._life)
        self._in_flight: deque[tuple[StepPlan, Batch]] = deque()
        self._decoded: list[Sequence] = []  # by the last plan, if it did nothing else
        self._makes_room = self._holds_loads_back = False
        self._step_id = 0
        self._retried_at = -1
        self.num_preemptions = 0

    # ---- what comes in -------------------------------------------------------------------

    def add(self, sequence: Sequence, now: float) -> None:
        """Take a sequence, to be admitted when its turn comes.

        Raises:
            PromptTooLong: Prompt and ``max_tokens`` do not fit the window.
            NeverFits: They need more blocks than there are.
            Overloaded: The queue is full, and the tenant has its share of it.
        """
        self._set_limits(sequence)
        tenant, queue = sequence.group[0], self._life.queue
        if not queue.has_room(tenant, self._max_queue):
            raise Overloaded(
                f"{queue.num_of(tenant)} turns are waiting",
                retry_after_s=self._admitter.retry_after_s,
                queued=queue.num_of(tenant),
            )
        self._life.enter(sequence, now)

    def _patience_s(self, start: int, end: int) -> float:
        worth_s = self._policy.patience_s(start, end, step_tokens=self._budget.alone)
        return max(self._least_patience_s, worth_s)

    def _set_limits(self, sequence: Sequence) -> None:
        """How many tokens it may sample: what was asked for, or what fits window and pool."""
        num_prompt, asked = sequence.num_prompt_tokens, sequence.sampling.max_tokens
        most = min(self._max_model_len, self._kv.num_blocks * self._kv.block_size + 1)
        if asked is not None and sequence.sampling.fit_window:
            asked = min(asked, max(1, most - num_prompt))
        if num_prompt + (asked or 1) > self._max_model_len:
            raise PromptTooLong(num_prompt, asked, self._max_model_len)
        # The last token sampled never gets KV.
        needed = -(-(num_prompt + (asked or 1) - 1) // self._kv.block_size)
        if needed > self._kv.num_blocks:
            raise NeverFits(needed, self._kv.num_blocks)
        sequence.max_output_tokens = asked or most - num_prompt

    def on_receipt(self, seq_id: int, receipt: DiskReceipt | None) -> None:
        """The store's answer to a look-up; None where it could not answer.

        A receipt that is of no use goes straight back through :meth:`take_receipts`.
        """
        sequence = self._life.sequences.get(seq_id)
        if sequence is None or not self._admitter.take_receipt(sequence, receipt):
            self._desk.give_back(receipt)

    def on_promise(self, result: TransferResult) -> None:
        """What a load is going to be answered with, all steps and copies to come being behind it.

        The sequence goes on as if it were answered; :meth:`on_transfer` takes the answer all the
        same, and until then it counts as under way and holds its blocks.
        """
        self._take_in(self._kv.promise_transfer(result))

    def on_transfer(self, result: TransferResult, now: float) -> Fetched | None:
        """A mover's answer; not None for a load of a sequence that runs, unless it was promised."""
        fetched = self._kv.finish_transfer(result)
        self._desk.answered(result.transfer_id, now)
        self._admitter.room_changed()
        self._take_in(fetched)
        return fetched

    def _take_in(self, fetched: Fetched | None) -> None:
        if fetched is None:
            return
        sequence = self._life.sequences.get(fetched.seq_id)
        if sequence is not None:
            sequence.num_arrived += fetched.num_blocks
            sequence.lost.update(fetched.lost)
            # What is lost has to be computed: then there is something to decide.
            left = 0 if fetched.lost else sequence.num_awaited - fetched.num_blocks
            sequence.num_awaited = max(left, 0)

    def cancel(self, seq_id: int) -> bool:
        """Drop a sequence in whatever state, also while a step computes it; whether it was there.

        No event follows, and no ``release``.
        """
        sequence = self._life.sequences.get(seq_id)
        if sequence is None:
            return False
        self._life.drop(sequence)
        return True

    def cancel_at(
        self,
        seq_id: int,
        num_output_tokens: int,
        reason: FinishReason = FinishReason.STOP,
    ) -> SequenceEvent | None:
        """End a sequence with its first ``num_output_tokens`` sampled tokens.

        Returns:
            The end, when the tokens are there and no step in flight computes it but one made
            ahead, whose result is then dropped; otherwise None, and the end comes from
            :meth:`commit`. None also where there is no such sequence or it has ended already.
        """
        sequence = self._life.sequences.get(seq_id)
        if sequence is None or sequence.state is SequenceState.FINISHED:
            return None
        if num_output_tokens <= sequence.max_output_tokens:
            sequence.max_output_tokens = num_output_tokens
            sequence.end_reason = reason
        if self._is_planned(sequence) or sequence.num_output_tokens < num_output_tokens:
            return None
        return self._life.finish(sequence, None)

    def _is_planned(self, sequence: Sequence) -> bool:
        """Whether a step in flight computes it that was not made ahead.

        Only the oldest can be one, and whoever is in a later one is in that too.
        """
        return sequence.num_in_flight > 0 and not self._in_flight[0][0].is_ahead

    def release(self, seq_id: int, keep_tokens: int | None = None) -> None:
        """End the leases of a finished sequence and forget it; at once, but for steps in flight.

        Args:
            seq_id: One whose event had ``finish``.
            keep_tokens: Length of the log that is kept, prompt included; None keeps all.

        Raises:
            KeyError: There is no such sequence, or it was released.
            ValueError: It has not finished.
        """
        sequence = self._life.sequences[seq_id]
        if sequence.state is not SequenceState.FINISHED:
            raise ValueError(f"sequence {seq_id} has not finished")
        self._life.release(sequence, keep_tokens)

    # ---- what goes out -------------------------------------------------------------------

    def take_transfers(self) -> list[Transfer]:
        """Moves for the movers, each once: fetches, and spills the cache wants now.

        While room is being made bit by bit nobody looks for blocks to spill after each bit.
        """
        if not self._makes_room:
            self._desk.collect_spills()
        return self._desk.take()

    def take_ready(self) -> list[Transfer]:
        """Of :meth:`take_transfers` what is there by now, without looking for blocks to spill."""
        return self._desk.take()

    def take_lookups(self) -> list[tuple[int, DiskQuery]]:
        """Questions to the store by seq_id, each once; :meth:`on_receipt` takes the answers."""
        return self._admitter.take_lookups()

    def take_receipts(self) -> list[int]:
        """Ids of disk receipts that nothing needs any more, each once."""
        return self._desk.take_receipts()

    def expired(self, now: float) -> list[int]:
        """Sequences that go on past their deadline, for the caller to cancel. A question."""
        return self._life.expired(now)

    def next_wake(self) -> float | None:
        """Earliest time at which something is due without anything coming in; None for never."""
        times = (self._life.next_deadline(), self._admitter.next_lookup_end())
        return min((time for time in times if time is not None), default=None)

    def get(self, seq_id: int) -> Sequence:
        """A sequence that has not been forgotten; for reading.

        Raises:
            KeyError: There is none.
        """
        return self._life.sequences[seq_id]

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and have not finished."""
        return len(self._life.running)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._life.queue)

    @property
    def has_more(self) -> bool:
        """Whether some sequence got a part of its room or of its loads, and would get more now."""
        return self._makes_room or self._holds_loads_back

    @property
    def disk_is_late(self) -> bool:
        """Whether nobody waits for reads from disk, nor begins any: until the next answer."""
        return self._desk.disk_is_late

    @property
    def awaited_alone(self) -> set[int]:
        """Transfers to a sequence that only waits for them, as long as there is nobody else."""
        running = self._life.running
        if len(running) != 1 or self.num_waiting or running[0].num_in_flight:
            return set()
        return self._kv.transfers_of(running[0].seq_id) if running[0].num_awaited else set()

    def idle_reason(self) -> str:
        """Why nothing is planned, in words, for logs and watchdogs."""
        states: dict[str, int] = {}
        for sequence in self._life.sequences.values():
            states[sequence.state.value] = states.get(sequence.state.value, 0) + 1
        counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        blocked = [s.seq_id for s in self._life.running if s.awaited_spills is not None]
        blocked += [s.seq_id for s in self._life.queue if s.blocked_since is not None]
        waits = {
            s.seq_id: s.wait.filler.seq_id if s.wait.filler else f"transfer {s.wait.transfer_id}"
            for s in self._life.queue
            if s.wait is not None
        }
        return (
            f"sequences: {counts or 'none'}; without room: {blocked}; waiting for others: {waits}; "
            f"transfers under way: {self._desk.num_under_way}"
        )

    # ---- a step --------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Decide the next step; None when there is nothing to compute now.

        Raises:
            RuntimeError: A plan was neither committed nor failed.
        """
        if self._in_flight:
            raise RuntimeError("the last plan is still in flight")
        self._admitter.end_lookups(now)
        self._give_up_transfers(now)
        if self._step_id % _RETRY_STEPS == 0:
            self._admitter.room_changed()
        self._makes_room = self._holds_loads_back = False
        batch = Batch(self._kv, self._budget)
        if self._plan_running(batch, now):
            self._plan_admissions(batch, now)
        return self._plan(batch)

    def load_beside(self, now: float) -> None:
        """While a step is in flight: admit those that load, and begin more of their loads.

        The step in flight is neither waited for nor changed, and :meth:`schedule_ahead` can plan
        the next one without those who only wait for loads. Of one sequence a bounded number of
        blocks is dealt with; :meth:`take_ready` has what to move.

        Raises:
            RuntimeError: No plan is in flight.
        """
        if not self._in_flight:
            raise RuntimeError("no plan is in flight")
        self._admitter.end_lookups(now)
        if self._is_retry_due:
            self._retried_at = self._step_id
            self._admitter.room_changed()
        self._makes_room = self._holds_loads_back = False
        for sequence in self._life.running:
            is_fetching = sequence.state is SequenceState.FETCHING
            if is_fetching and not (sequence.num_awaited or sequence.num_in_flight):
                sequence.only_loads = not self._meet(sequence, now)
        if self.num_waiting and self.num_running < self._max_running:
            self._admit_beside(now)

    def _admit_beside(self, now: float) -> None:
        for sequence in self._admitter.candidates(now, self._step_id):
            tried = self._admitter.admit_beside(
                sequence, now, self._step_id, most_blocks=self._most_blocks
            )
            self._makes_room = tried is Tried.MAKES_ROOM
            if tried is Tried.ADMITTED:
                self._life.admitted(sequence)
                # Its admission has cost as much as a part of its loads, which follow.
                self._holds_loads_back = sequence.only_loads = True
            elif tried is not Tried.WAITS or self.num_running >= self._max_running:
                return

    def _give_up_transfers(self, now: float) -> None:
        """Whoever waits for transfers that are not answered goes on without them."""
        overdue, late = self._kv.overdue(now), self._desk.give_up_reads(now)
        if not (overdue or late):
            return
        self._desk.give_up_spills(overdue)
        for sequence in list(self._life.running):
            is_fetching = sequence.state is SequenceState.FETCHING
            if late and is_fetching and late & self._kv.transfers_of(sequence.seq_id):
                self._life.go_on_without_disk(sequence)
        self._admitter.room_changed()

    def schedule_ahead(self, now: float) -> StepPlan | None:
        """Decide the step after the one in flight, before it is known what that samples.

        Only where it is certain that this step would otherwise be the same: nobody could be
        admitted, and all that run decode, have room, and are in flight, or only wait for their
        loads; and which tokens may come next does not depend on those in flight. Those that end
        with the token in flight by their limit are left out; one that ends otherwise is computed
        for nothing. None where that is not so: the step is then planned by :meth:`schedule`, when
        the one in flight was committed.

        Raises:
            RuntimeError: Not exactly one plan is in flight.
        """
        if len(self._in_flight) != 1:
            raise RuntimeError(f"{len(self._in_flight)} plans are in flight")
        self._admitter.end_lookups(now)
        if self._might_admit() or self._awaits_token():
            return None
        going_on = continued(self._life.running, self._reserve)
        if going_on is None:
            return None
        num_awaiting = sum(sequence.awaits_loads for sequence in self._life.running)
        if self.num_waiting and len(going_on) + num_awaiting < self.num_running:
            return None
        batch = Batch(self._kv, self._budget)
        batch.add_ahead(going_on)
        return self._plan(batch)

    def _might_admit(self) -> bool:
        if not self.num_waiting or self.num_running >= self._max_running or self._makes_room:
            return False
        return self._is_retry_due or not self._admitter.is_settled(self._step_id)

    @property
    def _is_retry_due(self) -> bool:
        """Unless it was made beside the step in flight."""
        return self._step_id % _RETRY_STEPS == 0 and self._retried_at != self._step_id

    def _awaits_token(self) -> bool:
        """Whether the token in flight decides which ones may follow it."""
        return self._life.num_constrained > 0 and any(
            sequence.constraint is not None and sequence.num_in_flight
            for sequence in self._life.running
        )

    def _plan(self, batch: Batch) -> StepPlan | None:
        if not batch.steps:
            return None
        self._step_id += 1
        plan = StepPlan(
            self._step_id,
            tuple(batch.starts),
            tuple(batch.steps),
            tuple(batch.copies),
            self._life.take_ends(),
            self._kv.take_freed(),
            batch.masks() if self._life.num_constrained else {},
        )
        self._in_flight.append((plan, batch))
        return plan

    def _plan_running(self, batch: Batch, now: float) -> bool:
        """Plan the sequences that hold blocks, in rank; whether all of them had room.

        Blocks are seen to before anything of lower rank is planned, and only lower ranks give way,
        so that nobody planned already loses its blocks.
        """
        batch.by_turns = self.num_waiting <= _MAX_PROMPTS_BY_TURNS
        if self._plan_alike(batch):
            return True
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        had_room, is_running = True, SequenceState.RUNNING
        for sequence in self._life.running:  # which may lose some of its end meanwhile
            if sequence.state is not is_running and not self._meet(sequence, now):
                continue
            known = len(sequence.token_ids)
            if known > sequence.capacity_tokens and not self._grow(sequence, known):
                had_room = False
            elif sequence.decodes:
                decodes.append(sequence)
            else:
                prefills.append(sequence)
        batch.add_decodes(decodes, may_be_read=self.num_waiting > 0)
        batch.by_turns &= len(prefills) + self.num_waiting <= _MAX_PROMPTS_BY_TURNS and all(
            sequence.num_computed <= _MAX_HISTORY_BY_TURNS for sequence in prefills
        )
        for sequence in prefills:
            if batch.budget <= 0:
                break
            self._add_prompt(batch, sequence)
        return had_room

    def _plan_alike(self, batch: Batch) -> bool:
        """Plan those that run, if all of them decoded in the last step and have room; whether so.

        Whoever ended, failed or gave up its blocks since then runs no more, and nobody is admitted
        between two steps: then all decode again, without being asked one by one.
        """
        decoded, self._decoded = self._decoded, []
        if not decoded or decoded != self._life.running:
            return False
        for sequence in decoded:
            known = len(sequence.token_ids)
            if known > sequence.capacity_tokens and not self._reserve(sequence, known):
                return False
        batch.add_decodes(decoded, may_be_read=self.num_waiting > 0)
        return True

    def _add_prompt(self, batch: Batch, sequence: Sequence) -> None:
        """Plan a prompt, or what is left of it, as far as this step goes.

        Where prompts are few a small step is not made large by further ones. Of many the device
        makes better use together, and those behind them count.
        """
        if not batch.leaves(sequence):
            sequence.share.charge(batch.add_prefill(sequence))

    def _plan_admissions(self, batch: Batch, now: float) -> None:
        room = self._max_running - self.num_running
        if room <= 0 or batch.budget <= 0 or not self.num_waiting:
            return
        for sequence in self._admitter.candidates(now, self._step_id):
            nobody_runs = not self.num_running
            tried = self._admitter.admit(
                sequence,
                now,
                self._step_id,
                most_blocks=None if nobody_runs else self._most_blocks,
                alone=nobody_runs and not self._life.num_unreleased,
            )
            self._makes_room = tried is Tried.MAKES_ROOM
            if tried is Tried.ADMITTED:
                room -= 1
                self._life.admitted(sequence)
                if sequence.state is SequenceState.RUNNING or self._meet(sequence, now):
                    self._add_prompt(batch, sequence)
            if room <= 0 or batch.budget <= 0 or self._makes_room:
                return

    def _meet(self, sequence: Sequence, now: float) -> bool:
        """Let the two cursors of a sequence that fetches go on; whether the front may compute.

        If it may not, a bounded part of its loads is begun, and what is left follows without being
        decided anew: a few blocks that are left are no sooner computed than loaded.
        """
        sequence.only_loads = False
        meeting = self._kv.advance(sequence.seq_id)
        if meeting.joined:
            self._join(sequence, meeting)
        if meeting.over:
            if sequence.started:
                table = self._kv.block_table(sequence.seq_id)
                sequence.new_block_ids = tuple(table[sequence.num_known_blocks :])
            sequence.compute_limit = UNBOUNDED
            self._life.fetched(sequence, now)
            return True
        claims, sequence.held_back = sequence.held_back, None
        if claims is None or sequence.lost:
            claims = self._policy.meet(meeting, self._workload(sequence, now))
        size = self._kv.block_size
        limits = [claims.compute_tokens, meeting.limit_tokens]
        limits += [meeting.unclaimed[tier][-count] * size for tier, count in claims.loads.items()]
        sequence.compute_limit = min((x for x in limits if x is not None), default=UNBOUNDED)
        may_compute = sequence.compute_limit > sequence.num_computed
        if not may_compute:
            wanted, claims = claims, claims.bounded(self._most_blocks)
            if claims is not wanted:
                sequence.held_back = wanted.without(claims)
                self._holds_loads_back = True
        awaited = 0 if sequence.lost else num_awaited(meeting, claims, size)
        sequence.num_awaited = 0 if may_compute else awaited
        transfers = self._kv.claim(sequence.seq_id, claims.loads)
        self._desk.load(transfers, sequence.receipt, now)
        return may_compute

    def _join(self, sequence: Sequence, meeting: Meeting) -> None:
        """Count what arrived, and let the runner start with it."""
        at, end = sequence.num_computed, sequence.num_prompt_tokens
        sequence.accounting.took(Tier.DEVICE, min(at, end))
        for tier, tokens in meeting.joined:
            at += tokens
            sequence.accounting.took(tier, min(at, end))
        sequence.num_computed = sequence.num_staged = at
        self._life.joined(sequence)

    def _workload(self, sequence: Sequence, now: float) -> Workload:
        """What else is to be computed and loaded. O(running)."""
        others = self._life.queue.num_tokens + sum(
            len(other.token_ids) - max(other.num_computed, other.found_tokens)
            for other in self._life.running
            if other is not sequence
        )
        is_shared = any(other.decodes for other in self._life.running)
        return Workload(
            num_tokens=len(sequence.token_ids),
            step_tokens=self._budget.shared if is_shared else self._budget.alone,
            other_tokens=others,
            lanes=self._desk.lanes(now),
        )

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Room for ``num_tokens`` positions, at the cost of lower ranks; False: not in this step.

        Before anybody is preempted, and after each preemption, spills under way get the chance to
        end: that is bounded, since only those seen at that moment are waited for.
        """
        while not self._reserve(sequence, num_tokens):
            if sequence.awaited_spills is None:
                self._desk.collect_spills()
                sequence.awaited_spills = set(self._desk.spills)
                continue  # planning the spills may itself have dropped what was clean
            sequence.awaited_spills &= self._desk.spills
            if sequence.awaited_spills or self._life.running[-1] is sequence:
                return False
            self.num_preemptions += 1
            self._life.preempt_last()
            sequence.awaited_spills = None
        return True

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow a table to hold ``num_tokens`` positions where there is room now."""
        added = self._kv.reserve(sequence.seq_id, num_tokens)
        if added is None:
            return False
        size = self._kv.block_size
        sequence.new_block_ids += added
        sequence.capacity_tokens = -(-num_tokens // size) * size
        sequence.awaited_spills = None
        return True

    # ---- after a step --------------------------------------------------------------------

    def commit(self, plan: StepPlan, output: StepOutput, now: float) -> list[SequenceEvent]:
        """Take in what a plan computed; one event for each sequence that sampled or ended.

        A failed sequence takes those with it that read its blocks in this very plan: they are
        computed again, without an event. Of a plan made ahead nothing counts for sequences that
        ended with the step before it: their logs may have been cut and continued otherwise since.

        Raises:
            RuntimeError: The plan is not the oldest in flight.
        """
        return self._landing.commit(plan, self._take_in_flight(plan), output, now)

    def fail_step(self, plan: StepPlan, error: BaseException) -> list[SequenceEvent]:
        """The runner raised: every sequence of the plan fails, and nothing it wrote counts.

        Raises:
            RuntimeError: The plan is not the oldest in flight.
        """
        return self._landing.fail(self._take_in_flight(plan), error)

    def _take_in_flight(self, plan: StepPlan) -> list[Sequence]:
        if not self._in_flight or self._in_flight[0][0] is not plan:
            raise RuntimeError(f"plan {plan.step_id} is not in flight, or not the oldest")
        batch = self._in_flight.popleft()[1]
        self._decoded = batch.sequences if batch.only_decodes else []
        return batch.sequences
