import random

import pytest

from sessionkv.types import FinishReason, MoveOutcome, SamplingParams
from tests.builders.checksum import cold_oracle, tokens
from tests.builders.mini_engine import DictDisk, MiniEngine


def test_one_prompt_cold_then_warm() -> None:
    engine = MiniEngine(16)
    prompt = tokens(10)
    want = cold_oracle(prompt, 4)
    first = engine.submit(prompt)
    engine.run()
    second = engine.submit(prompt)
    engine.run()
    assert engine.outputs == {first: want, second: want}
    assert engine.reports[first].cached_tokens == 0
    assert engine.reports[second].device_tokens == 9
    engine.assert_idle()


def test_next_turn_reuses_prompt_and_reply() -> None:
    engine = MiniEngine(16)
    first = engine.submit(tokens(10), 5)
    engine.run()
    prompt = [*tokens(10), *engine.outputs[first], 77, 78]
    second = engine.submit(prompt, 5)
    engine.run()
    assert engine.outputs[second] == cold_oracle(prompt, 5)
    # The last token of the reply has no KV yet.
    assert engine.reports[second].device_tokens == 14
    engine.assert_idle()


def test_eight_identical_cold_prompts_compute_their_prefix_once() -> None:
    engine = MiniEngine(64, step_tokens=16)
    prompt = tokens(50)
    ids = [engine.submit(prompt, 3) for _ in range(8)]
    engine.run()
    want = cold_oracle(prompt, 3)
    assert [engine.outputs[i] for i in ids] == [want] * 8
    computed = [engine.reports[i].computed_tokens for i in ids]
    # Whole blocks are shared; the tail after the last of them is each one's own.
    assert computed == [50, *[2] * 7]
    engine.assert_idle()


@pytest.mark.parametrize("cancel_after", [0, 1, 2, 3])
def test_cancelling_the_filler_leaves_the_others_right(cancel_after: int) -> None:
    engine = MiniEngine(64, step_tokens=16)
    prompt = tokens(50)
    ids = [engine.submit(prompt, 3) for _ in range(8)]
    for _ in range(cancel_after):
        engine.step()
    assert engine.cancel(ids[0])
    engine.run()
    want = cold_oracle(prompt, 3)
    assert [engine.outputs[i] for i in ids[1:]] == [want] * 7
    computed = sum(engine.reports[i].computed_tokens for i in ids[1:])
    assert computed == 50 - 16 * cancel_after + 2 * 6
    engine.assert_idle()


def test_host_and_disk_bring_back_what_the_device_lost() -> None:
    engine = MiniEngine(10, host_blocks=15, disk=DictDisk())
    prompts = [tokens(17, start=100 * i) for i in range(5)]
    for prompt in prompts:
        engine.submit(prompt, 3)
        engine.run()
    for prompt in reversed(prompts):  # the last ones are still on the device, then in the host
        seq_id = engine.submit(prompt, 3)
        engine.run()
        assert engine.outputs[seq_id] == cold_oracle(prompt, 3)
        assert engine.reports[seq_id].computed_tokens == 1
    reports = engine.reports.values()
    assert sum(r.host_tokens for r in reports) > 0
    assert sum(r.disk_tokens for r in reports) > 0
    engine.assert_idle()


def test_a_stop_string_found_later_cuts_the_tail() -> None:
    engine = MiniEngine(16)
    prompt = tokens(9)
    seq_id = engine.submit(prompt, 20)
    for _ in range(8):
        engine.step()
    event = engine.scheduler.cancel_at(seq_id, 4)
    assert event is not None
    assert event.finish is FinishReason.STOP
    engine.finish(event)
    assert engine.outputs[seq_id] == cold_oracle(prompt, 4)
    follow = [*prompt, *engine.outputs[seq_id], 50, 51, 52]
    second = engine.submit(follow, 4)
    engine.run()
    assert engine.outputs[second] == cold_oracle(follow, 4)
    assert engine.reports[second].device_tokens == 13
    engine.assert_idle()


