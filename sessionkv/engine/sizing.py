"""How memory and disk are split: what was asked for, else shares of what is free.

The decision is pure; :func:`measure` alone looks at the machine.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sessionkv.config import GIB, CacheConfig
from sessionkv.engine.scheduler.batch import StepBudget
from sessionkv.errors import ConfigError
from sessionkv.types import KVGeometry

RAM_SHARE = 0.25
DISK_SHARE = 0.10
MAX_DEVICE_BYTES = 4 * GIB
MAX_HOST_BYTES = 2 * GIB
GPU_SHARE = 0.90
MAX_GPU_HOST_BYTES = 64 * GIB
MAX_DISK_BYTES = 50 * GIB
MIRROR_SHARE = 1 / 3
"""Part of the device's KV bytes for contiguous copies of running sequences (CPU attention)."""
CPU_STEP = StepBudget(alone=512, shared=256)
GPU_STEP = StepBudget(alone=8192, shared=2048)
"""Larger steps use the device little better, and would hold up those that decode."""


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """What is free, in bytes.

    Attributes:
        free_gpu_bytes: Once the model is loaded and has its scratch memory; None without a GPU.
    """

    available_ram_bytes: int
    free_disk_bytes: int
    free_gpu_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The split.

    Attributes:
        num_device_blocks: Blocks of the device pool.
        mirror_bytes: For contiguous copies of running sequences; device KV too.
        num_host_blocks: Blocks of the host tier; 0 is off.
        disk_bytes: Cap of the disk tier; 0 is off.
        max_model_len: Most positions of one sequence.
        notes: What somebody should know, such as a window that had to shrink.
    """

    num_device_blocks: int
    mirror_bytes: int
    num_host_blocks: int
    disk_bytes: int
    max_model_len: int
    notes: tuple[str, ...] = ()


def measure(disk_path: Path) -> MachineMemory:
    """Free RAM (what can be had without swapping) and free disk at ``disk_path``."""
    available = 0
    with Path("/proc/meminfo").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    left = cgroup_bytes_left()
    if left is not None:
        available = min(available, left)
    # Unlike Path.exists, this answers also where one may not look; the store will say so.
    existing = next(p for p in (disk_path, *disk_path.resolve().parents) if os.path.exists(p))
    return MachineMemory(available, shutil.disk_usage(existing).free)


def cgroup_bytes_left(
    own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """What the process's control groups (version 2) leave it of memory; None without a limit.

    Args:
        own: Where the kernel names the process's group.
        root: Where groups are mounted.
    """
    try:
        names = [line[3:] for line in own.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        return None
    left: list[int] = []
    for name in names:
        group = root / name.strip("/")
        for folder in (group, *group.parents):
            try:
                limit = (folder / "memory.max").read_text().strip()
                if limit != "max":
                    used = int((folder / "memory.current").read_text())
                    left.append(max(0, int(limit) - used))
            except (OSError, ValueError):
                continue
    return min(left, default=None)


def check_memory(cache: CacheConfig, machine: MachineMemory) -> None:
    """Refuse a host tier that this machine could never hold, whatever the model.

    Raises:
        ConfigError: More bytes are asked for than there are.
    """
    if cache.host_bytes is not None:
        _check_ram("cache.host_bytes", cache.host_bytes, machine)


@contextmanager
def memory_for(name: str, num_bytes: int) -> Iterator[None]:
    """Say which setting asked for memory that the system refuses.

    Raises:
        ConfigError: The body met an ``OSError`` that says so.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        allowed = "less; the system refuses so much memory"
        raise ConfigError(name, _Size(num_bytes), allowed) from error


