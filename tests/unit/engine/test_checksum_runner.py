from collections.abc import Sequence

import pytest

from sessionkv.engine.checksum_runner import CELL_BYTES, ChecksumRunner, PlanError
from sessionkv.types import BlockCopy, SamplingParams, SequenceStart, SequenceStep, StepPlan
from tests.builders.checksum import GREEDY, cold_oracle, tokens

B = 4


def start(
    seq_id: int,
    prompt: Sequence[int],
    blocks: tuple[int, ...] = (),
    cached: int = 0,
    *,
    sampling: SamplingParams = GREEDY,
    stops: frozenset[int] = frozenset(),
    num_prompt: int | None = None,
) -> SequenceStart:
    num_prompt = len(prompt) if num_prompt is None else num_prompt
    return SequenceStart(seq_id, blocks, cached, prompt, num_prompt, sampling, stops)


def step(
    seq_id: int,
    prompt: Sequence[int],
    first: int,
    end: int,
    new: tuple[int, ...] = (),
) -> SequenceStep:
    return SequenceStep(seq_id, first, tuple(prompt[first:end]), new, end == len(prompt))


def one(runner: ChecksumRunner, prompt: list[int], blocks: tuple[int, ...], step_id: int) -> int:
    plan = StepPlan(step_id, (start(1, prompt, blocks),), (step(1, prompt, 0, len(prompt)),))
    return runner.execute(plan).sampled[1].token_id


@pytest.mark.parametrize("full_read", [True, False])
def test_prefill_and_decode_equal_the_oracle(full_read: bool) -> None:
    runner = ChecksumRunner(8, B, full_read=full_read)
    ids = tokens(6)
    want = cold_oracle(ids, 6)
    output = runner.execute(StepPlan(0, (start(1, ids, (5, 2)),), (step(1, ids, 0, 6),)))
    got = [output.sampled[1].token_id]
    for i in range(1, 6):
        ids.append(got[-1])
        new = (7,) if len(ids) == 9 else ()
        output = runner.execute(StepPlan(i, (), (step(1, ids, len(ids) - 1, len(ids), new),)))
        got.append(output.sampled[1].token_id)
    assert got == want


def test_chunks_of_any_size_give_the_same_token() -> None:
    ids = tokens(11)
    for chunk in range(1, 12):
        runner = ChecksumRunner(3, B)
        first = (start(1, ids, (2, 0, 1)),)
        got = None
        for i, at in enumerate(range(0, 11, chunk)):
            plan = StepPlan(i, first if i == 0 else (), (step(1, ids, at, min(11, at + chunk)),))
            got = runner.execute(plan).sampled.get(1)
        assert got is not None
        assert [got.token_id] == cold_oracle(ids, 1)


