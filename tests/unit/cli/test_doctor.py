from dataclasses import replace
from pathlib import Path

import pytest

from sessionkv.cli import doctor_checks
from sessionkv.cli.doctor_checks import (
    Finding,
    check_engine,
    check_gpu,
    check_model,
    check_store,
    serves_by_blas,
    size_up,
)
from sessionkv.config import CacheConfig, EngineConfig
from sessionkv.engine.gpu.devices import Gpu
from sessionkv.engine.sizing import MachineMemory
from sessionkv.kernels import linear
from sessionkv.model.spec import spec_from_config

SPEC = spec_from_config(
    {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "hidden_act": "silu", "torch_dtype": "float32",
    }
)  # fmt: skip
CONFIG = EngineConfig(
    model="m", cache=CacheConfig(device_blocks=64, host_bytes=2**20, disk_bytes=0)
)


def texts(findings: list[Finding], topic: str) -> list[str]:
    return [finding.text for finding in findings if finding.topic == topic]


def test_size_up_counts_weights_kv_and_tokens() -> None:
    found = list(size_up(CONFIG, SPEC, MachineMemory(2**34, 2**40)))
    assert [finding for finding in found if finding.advice] == []
    # 2 layers of (64*(4+2)*16*2 + 3*64*128) and 1000*64 twice, in fp32.
    assert texts(found, "model") == [
        "m: llama, 2 layers, window 512 tokens, weights 788.0 KiB in fp32"
    ]
    # 2 layers * (K, V) * 2 heads * 16 * 4 bytes.
    assert texts(found, "KV") == ["512 B a token, 8.0 KiB a block of 16"]
    assert texts(found, "device") == ["512.0 KiB of KV = 1,024 tokens"]
    assert texts(found, "host") == ["1.0 MiB of KV = 2,048 tokens"]
    assert texts(found, "disk") == ["0 B of KV = 0 tokens"]


def test_size_up_counts_weights_that_are_held_twice() -> None:
    [line] = texts(list(size_up(CONFIG, SPEC, MachineMemory(2**34, 2**40), blas=True)), "model")
    assert line.endswith("weights 1.3 MiB in fp32, held twice for this processor")


@pytest.mark.parametrize("openblas", [False, True])
def test_products_go_as_serve_would_compute_them(
    monkeypatch: pytest.MonkeyPatch, openblas: bool
) -> None:
    monkeypatch.setattr(
        linear, "blas_is_faster", lambda *, threads_wait_asleep: openblas and threads_wait_asleep
    )
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert serves_by_blas() == openblas  # serve sets it
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert not serves_by_blas()


def test_size_up_says_when_the_weights_do_not_fit() -> None:
    config = replace(CONFIG, cache=replace(CONFIG.cache, host_bytes=2**16))
    found = list(size_up(config, SPEC, MachineMemory(900 * 1024, 2**40)))
    [problem] = [finding for finding in found if finding.advice]
    assert problem.text == "the weights need 788.0 KiB of 900.0 KiB available"


def test_size_up_says_when_a_tier_does_not_fit() -> None:
    config = replace(CONFIG, cache=replace(CONFIG.cache, host_bytes=2**34 + 2**30))
    [problem] = [f for f in size_up(config, SPEC, MachineMemory(2**34, 2**40)) if f.advice]
    assert problem.text.startswith("cache.host_bytes is 17.0 GiB; allowed: at most 16.0 GiB")


def test_size_up_says_that_the_window_shrinks() -> None:
    config = replace(CONFIG, cache=replace(CONFIG.cache, device_blocks=8))
    found = list(size_up(config, SPEC, MachineMemory(2**34, 2**40)))
    assert texts(found, "window")[0].startswith("the window is 129 tokens instead of 512")


def test_size_up_refuses_a_window_that_the_model_has_not() -> None:
    config = replace(CONFIG, max_model_len=4096)
    [problem] = [f for f in size_up(config, SPEC, MachineMemory(2**34, 2**40)) if f.advice]
    assert problem.text == "max_model_len is 4096; allowed: at most 512, the model's own"


def test_missing_model_is_a_finding() -> None:
    [finding] = list(check_model(replace(CONFIG, model="/nonexistent/model.gguf")))
    assert finding.text.startswith("/nonexistent/model.gguf does not exist")
    assert finding.advice == "Name a model that is here."


@pytest.mark.parametrize("offline", [False, True])
def test_model_not_fetched_yet_is_a_finding(tmp_path: Path, offline: bool) -> None:
    config = replace(CONFIG, model="smollm2-135m", model_cache=tmp_path, offline=offline)
    [finding] = list(check_model(config))
    assert finding.text.startswith("smollm2-135m is not here yet")
    assert ("offline is set" in finding.text) == offline
    assert ("`sessionkv serve` fetches it" in finding.advice) != offline


