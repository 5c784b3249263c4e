from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from sessionkv.config import GIB, MIB, CacheConfig, EngineConfig
from sessionkv.engine.build import build_engine
from sessionkv.engine.scheduler.batch import StepBudget
from sessionkv.engine.sizing import (
    MachineMemory,
    MemoryPlan,
    measure,
    memory_for,
    plan_memory,
    step_budget,
)
from sessionkv.errors import ConfigError
from sessionkv.types import KVGeometry

GEOMETRY = KVGeometry(30, 3, 64, 16, "float32", 4)
BLOCK = GEOMETRY.block_bytes


def plan(
    *,
    ram: int = 24 * GIB,
    disk: int = 100 * GIB,
    gpu: int | None = None,
    asked: int | None = None,
    **cache: Any,
) -> MemoryPlan:
    return plan_memory(
        CacheConfig(**cache),
        GEOMETRY,
        model_max_len=8192,
        asked_max_len=asked,
        machine=MachineMemory(available_ram_bytes=ram, free_disk_bytes=disk, free_gpu_bytes=gpu),
    )


def device_bytes(found: MemoryPlan) -> int:
    return found.num_device_blocks * BLOCK + found.mirror_bytes


def test_a_large_machine_meets_the_caps() -> None:
    found = plan(ram=64 * GIB, disk=1024 * GIB)
    assert BLOCK == 737280
    assert device_bytes(found) == 4 * GIB
    assert found.num_device_blocks == int(4 * GIB * (1 - 1 / 3)) // BLOCK
    assert found.num_host_blocks == 2 * GIB // BLOCK
    assert found.disk_bytes == 50 * GIB
    assert (found.max_model_len, found.notes) == (8192, ())


def test_a_small_machine_gives_shares() -> None:
    found = plan(ram=4 * GIB, disk=20 * GIB)
    assert device_bytes(found) == GIB
    assert found.num_host_blocks == GIB // BLOCK
    assert found.disk_bytes == 2 * GIB


def test_explicit_sizes_are_taken_as_they_are() -> None:
    found = plan(device_bytes=300 * MIB, host_bytes=10 * BLOCK + 5, disk_bytes=7)
    assert device_bytes(found) == 300 * MIB
    assert (found.num_host_blocks, found.disk_bytes) == (10, 7)


def test_tiers_can_be_off() -> None:
    found = plan(host_bytes=0, disk_bytes=0)
    assert (found.num_host_blocks, found.disk_bytes) == (0, 0)


def test_device_blocks_override_bytes() -> None:
    found = plan(device_blocks=512, device_bytes=1)
    assert found.num_device_blocks == 512
    assert abs(found.mirror_bytes - 256 * BLOCK) <= 1


def test_the_longest_sequence_shrinks_to_the_pool_and_says_so() -> None:
    found = plan(device_blocks=10)
    assert found.max_model_len == 161  # the last token of a sequence needs no slot
    assert len(found.notes) == 1
    assert "161" in found.notes[0]
    assert "8192" in found.notes[0]


def test_a_shorter_length_asked_for_needs_no_note() -> None:
    found = plan(device_blocks=10, asked=160)
    assert (found.max_model_len, found.notes) == (160, ())


def test_a_length_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len is 9000; allowed: at most 8192"):
        plan(asked=9000)


def test_no_room_for_one_block_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ConfigError, match="at least") as caught:
        plan(device_bytes=BLOCK)
    needed = int(str(caught.value).split("at least ")[1].split(" ")[0])
    assert plan(device_bytes=needed).num_device_blocks == 1


@pytest.mark.parametrize("name", ["host_bytes", "device_bytes"])
def test_a_tier_larger_than_memory_is_refused_with_what_there_is(name: str) -> None:
    words = rf"cache.{name} is 900.0 GiB; allowed: at most 23.9 GiB, what this machine can give"
    with pytest.raises(ConfigError, match=words):
        plan(ram=24 * GIB - 1, **{name: 900 * GIB})
    most = 24 * GIB
    assert plan(ram=most, **{name: most}).num_host_blocks  # all of it may be asked for
    with pytest.raises(ConfigError, match=f"cache.{name}"):
        plan(ram=most, **{name: most + 1})


def test_more_device_blocks_than_memory_holds_are_refused_with_how_many_it_does() -> None:
    assert plan(ram=100 * BLOCK, device_blocks=100, host_bytes=0).num_device_blocks == 100
    with pytest.raises(ConfigError, match=r"device_blocks is 101; allowed: at most 100, what"):
        plan(ram=100 * BLOCK, device_blocks=101, host_bytes=0)


