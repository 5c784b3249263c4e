"""Whole engines over the GPU's runner: on a CUDA device, or on the CPU under Triton's interpreter.

There the pool is reached by copies all the same, so moves go their way through staging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sessionkv import CacheConfig, EngineConfig, SchedulerConfig
from sessionkv.engine.build import BuiltEngine, build_engine
from sessionkv.engine.gpu.runner import GpuRunner
from sessionkv.engine.model_runner import kv_fingerprint
from sessionkv.engine.runner import Runner
from sessionkv.model.gpu_decoder import GpuDecoder
from sessionkv.model.prepare import prepare_model
from sessionkv.model.weights import WeightFiles
from sessionkv.types import StepPlan
from tests.builders.engine import Building, CheckedEngine
from tests.builders.tiny_engine import Gated, save_speaking_model

BLOCK = 4
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
MAX_RUNNING = 8
_LAYERS, _KV_HEADS, _HEAD_DIM = 2, 1, 16


def save_small_model(folder: Path) -> Path:
    """A model of two layers, which an interpreter computes in a tenth of a second a token."""
    save_speaking_model(folder, "llama", **SHAPE)
    return folder


def gpu_config(
    model: Path,
    store: Path,
    *,
    device: str,
    blocks: int = 64,
    host_blocks: int = 0,
    disk: bool = False,
    dtype: str = "float32",
    step_tokens: int | None = None,
    **cache: Any,
) -> EngineConfig:
    """Tiers are off unless given, and the disk is waited for."""
    block_bytes = _LAYERS * 2 * _KV_HEADS * BLOCK * _HEAD_DIM * (4 if dtype == "float32" else 2)
    return EngineConfig(
        model=str(model),
        store=store,
        model_cache=model.with_name("prepared"),
        device=device,
        dtype=dtype,
        offline=True,
        scheduler=SchedulerConfig(
            step_tokens=step_tokens, max_running=MAX_RUNNING, min_lookup_wait_ms=30_000
        ),
        cache=CacheConfig(
            block_size=BLOCK,
            device_blocks=blocks,
            host_bytes=host_blocks * block_bytes,
            disk_bytes=10**7 if disk else 0,
            **cache,
        ),
    )


class GpuBuilding(Building):
    """Builds the runner of the configured device, for the CPU too; all that is found is loaded."""

    def __init__(self, gate: Callable[[StepPlan], None] | None) -> None:
        super().__init__()
        self._gate = gate or (lambda plan: None)

    def __call__(self, config: EngineConfig, **arguments: Any) -> BuiltEngine:
        def wrap(runner: Runner) -> Any:
            if config.device == "cpu":
                runner.close()
                runner = interpreted_runner(config, runner)
            return Gated(runner, self._gate)

        self.built = build_engine(config, wrap_runner=wrap, **arguments)
        self.built.parts.planner.rates.observe_prefill = lambda *args, **fields: None
        return self.built


def interpreted_runner(config: EngineConfig, like: Runner) -> GpuRunner:
    """With everything on the CPU, of the sizes of another runner."""
    assert config.model_cache is not None
    prepared = prepare_model(config.model, cache_dir=config.model_cache, offline=True)
    spec = prepared.spec
    files = WeightFiles(prepared.folder, spec, device=torch.device("cpu"), neighbours=False)
    return GpuRunner(
        GpuDecoder(spec, files, max_model_len=like.max_model_len),
        fingerprint=kv_fingerprint(spec, prepared.fingerprint, numerics="interpreted"),
        geometry=like.geometry,
        num_blocks=like.num_blocks,
        max_model_len=like.max_model_len,
        max_step_tokens=config.scheduler.step_tokens or 512,
        max_running=MAX_RUNNING,
        device=torch.device("cpu"),
    )


@contextmanager
def gpu_engine(
    config: EngineConfig, *, gate: Callable[[StepPlan], None] | None = None
) -> Iterator[CheckedEngine]:
    """An engine over the GPU's runner; ``gate`` is called with each plan before it is executed."""
    engine = CheckedEngine(config, GpuBuilding(gate))
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def cold_engine(model: Path, store: Path) -> Iterator[CheckedEngine]:
    """The CPU's own engine in plain torch, without a cache: what everything is compared with."""
    config = gpu_config(model, store, device="cpu", blocks=256, prefix_cache=False)

    def build(config: EngineConfig, **arguments: Any) -> BuiltEngine:
        return build_engine(config, **arguments)

    engine = CheckedEngine(replace(config), build)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()
