from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sessionkv import CacheConfig, Engine
from sessionkv.config import GIB
from sessionkv.engine.build import build_engine
from sessionkv.engine.gpu.build import check_room, largest_steps
from sessionkv.engine.gpu.devices import pick_device
from sessionkv.engine.gpu.limits import check_model
from sessionkv.engine.scheduler.batch import StepBudget
from sessionkv.errors import ConfigError, ModelUnsupported
from sessionkv.model.spec import spec_from_config
from tests.builders.gpu_engine import gpu_config, gpu_engine, save_small_model
from tests.builders.schedules import spans
from tests.builders.tiny_engine import save_speaking_model

SPEC = spec_from_config(
    {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }
)  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "num_gpus", "picked"),
    [
        ("cpu", 2, "cpu"),
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_the_device_that_is_asked_for(asked: str, num_gpus: int, picked: str) -> None:
    assert str(pick_device(asked, num_gpus)) == picked


@pytest.mark.parametrize(("asked", "num_gpus"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_gpu_that_is_not_there_is_refused(asked: str, num_gpus: int) -> None:
    with pytest.raises(ConfigError, match=f"device is '{asked}'; .*it sees {num_gpus}.*or cpu"):
        pick_device(asked, num_gpus)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 24}, "head_dim is 24; supported on a GPU: multiples of 16 up to 256"),
        ({"head_dim": 512}, "head_dim is 512"),
        ({"num_heads": 64}, "query heads a key head is 32; supported on a GPU: up to 16"),
        ({"vocab_size": 2**18 + 1}, "vocab_size is 262145; supported on a GPU: up to 262144"),
        ({"hidden_size": 2**15}, "hidden_size is 32768"),
    ],
)
def test_what_kernels_do_not_take_is_refused_by_name(changes: dict[str, int], words: str) -> None:
    check_model(SPEC)
    with pytest.raises(ModelUnsupported, match=words) as caught:
        check_model(replace(SPEC, **changes))
    assert 'device = "cpu"' in caught.value.message


def test_weights_that_do_not_fit_are_refused_with_the_numbers() -> None:
    needed = 2 * SPEC.num_parameters
    check_room(SPEC, "bfloat16", "cuda:0", free_bytes=needed, total_bytes=10**9)
    with pytest.raises(ConfigError, match="device is 'cuda:0'") as caught:
        check_room(SPEC, "bfloat16", "cuda:0", free_bytes=needed - 1, total_bytes=10**9)
    for words in (f"{needed:,} bytes free", "1,000,000,000", f"{needed - 1:,}", "another process"):
        assert words in str(caught.value)


def test_the_largest_steps_are_at_the_end_of_the_window() -> None:
    many, singles = largest_steps(
        StepBudget(64, 32), max_len=200, block_size=16, max_running=20, vocab_size=70
    )
    assert spans(many) == [(0, 136, 200)]
    assert spans(singles) == [(i, 199, 200) for i in range(1, 17)]
    assert singles.ends == (0,)
    assert singles.masks == {i: b"\xff" * 12 for i in range(1, 17)}
    assert len(many.starts[0].block_ids) == 13
    several, few = largest_steps(
        StepBudget(64, 32), max_len=24, block_size=16, max_running=5, vocab_size=70
    )
    assert spans(several) == [(0, 0, 24), (1, 0, 24), (2, 8, 24)]
    assert spans(few) == [(i, 23, 24) for i in range(3, 8)]
    assert few.ends == (0, 1, 2)
    cut, _ = largest_steps(
        StepBudget(64, 32), max_len=16, block_size=16, max_running=2, vocab_size=70
    )
    assert spans(cut) == [(0, 0, 16), (1, 0, 16)]


def test_errors_before_anything_is_loaded(tmp_path: Path) -> None:
    config = gpu_config(tmp_path / "no model", tmp_path / "store", device="cpu", dtype="bfloat16")
    with pytest.raises(
        ConfigError, match="dtype is 'bfloat16'; allowed: auto or float32 on the CPU"
    ):
        Engine(config)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device is 'cuda'; allowed: a GPU"):
            Engine(replace(config, device="cuda"))


@pytest.mark.gpu
def test_a_pool_that_does_not_fit_names_what_is_free(tmp_path: Path) -> None:
    model = save_small_model(tmp_path / "model")
    total = torch.cuda.mem_get_info()[1]
    config = gpu_config(model, tmp_path / "store", device="cuda", blocks=total // 1024)
    with pytest.raises(ConfigError, match=r"cache\.device_blocks is .*another process"):
        Engine(config)
    # What was measured has been given back: an engine of a tenth starts.
    with gpu_engine(replace(config, cache=replace(config.cache, device_blocks=1000))) as engine:
        engine.generate(tokens=[5, 6, 7])


@pytest.mark.gpu
def test_memory_that_somebody_else_holds_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_small_model(tmp_path / "model")
    config = gpu_config(model, tmp_path / "store", device="cuda")
    config = replace(config, cache=CacheConfig(block_size=256, host_bytes=0, disk_bytes=0))
    left, free_bytes, ask = 2 * GIB, [], torch.cuda.mem_get_info

    def asked(*args: Any) -> tuple[int, int]:
        free, total = ask(*args)
        free_bytes.append(free)
        return free, total

    torch.cuda.empty_cache()  # what torch keeps of earlier tests counts as taken until it is needed
    held = torch.empty(ask()[0] - left, dtype=torch.uint8, device="cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", asked)
    with gpu_engine(config) as engine:
        # Of what was free then: other processes may have let go of memory meanwhile.
        assert free_bytes[-1] // 2 < engine.parts.runner.pool_bytes <= free_bytes[-1] * 9 // 10
        engine.generate(tokens=[5, 6, 7])
    del held
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_a_model_that_kernels_do_not_take(tmp_path: Path) -> None:
    save_speaking_model(tmp_path / "model", "llama")  # of head_dim 8
    config = gpu_config(tmp_path / "model", tmp_path / "store", device="cuda")
    before = torch.cuda.memory_allocated()
    with pytest.raises(ModelUnsupported, match="head_dim is 8"):
        Engine(config)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_stages_of_a_start_are_told_and_host_memory_is_pinned(tmp_path: Path) -> None:
    model = save_small_model(tmp_path / "model")
    events: list[dict[str, object]] = []
    config = gpu_config(model, tmp_path / "store", device="cuda", host_blocks=64)
    built = build_engine(config, progress=events.append)
    with built.resources:
        stages = list(dict.fromkeys(event["stage"] for event in events))
        assert stages[-2:] == ["load", "graphs"]
        last = events[-1]
        assert last["done"] == last["total"]
        memory = built.parts.runner.memory
        memory.wait_pinned()
        assert torch.frombuffer(built.parts.mover._host.memory, dtype=torch.uint8).is_pinned()
