"""The doctor's checks. Each yields findings and never raises for what it finds."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from sessionkv.cli import output
from sessionkv.cli.hints import hint_for
from sessionkv.config import EngineConfig, user_cache_dir
from sessionkv.engine.sizing import MachineMemory, measure, plan_memory
from sessionkv.errors import ConfigError, ModelError, ModelNotFound, SessionKVError, Unauthorized

if TYPE_CHECKING:
    from sessionkv.engine.gpu.devices import Gpu
    from sessionkv.model.spec import ModelSpec

LIBRARIES = (
    "torch", "numpy", "transformers", "tokenizers", "jinja2", "msgpack", "pyzmq", "lmdb", "xxhash",
)  # fmt: skip
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
ROOM_FACTOR = 1.2
"""Weights have to fit the memory with this much to spare, for activations and the cache."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact; something is wrong when there is advice."""

    topic: str
    text: str
    advice: str = ""


def check_machine() -> Iterator[Finding]:
    """Processor, memory, system."""
    yield Finding("system", f"{platform.platform()}, Python {platform.python_version()}")
    if sys.platform == "win32":
        yield Finding("system", "Windows is not supported", "Use Linux, macOS or WSL.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("processor", f"{platform.machine()}, {cores} usable cores")
    yield Finding("memory", f"{output.size(memory)}")


def check_libraries() -> Iterator[Finding]:
    """What the engine needs."""
    found, missing = [], []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    yield Finding("libraries", ", ".join(found))
    if missing:
        yield Finding(
            "libraries", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}"
        )


def usable_gpus(config: EngineConfig) -> Sequence[Gpu]:
    """GPUs that torch can use; none are looked for where the CPU is asked for."""
    if config.device == "cpu":
        return ()
    try:
        from sessionkv.engine.gpu.devices import find_gpus
    except ImportError:
        return ()
    return find_gpus()


