"""A runner on a GPU: loads the model, measures what is left, allocates the pool.

Memory is never guessed: the weights are loaded and steps of the largest sizes are run before the
pool takes a share of what is free then. The rest of that share's memory is for graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from sessionkv.config import EngineConfig
from sessionkv.engine.gpu.limits import check_model
from sessionkv.engine.gpu.runner import GpuRunner
from sessionkv.engine.gpu.sampling import ROWS_AT_ONCE
from sessionkv.engine.model_runner import kv_fingerprint
from sessionkv.engine.scheduler.batch import StepBudget
from sessionkv.engine.sizing import (
    MachineMemory,
    MemoryPlan,
    plan_memory,
    step_budget,
    window_tokens,
)
from sessionkv.errors import ConfigError
from sessionkv.model.gpu_decoder import GpuDecoder
from sessionkv.model.prepare import PreparedModel
from sessionkv.model.spec import ELEMENT_BYTES, ModelSpec
from sessionkv.model.weights import WeightFiles
from sessionkv.types import SamplingParams, SequenceStart, SequenceStep, StepPlan
from sessionkv.types.sampling import MAX_LOGPROBS

NUMERICS = "gpu 2"
"""Names the arithmetic; to be changed whenever the same weights give other KV bytes."""


def load_gpu_runner(
    config: EngineConfig,
    prepared: PreparedModel,
    *,
    device: torch.device,
    machine: MachineMemory,
    progress: Callable[[str, int, int], None],
) -> tuple[MemoryPlan, GpuRunner]:
    """Load the model, allocate its pool and capture its graphs.

    Args:
        config: The engine's.
        prepared: Model folder, checked.
        device: A CUDA device.
        machine: Free RAM and disk.
        progress: Told of a stage's name, and how many of how many steps of it are done.

    Raises:
        ModelUnsupported: The kernels do not take the model.
        ConfigError: The GPU has too little memory free, or the window is not the model's.
        ModelBroken: A file is missing or damaged.
    """
    check_model(prepared.spec)
    torch.cuda.set_device(device)
    dtype = gpu_dtype(config)
    free, total = torch.cuda.mem_get_info(device)
    check_room(prepared.spec, dtype, str(device), free_bytes=free, total_bytes=total)
    try:
        return _load(config, prepared, device=device, machine=machine, progress=progress)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        raise ConfigError(
            "cache.device_bytes",
            config.cache.device_bytes,
            f"what leaves room for the model, its steps and its graphs: of the GPU's {total:,} "
            f"bytes {free:,} were free at the start (another process may hold the rest)",
        ) from None


def gpu_dtype(config: EngineConfig) -> str:
    """Of weights and KV on a GPU."""
    return "bfloat16" if config.dtype == "auto" else config.dtype


def check_room(
    spec: ModelSpec, dtype: str, device: str, *, free_bytes: int, total_bytes: int
) -> None:
    """Refuse a GPU whose free memory does not hold the weights.

    Raises:
        ConfigError: With the numbers.
    """
    needed = spec.num_parameters * ELEMENT_BYTES[dtype]
    if needed > free_bytes:
        raise ConfigError(
            "device",
            device,
            f"a GPU with {needed:,} bytes free for the weights (of {total_bytes:,} this one has "
            f"{free_bytes:,} free; another process may hold the rest), or cpu",
        )


def _load(
    config: EngineConfig,
    prepared: PreparedModel,
    *,
    device: torch.device,
    machine: MachineMemory,
    progress: Callable[[str, int, int], None],
) -> tuple[MemoryPlan, GpuRunner]:
    spec, dtype = prepared.spec, gpu_dtype(config)
    max_len = window_tokens(config.max_model_len, spec.max_model_len)
    progress("load", 0, 1)
    weights = WeightFiles(
        prepared.folder, spec, dtype=getattr(torch, dtype), device=device, neighbours=False
    )
    decoder = GpuDecoder(spec, weights, max_model_len=max_len)
    progress("load", 1, 1)
    geometry = spec.kv_geometry(config.cache.block_size, dtype)
    budget = step_budget(config.scheduler.step_tokens, on_gpu=True)
    max_running = budget.most_running(config.scheduler.max_running)

    def runner(num_blocks: int, max_model_len: int) -> GpuRunner:
        return GpuRunner(
            decoder,
            fingerprint=kv_fingerprint(spec, prepared.fingerprint, numerics=f"{NUMERICS} {dtype}"),
            geometry=geometry,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_step_tokens=budget.alone,
            max_running=max_running,
            device=device,
        )

    plans = largest_steps(
        budget,
        max_len=max_len,
        block_size=geometry.block_size,
        max_running=max_running,
        vocab_size=spec.vocab_size,
    )
    needed_bytes = _measure(lambda: runner(1, max_len), plans, device)
    memory = plan_memory(
        config.cache,
        geometry,
        model_max_len=spec.max_model_len,
        asked_max_len=config.max_model_len,
        machine=replace(
            machine,
            free_gpu_bytes=max(0, torch.cuda.mem_get_info(device)[0] - needed_bytes),
        ),
    )
    built = runner(memory.num_device_blocks, memory.max_model_len)
    built.warm_up(lambda done, total: progress("graphs", done, total))
    return memory, built


def largest_steps(
    budget: StepBudget, *, max_len: int, block_size: int, max_running: int, vocab_size: int
) -> list[StepPlan]:
    """Steps that take as much memory as any: of the most tokens, and of the most to be sampled.

    At the end of sequences of the greatest length, since there is scratch memory for what lies
    before the new tokens. All blocks are block 0: what they hold does not matter.
    """
    table = (0,) * -(-max_len // block_size)
    token_ids = [0] * max_len
    sampling = SamplingParams(temperature=1.0, seed=0, presence_penalty=1.0, logprobs=MAX_LOGPROBS)
    mask = b"\xff" * (-(-vocab_size // 32) * 4)

    def step(step_id: int, sizes: Sequence[int], ends: tuple[int, ...]) -> StepPlan:
        first = len(ends)
        starts = tuple(
            SequenceStart(first + i, table, max_len - n, token_ids, max_len, sampling, frozenset())
            for i, n in enumerate(sizes)
        )
        steps = tuple(
            SequenceStep(first + i, max_len - n, token_ids[:n], (), sample=True)
            for i, n in enumerate(sizes)
        )
        masks = {start.seq_id: mask for start in starts}
        return StepPlan(step_id, starts, steps, ends=ends, masks=masks)

    whole, rest = divmod(budget.alone, max_len)
    chunks = ([max_len] * whole + [rest] * (rest > 0))[:max_running]
    singles = [1] * min(ROWS_AT_ONCE, max_running)
    return [step(1, chunks, ()), step(2, singles, tuple(range(len(chunks))))]


def _measure(
    runner: Callable[[], GpuRunner], plans: Sequence[StepPlan], device: torch.device
) -> int:
    """Most memory that a runner takes beside weights and pool while it carries out plans."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    trial = runner()
    for plan in plans:
        trial.execute(plan)
    peak = torch.cuda.max_memory_allocated(device) - before - trial.pool_bytes
    trial.close()
    torch.cuda.empty_cache()
    return peak