def test_store_open_to_others_is_a_finding(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    place, problem = check_store(replace(CONFIG, store=tmp_path))
    assert place.text.startswith(f"{tmp_path} (exists), ")
    assert problem.advice == f"chmod 700 {tmp_path}"
    tmp_path.chmod(0o700)
    assert len(list(check_store(replace(CONFIG, store=tmp_path)))) == 1


def test_store_that_will_be_made_is_none(tmp_path: Path) -> None:
    [finding] = list(check_store(replace(CONFIG, store=tmp_path / "a" / "b")))
    assert "(will be made)" in finding.text
    assert not (tmp_path / "a").exists()


def test_no_engine_is_no_problem(tmp_path: Path) -> None:
    [finding] = list(check_engine(f"ipc://{tmp_path}/e.sock"))
    assert finding == Finding("engine", f"ipc://{tmp_path}/e.sock: no engine is running")
    (tmp_path / "e.sock").touch()
    [finding] = list(check_engine(f"ipc://{tmp_path}/e.sock"))
    assert finding.text.endswith("a dead engine's socket is there")


def test_bad_endpoint_is_a_finding() -> None:
    [finding] = list(check_engine("http://localhost"))
    assert "ipc://" in finding.text


def test_missing_library_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "LIBRARIES", ("msgpack", "no-such-library", "torch"))
    problems = [f for f in doctor_checks.check_libraries() if f.advice]
    assert problems == [
        Finding("libraries", "missing: no-such-library", "pip install no-such-library")
    ]


def test_gpus_are_named_by_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number, name in enumerate(("NVIDIA A", "NVIDIA B")):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ: 1\n")
    monkeypatch.setattr(doctor_checks, "NVIDIA_GPUS", tmp_path)
    [problem] = list(check_gpu(CONFIG, []))
    assert problem.text == "NVIDIA A, NVIDIA B: there, and torch cannot use it"
    assert "torch with CUDA" in problem.advice
    [finding] = list(check_gpu(replace(CONFIG, device="cpu"), []))
    assert finding == Finding("GPU", "not used: device is cpu")
    monkeypatch.setattr(doctor_checks, "NVIDIA_GPUS", tmp_path / "none")
    assert list(check_gpu(CONFIG, [])) == [Finding("GPU", "none; computing on CPU")]


def test_gpus_show_what_is_free_and_whether_the_one_asked_for_is_there() -> None:
    gpus = [Gpu("A", 30 * 2**30, 32 * 2**30), Gpu("B", 2**30, 2**30)]
    assert list(check_gpu(CONFIG, gpus)) == [
        Finding("GPU", "A: 30.0 GiB of 32.0 GiB free, 2.0 GiB held by processes"),
        Finding("GPU", "B: 1.0 GiB of 1.0 GiB free, 0 B held by processes"),
    ]
    assert [f for f in check_gpu(replace(CONFIG, device="cuda:1"), gpus) if f.advice] == []
    [problem] = [f for f in check_gpu(replace(CONFIG, device="cuda:2"), gpus) if f.advice]
    assert problem.text == "device is cuda:2, and torch can use 2 GPUs"
    [problem] = [f for f in check_gpu(replace(CONFIG, device="cuda"), []) if f.advice]
    assert problem.text == "device is cuda, and torch can use 0 GPUs"


def test_size_up_on_a_gpu_counts_its_memory_and_16_bits() -> None:
    # 2 layers of (64*(4+2)*16*2 + 3*64*128) and 1000*64 once, in bf16.
    weights_bytes = 2 * (2 * (64 * 6 * 16 * 2 + 3 * 64 * 128) + 1000 * 64)
    gpu = Gpu("A", weights_bytes + 100 * 4096, 2**30)
    config = replace(CONFIG, cache=replace(CONFIG.cache, device_blocks=None))
    found = list(size_up(config, SPEC, MachineMemory(2**34, 2**40), gpu))
    assert texts(found, "KV") == ["256 B a token, 4.0 KiB a block of 16"]
    assert texts(found, "device") == ["360.0 KiB of KV = 1,440 tokens"]
    assert "weights 269.0 KiB in bf16" in texts(found, "model")[0]
    assert [finding for finding in found if finding.advice] == []
    small = Gpu("A", 10**5, 2**30)
    [problem] = [f for f in size_up(config, SPEC, MachineMemory(2**34, 2**40), small) if f.advice]
    assert problem.text == "the weights need 269.0 KiB of 97.7 KiB available"
    assert "--device cpu" in problem.advice
    too_many = replace(CONFIG, cache=replace(CONFIG.cache, device_blocks=101))
    [problem] = [f for f in size_up(too_many, SPEC, MachineMemory(2**34, 2**40), gpu) if f.advice]
    assert problem.text.startswith("cache.device_blocks is 101; allowed: from 4096 (one block) to")


def test_size_up_names_what_the_gpu_does_not_take() -> None:
    spec = replace(SPEC, head_dim=24)
    found = size_up(CONFIG, spec, MachineMemory(2**34, 2**40), Gpu("A", 2**30, 2**30))
    [problem] = [finding for finding in found if finding.advice]
    assert "head_dim is 24; supported on a GPU: multiples of 16 up to 256" in problem.text
