import pytest

from sessionkv.errors import TurnFailed
from tests.builders.checksum import cold_oracle, tokens
from tests.builders.engine import engine_config, greedy, open_engine, oracle
from tests.builders.mini_engine import MiniEngine


def test_a_prompt_that_gave_nan_leaves_nothing_to_match() -> None:
    broken = [True]
    engine = MiniEngine(16, fail_sequence=lambda seq_id, _: broken[0] and seq_id == 1)
    first = engine.submit(tokens(9), 4)
    engine.run()
    error = engine.ends[first].error
    assert error is not None
    assert error.code == "turn_failed"
    assert "NaN" in str(error)
    assert engine.outputs[first] == []
    assert engine.kv.resident_keys() == ()
    again = engine.submit(tokens(9), 4)
    engine.run()
    assert engine.outputs[again] == cold_oracle(tokens(9), 4)
    assert engine.reports[again].cached_tokens == 0
    engine.assert_idle()


@pytest.mark.parametrize("rest", range(4))
def test_extending_a_prefill_that_ended_past_a_boundary(rest: int) -> None:
    for blocks in (1, 2, 3):
        engine = MiniEngine(16)
        prompt = tokens(4 * blocks + rest)
        engine.submit(prompt, 1)
        engine.run()
        longer = [*tokens(4 * blocks + rest), *tokens(7, start=60)]
        seq_id = engine.submit(longer, 3)
        engine.run()
        assert engine.outputs[seq_id] == cold_oracle(longer, 3)
        assert engine.reports[seq_id].device_tokens == len(prompt)
        engine.assert_idle()


def test_nan_while_decoding_keeps_what_was_committed_before() -> None:
    engine = MiniEngine(16, fail_sequence=lambda seq_id, known: seq_id == 1 and len(known) == 12)
    prompt = tokens(9)
    first = engine.submit(prompt, 8)
    engine.run()
    assert engine.ends[first].error is not None
    assert engine.outputs[first] == cold_oracle(prompt, 3)
    longer = prompt + engine.outputs[first]
    again = engine.submit(longer, 3)
    engine.run()
    assert engine.outputs[again] == cold_oracle(longer, 3)
    assert engine.reports[again].device_tokens == 11
    engine.assert_idle()


def test_readers_of_a_failed_filler_in_the_same_plan_are_computed_again() -> None:
    engine = MiniEngine(32, fail_sequence=lambda seq_id, _: seq_id == 1)
    prompt = tokens(18)
    ids = [engine.submit([*prompt, i], 3) for i in range(4)]
    engine.run()
    assert engine.ends[ids[0]].error is not None
    for i, seq_id in enumerate(ids[1:], 1):
        assert engine.outputs[seq_id] == cold_oracle([*prompt, i], 3)
    # Nothing of the failed one was reused, and the rest was shared anew.
    assert [engine.reports[i].computed_tokens for i in ids[1:]] == [19, 3, 3]
    engine.assert_idle()


def test_a_step_that_raises_leaves_nothing_to_match() -> None:
    engine = MiniEngine(32, fail_step=lambda plan: plan.step_id == 1)
    first, second = engine.submit(tokens(9), 3), engine.submit(tokens(9), 3)
    engine.run()
    assert engine.ends[first].error is not None
    assert engine.ends[second].error is not None
    again = engine.submit(tokens(9), 3)
    engine.run()
    assert engine.outputs[again] == cold_oracle(tokens(9), 3)
    assert engine.reports[again].cached_tokens == 0
    engine.assert_idle()


@pytest.mark.parametrize("fault", ["fail_sequence", "fail_step"])
def test_a_turn_that_failed_leaves_its_session_as_it_was(fault: str) -> None:
    broken = [True]
    with open_engine(runner={fault: lambda *args: broken[0]}) as engine:
        session = engine.open("a")
        with pytest.raises(TurnFailed):
            session.turn(tokens=tokens(9), sampling=greedy(4))
        assert (session.info().turns, session.info().tokens) == (0, 0)
        broken[0] = False
        result = session.turn(tokens=tokens(9), sampling=greedy(4))
        assert list(result.tokens) == oracle(tokens(9), greedy(4))
        assert result.cache.cached_tokens == 0
        broken[0] = True
        with pytest.raises(TurnFailed):
            session.turn(tokens=[7], sampling=greedy(4))
        assert (session.info().turns, session.info().tokens) == (1, 13)
        broken[0] = False
        log = [*tokens(9), *result.tokens]
        result = session.turn(tokens=[7], sampling=greedy(4))
        assert list(result.tokens) == oracle([*log, 7], greedy(4))
        assert result.cache.device_tokens == 12
        engine.assert_ledger()


@pytest.mark.parametrize("rest", range(4))
def test_extending_sessions_whose_last_turn_ended_past_a_boundary(rest: int) -> None:
    with open_engine(engine_config(blocks=32)) as engine:
        for blocks in (1, 2, 3):
            log = tokens(4 * blocks + rest, start=100 * blocks)
            session = engine.open(f"s{blocks}")
            log += session.turn(tokens=log, sampling=greedy(1)).tokens
            delta = tokens(7, start=60)
            result = session.turn(tokens=delta, sampling=greedy(3))
            assert list(result.tokens) == oracle([*log, *delta], greedy(3))
            assert result.cache.device_tokens == len(log) - 1
        engine.assert_ledger()
