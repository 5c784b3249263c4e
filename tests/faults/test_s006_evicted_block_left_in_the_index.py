from tests.builders.checksum import cold_oracle, tokens
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
    # Only the head of its chain had stayed, where anything had.
    assert engine.reports[again].cached_tokens in (0, 4)
    engine.assert_idle()
