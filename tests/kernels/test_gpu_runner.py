from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sessionkv.engine.gpu import graphs
from sessionkv.engine.gpu.runner import GpuRunner
from sessionkv.engine.model_runner import ModelRunner
from sessionkv.errors import SessionKVError
from sessionkv.model.gpu_decoder import GpuDecoder
from sessionkv.model.prepare import PreparedModel
from sessionkv.model.weights import WeightFiles
from sessionkv.types import BlockCopy, SamplingParams, StepOutput
from tests.builders.masks import packed
from tests.builders.tiny_models import (
    VOCAB,
    Driver,
    make_runner,
    prepare_tiny,
    start,
    step,
    tokens,
)

B = 8
BLOCKS = 32
# Layers and heads are what an interpreter pays for. Every number of key heads and of query heads
# for each occurs in the tests of the kernels; here there is one of each kind.
LAYERS = {"num_hidden_layers": 2}
TWO_OF_TWO = LAYERS | {"num_attention_heads": 4, "num_key_value_heads": 2}
TWO_OF_ONE = LAYERS | {"num_attention_heads": 2, "num_key_value_heads": 2}
ONE_OF_THREE = LAYERS | {"num_attention_heads": 3, "num_key_value_heads": 1}


def gpu_runner(
    prepared: PreparedModel, device: torch.device, *, max_step_tokens: int = 64
) -> GpuRunner:
    """In fp32, so that it can be compared with the CPU's.

    Prompts are padded to 16 rows, or to ``max_step_tokens`` where it is less.
    """
    spec = prepared.spec
    weights = WeightFiles(prepared.folder, spec, device=device, neighbours=False)
    runner = GpuRunner(
        GpuDecoder(spec, weights, max_model_len=256),
        fingerprint="f",
        geometry=spec.kv_geometry(B),
        num_blocks=BLOCKS,
        max_model_len=256,
        max_step_tokens=max_step_tokens,
        max_running=4,
        device=device,
    )
    runner.warm_up(lambda done, total: None)
    return runner


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How steps go in which a sequence computes several tokens.

    As graphs have them, those that decode among the others or apart; or as large steps do.
    """
    name: str = request.param
    rows, apart = {"small": ((8, 24), ()), "large": ((2,), ()), "apart": ((2, 16), (8,))}[name]
    monkeypatch.setattr(graphs, "_CHUNK_ROWS", rows)
    monkeypatch.setattr(graphs, "_MIXED_ROWS", apart)
    return name


def ways(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("way", names, indirect=True)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return prepare_tiny("qwen3", tmp_path_factory.mktemp("qwen"), **TWO_OF_TWO)


def conversation(runner: GpuRunner | ModelRunner, **changes: object) -> list[StepOutput]:
    """Two sequences of which one reads the other's blocks, a copied tail, every kind of step."""
    params = SamplingParams(**({"temperature": 0.0} | changes))
    shared, ends = tokens(16, 5), [tokens(3, 6), tokens(2, 7)]
    run = Driver(runner).run
    first = run(
        starts=[
            start(1, shared + ends[0], sampling=params),
            start(2, shared + ends[1], [10, 11], cached=16, sampling=params),
        ],
        steps=[
            step(1, 0, shared + ends[0], [10, 11, 12], sample=True),
            step(2, 16, ends[1], [13], sample=True),
        ],
    )
    second = run(
        starts=[start(3, shared[:12] + ends[0], [10, 21], cached=12, sampling=params)],
        steps=[
            step(1, 19, [first.sampled[1].token_id], sample=True),
            step(2, 18, [first.sampled[2].token_id], sample=True),
            step(3, 12, ends[0], [], sample=True),
        ],
        copies=(BlockCopy(src=11, dst=21, num_tokens=4),),
    )
    third = run(
        steps=[
            step(1, 20, [second.sampled[1].token_id], sample=True),
            step(2, 19, [second.sampled[2].token_id], sample=True),
            step(3, 15, [second.sampled[3].token_id], sample=True),
        ],
    )
    last = [third.sampled[3].token_id]
    return [first, second, third, run(steps=[step(3, 16, last, [22], sample=True)], ends=(1, 2))]


def ids(outputs: list[StepOutput]) -> list[dict[int, int]]:
    return [{i: token.token_id for i, token in o.sampled.items()} for o in outputs]