def plan_memory(
    cache: CacheConfig,
    geometry: KVGeometry,
    *,
    model_max_len: int,
    asked_max_len: int | None,
    machine: MachineMemory,
) -> MemoryPlan:
    """Decide the split.

    Args:
        cache: What was asked for.
        geometry: Of a block.
        model_max_len: Positions the model was made for.
        asked_max_len: What was asked for; None is the model's own.
        machine: What is free.

    Raises:
        ConfigError: The device's share holds no block, or the window asked for is the model's not,
            or a tier is larger than this machine's memory.
    """
    check_memory(cache, machine)
    block_bytes = geometry.block_bytes
    num_device, mirror_bytes = _device(cache, block_bytes, machine)
    max_len = window_tokens(asked_max_len, model_max_len)
    notes = []
    # The last token of a sequence never gets KV.
    room = num_device * geometry.block_size + 1
    if max_len > room:
        notes.append(
            f"the window is {room} tokens instead of {max_len}: "
            f"{num_device} device blocks hold no more (cache.device_bytes)"
        )
        max_len = room
    host_bytes = cache.host_bytes
    if host_bytes is None:
        most = MAX_HOST_BYTES if machine.free_gpu_bytes is None else MAX_GPU_HOST_BYTES
        host_bytes = min(int(machine.available_ram_bytes * RAM_SHARE), most)
    disk_bytes = cache.disk_bytes
    if disk_bytes is None:
        disk_bytes = min(int(machine.free_disk_bytes * DISK_SHARE), MAX_DISK_BYTES)
    return MemoryPlan(
        num_device_blocks=num_device,
        mirror_bytes=mirror_bytes,
        num_host_blocks=host_bytes // block_bytes,
        disk_bytes=disk_bytes,
        max_model_len=max_len,
        notes=tuple(notes),
    )


def step_budget(asked: int | None, *, on_gpu: bool) -> StepBudget:
    """Most tokens of a step: as asked for, whoever decodes; else the device's defaults."""
    if asked is not None:
        return StepBudget(alone=asked, shared=asked)
    return GPU_STEP if on_gpu else CPU_STEP


def window_tokens(asked_max_len: int | None, model_max_len: int) -> int:
    """Most positions of one sequence; None is what the model was made for.

    Raises:
        ConfigError: The model was made for fewer.
    """
    max_len = model_max_len if asked_max_len is None else asked_max_len
    if max_len > model_max_len:
        raise ConfigError("max_model_len", max_len, f"at most {model_max_len}, the model's own")
    return max_len


class _Size(int):
    """Bytes that a message shows in GiB."""

    def __repr__(self) -> str:
        return f"{int(self) / GIB:,.1f} GiB"


def _check_ram(name: str, num_bytes: int, machine: MachineMemory) -> None:
    if num_bytes > machine.available_ram_bytes:
        most = machine.available_ram_bytes * 10 // GIB / 10  # rounded down, as it is a bound
        allowed = f"at most {most:,.1f} GiB, what this machine can give"
        raise ConfigError(name, _Size(num_bytes), allowed)


def _device(cache: CacheConfig, block_bytes: int, machine: MachineMemory) -> tuple[int, int]:
    """Blocks of the pool, and bytes beside it for mirrors."""
    if machine.free_gpu_bytes is not None:
        return _gpu_blocks(cache, block_bytes, machine.free_gpu_bytes), 0
    if cache.device_blocks is not None:
        pool_bytes = cache.device_blocks * block_bytes
        if pool_bytes > machine.available_ram_bytes:
            most = machine.available_ram_bytes // block_bytes
            raise ConfigError(
                "cache.device_blocks",
                cache.device_blocks,
                f"at most {most:,}, what this machine can give",
            )
        return cache.device_blocks, int(pool_bytes * MIRROR_SHARE / (1 - MIRROR_SHARE))
    device_bytes = cache.device_bytes
    if device_bytes is None:
        device_bytes = min(int(machine.available_ram_bytes * RAM_SHARE), MAX_DEVICE_BYTES)
    _check_ram("cache.device_bytes", device_bytes, machine)
    num_blocks = int(device_bytes * (1 - MIRROR_SHARE)) // block_bytes
    if num_blocks < 1:
        least = -(-block_bytes * 3 // 2)
        raise ConfigError("cache.device_bytes", device_bytes, f"at least {least} (one block)")
    return num_blocks, device_bytes - num_blocks * block_bytes


def _gpu_blocks(cache: CacheConfig, block_bytes: int, free_bytes: int) -> int:
    """Blocks of a pool on a GPU with so much free memory."""
    if cache.device_blocks is not None:
        name, asked, wanted_bytes = (
            "cache.device_blocks", cache.device_blocks, cache.device_blocks * block_bytes
        )  # fmt: skip
    elif cache.device_bytes is not None:
        name, asked, wanted_bytes = "cache.device_bytes", cache.device_bytes, cache.device_bytes
    else:
        name, asked, wanted_bytes = "cache.device_bytes", None, int(free_bytes * GPU_SHARE)
    if not block_bytes <= wanted_bytes <= free_bytes:
        raise ConfigError(
            name,
            asked,
            f"from {block_bytes} (one block) to {free_bytes} bytes, which the GPU has free beside "
            f"the model; another process may hold memory of it",
        )
    return wanted_bytes // block_bytes
