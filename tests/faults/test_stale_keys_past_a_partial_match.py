import pytest

from tests.builders.checksum import cold_oracle, tokens
from tests.builders.engine import engine_config, greedy, open_engine, oracle
from tests.builders.mini_engine import MiniEngine


@pytest.mark.parametrize("edited", range(14))
def test_nothing_past_the_common_prefix_is_read(edited: int) -> None:
    engine = MiniEngine(12)
    first = tokens(14)
    engine.submit(first, 3)
    engine.run()
    second = [*first]
    second[edited] = 99
    seq_id = engine.submit(second, 3)
    engine.run()
    assert engine.outputs[seq_id] == cold_oracle(second, 3)
    assert engine.reports[seq_id].device_tokens == edited
    again = engine.submit(first, 3)
    engine.run()
    assert engine.outputs[again] == cold_oracle(first, 3)
    assert engine.reports[again].device_tokens == 13
    engine.assert_idle()


def test_a_session_taken_back_and_asked_otherwise() -> None:
    with open_engine(engine_config(blocks=100)) as engine:
        session = engine.open("a")
        first = tokens(14)
        session.turn(tokens=first, sampling=greedy(3))
        for edited in range(1, 14):
            session.rewind()
            second = [*first]
            second[edited] = 99
            result = session.turn(tokens=second, sampling=greedy(3))
            assert list(result.tokens) == oracle(second, greedy(3))
            assert result.cache.device_tokens == edited
        engine.assert_ledger()
