"""What is copied down is what steps that succeeded wrote, and stays until the copy has ended."""

from __future__ import annotations

import threading

from sessionkv.types import BlockRecord, StepPlan, Transfer
from tests.builders.checksum import tokens
from tests.builders.engine import StepGate, engine_config, greedy, open_engine, oracle
from tests.builders.store import Gates

LONG = greedy(20)


def test_a_block_is_not_reused_while_its_copy_waits() -> None:
    """The copy of a cold session is held; work that wants its blocks waits and both are right."""
    gates = Gates("before_d2h")
    config = engine_config(blocks=24, host_blocks=64)
    with open_engine(config, gates=gates) as engine:
        first = tokens(41)
        reply = engine.open("cold").turn(tokens=first, sampling=LONG).tokens
        assert list(reply) == oracle(first, LONG)
        second = tokens(45, start=300)
        answered: list[list[int]] = []

        def work() -> None:
            answered.append(list(engine.open("busy").turn(tokens=second, sampling=LONG).tokens))

        thread = threading.Thread(target=work)
        thread.start()
        assert gates.reached["before_d2h"].wait(30)
        # Whatever could be done without the blocks that are being copied has been done.
        assert not answered
        gates.open("before_d2h")
        thread.join(60)
        assert answered == [oracle(second, LONG)]
        history = [*first, *reply]
        result = engine.session("cold").turn(tokens=[7], sampling=LONG)
        assert result.cache.host_tokens > 0
        assert list(result.tokens) == oracle([*history, 7], LONG)
        engine.assert_ledger()


def test_a_block_that_a_step_still_writes_is_not_copied() -> None:
    """While a step stands, blocks of earlier steps go down; the one being written does not."""
    plans: list[StepPlan] = []

    def writes_slot_49(plan: StepPlan) -> bool:
        plans.append(plan)
        return any(step.start == 49 for step in plan.steps)

    gate = StepGate(writes_slot_49)
    with open_engine(engine_config(blocks=24, host_blocks=64), gate=gate) as engine:
        moved: list[BlockRecord] = []
        submit = engine.parts.mover.submit

        def watched(transfer: Transfer) -> None:
            moved.extend(move.record for move in transfer.moves)
            submit(transfer)

        engine.parts.mover.submit = watched
        cold = tokens(30, start=600)
        reply = engine.open("cold").turn(tokens=cold, sampling=greedy(1)).tokens
        prompt = tokens(45)
        stream = engine.open("busy").stream(tokens=prompt, sampling=LONG)
        gate.reached()
        [step] = plans[-1].steps
        chain = engine.parts.scheduler.get(step.seq_id).chain
        assert moved
        assert chain.parent(49 // 4) not in {record.parent for record in moved}
        gate.open()
        for _ in stream:
            pass
        assert stream.result is not None
        assert list(stream.result.tokens) == oracle(prompt, LONG)
        # Through the host and back: every byte is read again to answer.
        third = tokens(92, start=900)
        engine.open("third").turn(tokens=third, sampling=greedy(1))
        log = [*prompt, *stream.result.tokens]
        again = engine.session("busy").turn(tokens=[3], sampling=LONG)
        assert again.cache.host_tokens > 0
        assert list(again.tokens) == oracle([*log, 3], LONG)
        last = engine.session("cold").turn(tokens=[3], sampling=greedy(4))
        assert list(last.tokens) == oracle([*cold, *reply, 3], greedy(4))
        engine.assert_ledger()