@pytest.mark.parametrize("position", range(7))
def test_every_wrong_cell_changes_the_answer(position: int) -> None:
    ids = tokens(8)
    runner = ChecksumRunner(2, B)
    runner.execute(StepPlan(0, (start(1, ids[:7], (1, 0)),), (step(1, ids[:7], 0, 7),)))
    at = position % B * CELL_BYTES
    runner.block_view((1, 0)[position // B])[at] ^= 1
    plan = StepPlan(1, (start(2, ids, (1, 0), 7),), (step(2, ids, 7, 8),), ends=(1,))
    assert [runner.execute(plan).sampled[2].token_id] != cold_oracle(ids, 1)


@pytest.mark.parametrize("table", [(1, 0, 2), (0, 2, 1), (0, 3, 2), (2, 1, 0), (3, 1, 2)])
def test_a_wrong_block_changes_the_answer(table: tuple[int, ...]) -> None:
    ids = tokens(13)
    runner = ChecksumRunner(5, B)
    runner.execute(StepPlan(0, (start(1, ids[:12], (0, 1, 2)),), (step(1, ids[:12], 0, 12),)))
    other = tokens(4, start=4)
    runner.execute(StepPlan(1, (start(3, other, (3,)),), (step(3, other, 0, 4),), ends=(1,)))
    plan = StepPlan(2, (start(2, ids, table, 12),), (step(2, ids, 12, 13, (4,)),), ends=(3,))
    assert [runner.execute(plan).sampled[2].token_id] != cold_oracle(ids, 1)


def test_copy_on_write_and_in_plan_sharing() -> None:
    ids, fork = tokens(8), [*tokens(6), 77]
    runner = ChecksumRunner(5, B)
    runner.execute(StepPlan(0, (start(1, ids, (0, 1)),), (step(1, ids, 0, 8),)))
    with pytest.raises(PlanError, match="in a table"):
        runner.execute(StepPlan(1, copies=(BlockCopy(0, 1, 2),)))
    plan = StepPlan(
        2,
        (start(2, fork, (0, 2), 6), start(3, [*ids, 1], (3, 4)), start(4, [*ids, 2], (3, 4), 8)),
        (step(2, fork, 6, 7), step(3, [*ids, 1], 0, 8), step(4, [*ids, 2], 8, 9, (1,))),
        copies=(BlockCopy(1, 2, 2),),
        ends=(1,),
    )
    output = runner.execute(plan)
    assert [output.sampled[2].token_id] == cold_oracle(fork, 1)
    assert [output.sampled[4].token_id] == cold_oracle([*ids, 2], 1)


def test_freed_and_fresh_blocks_are_poisoned() -> None:
    runner = ChecksumRunner(3, B)
    one(runner, tokens(8), (0, 1), 0)
    poison = b"\xff" * B * CELL_BYTES
    assert bytes(runner.block_view(0)) != poison
    runner.execute(StepPlan(1, ends=(1,), freed_block_ids=(0,)))
    assert bytes(runner.block_view(0)) == poison
    ids = tokens(1)
    runner.execute(StepPlan(2, (start(2, ids),), (step(2, ids, 0, 1, (1,)),)))
    assert bytes(runner.block_view(1)[CELL_BYTES:]) == poison[CELL_BYTES:]


def test_seed_and_counter_decide_a_sampled_token() -> None:
    ids = tokens(5)
    warm = SamplingParams(temperature=1.0, seed=11)
    seen = set()
    for number, (sampling, num_prompt) in enumerate(
        [(GREEDY, 5), (warm, 5), (warm, 4), (SamplingParams(temperature=1.0, seed=12), 5)]
    ):
        runner = ChecksumRunner(2, B)
        first = start(number, ids, (0, 1), sampling=sampling, num_prompt=num_prompt)
        output = runner.execute(StepPlan(0, (first,), (step(number, ids, 0, 5),)))
        seen.add(output.sampled[number].token_id)
    assert len(seen) == 4


def test_forbidden_ids_are_not_sampled() -> None:
    ids = tokens(5)
    [plain] = cold_oracle(ids, 1, vocab_size=8)
    assert plain not in cold_oracle(ids, 1, vocab_size=8, never_sample=frozenset({plain}))
    sampling = SamplingParams(temperature=0.0, min_tokens=1)
    stops = frozenset({plain})
    assert plain not in cold_oracle(ids, 1, sampling, stop_token_ids=stops, vocab_size=8)
    runner = ChecksumRunner(2, B, vocab_size=8)
    first = start(1, ids, (0, 1), sampling=sampling, stops=stops)
    output = runner.execute(StepPlan(0, (first,), (step(1, ids, 0, 5),)))
    want = cold_oracle(ids, 1, sampling, stop_token_ids=stops, vocab_size=8)
    assert [output.sampled[1].token_id] == want


def test_script_and_sampler_choose_the_token() -> None:
    ids = tokens(3)
    scripted = ChecksumRunner(1, B, script=lambda known: 400 + len(known))
    assert one(scripted, ids, (0,), 0) == 403
    calls = []

    def best(
        logits: list[float], sampling: SamplingParams, known: Sequence[int], num_prompt: int
    ) -> int:
        calls.append((sampling, list(known), num_prompt))
        return max(range(len(logits)), key=logits.__getitem__)

    sampled = ChecksumRunner(1, B, vocab_size=16, never_sample={2, 3}, sampler=best)
    assert one(sampled, ids, (0,), 0) not in (2, 3)
    assert calls == [(GREEDY, ids, 3)]


def test_logprobs_start_with_the_token() -> None:
    ids = tokens(3)
    runner = ChecksumRunner(1, B)
    first = start(1, ids, (0,), sampling=SamplingParams(temperature=0.0, logprobs=2))
    sampled = runner.execute(StepPlan(0, (first,), (step(1, ids, 0, 3),))).sampled[1]
    assert len(sampled.logprobs) == 3
    assert sampled.logprobs[0].token_id == sampled.token_id
    assert sampled.logprobs[1].logprob >= sampled.logprobs[2].logprob


def test_faults_are_injected_where_asked() -> None:
    ids = tokens(3)
    gates = []
    runner = ChecksumRunner(
        4,
        B,
        gate=lambda plan: gates.append(plan.step_id),
        fail_step=lambda plan: plan.step_id == 1,
        fail_sequence=lambda seq_id, _: seq_id == 3,
    )
    one(runner, ids, (0,), 0)
    with pytest.raises(RuntimeError, match="told to fail"):
        runner.execute(StepPlan(1, (start(2, ids, (1,)),), (step(2, ids, 0, 3),)))
    output = runner.execute(StepPlan(2, (start(3, ids, (2,)),), (step(3, ids, 0, 3),), ends=(2,)))
    assert dict(output.sampled) == {}
    assert dict(output.failed) == {3: "NaN in the logits"}
    assert gates == [0, 1, 2]


def bad_plans() -> list[tuple[str, StepPlan]]:
    """Plans that break one rule each, for a runner where sequence 1 has 5 tokens in blocks 0, 1."""
    ids, more = tokens(5), tokens(6)
    go = start(2, ids, (2, 3))
    return [
        ("comes after", StepPlan(0)),
        ("not running", StepPlan(1, ends=(9,))),
        ("is running", StepPlan(1, (start(1, ids, (2, 3)),))),
        ("bad table", StepPlan(1, (start(2, ids, (2,), 5),))),
        ("bad table", StepPlan(1, (start(2, ids, (2, 2)),))),
        ("did not start", StepPlan(1, (), (step(7, ids, 0, 5),))),
        ("in a table", StepPlan(1, (start(2, ids, (2, 1)),))),
        ("in a table", StepPlan(1, freed_block_ids=(0,))),
        ("in a table", StepPlan(1, (go,), (step(2, ids, 0, 5, (1,)),))),
        ("computed", StepPlan(1, (go,), (step(2, ids, 1, 5),))),
        ("computed", StepPlan(1, (go,), (step(2, ids, 0, 0),))),
        ("past its table", StepPlan(1, (start(2, ids, (2,)),), (step(2, ids, 0, 5),))),
        ("other tokens", StepPlan(1, (go,), (step(2, more[1:], 0, 5),))),
        (
            "before its last",
            StepPlan(1, (start(2, more, (2, 3)),), (SequenceStep(2, 0, more[:5], (), True),)),
        ),
        ("two steps", StepPlan(1, (go,), (step(2, ids, 0, 4), step(2, ids, 4, 5)))),
        ("two tables", StepPlan(1, (start(2, more, (0, 1), 5),), (step(2, more, 5, 6),))),
        (
            "its fill is",
            StepPlan(
                1,
                (start(2, ids, (2, 3)), start(3, ids, (2,), 4)),
                (step(3, ids, 4, 5, (4,)), step(2, ids, 0, 5)),
            ),
        ),
    ]


@pytest.mark.parametrize("case", range(len(bad_plans())))
def test_bad_plans_are_refused(case: int) -> None:
    runner = ChecksumRunner(5, B)
    one(runner, tokens(5), (0, 1), 0)
    reason, plan = bad_plans()[case]
    with pytest.raises(PlanError, match=reason):
        runner.execute(plan)
