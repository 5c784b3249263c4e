import pytest

from tests.builders.checksum import cold_oracle, tokens
from tests.builders.engine import StepGate, engine_config, greedy, open_engine, oracle
from tests.builders.mini_engine import MiniEngine


@pytest.mark.parametrize("when", ["between steps", "during a step"])
def test_chunks_of_an_aborted_prompt_are_used_only_while_cached(when: str) -> None:
    prompt = tokens(16)
    engine = MiniEngine(6, step_tokens=4)
    seq_id = engine.submit(prompt, 3)
    engine.step()
    if when == "between steps":
        engine.step()
        engine.cancel(seq_id)
    else:
        engine.runner._gate = lambda plan: engine.cancel(seq_id)
        engine.step()
        engine.runner._gate = None
    engine.kv.check()
    again = engine.submit(prompt, 3)
    engine.run()
    assert engine.outputs[again] == cold_oracle(prompt, 3)
    assert engine.reports[again].device_tokens == 8

    filler = engine.submit(tokens(20, start=50), 1)
    engine.run()
    assert engine.outputs[filler] == cold_oracle(tokens(20, start=50), 1)
    last = engine.submit(prompt, 3)
    engine.run()
    assert engine.outputs[last] == cold_oracle(prompt, 3)
    engine.assert_idle()


def test_a_session_whose_first_turn_was_cancelled_between_its_chunks() -> None:
    prompt = tokens(16)
    gate = StepGate(lambda plan: plan.step_id == 2)
    config = engine_config(blocks=6, step_tokens=4)
    with open_engine(config, gate=gate) as engine:
        session = engine.open("a")
        stream = session.stream(tokens=prompt, sampling=greedy(3))
        gate.reached()
        stream.close()
        engine.await_messages(1)
        gate.open()
        engine.generate(tokens=tokens(20, start=50), sampling=greedy(1))
        assert session.info().turns == 0
        result = session.turn(tokens=prompt, sampling=greedy(3))
        assert list(result.tokens) == oracle(prompt, greedy(3))
        assert result.cache.device_tokens == 4  # the other prompt took all blocks but one
        engine.assert_ledger()


def test_chunks_computed_before_the_cancel_are_there_for_the_next_try() -> None:
    prompt = tokens(16)
    gate = StepGate(lambda plan: plan.step_id == 3)
    with open_engine(engine_config(step_tokens=4), gate=gate) as engine:
        session = engine.open("a")
        stream = session.stream(tokens=prompt, sampling=greedy(3))
        gate.reached()
        stream.close()
        engine.await_messages(1)
        gate.open()
        result = session.turn(tokens=prompt, sampling=greedy(3))
        assert list(result.tokens) == oracle(prompt, greedy(3))
        assert result.cache.device_tokens == 12
        engine.assert_ledger()
