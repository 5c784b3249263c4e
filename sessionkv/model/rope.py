"""Rotary position embedding with fixed frequencies, as one complex product.

A pair of dimensions is a complex number that turns with its position (RoFormer,
arXiv:2104.09864). Pairs are neighbours here: :mod:`sessionkv.model.weights` re-orders the rows of
query and key projections so, which saves the shuffling in every step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sessionkv.model.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair: ``[head_dim / 2]`` fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain


def rotation_table(rope: RopeSpec, head_dim: int, num_positions: int) -> Tensor:
    """Rotation of every position: ``[num_positions, head_dim / 2]`` complex64."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)
    return torch.polar(torch.full_like(angles, rope.attention_factor), angles)


def rotate_(heads: Tensor, rotations: Tensor) -> None:
    """Turn queries and keys to their positions, in place.

    Args:
        heads: ``[num_tokens, num_heads, head_dim]`` fp32, last dimension contiguous.
        rotations: ``[num_tokens, 1, head_dim / 2]`` rows of the table.
    """
    pairs = heads.view(*heads.shape[:-1], heads.shape[-1] // 2, 2)
    torch.view_as_complex(pairs).mul_(rotations)


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    """Llama 3.1: stretch long wavelengths, leave short ones alone, blend between."""
    wavelengths = 2 * math.pi / plain
    turns = rope.original_max_len / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(plain: Tensor, rope: RopeSpec, head_dim: int) -> Tensor:
    """YaRN (arXiv:2309.00071, section 3.2): a ramp over dimensions between two rotation counts."""

    def dimension(rotations: float) -> float:
        ratio = rope.original_max_len / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    stretched = ((steps - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return plain / rope.factor * stretched + plain * (1 - stretched)
