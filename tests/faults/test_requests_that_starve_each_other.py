from pathlib import Path

import pytest

from sessionkv.errors import NeverFits, PromptTooLong
from tests.builders.checksum import cold_oracle, tokens
from tests.builders.doors import Later
from tests.builders.engine import StepGate, engine_config, greedy, open_engine, oracle
from tests.builders.mini_engine import DictDisk, MiniEngine


def test_what_can_never_fit_is_refused_at_once() -> None:
    engine = MiniEngine(5)
    with pytest.raises(NeverFits) as raised:
        engine.submit(tokens(20), 2)
    assert raised.value.details == {"needed_blocks": 6, "available_blocks": 5}
    engine.submit(tokens(20), 1)
    engine.run()
    engine.assert_idle()


def test_two_that_exceed_the_pool_finish_one_after_the_other() -> None:
    engine = MiniEngine(5)
    prompts = [tokens(9), tokens(9, start=50)]
    ids = [engine.submit(prompt, 8) for prompt in prompts]
    engine.run()
    for seq_id, prompt in zip(ids, prompts, strict=True):
        assert engine.outputs[seq_id] == cold_oracle(prompt, 8)
    engine.assert_idle()


@pytest.mark.parametrize("start", [0, 1, 2])
def test_many_that_grow_together_all_finish(start: int) -> None:
    engine = MiniEngine(5, host_blocks=4 * (start > 0), disk=DictDisk() if start > 1 else None)
    prompts = [tokens(3 + i, start=40 * i) for i in range(6)]
    ids = [engine.submit(prompt, 11) for prompt in prompts]
    engine.run()
    for seq_id, prompt in zip(ids, prompts, strict=True):
        assert engine.outputs[seq_id] == cold_oracle(prompt, 11)
    engine.assert_idle()


def test_one_without_blocks_ahead_of_one_with_restored_blocks() -> None:
    engine = MiniEngine(5, host_blocks=8)
    restored, big = tokens(12), tokens(17, start=50)
    engine.submit(restored, 1)
    engine.run()
    engine.submit(tokens(19, start=200), 1)
    engine.run()
    busy = engine.submit(tokens(3, start=90), 10)
    engine.step()
    first = engine.submit(big, 3)
    second = engine.submit([*restored, 5], 3)
    engine.run()
    assert engine.outputs[busy] == cold_oracle(tokens(3, start=90), 10)
    assert engine.outputs[first] == cold_oracle(big, 3)
    assert engine.outputs[second] == cold_oracle([*restored, 5], 3)
    engine.assert_idle()


def test_a_prompt_cached_up_to_the_last_block_of_a_full_pool_still_fits() -> None:
    # Its tail is to be copied while the source is held: one block more than there are.
    engine = MiniEngine(5)
    engine.submit(tokens(20), 1)
    engine.run()
    seq_id = engine.submit(tokens(20), 1)
    engine.run()
    assert engine.outputs[seq_id] == cold_oracle(tokens(20), 1)
    engine.assert_idle()


def test_a_whole_engine_refuses_what_never_fits_and_finishes_the_rest() -> None:
    gate = StepGate()
    with open_engine(engine_config(blocks=5), gate=gate) as engine:
        session = engine.open("a")
        # The window shrinks to what the pool holds: five blocks, and a last token without KV.
        with pytest.raises(PromptTooLong) as raised:
            session.turn(tokens=tokens(20), sampling=greedy(2))
        assert raised.value.details == {"n_prompt": 20, "max_tokens": 2, "n_ctx": 21}
        assert session.info().turns == 0
        prompts = [tokens(9, start=50 * i) for i in range(4)]

        def ask(prompt: list[int]) -> Later:
            return Later(lambda: engine.generate(tokens=prompt, sampling=greedy(8)))

        turns = [ask(prompts[0])]
        gate.reached()
        turns += [ask(prompt) for prompt in prompts[1:]]
        engine.await_messages(3)
        gate.open()
        for prompt, turn in zip(prompts, turns, strict=True):
            assert list(turn.result().tokens) == oracle(prompt, greedy(8))
        engine.assert_ledger()


def test_a_session_with_restored_blocks_behind_one_without_any(tmp_path: Path) -> None:
    gate = StepGate()
    gate.open()
    config = engine_config(tmp_path, blocks=6, disk_bytes=50_000_000)
    with open_engine(config, gate=lambda plan: gate(plan)) as engine:
        log = tokens(12)
        log += engine.open("b").turn(tokens=log, sampling=greedy(2)).tokens
        engine.generate(tokens=tokens(22, start=50), sampling=greedy(1))
        gate = StepGate()
        first = Later(lambda: engine.generate(tokens=tokens(3, start=200), sampling=greedy(4)))
        gate.reached()
        big = Later(
            lambda: engine.generate(tokens=tokens(18, start=300), sampling=greedy(6), priority=1)
        )
        engine.await_messages(1)
        restored = Later(lambda: engine.session("b").turn(tokens=[7], sampling=greedy(6)))
        engine.await_messages(2)
        gate.open()
        assert list(first.result().tokens) == oracle(tokens(3, start=200), greedy(4))
        assert list(big.result().tokens) == oracle(tokens(18, start=300), greedy(6))
        assert list(restored.result().tokens) == oracle([*log, 7], greedy(6))
        engine.assert_ledger()