GREEDY = ("mistral-head-dim", ONE_OF_THREE, {})
DRAWN = (
    "qwen3",
    TWO_OF_TWO,
    {"temperature": 1.5, "seed": 2**64 - 3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
)
PENALTIES = (
    "llama-head-dim",
    TWO_OF_ONE,
    {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "logit_bias": {9: 4.0}},
)


@pytest.mark.parametrize(
    ("way", "variant", "shape", "sampling"),
    [
        pytest.param(way, *case, id=f"{way}-{case[0]}")
        for way, cases in {
            "small": (GREEDY, DRAWN), "large": (DRAWN, PENALTIES), "apart": (GREEDY, PENALTIES)
        }.items()
        for case in cases
    ],
    indirect=["way"],
)  # fmt: skip
@pytest.mark.usefixtures("way")
def test_tokens_equal_the_cpus(
    tmp_path: Path,
    device: torch.device,
    variant: str,
    shape: dict[str, int],
    sampling: dict[str, object],
) -> None:
    tiny = prepare_tiny(variant, tmp_path, **shape)
    found = conversation(gpu_runner(tiny, device), **sampling)
    assert ids(found) == ids(conversation(make_runner(tiny, block_size=B), **sampling))
    times = [output.computed_s for output in found]
    assert all(time and time > 0 for time in times) if device.type == "cuda" else not any(times)


@ways("small", "large", "apart")
@pytest.mark.usefixtures("way")
def test_a_bad_number_fails_only_its_own_sequence(
    qwen: PreparedModel, device: torch.device
) -> None:
    runner = gpu_runner(qwen, device)
    bad, good = tokens(10, 1), tokens(3, 2)
    steps = [step(1, 0, bad, [1, 2]), step(2, 0, good, [4], sample=True)]
    expected = Driver(runner).run(starts=[start(1, bad), start(2, good)], steps=steps)
    Driver(runner).run(ends=(1, 2))
    memory = bytearray(b"\xff" * runner.geometry.block_bytes)  # not a number, in any dtype
    runner.memory.copy_in([(6, memoryview(memory))], runner.memory.fence()).wait()
    output = Driver(runner).run(
        starts=[start(1, bad, [6], cached=8), start(2, good)],
        steps=[step(1, 8, bad[8:], [2]), step(2, 0, good, [4], sample=True)],
    )
    assert set(output.failed) == {1}
    assert output.sampled == expected.sampled
    # Also in a step of one token each, which is another way.
    output = Driver(runner).run(
        starts=[start(3, bad[:9], [6], cached=8)],
        steps=[
            step(2, 3, [output.sampled[2].token_id], sample=True),
            step(3, 8, bad[8:9], [7], sample=True),
        ],
    )
    assert set(output.failed) == {3}
    assert set(output.sampled) == {2}


def test_log_probabilities_equal_the_cpus(qwen: PreparedModel, device: torch.device) -> None:
    runners = gpu_runner(qwen, device), make_runner(qwen, block_size=B)
    ours, cpus = (conversation(runner, logprobs=3)[1].sampled for runner in runners)
    for seq_id, token in cpus.items():
        assert [x.token_id for x in ours[seq_id].logprobs] == [x.token_id for x in token.logprobs]
        for got, wanted in zip(ours[seq_id].logprobs, token.logprobs, strict=True):
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)


@pytest.mark.parametrize("count", [0, 3])
def test_log_probabilities_of_prompts_equal_the_cpus(
    qwen: PreparedModel, device: torch.device, count: int
) -> None:
    """In chunks, one of them of one token, beside one that decodes and one that does not ask."""
    long, short, other = tokens(21, 4), tokens(3, 5), tokens(4, 6)

    def run(runner: GpuRunner | ModelRunner) -> list[StepOutput]:
        run = Driver(runner).run
        starts = [
            start(1, long, [1, 2, 3], prompt_logprobs=count),
            start(2, short, [4], prompt_logprobs=count),
            start(3, other, [5]),
        ]
        first = run(
            starts=starts,
            steps=[
                step(1, 0, long[:1]),
                step(2, 0, short, sample=True),
                step(3, 0, other, sample=True),
            ],
        )
        last = [first.sampled[seq_id].token_id for seq_id in (2, 3)]
        second = run(
            steps=[
                step(1, 1, long[1:], sample=True),
                step(2, 3, last[:1], sample=True),
                step(3, 4, last[1:], sample=True),
            ]
        )
        return [first, second]

    found, expected = run(gpu_runner(qwen, device)), run(make_runner(qwen, block_size=B))
    assert ids(found) == ids(expected)
    for ours, cpus in zip(found, expected, strict=True):
        assert ours.prompt_logprobs.keys() == cpus.prompt_logprobs.keys()
        for seq_id, entries in cpus.prompt_logprobs.items():
            for got, wanted in zip(ours.prompt_logprobs[seq_id], entries, strict=True):
                assert [i for i, _ in got] == [i for i, _ in wanted]
                assert [x for _, x in got] == pytest.approx([x for _, x in wanted], abs=1e-4)
    assert [{i: len(e) for i, e in o.prompt_logprobs.items()} for o in found] == [
        {1: 1, 2: 2}, {1: 19},
    ]  # fmt: skip


