"""The doctor's checks. Each yields findings and never raises for what it finds."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from sessionkv.cli import output
from sessionkv.cli.hints import hint_for
from sessionkv.config import EngineConfig, user_cache_dir
from sessionkv.errors import ModelError, SessionKVError

LIBRARIES = ("torch", "transformers", "tokenizers", "jinja2", "msgpack", "pyzmq", "lmdb", "xxhash")
FP32_BYTES = 4
ROOM_FACTOR = 1.2
"""Weights have to fit the memory with this much to spare, for activations and the cache."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact; something is wrong when there is advice."""

    topic: str
    text: str
    advice: str = ""


def available_memory_bytes() -> int:
    """Memory that a new process can use without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_machine() -> Iterator[Finding]:
    """Processor, memory, system."""
    yield Finding("system", f"{platform.platform()}, Python {platform.python_version()}")
    if sys.platform == "win32":
        yield Finding("system", "Windows is not supported", "Use Linux, macOS or WSL.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("processor", f"{platform.machine()}, {cores} usable cores")
    yield Finding("memory", f"{output.size(available_memory_bytes())} available")


def check_libraries() -> Iterator[Finding]:
    """What the engine needs, and whether torch sees a GPU."""
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
    if "torch" in missing:
        return
    import torch

    if not torch.cuda.is_available():
        yield Finding("device", f"cpu, {torch.get_num_threads()} threads (no CUDA device)")
    for index in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(index)
        yield Finding("device", f"{props.name}, {output.size(props.total_memory)}; not used yet")


def check_model(config: EngineConfig) -> Iterator[Finding]:
    """Whether the model is there and supported, what it weighs, and how many tokens fit."""
    try:
        from sessionkv.model.prepare import prepare_model
    except ImportError as error:
        yield Finding("model", f"cannot be looked at: {error}", "Install what is missing.")
        return
    try:
        spec = prepare_model(
            config.model, cache_dir=config.model_cache or user_cache_dir(), offline=True
        ).spec
    except ModelError as error:
        yield Finding("model", error.message, hint_for(error) or "")
        return
    weights = spec.num_parameters * FP32_BYTES
    token_bytes = 2 * spec.num_layers * spec.kv_size * FP32_BYTES
    yield Finding(
        "model",
        f"{config.model}: {spec.family}, {spec.num_layers} layers, "
        f"window {spec.max_model_len:,} tokens, weights {output.size(weights)} in fp32",
    )
    yield Finding(
        "KV",
        f"{output.size(token_bytes)} a token, "
        f"{output.size(token_bytes * config.cache.block_size)} a block of "
        f"{config.cache.block_size}",
    )
    available = available_memory_bytes()
    if weights * ROOM_FACTOR > available:
        yield Finding(
            "model",
            f"the weights need {output.size(weights)}, {output.size(available)} are available",
            "Take a smaller model, or free memory.",
        )
    yield from _check_tiers(config, token_bytes)


def _check_tiers(config: EngineConfig, token_bytes: int) -> Iterator[Finding]:
    """How many tokens each tier would hold, as ``serve`` would size it now."""
    yield Finding("tiers", f"{token_bytes} {config.cache}")


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
    except SessionKVError as error:
        yield Finding("engine", f"{endpoint}: {error.message}", hint_for(error) or "")
        return
    yield Finding("engine", f"{endpoint}: running")