class Workload:
    """Random prompts with shared prefixes, forks, follow-ups, cancels and late transfers."""

    def __init__(self, seed: int, engine: MiniEngine) -> None:
        self.rng = random.Random(seed)
        self.engine = engine
        self.prompts: dict[int, list[int]] = {}
        self.samplings: dict[int, SamplingParams] = {}
        self.dropped: set[int] = set()

    def a_prompt(self, longest: int) -> list[int]:
        rng = self.rng
        past = [p + self.engine.outputs[i] for i, p in self.prompts.items()]
        if past and rng.random() < 0.7:
            base = rng.choice(past)
            prompt = base[: rng.randint(1, len(base))] if rng.random() < 0.5 else list(base)
        else:
            prompt = tokens(rng.randint(1, 12), start=rng.choice((0, 0, 200)))
        prompt += [rng.randrange(5) for _ in range(rng.randint(0, 6))]
        return prompt[:longest]

    def submit(self, longest: int) -> None:
        rng = self.rng
        prompt = self.a_prompt(longest)
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(9), max_tokens=rng.randint(1, 9)
        )
        seq_id = self.engine.submit(
            prompt,
            sampling=sampling,
            priority=rng.choice((0, 0, 1)),
            use_cache=rng.random() < 0.95,
            group=("local", rng.choice("abc")),
        )
        self.prompts[seq_id] = prompt
        self.samplings[seq_id] = sampling

    def run(self, requests: int, longest: int, *, check: bool = True) -> None:
        rng, engine = self.rng, self.engine
        todo = requests
        for _ in range(requests * 200):
            if todo and rng.random() < 0.4:
                self.submit(longest)
                todo -= 1
            if rng.random() < 0.05 and self.prompts:
                seq_id = rng.choice(list(self.prompts))
                if engine.cancel(seq_id):
                    self.dropped.add(seq_id)
            engine.hold_transfers = rng.random() < 0.5
            busy = engine.step()
            if engine.in_flight and rng.random() < 0.5:
                rng.shuffle(engine.in_flight)
                engine.end_transfers(1)
            if check:
                engine.kv.check()
            if not todo and not busy and not engine.scheduler.num_running and not engine.in_flight:
                break
        engine.hold_transfers = False
        engine.run()
        self.verify()

    def verify(self) -> None:
        for seq_id, prompt in self.prompts.items():
            got, sampling = self.engine.outputs[seq_id], self.samplings[seq_id]
            want = cold_oracle(prompt, sampling.max_tokens or 0, sampling)
            end = self.engine.ends.get(seq_id)
            if seq_id in self.dropped or (end is not None and end.error is not None):
                assert got == want[: len(got)], seq_id
                continue
            assert got == want, seq_id
            report = self.engine.reports[seq_id]
            assert report.prompt_tokens == len(prompt)
            assert report.cached_tokens + report.computed_tokens == len(prompt)
            assert report.computed_tokens >= 1
        self.engine.assert_idle()


TIERS = [
    {"host_blocks": 0, "disk": None},
    {"host_blocks": 6, "disk": None},
    {"host_blocks": 6, "disk": 40},
    {"host_blocks": 0, "disk": 10},
    {"host_blocks": 30, "disk": 1000},
]


@pytest.mark.parametrize("plans_ahead", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("tiers", range(len(TIERS)))
def test_random_workloads_equal_the_cold_oracle(tiers: int, seed: int, plans_ahead: bool) -> None:
    choice = TIERS[tiers]
    disk = DictDisk(choice["disk"]) if choice["disk"] else None
    engine = MiniEngine(
        12,
        host_blocks=choice["host_blocks"],
        disk=disk,
        step_tokens=random.Random(seed).choice((5, 9, 32)),
        plans_ahead=plans_ahead,
    )
    Workload(seed, engine).run(40, longest=36)


@pytest.mark.parametrize("plans_ahead", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize("seed", range(20))
def test_random_workloads_with_failures_equal_the_cold_oracle(seed: int, plans_ahead: bool) -> None:
    chance = random.Random(seed + 1000)
    outcomes = [outcome for outcome in MoveOutcome if outcome is not MoveOutcome.OK]
    engine = MiniEngine(
        10,
        host_blocks=6,
        disk=DictDisk(40),
        step_tokens=8,
        fault=lambda _, move: chance.choice(outcomes) if chance.random() < 0.2 else None,
        fail_sequence=lambda seq_id, known: chance.random() < 0.03,
        fail_step=lambda plan: chance.random() < 0.02,
        plans_ahead=plans_ahead,
    )
    workload = Workload(seed, engine)
    workload.run(40, longest=27)
    assert any(end.error is not None for end in engine.ends.values())


@pytest.mark.parametrize(("host_blocks", "seed"), [(4, 16), (4, 23), (4, 36), (4, 48)])
def test_an_idle_cache_comes_to_rest(host_blocks: int, seed: int) -> None:
    # Two cold tails on the device used to push each other's copy out of a small host tier.
    engine = MiniEngine(20, host_blocks=host_blocks, disk=DictDisk(40), step_tokens=32)
    Workload(seed, engine).run(20, longest=27)
    assert engine.step() is False
