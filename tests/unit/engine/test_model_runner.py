from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from sessionkv.engine.model_runner import ModelRunner, kv_fingerprint
from sessionkv.errors import ConfigError, SessionKVError
from sessionkv.model.prepare import PreparedModel
from sessionkv.types import BlockCopy, SamplingParams
from tests.builders.masks import packed
from tests.builders.tiny_models import (
    VOCAB,
    Driver,
    hugging_face_model,
    make_runner,
    prepare_tiny,
    start,
    step,
    tokens,
)

B = 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return prepare_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=[True, False], ids=["mirrors", "blocks"])
def runner(request: pytest.FixtureRequest, tiny: PreparedModel) -> ModelRunner:
    return make_runner(tiny, block_size=B, mirrors=request.param)


def greedy(runner: ModelRunner, prompt: list[int], count: int, *, seq_id: int = 1) -> list[int]:
    """Cold, alone, in one prefill step; the sequence is ended."""
    return Conversation(Driver(runner), seq_id, prompt, list(range(40, 64))).run(count)


class Conversation:
    """One sequence over given blocks, step by step."""

    def __init__(
        self, driver: Driver, seq_id: int, prompt: list[int], blocks: list[int], **options: object
    ) -> None:
        self.driver, self.seq_id, self.prompt, self.blocks = driver, seq_id, prompt, blocks
        self.options = options
        self.held = 0

    def grow(self, num_tokens: int) -> list[int]:
        wanted = -(-num_tokens // B)
        new, self.held = self.blocks[self.held : wanted], max(self.held, wanted)
        return new

    def run(self, count: int) -> list[int]:
        first = start(self.seq_id, self.prompt, **self.options)
        end = len(self.prompt)
        output = self.driver.run(
            starts=[first], steps=[step(self.seq_id, 0, self.prompt, self.grow(end), sample=True)]
        )
        found = [output.sampled[self.seq_id].token_id]
        for at in range(end, end + count - 1):
            plan_step = step(self.seq_id, at, found[-1:], self.grow(at + 1), sample=True)
            output = self.driver.run(steps=[plan_step])
            found.append(output.sampled[self.seq_id].token_id)
        self.driver.run(ends=(self.seq_id,))
        return found


def test_greedy_equals_transformers(runner: ModelRunner) -> None:
    prompt = tokens(13)
    model = hugging_face_model("llama")
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(20):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert greedy(runner, prompt, 20) == ids[13:]


def test_a_plan_of_ends_only_computes_nothing(runner: ModelRunner) -> None:
    greedy(runner, tokens(5), 2)
    output = Driver(runner).run(ends=(99,))
    assert (output.step_id, dict(output.sampled), dict(output.failed)) == (1, {}, {})


def test_batch_mates_in_every_phase_do_not_change_each_other(runner: ModelRunner) -> None:
    prompts = {1: tokens(9, 1), 2: tokens(14, 2), 3: tokens(4, 3)}
    alone = {seq_id: greedy(runner, prompt, 3, seq_id=seq_id) for seq_id, prompt in prompts.items()}
    driver = Driver(runner)
    table = {1: [0, 7, 3, 12], 2: [9, 1, 20, 5, 30], 3: [33, 2]}
    # 1 prefills whole; 2 in two chunks; 3 joins when 1 decodes.
    output = driver.run(
        starts=[start(1, prompts[1]), start(2, prompts[2])],
        steps=[
            step(1, 0, prompts[1], table[1][:3], sample=True),
            step(2, 0, prompts[2][:6], table[2][:2]),
        ],
    )
    found = {1: [output.sampled[1].token_id]}
    assert set(output.sampled) == {1}
    output = driver.run(
        starts=[start(3, prompts[3])],
        steps=[
            step(1, 9, found[1], sample=True),
            step(2, 6, prompts[2][6:], table[2][2:4], sample=True),
            step(3, 0, prompts[3], table[3][:1], sample=True),
        ],
    )
    for seq_id in (1, 2, 3):
        found.setdefault(seq_id, []).append(output.sampled[seq_id].token_id)
    output = driver.run(
        steps=[
            step(1, 10, found[1][-1:], sample=True),
            step(2, 14, found[2][-1:], sample=True),
            step(3, 4, found[3][-1:], table[3][1:], sample=True),
        ]
    )
    for seq_id in (1, 2, 3):
        found[seq_id].append(output.sampled[seq_id].token_id)
    assert found[1] == alone[1]
    assert found[2] == alone[2][:2]
    assert found[3] == alone[3][:2]


def test_a_sequence_may_read_blocks_that_its_own_plan_fills(runner: ModelRunner) -> None:
    shared, ends = tokens(8, 5), [tokens(3, 6), tokens(2, 7)]
    expected = [greedy(runner, shared + end, 4) for end in ends]
    driver = Driver(runner)
    output = driver.run(
        starts=[start(1, shared + ends[0]), start(2, shared + ends[1], [10, 11], cached=8)],
        steps=[
            step(1, 0, shared + ends[0], [10, 11, 12], sample=True),
            step(2, 8, ends[1], [13], sample=True),
        ],
    )
    found = [[output.sampled[1].token_id], [output.sampled[2].token_id]]
    for turn in range(3):
        output = driver.run(
            steps=[
                step(1, 11 + turn, found[0][-1:], [14] if turn == 1 else [], sample=True),
                step(2, 10 + turn, found[1][-1:], [15] if turn == 2 else [], sample=True),
            ]
        )
        found[0].append(output.sampled[1].token_id)
        found[1].append(output.sampled[2].token_id)
    assert found == expected


def test_a_copied_tail_continues_and_leaves_the_original_alone(runner: ModelRunner) -> None:
    prompt, other = tokens(6, 8), tokens(3, 9)
    expected = greedy(runner, prompt[:5] + other, 2)
    driver = Driver(runner)
    driver.run(starts=[start(1, prompt)], steps=[step(1, 0, prompt, [20, 21])])
    before = bytes(runner.block_view(21))
    output = driver.run(
        starts=[start(2, prompt[:5] + other, [20, 22], cached=5)],
        steps=[step(2, 5, other, sample=True)],
        copies=(BlockCopy(src=21, dst=22, num_tokens=1),),
    )
    found = [output.sampled[2].token_id]
    output = driver.run(steps=[step(2, 8, found, [23], sample=True)])
    assert [*found, output.sampled[2].token_id] == expected
    assert bytes(runner.block_view(21)) == before


def test_blocks_moved_as_bytes_continue_the_same(tiny: PreparedModel, runner: ModelRunner) -> None:
    prompt = tokens(9, 10)
    expected = greedy(runner, prompt, 5)
    Driver(runner).run(starts=[start(1, prompt)], steps=[step(1, 0, prompt, [1, 2, 3])])
    extents = [bytes(runner.block_view(block)) for block in (1, 2)]
    assert all(len(extent) == runner.geometry.block_bytes for extent in extents)
    fresh = make_runner(tiny, block_size=B)
    for block, extent in zip((6, 4), extents, strict=True):
        fresh.block_view(block)[:] = extent
    driver = Driver(fresh)
    output = driver.run(
        starts=[start(1, prompt, [6, 4], cached=8)],
        steps=[step(1, 8, prompt[8:], [9], sample=True)],
    )
    assert output.sampled[1].token_id == expected[0]


def test_growth_past_the_mirror_budget_falls_back_to_blocks(tiny: PreparedModel) -> None:
    token_bytes = tiny.spec.kv_geometry(B).token_bytes
    prompt = tokens(100, 11)
    expected = greedy(make_runner(tiny, block_size=B), prompt[:60], 3)
    small = make_runner(tiny, block_size=B, mirror_bytes=128 * token_bytes)
    driver = Driver(small)
    first = driver.run(starts=[start(1, prompt)], steps=[step(1, 0, prompt[:60], range(15))])
    assert not first.failed
    mirrored = small.pool_bytes
    # A second sequence finds the budget spent; the first outgrows it.
    found = Conversation(driver, 2, prompt[:60], list(range(40, 60))).run(3)
    assert found == expected
    long = tokens(130, 12)
    both = [
        Conversation(Driver(r), 3, long, list(range(15, 50))).run(3)
        for r in (make_runner(tiny, block_size=B), small)
    ]
    assert both[0] == both[1]
    assert mirrored == small.num_blocks * small.geometry.block_bytes + 128 * token_bytes


def test_mirrors_are_given_back_and_their_memory_serves_the_next(tiny: PreparedModel) -> None:
    runner = make_runner(tiny, block_size=B)
    assert runner.pool_bytes == runner.num_blocks * runner.geometry.block_bytes
    greedy(runner, tokens(85, 13), 5)
    after_one = runner.pool_bytes
    for seed in range(3):
        greedy(runner, tokens(80 + seed, seed), 5)
    assert runner.pool_bytes == after_one


def test_a_growing_mirror_keeps_its_history(tiny: PreparedModel) -> None:
    prompt = tokens(120, 14)
    runners = [make_runner(tiny, block_size=B, mirrors=mirrors) for mirrors in (True, False)]
    outputs = [Conversation(Driver(r), 1, prompt, list(range(64))).run(30) for r in runners]
    assert outputs[0] == outputs[1]
    for block in range(149 // B):  # the last token sampled has no KV
        mirrored, plain = (
            torch.frombuffer(r.block_view(block), dtype=torch.float32) for r in runners
        )
        torch.testing.assert_close(mirrored, plain, atol=1e-5, rtol=0)


def test_a_bad_number_fails_only_its_own_sequence(runner: ModelRunner) -> None:
    prompt, other = tokens(8, 15), tokens(7, 16)
    expected = greedy(runner, other, 2)
    memory = torch.frombuffer(runner.block_view(5), dtype=torch.float32)
    memory.fill_(float("nan"))
    driver = Driver(runner)
    output = driver.run(
        starts=[start(1, prompt, [5], cached=4), start(2, other)],
        steps=[
            step(1, 4, prompt[4:], [6], sample=True),
            step(2, 0, other, [7, 8], sample=True),
        ],
    )
    assert list(output.failed) == [1]
    assert output.sampled[2].token_id == expected[0]
    assert set(output.sampled) == {2}
    assert greedy(runner, other, 2, seq_id=3) == expected


def test_a_bad_number_in_a_chunk_that_samples_nothing_is_seen(runner: ModelRunner) -> None:
    torch.frombuffer(runner.block_view(5), dtype=torch.float32).fill_(float("inf"))
    output = Driver(runner).run(
        starts=[start(1, tokens(8), [5], cached=4)], steps=[step(1, 4, tokens(8)[4:7], [6])]
    )
    assert list(output.failed) == [1]


def test_the_runner_survives_a_step_that_raises(runner: ModelRunner) -> None:
    expected = greedy(runner, tokens(9), 3)
    driver = Driver(runner)
    with pytest.raises(IndexError):
        driver.run(
            starts=[start(7, tokens(9))],
            steps=[step(7, 0, [5, VOCAB + 1, 6], [1], sample=True)],
        )
    driver.run(ends=(7,))
    assert greedy(runner, tokens(9), 3) == expected


def test_a_sequence_cannot_start_twice(runner: ModelRunner) -> None:
    driver = Driver(runner)
    driver.run(starts=[start(1, tokens(3))], steps=[step(1, 0, tokens(3), [0])])
    with pytest.raises(SessionKVError, match="sequence 1"):
        driver.run(starts=[start(1, tokens(3))])


def test_logprobs_of_a_batch(runner: ModelRunner) -> None:
    prompt = tokens(6)
    params = SamplingParams(temperature=0.0, logprobs=2)
    output = Driver(runner).run(
        starts=[start(1, prompt, sampling=params), start(2, prompt)],
        steps=[
            step(1, 0, prompt, [0, 1], sample=True),
            step(2, 0, prompt, [2, 3], sample=True),
        ],
    )
    with torch.no_grad():
        row = hugging_face_model("llama")(torch.tensor([prompt])).logits[0, -1].double()
    expected = row.log_softmax(0)
    assert [item.token_id for item in output.sampled[1].logprobs[1:]] == row.topk(2)[1].tolist()
    for item in output.sampled[1].logprobs:
        assert item.logprob == pytest.approx(float(expected[item.token_id]), abs=1e-4)
    assert output.sampled[2].logprobs == ()


def test_the_maximum_length_is_bounded_by_the_model(tiny: PreparedModel) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        ModelRunner(
            tiny, block_size=B, num_blocks=4, max_model_len=257, threads=None, mirror_bytes=0
        )


def test_fingerprint_names_all_that_changes_kv(tiny: PreparedModel, tmp_path: Path) -> None:
    from dataclasses import replace

    fingerprint = partial(kv_fingerprint, numerics="n")
    spec, base = tiny.spec, fingerprint(tiny.spec, "w")
    rope = replace(spec.rope, theta=spec.rope.theta + 1)
    changed = [
        fingerprint(spec, "v"),
        fingerprint(replace(spec, rope=rope), "w"),
        fingerprint(replace(spec, rms_eps=1e-4), "w"),
        fingerprint(replace(spec, windows=(8, 8, 8)), "w"),
    ]
    changed.append(kv_fingerprint(spec, "w", numerics="m"))
    assert len({base, *changed}) == 6
    assert fingerprint(replace(spec, max_model_len=16), "w") == base


def test_close_leaves_given_views_valid(tiny: PreparedModel) -> None:
    runner = make_runner(tiny, block_size=B)
    view = runner.block_view(3)
    view[:4] = b"abcd"
    runner.close()
    assert bytes(view[:4]) == b"abcd"


def test_log_probabilities_of_a_prompt_equal_transformers(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt in three chunks, beside another one, and some rows of logits at a time."""
    monkeypatch.setattr("sessionkv.engine.model_runner._ROWS_AT_ONCE", 4)
    prompt, run = tokens(23), Driver(runner).run
    found = []
    for number, (first, end) in enumerate([(0, 11), (11, 12), (12, 23)]):
        starts = [start(1, prompt, [1, 2, 3, 4, 5, 6], prompt_logprobs=3), start(2, prompt, [7])]
        steps = [
            step(1, first, prompt[first:end], sample=end == 23),
            step(2, number, prompt[number : number + 1]),
        ]
        output = run(starts=starts if not number else (), steps=steps)
        found += output.prompt_logprobs[1]
        assert set(output.prompt_logprobs) == {1}
    with torch.no_grad():
        logits = hugging_face_model("llama")(torch.tensor([prompt])).logits[0]
    expected = torch.log_softmax(logits.double(), 1)
    assert [entry[0][0] for entry in found] == prompt[1:]
    for row, entry in enumerate(found):
        best = expected[row].topk(3)
        assert [token_id for token_id, _ in entry[1:]] == best.indices.tolist()
        wanted = [float(expected[row, prompt[row + 1]]), *best.values.tolist()]
        assert [value for _, value in entry] == pytest.approx(wanted, abs=1e-4)


def test_a_mask_is_all_that_may_be_sampled(runner: ModelRunner) -> None:
    prompt, run = tokens(5), Driver(runner).run
    drawn = SamplingParams(temperature=3.0, seed=1, logit_bias={7: 50.0}, min_tokens=9)
    output = run(
        starts=[start(1, prompt), start(2, prompt, sampling=drawn)],
        steps=[step(1, 0, prompt, [1, 4], sample=True)],
        masks={1: packed([44], VOCAB)},
    )
    assert output.sampled[1].token_id == 44
    steps = [step(1, 5, [44], sample=True), step(2, 0, prompt, [2, 3], sample=True)]
    output = run(steps=steps, masks={2: packed([2], VOCAB)})  # an end token, before min_tokens
    assert output.sampled[2].token_id == 2
