from __future__ import annotations

import pytest
import torch

from sessionkv.errors import SessionKVError
from sessionkv.model.mirror import MirrorPool

TOKEN_BYTES = 2 * 2 * 3 * 8 * 4


def pool(budget_tokens: int, *, max_tokens: int = 1000) -> MirrorPool:
    return MirrorPool(
        num_layers=2,
        kv_heads=3,
        head_dim=8,
        max_tokens=max_tokens,
        budget_bytes=budget_tokens * TOKEN_BYTES,
    )


def test_bytes_are_counted_and_bounded() -> None:
    mirrors = pool(300)
    first = mirrors.create(100)
    assert first is not None
    assert (first.capacity, mirrors.used_bytes) == (128, 128 * TOKEN_BYTES)
    second = mirrors.create(129)
    assert second is None
    assert mirrors.used_bytes == 128 * TOKEN_BYTES
    mirrors.release(first)
    assert mirrors.used_bytes == 0
    assert mirrors.create(129) is not None


def test_growth_doubles_keeps_what_is_valid_and_counts_once() -> None:
    mirrors = pool(1000)
    mirror = mirrors.create(128)
    assert mirror is not None
    mirror.data.normal_()
    mirror.num_tokens = 120
    before = mirror.data[:, :, :, :120].clone()
    assert mirrors.grow(mirror, 129)
    assert mirror.capacity == 256
    assert torch.equal(mirror.data[:, :, :, :120], before)
    assert mirrors.used_bytes == 256 * TOKEN_BYTES


def test_growth_takes_less_than_double_near_the_end_and_says_no_past_it() -> None:
    mirrors = pool(640)
    mirror = mirrors.create(256)
    assert mirror is not None
    assert mirrors.grow(mirror, 300)  # 512 more would not fit beside the 256; 384 do
    assert mirror.capacity == 384
    assert not mirrors.grow(mirror, 500)
    assert mirrors.used_bytes == 384 * TOKEN_BYTES


def test_a_second_release_raises() -> None:
    mirrors = pool(300)
    mirror = mirrors.create(10)
    assert mirror is not None
    mirrors.release(mirror)
    with pytest.raises(SessionKVError, match="twice"):
        mirrors.release(mirror)


def test_memory_given_back_serves_the_next_mirror_and_makes_room_for_a_larger_one() -> None:
    mirrors = pool(400)
    first = mirrors.create(200)
    assert first is not None
    memory = first.data.data_ptr()
    mirrors.release(first)
    assert (mirrors.used_bytes, mirrors.held_bytes) == (0, 256 * TOKEN_BYTES)
    second = mirrors.create(130)
    assert second is not None
    assert second.data.data_ptr() == memory
    assert (second.num_tokens, mirrors.held_bytes) == (0, 256 * TOKEN_BYTES)
    mirrors.release(second)
    third = mirrors.create(380)
    assert third is not None
    assert (third.capacity, mirrors.held_bytes) == (384, 384 * TOKEN_BYTES)
