from tests.builders.checksum import cold_oracle, tokens
from tests.builders.mini_engine import MiniEngine


def test_cached_tokens_are_those_of_the_moment_it_runs() -> None:
    engine = MiniEngine(6)
    cached = tokens(12)
    engine.submit(cached, 1)
    engine.run()
    job = tokens(20, start=50)
    busy = engine.submit(job, 4, priority=1)
    engine.step()
    late = engine.submit([*cached, 1], 3)
    engine.run()
    assert engine.outputs[busy] == cold_oracle(job, 4)
    assert engine.outputs[late] == cold_oracle([*cached, 1], 3)
    # The job took all six blocks, so none of the cached ones was left.
    assert engine.reports[late].cached_tokens == 0
    assert engine.reports[late].computed_tokens == 13
    engine.assert_idle()
