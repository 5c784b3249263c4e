"""A prefix read into contiguous memory, and two results joined by their sums of exponentials."""

from __future__ import annotations

import pytest
import torch

from sessionkv.kernels.attention_parts import gather_kv_layer, merge_attention
from sessionkv.kernels.paged_kv import block_runs, gather_kv
from tests.builders.paged import LAYER, paged_batch


@pytest.mark.parametrize(
    ("head_dim", "block_size", "length", "dtype"),
    [
        (64, 16, 48, torch.float16),
        (80, 8, 13, torch.bfloat16),
        (96, 32, 33, torch.float32),
        (128, 256, 200, torch.bfloat16),
        (256, 16, 1, torch.float16),
    ],
)
def test_gather_reads_the_first_positions_and_nothing_else(
    device: torch.device, head_dim: int, block_size: int, length: int, dtype: torch.dtype
) -> None:
    batch = paged_batch(
        [(1, length)], head_dim=head_dim, block_size=block_size, dtype=dtype, device=device,
        padding=1,
    )  # fmt: skip
    table = batch.block_tables[0]
    scratch = torch.full((2, 2, length + 5, head_dim), 7.0, dtype=dtype, device=device)
    gather_kv_layer(
        batch.pool, LAYER, block_table=table, num_tokens=length, out=scratch[:, :, :length]
    )
    wanted = torch.empty((2, 2, length, head_dim), dtype=dtype, device=device)
    runs = block_runs(table[: -(-length // block_size)].tolist())
    gather_kv(batch.pool, LAYER, runs, wanted)
    assert torch.equal(scratch[:, :, :length], wanted)
    assert (scratch[:, :, length:] == 7.0).all()


def test_gather_of_nothing_touches_nothing(device: torch.device) -> None:
    batch = paged_batch([(1, 16)], device=device)
    out = torch.empty((2, 2, 0, 64), device=device)
    gather_kv_layer(batch.pool, LAYER, block_table=batch.block_tables[0], num_tokens=0, out=out)


def test_gather_refuses_more_than_the_table_holds() -> None:
    batch = paged_batch([(1, 16)])
    out = torch.empty((2, 2, 17, 64))
    with pytest.raises(ValueError, match="num_tokens is 17, not 0 to 16"):
        gather_kv_layer(
            batch.pool, LAYER, block_table=batch.block_tables[0], num_tokens=17, out=out
        )


def parts(
    scores: torch.Tensor, values: torch.Tensor, keys: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    part = scores[..., keys]
    return torch.einsum("hqk,khd->qhd", part.softmax(-1), values[keys]), part.logsumexp(-1).T


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_merge_of_two_parts_is_the_whole(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scores, values = torch.randn(3, 70, 50) * 4, torch.randn(50, 3, 80)
    a, logs_a = parts(scores, values, slice(0, 20))
    b, logs_b = parts(scores, values, slice(20, 50))
    whole, whole_logs = parts(scores, values, slice(0, 50))
    a = a.contiguous().to(device, dtype)
    b = b.transpose(0, 1).contiguous().transpose(0, 1).to(device, dtype)  # as torch returns it
    given = (a, logs_a.contiguous().to(device), b, logs_b.to(device))
    bound = 2e-6 if dtype == torch.float32 else 2e-3
    merged = merge_attention(*given)
    torch.testing.assert_close(merged, whole.to(device, dtype), atol=bound, rtol=bound)
    assert torch.equal(merge_attention(*given, out=given[0], log_sums=given[1]), merged)
    assert torch.equal(given[0], merged)
    torch.testing.assert_close(given[1], whole_logs.to(device))


def test_merge_reads_nothing_of_a_part_that_saw_nothing(device: torch.device) -> None:
    a = torch.randn(2, 1, 16, device=device)
    b = torch.full_like(a, torch.nan)
    never = torch.full((2, 1), -torch.inf, device=device)
    logs = torch.tensor([[3.0], [-torch.inf]], device=device)
    both = torch.zeros_like(logs)
    merged = merge_attention(a, logs, b, never, log_sums=both)
    assert torch.equal(merged[0], a[0])
    assert (merged[1] == 0.0).all()
    torch.testing.assert_close(both, logs)


def test_merge_refuses_parts_that_differ() -> None:
    a, logs = torch.zeros(2, 1, 16), torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"out_b has shape \[1, 1, 16\], not \[2, 1, 16\]"):
        merge_attention(a, logs, a[:1], logs)
    with pytest.raises(ValueError, match=r"log_sums_b is torch\.float64"):
        merge_attention(a, logs, a, logs.double())
