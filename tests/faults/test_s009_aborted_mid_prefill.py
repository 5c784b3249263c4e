import pytest

from tests.builders.checksum import cold_oracle, tokens
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
