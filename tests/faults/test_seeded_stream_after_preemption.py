import pytest

from sessionkv.types import SamplingParams
from tests.builders.checksum import cold_oracle, tokens
from tests.builders.doors import Later
from tests.builders.engine import StepGate, engine_config, open_engine, oracle
from tests.builders.mini_engine import DictDisk, MiniEngine


@pytest.mark.parametrize("tiers", ["none", "host", "disk", "no cache"])
def test_a_preempted_seeded_turn_goes_on_exactly(tiers: str) -> None:
    sampling = SamplingParams(temperature=1.0, seed=11, max_tokens=20)
    mates = SamplingParams(temperature=1.0, seed=12, max_tokens=20)
    engine = MiniEngine(
        10,
        host_blocks=8 if tiers == "host" else 0,
        disk=DictDisk() if tiers == "disk" else None,
        prefix_cache=tiers != "no cache",
    )
    first = engine.submit(tokens(7, start=50), sampling=mates)
    victim = engine.submit(tokens(7), sampling=sampling)
    engine.run()
    assert engine.scheduler.num_preemptions >= 1
    assert engine.outputs[victim] == cold_oracle(tokens(7), 20, sampling)
    assert engine.outputs[first] == cold_oracle(tokens(7, start=50), 20, mates)
    starts = [s for plan in engine.plans for s in plan.starts if s.seq_id == victim]
    assert len(starts) >= 2
    assert {start.num_prompt_tokens for start in starts} == {7}
    recomputed = engine.reports[victim].recomputed_tokens
    assert recomputed > 0 if tiers == "no cache" else recomputed < 20
    engine.assert_idle()


@pytest.mark.parametrize("host_blocks", [0, 8], ids=["recomputed", "fetched"])
def test_seeded_turns_of_a_whole_engine(host_blocks: int) -> None:
    gate = StepGate()
    with open_engine(engine_config(blocks=10, host_blocks=host_blocks), gate=gate) as engine:
        prompts = [tokens(7, start=50), tokens(7)]
        samplings = [
            SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True)
            for seed in (12, 11)
        ]
        turns = []
        for i in range(2):
            turns.append(
                Later(lambda i=i: engine.generate(tokens=prompts[i], sampling=samplings[i]))
            )
            gate.reached()
        engine.await_messages(1)
        gate.open()
        for prompt, sampling, turn in zip(prompts, samplings, turns, strict=True):
            assert list(turn.result().tokens) == oracle(prompt, sampling)
        assert engine.stats()["preemptions"] >= 1
        engine.assert_ledger()
