from tests.builders.checksum import cold_oracle, tokens
from tests.builders.doors import Later
from tests.builders.engine import StepGate, engine_config, greedy, open_engine, oracle
from tests.builders.mini_engine import MiniEngine


def test_a_block_with_a_new_owner_is_not_found_under_its_old_hash() -> None:
    engine = MiniEngine(7)
    cached, unrelated = tokens(8), tokens(16, start=50)
    first = engine.submit(cached, 1)
    engine.run()
    chain = engine.kv.resident_keys()
    assert len(chain) == 2
    other = engine.submit(unrelated, 9)
    while not engine.outputs[other]:
        engine.step()
    again = engine.submit(cached, 1)
    while engine.scheduler.num_running or engine.scheduler.num_waiting:
        engine.step()
        engine.kv.check()
    assert engine.outputs[first] == engine.outputs[again] == cold_oracle(cached, 1)
    assert engine.outputs[other] == cold_oracle(unrelated, 9)
    engine.assert_idle()


def test_eviction_while_the_new_owner_decodes_makes_a_miss() -> None:
    engine = MiniEngine(6)
    cached, unrelated = tokens(8), tokens(16, start=50)
    engine.submit(cached, 1)
    engine.run()
    other = engine.submit(unrelated, 8)
    again = engine.submit(cached, 1)
    engine.run()
    assert engine.outputs[again] == cold_oracle(cached, 1)
    assert engine.outputs[other] == cold_oracle(unrelated, 8)
    # The other took all six blocks.
    assert engine.reports[again].cached_tokens == 0
    engine.assert_idle()


def test_in_a_whole_engine_while_the_new_owner_decodes() -> None:
    cached, unrelated = tokens(8), tokens(16, start=50)
    gate = StepGate(lambda plan: any(len(step.token_ids) == 1 for step in plan.steps))
    gate.open()
    with open_engine(engine_config(blocks=7), gate=lambda plan: gate(plan)) as engine:
        engine.generate(tokens=cached, sampling=greedy(1))
        gate = StepGate(gate.when)
        other = Later(lambda: engine.generate(tokens=unrelated, sampling=greedy(9)))
        gate.reached()
        again = Later(lambda: engine.generate(tokens=cached, sampling=greedy(5)))
        engine.await_messages(1)
        gate.open()
        assert list(other.result().tokens) == oracle(unrelated, greedy(9))
        assert list(again.result().tokens) == oracle(cached, greedy(5))
        engine.assert_ledger()
