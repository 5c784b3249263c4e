"""A runner on a GPU: loads the model, measures what is left, allocates the pool.

Memory is never guessed: the weights are loaded and a step of the largest size is run before the
pool takes a share of what is free then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from sessionkv.config import EngineConfig
from sessionkv.engine.gpu.runner import GpuRunner
from sessionkv.engine.model_runner import kv_fingerprint
from sessionkv.engine.sizing import MachineMemory, MemoryPlan, plan_memory, step_budget
from sessionkv.errors import ConfigError
from sessionkv.model.gpu_decoder import GpuDecoder
from sessionkv.model.prepare import PreparedModel
from sessionkv.model.spec import ELEMENT_BYTES, ModelSpec
from sessionkv.model.weights import WeightFiles
from sessionkv.types import SamplingParams, SequenceStart, SequenceStep, StepPlan

NUMERICS = "gpu 1"
"""Names the arithmetic; to be changed whenever the same weights give other KV bytes."""


def load_gpu_runner(
    config: EngineConfig,
    prepared: PreparedModel,
    *,
    device: torch.device,
    machine: MachineMemory,
    progress: Callable[[str, int, int], None],
) -> tuple[MemoryPlan, GpuRunner]:
    """Load the model and allocate its pool.

    Args:
        config: The engine's.
        prepared: Model folder, checked.
        device: A CUDA device.
        machine: Free RAM and disk.
        progress: Told of a stage's name, and how many of how many steps of it are done.

    Raises:
        ConfigError: The GPU has too little memory free.
        ModelBroken: A file is missing or damaged.
    """
    torch.cuda.set_device(device)
    spec, dtype = prepared.spec, "bfloat16" if config.dtype == "auto" else config.dtype
    _check_room(spec, dtype, device)
    progress("load", 0, 1)
    weights = WeightFiles(
        prepared.folder, spec, dtype=getattr(torch, dtype), device=device, neighbours=False
    )
    max_len = config.max_model_len or spec.max_model_len
    decoder = GpuDecoder(spec, weights, max_model_len=max_len)
    progress("load", 1, 1)
    geometry = spec.kv_geometry(config.cache.block_size, dtype)
    budget = step_budget(config.scheduler.step_tokens, on_gpu=True)

    def runner(num_blocks: int, max_model_len: int) -> GpuRunner:
        return GpuRunner(
            decoder,
            fingerprint=kv_fingerprint(spec, prepared.fingerprint, numerics=f"{NUMERICS} {dtype}"),
            geometry=geometry,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_step_tokens=budget.alone,
            max_running=min(config.scheduler.max_running, budget.shared),
            device=device,
        )

    longest = min(budget.alone, max_len)
    scratch_bytes = _scratch_bytes(runner(-(-longest // geometry.block_size), max_len), longest)
    free_bytes = max(0, torch.cuda.mem_get_info(device)[0] - scratch_bytes)
    memory = plan_memory(
        config.cache,
        geometry,
        model_max_len=spec.max_model_len,
        asked_max_len=config.max_model_len,
        machine=replace(machine, free_gpu_bytes=free_bytes),
    )
    built = runner(memory.num_device_blocks, memory.max_model_len)
    built.warm_up(lambda done, total: progress("graphs", done, total))
    return memory, built


def _check_room(spec: ModelSpec, dtype: str, device: torch.device) -> None:
    needed = spec.num_parameters * ELEMENT_BYTES[dtype]
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        raise ConfigError(
            "device",
            str(device),
            f"a GPU with {needed} bytes free for the weights; of its {total} bytes {free} are free "
            f"(another process may hold the rest)",
        )


def _scratch_bytes(runner: GpuRunner, num_tokens: int) -> int:
    """Most memory that a step of so many tokens takes beside weights and pool; ends the runner."""
    device = torch.cuda.current_device()
    tokens = [0] * num_tokens
    blocks = tuple(range(runner.num_blocks))
    sampling = SamplingParams(temperature=1.0, seed=0)
    start = SequenceStart(0, blocks, 0, tokens, num_tokens, sampling, frozenset())
    step = SequenceStep(0, 0, tokens, (), sample=True)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.execute(StepPlan(1, (start,), (step,)))
    peak = torch.cuda.max_memory_allocated(device) - before
    runner.close()
    torch.cuda.empty_cache()
    return peak
