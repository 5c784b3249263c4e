from sessionkv import MissReason
from tests.builders.checksum import cold_oracle, tokens
from tests.builders.doors import Later
from tests.builders.engine import StepGate, engine_config, greedy, open_engine, oracle
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


def test_a_session_that_waited_while_its_blocks_went() -> None:
    gate = StepGate()
    gate.open()
    with open_engine(engine_config(blocks=6), gate=lambda plan: gate(plan)) as engine:
        first = engine.open("a").turn(tokens=tokens(12), sampling=greedy(1))
        gate = StepGate()
        job = Later(lambda: engine.generate(tokens=tokens(20, start=50), sampling=greedy(4)))
        gate.reached()
        late = Later(lambda: engine.session("a").turn(tokens=[1], sampling=greedy(3)))
        engine.await_messages(1)
        gate.open()
        assert list(job.result().tokens) == oracle(tokens(20, start=50), greedy(4))
        result = late.result()
        assert list(result.tokens) == oracle([*tokens(12), *first.tokens, 1], greedy(3))
        assert result.cache.cached_tokens == 0
        assert result.cache.miss.reason is MissReason.EVICTED
        engine.assert_ledger()
