from __future__ import annotations

import pytest
import torch

from sessionkv.kernels import reference_pointwise as reference
from sessionkv.kernels.block_copies import copy_block_slots, gather_blocks, scatter_blocks

DTYPES = [torch.float32, torch.bfloat16]


def make_pool(dtype: torch.dtype, *, head_dim: int = 20, num_blocks: int = 6) -> torch.Tensor:
    """Every 16 bits another value."""
    elements = num_blocks * 2 * 2 * 3 * 8 * head_dim
    words = torch.arange(elements * dtype.itemsize // 2, dtype=torch.int32).to(torch.int16)
    return words.view(dtype).view(num_blocks, 2, 2, 3, 8, head_dim)


def bits(pool: torch.Tensor) -> torch.Tensor:
    return pool.cpu().contiguous().view(torch.int16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [20, 18, 80])
def test_first_slots_of_all_layers_are_copied(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> None:
    copies = [(0, 3, 5), (1, 4, 8), (0, 5, 0), (2, 2, 0)]
    pool, expected = make_pool(dtype, head_dim=head_dim), make_pool(dtype, head_dim=head_dim)
    on_device = pool.to(device, copy=True)
    copy_block_slots(on_device, torch.tensor(copies, device=device))
    reference.copy_block_slots(expected, copies)
    assert torch.equal(bits(on_device), bits(expected))
    assert not torch.equal(bits(on_device), bits(pool))


def test_no_copies(device: torch.device) -> None:
    pool = make_pool(torch.float32).to(device)
    copy_block_slots(pool, torch.zeros((0, 3), dtype=torch.int64, device=device))
    assert torch.equal(bits(pool), bits(make_pool(torch.float32)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("programs", [1, 3])
def test_blocks_go_out_and_come_back(
    device: torch.device, dtype: torch.dtype, programs: int
) -> None:
    pool = make_pool(dtype, head_dim=100)  # extents longer than one turn of a program
    on_device, ids = pool.to(device, copy=True), torch.tensor([4, -1, 0], device=device)
    block_bytes = pool[0].numel() * pool.element_size()
    buffer = torch.full((3, block_bytes), 7, dtype=torch.uint8, device=device)
    gather_blocks(on_device, ids, buffer, programs=programs)
    assert torch.equal(buffer[0].cpu().view(torch.int16), bits(pool[4]).view(-1))
    assert torch.equal(buffer[2].cpu().view(torch.int16), bits(pool[0]).view(-1))
    assert bool((buffer[1] == 7).all())
    assert torch.equal(bits(on_device), bits(pool))

    targets = torch.tensor([1, -1, 5], device=device)
    scatter_blocks(on_device, targets, buffer, programs=programs)
    expected = pool.clone()
    expected[[1, 5]] = pool[[4, 0]]
    assert torch.equal(bits(on_device), bits(expected))


@pytest.mark.gpu
def test_pinned_host_memory_is_reached() -> None:
    pool = make_pool(torch.bfloat16).to("cuda")
    ids = torch.tensor([5, 2], device="cuda")
    buffer = torch.zeros((2, *pool.shape[1:]), dtype=pool.dtype).pin_memory()
    gather_blocks(pool, ids, buffer)
    torch.cuda.synchronize()
    assert torch.equal(bits(buffer), bits(pool[[5, 2]]))
    scatter_blocks(pool, ids.flip(0), buffer)
    torch.cuda.synchronize()
    assert torch.equal(bits(pool[[2, 5]]), bits(buffer))


def test_wrong_arguments() -> None:
    pool = make_pool(torch.float32)
    ids = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="not 2 contiguous extents of 7680"):
        gather_blocks(pool, ids, torch.zeros(2, 100))
    with pytest.raises(ValueError, match=r"block_ids is torch\.int32"):
        scatter_blocks(pool, ids.int(), torch.zeros(2, 1920))
    with pytest.raises(ValueError, match="programs is 0"):
        scatter_blocks(pool, ids, torch.zeros(2, 1920), programs=0)
    with pytest.raises(ValueError, match=r"copies has shape \[2, 2\], not \[any, 3\]"):
        copy_block_slots(pool, torch.zeros((2, 2), dtype=torch.int64))
    with pytest.raises(ValueError, match=r"pool has shape \[2, 3\]"):
        copy_block_slots(torch.zeros(2, 3), torch.zeros((2, 3), dtype=torch.int64))
    odd = torch.zeros(1, 1, 2, 1, 2, 3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="rows of 6 bytes"):
        copy_block_slots(odd, torch.zeros((1, 3), dtype=torch.int64))