def test_a_gpu_takes_its_pool_from_its_own_memory_and_the_host_tier_from_the_machines() -> None:
    assert plan(ram=GIB, gpu=80 * GIB, device_bytes=60 * GIB).num_device_blocks == 60 * GIB // BLOCK
    with pytest.raises(ConfigError, match=r"host_bytes is 2\.0 GiB; allowed: at most 1\.0 GiB"):
        plan(ram=GIB, gpu=80 * GIB, host_bytes=2 * GIB)


@pytest.mark.parametrize("name", ["host_bytes", "device_bytes"])
def test_an_engine_with_a_tier_larger_than_memory_makes_no_store(tmp_path: Path, name: str) -> None:
    store = tmp_path / "store"
    cache = CacheConfig(**{name: 2**50})
    with pytest.raises(ConfigError, match=rf"{name} is 1,048,576\.0 GiB; allowed: at most"):
        build_engine(EngineConfig(model="checksum", store=store, cache=cache))
    assert not store.exists()


def test_memory_the_system_refuses_is_told_with_the_setting_that_asked_for_it() -> None:
    with (
        pytest.raises(ConfigError, match=r"cache\.host_bytes is 3\.0 GiB; allowed: less"),
        memory_for("cache.host_bytes", 3 * GIB),
    ):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    with pytest.raises(PermissionError), memory_for("cache.host_bytes", 3 * GIB):
        raise PermissionError(errno.EACCES, "no")  # something else is not hidden


def test_a_gpu_gives_nine_tenths_of_what_is_free_and_a_larger_host_tier() -> None:
    found = plan(gpu=80 * GIB, ram=1024 * GIB)
    assert (found.num_device_blocks, found.mirror_bytes) == (int(72 * GIB) // BLOCK, 0)
    assert found.num_host_blocks == 64 * GIB // BLOCK
    assert (found.max_model_len, found.notes) == (8192, ())
    assert plan(gpu=80 * GIB, ram=100 * GIB).num_host_blocks == 25 * GIB // BLOCK


def test_what_is_asked_of_a_gpu_is_taken_as_far_as_it_is_free() -> None:
    assert plan(gpu=10 * BLOCK, device_blocks=10).num_device_blocks == 10
    assert plan(gpu=10 * BLOCK, device_bytes=3 * BLOCK + 5).num_device_blocks == 3
    free = f"from {BLOCK} .one block. to {10 * BLOCK} bytes.*another process"
    with pytest.raises(ConfigError, match=f"cache.device_blocks is 11; allowed: {free}"):
        plan(gpu=10 * BLOCK, device_blocks=11)
    with pytest.raises(ConfigError, match=f"cache.device_bytes is {10 * BLOCK + 1}; .*{free}"):
        plan(gpu=10 * BLOCK, device_bytes=10 * BLOCK + 1)
    with pytest.raises(ConfigError, match=f"cache.device_bytes is {BLOCK - 1}; .*{free}"):
        plan(gpu=10 * BLOCK, device_bytes=BLOCK - 1)


def test_a_gpu_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"to {BLOCK} bytes, which the GPU has free"):
        plan(gpu=BLOCK)  # nine tenths of it hold none
    assert plan(gpu=2 * BLOCK).num_device_blocks == 1


def test_a_window_shrinks_to_the_gpus_pool_too() -> None:
    found = plan(gpu=100 * BLOCK)
    assert found.max_model_len == 90 * 16 + 1
    assert "1441" in found.notes[0]


@pytest.mark.parametrize(
    ("asked", "on_gpu", "budget"),
    [
        (None, False, StepBudget(alone=512, shared=256)),
        (None, True, StepBudget(alone=8192, shared=2048)),
        (100, False, StepBudget(alone=100, shared=100)),
        (4096, True, StepBudget(alone=4096, shared=4096)),
    ],
)
def test_steps_are_larger_alone_unless_told(
    asked: int | None, on_gpu: bool, budget: StepBudget
) -> None:
    assert step_budget(asked, on_gpu=on_gpu) == budget


def test_measure_looks_at_the_nearest_existing_folder(tmp_path: Path) -> None:
    found = measure(tmp_path / "not" / "yet")
    assert found.available_ram_bytes > 100 * MIB
    assert found.free_disk_bytes > 0