def check_gpu(config: EngineConfig, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """The GPUs there are and what is free of them; whether the one asked for can be used."""
    if config.device == "cpu":
        yield Finding("GPU", "not used: device is cpu")
        return
    for gpu in gpus:
        held = gpu.total_bytes - gpu.free_bytes
        yield Finding(
            "GPU",
            f"{gpu.name}: {output.size(gpu.free_bytes)} of {output.size(gpu.total_bytes)} free, "
            f"{output.size(held)} held by processes",
        )
    shown = _nvidia_gpus()
    if shown and not gpus:
        yield Finding(
            "GPU",
            f"{', '.join(shown)}: there, and torch cannot use it",
            "Install a build of torch with CUDA, and a driver that fits it.",
        )
    elif not gpus:
        yield Finding("GPU", "none; computing on CPU")
    if config.device != "auto" and _chosen(config, gpus) is None:
        yield Finding(
            "GPU",
            f"device is {config.device}, and torch can use {output.count(len(gpus), 'GPU')}",
            "Take another with --device; auto takes the CPU where there is none.",
        )


def _chosen(config: EngineConfig, gpus: Sequence[Gpu]) -> Gpu | None:
    """The GPU that an engine would compute on."""
    index = int(config.device.partition(":")[2] or 0)
    return gpus[index] if config.device != "cpu" and index < len(gpus) else None


def _nvidia_gpus() -> list[str]:
    """Names of the NVIDIA GPUs that the driver shows; asks no library."""
    names = []
    for path in sorted(NVIDIA_GPUS.glob("*/information")):
        for line in path.read_text().splitlines():
            if line.startswith("Model:"):
                names.append(line.partition(":")[2].strip())
    return names


def check_model(config: EngineConfig, gpus: Sequence[Gpu] = ()) -> Iterator[Finding]:
    """Whether the model is there and supported, and what of it fits."""
    try:
        from sessionkv.model.prepare import prepare_model

        prepared = prepare_model(
            config.model, cache_dir=config.model_cache or user_cache_dir(), offline=True
        )
    except ImportError as error:
        yield Finding("model", f"cannot be looked at: {error}", "Install what is missing.")
        return
    except ModelNotFound as error:
        if config.offline or error.details.keys() & {"path", "ref"}:
            yield Finding("model", error.message, "Name a model that is here.")
        else:
            found = f"{config.model} is not here yet"
            yield Finding("model", found, "`sessionkv serve` fetches it, with network.")
        return
    except ModelError as error:
        yield Finding("model", error.message, hint_for(error) or "Take another model.")
        return
    machine = measure(config.store or user_cache_dir())
    blas = serves_by_blas()
    yield from size_up(config, prepared.spec, machine, _chosen(config, gpus), blas=blas)


def serves_by_blas() -> bool:
    """Whether ``serve`` computes products through numpy's BLAS here."""
    from sessionkv.actor.serve import WAIT_POLICY
    from sessionkv.kernels.linear import blas_is_faster

    policy = os.environ.get("OMP_WAIT_POLICY", WAIT_POLICY)
    return blas_is_faster(threads_wait_asleep=policy.lower() == WAIT_POLICY)


def size_up(
    config: EngineConfig,
    spec: ModelSpec,
    machine: MachineMemory,
    gpu: Gpu | None = None,
    *,
    blas: bool = False,
) -> Iterator[Finding]:
    """What the model weighs, and how many tokens ``serve`` would keep in each tier.

    On a GPU about so many: what steps take beside the weights is measured only by an engine.

    Args:
        config: The engine's.
        spec: The model's.
        machine: Memory and disk that are free.
        gpu: What it computes on, None for the CPU.
        blas: Whether products on the CPU go through numpy's BLAS.
    """
    dtype, weights_bytes = "float32", spec.cpu_weights_bytes(blas=blas)
    if gpu is not None:
        dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        weights_bytes = spec.num_parameters * spec.kv_geometry(1, dtype).element_bytes
        machine = replace(machine, free_gpu_bytes=max(0, gpu.free_bytes - weights_bytes))
    geometry = spec.kv_geometry(config.cache.block_size, dtype)
    yield Finding(
        "model",
        f"{config.model}: {spec.family}, {spec.num_layers} layers, window "
        f"{spec.max_model_len:,} tokens, weights {output.size(weights_bytes)} in {_DTYPES[dtype]}"
        + (", held twice for this processor" if blas and gpu is None else ""),
    )
    yield Finding(
        "KV",
        f"{output.size(geometry.token_bytes)} a token, {output.size(geometry.block_bytes)} a "
        f"block of {geometry.block_size}",
    )
    yield from _limits(spec, gpu)
    available = machine.available_ram_bytes if gpu is None else gpu.free_bytes
    if weights_bytes * ROOM_FACTOR > available:
        yield Finding(
            "memory" if gpu is None else "GPU",
            f"the weights need {output.size(weights_bytes)} of {output.size(available)} available",
            "Take a smaller model, or free memory"
            + ("." if gpu is None else " of the GPU, or compute with --device cpu."),
        )
        if gpu is not None:
            return
    try:
        plan = plan_memory(
            config.cache, geometry, model_max_len=spec.max_model_len,
            asked_max_len=config.max_model_len, machine=machine,
        )  # fmt: skip
    except ConfigError as error:
        yield Finding("tiers", error.message, "Correct it; `sessionkv config show` says where.")
        return
    for tier, num_blocks in (
        ("device", plan.num_device_blocks),
        ("host", plan.num_host_blocks),
        ("disk", plan.disk_bytes // geometry.block_bytes),
    ):
        held = output.size(num_blocks * geometry.block_bytes)
        yield Finding(tier, f"{held} of KV = {num_blocks * geometry.block_size:,} tokens")
    for note in plan.notes:
        yield Finding("window", note)


def _limits(spec: ModelSpec, gpu: Gpu | None) -> Iterator[Finding]:
    """What the GPU's kernels do not take."""
    if gpu is None:
        return
    from sessionkv.engine.gpu.limits import check_model as check_limits

    try:
        check_limits(spec)
    except ModelError as error:
        yield Finding("model", error.message, "Compute it with --device cpu.")


def check_store(config: EngineConfig) -> Iterator[Finding]:
    """Whether the store's directory can be used, and by whom it is used now."""
    store = config.store
    if store is None:
        return
    parent = next(path for path in (store, *store.absolute().parents) if path.exists())
    free = shutil.disk_usage(parent).free
    state = "exists" if store.exists() else "will be made"
    yield Finding("store", f"{store} ({state}), {output.size(free)} free")
    if not os.access(parent, os.W_OK | os.X_OK):
        yield Finding("store", f"{parent} cannot be written", "Name another with --store.")
    if store.exists() and store.stat().st_mode & 0o077:
        yield Finding("store", f"{store} is open to other users", f"chmod 700 {store}")


def check_engine(endpoint: str | None) -> Iterator[Finding]:
    """Whether an engine answers at the socket."""
    from sessionkv.client import Client
    from sessionkv.ipc.endpoint import default_endpoint, is_listening, socket_path

    endpoint = endpoint or default_endpoint()
    try:
        path = socket_path(endpoint)
        if not is_listening(endpoint):
            state = "a dead engine's socket is there" if path.exists() else "no engine is running"
            yield Finding("engine", f"{endpoint}: {state}")
            return
        with Client(endpoint) as client:
            client.stats()
    except Unauthorized:
        yield Finding("engine", f"{endpoint}: running, and asks for a key")
        return
    except SessionKVError as error:
        yield Finding("engine", f"{endpoint}: {error.message}", hint_for(error) or "")
        return
    yield Finding("engine", f"{endpoint}: running")