def test_extras_of_some_leave_the_others_as_they_are(
    qwen: PreparedModel, device: torch.device
) -> None:
    prompt, outputs = tokens(3, 4), [7, 7]
    asked = [{"logprobs": 2}, {}, {"logit_bias": {42: 90.0}, "frequency_penalty": 99.0}]

    def run(runner: GpuRunner | ModelRunner) -> list[StepOutput]:
        """All resumed with some output, and one more token of each."""
        known = prompt + outputs
        params = [SamplingParams(temperature=0.0, **kind) for kind in asked]
        driver = Driver(runner)
        first = driver.run(
            starts=[start(i, known, num_prompt=3, sampling=p) for i, p in enumerate(params)],
            steps=[step(i, 0, known, [i], sample=True) for i in range(3)],
        )
        sampled = [first.sampled[i].token_id for i in range(3)]
        steps = [step(i, 5, [token_id], sample=True) for i, token_id in enumerate(sampled)]
        return [first, driver.run(steps=steps)]

    found, expected = run(gpu_runner(qwen, device)), run(make_runner(qwen, block_size=B))
    assert ids(found) == ids(expected)
    changed = [output.sampled[2].token_id for output in found]
    assert changed[0] == 42
    assert changed[1] != 42
    assert [[len(o.sampled[i].logprobs) for i in range(3)] for o in found] == [[3, 0, 0]] * 2


@ways("small", "large")
@pytest.mark.usefixtures("way")
def test_masks_are_kept_to_as_on_the_cpu(qwen: PreparedModel, device: torch.device) -> None:
    prompt = tokens(3, 4)
    kinds = [{"temperature": 0.0}, {"temperature": 2.0, "seed": 5}, {"temperature": 0.0}]
    grammar = {"regex": "a"}

    def run(runner: GpuRunner | ModelRunner) -> list[StepOutput]:
        """Two of three have masks, other ones with each step."""
        params = [
            SamplingParams(**kind, grammar=grammar if i else None) for i, kind in enumerate(kinds)
        ]
        driver = Driver(runner)
        starts = [start(i, prompt, sampling=p) for i, p in enumerate(params)]
        steps = [step(i, 0, prompt, [i], sample=True) for i in range(3)]
        outputs = []
        for number in range(3):
            masks = {1: packed(range(number, VOCAB, 7), VOCAB), 2: packed([9 + number], VOCAB)}
            outputs.append(driver.run(starts=starts, steps=steps, masks=masks))
            last = [outputs[-1].sampled[i].token_id for i in range(3)]
            starts, steps = (
                [],
                [step(i, 3 + number, last[i : i + 1], sample=True) for i in range(3)],
            )
        return outputs

    found = ids(run(gpu_runner(qwen, device)))
    assert found == ids(run(make_runner(qwen, block_size=B)))
    assert [output[2] for output in found] == [9, 10, 11]
    assert [output[1] % 7 for output in found] == [0, 1, 2]


@ways("small", "large")
@pytest.mark.usefixtures("way")
def test_a_chunk_of_one_token_samples_nothing(qwen: PreparedModel, device: torch.device) -> None:
    runner, prompt = gpu_runner(qwen, device, max_step_tokens=6), tokens(5, 3)
    run = Driver(runner).run
    whole = run(starts=[start(1, prompt)], steps=[step(1, 0, prompt, [1], sample=True)])
    first = run(starts=[start(2, prompt)], steps=[step(2, 0, prompt[:1], [3])])
    assert (first.sampled, first.failed) == ({}, {})
    last = run(steps=[step(2, 1, prompt[1:], sample=True)])
    assert last.sampled[2] == whole.sampled[1]


def test_rows_are_used_again_and_run_out(qwen: PreparedModel, device: torch.device) -> None:
    runner, prompt = gpu_runner(qwen, device, max_step_tokens=6), tokens(5)
    run = Driver(runner).run
    first = run(starts=[start(1, prompt)], steps=[step(1, 0, prompt, [1], sample=True)])
    run(starts=[start(i, prompt) for i in (2, 3, 4)])
    with pytest.raises(SessionKVError, match="no row"):
        run(starts=[start(5, prompt)])
    with pytest.raises(SessionKVError, match="sequence 4"):
        run(starts=[start(4, prompt)], ends=(3,))
    again = run(
        starts=[start(6, prompt)], steps=[step(6, 0, prompt, [9], sample=True)], ends=(1, 99)
    )
    assert again.sampled[6] == first.sampled[1]


def test_blocks_moved_as_bytes_continue_the_same(qwen: PreparedModel, device: torch.device) -> None:
    runner, prompt = gpu_runner(qwen, device, max_step_tokens=20), tokens(18, 3)
    run = Driver(runner).run
    expected = run(starts=[start(1, prompt)], steps=[step(1, 0, prompt, [1, 2, 3], sample=True)])
    extents = [memoryview(bytearray(runner.geometry.block_bytes)) for _ in range(2)]
    fence = runner.memory.fence()
    assert all(runner.memory.copy_out(list(zip((1, 2), extents, strict=True)), fence).wait())
    fresh = gpu_runner(qwen, device)
    copies = list(zip((30, 4), extents, strict=True))
    assert all(fresh.memory.copy_in(copies, fresh.memory.fence()).wait())
    output = Driver(fresh).run(
        starts=[start(1, prompt, [30, 4], cached=16)],
        steps=[step(1, 16, prompt[16:], [9], sample=True)],
    )
    assert output.sampled == expected.sampled
