"""Random inputs in the shape of an 8B model, for measuring and for checking kernels on a device."""

from __future__ import annotations

import torch

from sessionkv.kernels.sampling import SamplingRows

HIDDEN, INTERMEDIATE, VOCAB = 4096, 12288, 151_936
HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 32, 8, 128, 16, 36
MAX_LEN, EPS = 40_960, 1e-6
BF16, DEVICE = torch.bfloat16, "cuda"


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def rotation_arguments(rows: int, pool: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random positions and different random slots."""
    angles = torch.arange(MAX_LEN, device=DEVICE)[:, None] * torch.rand(DIM // 2, device=DEVICE)
    return {
        "qkv": randn(rows, HEADS + 2 * KV_HEADS, DIM),
        "positions": torch.randint(MAX_LEN, (rows,), device=DEVICE),
        "slots": torch.randperm(pool.shape[0] * BLOCK, device=DEVICE)[:rows],
        "cos_sin": torch.cat([angles.cos(), angles.sin()], 1),
    }


def make_logits(rows: int, *, is_flat: bool = False) -> torch.Tensor:
    """Like a sure model's: a few dozen tokens far above the rest; or all alike."""
    logits = randn(rows, VOCAB) * 2.5
    if not is_flat:
        places = torch.randint(VOCAB, (rows, 40), device=DEVICE)
        logits.scatter_(1, places, 14 + 2 * randn(rows, 40))
    return logits


def make_rows(
    rows: int, temperature: float, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingRows:
    """The same parameters for all rows, other seeds and indices."""
    return SamplingRows(
        temperature=torch.full((rows,), temperature, device=DEVICE),
        top_k=torch.full((rows,), top_k, dtype=torch.int32, device=DEVICE),
        top_p=torch.full((rows,), top_p, device=DEVICE),
        min_p=torch.full((rows,), min_p, device=DEVICE),
        seed=torch.arange(rows, device=DEVICE) * 7919,
        index=torch.arange(rows, device=DEVICE) + 100,
    )


def make_pool(num_blocks: int) -> torch.Tensor:
    shape = (num_blocks, LAYERS, 2, KV_HEADS, BLOCK, DIM)
    pool = torch.empty(shape, dtype=BF16, device=DEVICE)
    for part in pool.split(256):
        part.normal_()
    return pool
