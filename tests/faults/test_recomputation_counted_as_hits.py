from tests.builders.checksum import cold_oracle, tokens
from tests.builders.doors import Later
from tests.builders.engine import StepGate, engine_config, greedy, open_engine, oracle
from tests.builders.mini_engine import MiniEngine


def test_a_cold_prompt_reports_nothing_cached() -> None:
    engine = MiniEngine(16)
    seq_id = engine.submit(tokens(9), 3)
    engine.run()
    report = engine.reports[seq_id]
    assert (report.cached_tokens, report.computed_tokens, report.recomputed_tokens) == (0, 9, 0)
    counters = engine.kv.usage().counters
    assert (counters.looked_up, counters.hit) == (2, 0)


def test_a_preempted_turn_reports_its_first_admission() -> None:
    engine = MiniEngine(6)
    prompts = [tokens(7), tokens(7, start=50)]
    ids = [engine.submit(prompt, 12) for prompt in prompts]
    engine.run()
    assert engine.scheduler.num_preemptions == 1
    for seq_id, prompt in zip(ids, prompts, strict=True):
        assert engine.outputs[seq_id] == cold_oracle(prompt, 12)
        report = engine.reports[seq_id]
        assert (report.prompt_tokens, report.cached_tokens, report.computed_tokens) == (7, 0, 7)
    assert engine.reports[ids[0]].recomputed_tokens == 0
    assert engine.reports[ids[1]].recomputed_tokens > 0
    counters = engine.kv.usage().counters
    assert (counters.looked_up, counters.hit) == (2, 0)
    engine.assert_idle()


def test_reports_and_hit_rate_of_a_whole_engine_leave_out_what_is_done_again() -> None:
    gate = StepGate()
    with open_engine(engine_config(blocks=6), gate=gate) as engine:
        prompts = [tokens(7), tokens(7, start=50)]
        turns = [Later(lambda: engine.generate(tokens=prompts[0], sampling=greedy(12)))]
        gate.reached()
        turns.append(Later(lambda: engine.generate(tokens=prompts[1], sampling=greedy(12))))
        engine.await_messages(1)
        gate.open()
        for prompt, turn in zip(prompts, turns, strict=True):
            result = turn.result()
            assert list(result.tokens) == oracle(prompt, greedy(12))
            assert (result.cache.cached_tokens, result.cache.computed_tokens) == (0, 7)
        stats = engine.stats()
        assert stats["preemptions"] == 1
        assert stats["recomputed_tokens"] > 0
        cache = stats["prefix_cache"]
        assert (cache["queries_tokens"], cache["hits_tokens"]) == (14, 0)
        assert (cache["queries_blocks"], cache["hits_blocks"]) == (2, 0)
        engine.assert_ledger()
