from __future__ import annotations

import pytest
import torch

from sessionkv.kernels.paged_kv import block_runs, copy_slots, gather_kv, write_kv, write_layers

LAYERS, HEADS, BLOCK, DIM = 2, 3, 4, 8


def numbered_pool(num_blocks: int) -> torch.Tensor:
    shape = (num_blocks, LAYERS, 2, HEADS, BLOCK, DIM)
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_write_touches_exactly_its_slots() -> None:
    pool = numbered_pool(5)
    before = pool.clone()
    kv = -torch.rand(3, 2, HEADS, DIM) - 1
    where = [(4, 0), (1, 3), (1, 1)]
    write_kv(
        pool,
        1,
        kv,
        block_ids=torch.tensor([b for b, _ in where]),
        slots=torch.tensor([s for _, s in where]),
    )
    for i, (block, slot) in enumerate(where):
        assert torch.equal(pool[block, 1, :, :, slot], kv[i])
        before[block, 1, :, :, slot] = kv[i]
    assert torch.equal(pool, before)


def test_write_of_all_layers_equals_one_after_the_other() -> None:
    pool = numbered_pool(5)
    expected = pool.clone()
    kv = -torch.rand(LAYERS, 3, 2, HEADS, DIM) - 1
    where = {"block_ids": torch.tensor([4, 1, 1]), "slots": torch.tensor([0, 3, 1])}
    for layer in range(LAYERS):
        write_kv(expected, layer, kv[layer], **where)
    write_layers(pool, kv, **where)
    assert torch.equal(pool, expected)


def test_runs_are_the_blocks_that_adjoin() -> None:
    table = [4, 5, 6, 0, 1, 9, 3, 2]
    runs = block_runs(table)
    assert runs == (slice(4, 7), slice(0, 2), slice(9, 10), slice(3, 4), slice(2, 3))
    assert block_runs([]) == ()


@pytest.mark.parametrize("table", [[5, 0, 3], [1, 2, 3], [3, 4, 0]])
def test_gather_reads_positions_in_table_order(table: list[int]) -> None:
    pool = numbered_pool(6)
    for count in range(1, 3 * BLOCK + 1):
        out = torch.empty(2, HEADS, count, DIM)
        gather_kv(pool, 1, block_runs(table[: -(-count // BLOCK)]), out)
        for p in range(count):
            assert torch.equal(out[:, :, p], pool[table[p // BLOCK], 1, :, :, p % BLOCK])


def test_gather_writes_into_a_view_of_a_larger_buffer() -> None:
    pool = numbered_pool(3)
    buffer = torch.full((2, HEADS, 20, DIM), -1.0)
    gather_kv(pool, 0, block_runs([2, 1]), buffer[:, :, :7])
    assert torch.equal(buffer[:, :, 4:7], pool[1, 0, :, :, :3])
    assert bool((buffer[:, :, 7:] == -1).all())


def test_copy_slots_leaves_later_slots_alone() -> None:
    pool = numbered_pool(3)
    before = pool.clone()
    copy_slots(pool, src=0, dst=2, num_tokens=3)
    assert torch.equal(pool[2, :, :, :, :3], before[0, :, :, :, :3])
    assert torch.equal(pool[2, :, :, :, 3:], before[2, :, :, :, 3:])
    assert torch.equal(pool[:2], before[:2])
