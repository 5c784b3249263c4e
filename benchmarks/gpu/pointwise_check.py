"""Compares kernels on a device with their references, in the shape of an 8B model.

Draws fresh random inputs; ``python -m benchmarks.gpu.pointwise --check`` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.pointwise_inputs import (
    BLOCK,
    DEVICE,
    DIM,
    EPS,
    make_logits,
    make_pool,
    make_rows,
    randn,
    rotation_arguments,
)  # fmt: skip
from sessionkv.kernels import reference_pointwise as reference
from sessionkv.kernels.block_copies import copy_block_slots, gather_blocks, scatter_blocks
from sessionkv.kernels.fused_norm import add_rms_norm, rms_norm
from sessionkv.kernels.philox import random_bits
from sessionkv.kernels.rotary_store import rotate_and_store
from sessionkv.kernels.sampling import SamplingRows, sample_tokens
from sessionkv.kernels.silu_mul import silu_mul

TOLERANCE = 1e-2


def check() -> bool:
    """Compare everything; prints the relative error, or the number of differences, of each case."""
    torch.manual_seed(0)
    pool = make_pool(2000)  # more than 2**31 elements
    errors = dict(check_rows())
    errors |= check_rotation(pool) | check_copies(pool) | check_sampling()
    for name, error in errors.items():
        print(f"{name:40} {error:.2e}{'' if error < TOLERANCE else '   OFF'}")
    return all(error < TOLERANCE for error in errors.values())


def check_rows() -> Iterator[tuple[str, float]]:
    for width in (576, 4096, 5120, 16_384):
        x, stream, weight = randn(33, width), randn(33, width), randn(width)
        yield f"rms_norm {width}", relative(rms_norm(x, weight, EPS), reference.rms_norm, x, weight)
        added = add_rms_norm(x, residual := stream.clone(), weight, EPS)
        yield f"residual {width}", differences(residual, (x.float() + stream.float()).bfloat16())
        yield f"add_rms_norm {width}", relative(added, reference.rms_norm, residual, weight)
    gate_up = randn(33, 2 * 5000) * 4
    yield "silu_mul", error_of(silu_mul(gate_up), reference.silu_mul(gate_up.cpu()))


def relative(
    found: torch.Tensor, norm: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor
) -> float:
    return error_of(found, norm(x.cpu(), weight.cpu(), EPS))


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error; infinite for NaN."""
    exact = wanted.double().cpu()
    error = float((found.double().cpu() - exact).norm() / exact.norm())
    return error if error == error else float("inf")


def differences(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How many elements differ."""
    return float((found != wanted).sum())


def check_rotation(pool: torch.Tensor) -> dict[str, float]:
    """In the last blocks, beyond 2**31 elements; all that is not written must stay."""
    last = pool[-4:]
    before, small = last.clone(), last.cpu()
    arguments = rotation_arguments(40, last)
    arguments["slots"][::5] = -1
    norms = {"q_norm": randn(DIM), "k_norm": randn(DIM)}
    wanted = reference.rotate_and_store(
        arguments["qkv"].cpu(),
        **{name: arguments[name].cpu() for name in ("positions", "slots", "cos_sin")},
        **{name: norm.cpu() for name, norm in norms.items()},
        eps=EPS,
        pool=small,
        layer=35,
    )
    far = arguments["slots"] + torch.where(arguments["slots"] < 0, 0, (pool.shape[0] - 4) * BLOCK)
    given = arguments | norms | {"slots": far}
    queries = rotate_and_store(given.pop("qkv"), **given, eps=EPS, pool=pool, layer=35)
    untouched = (small == before.cpu()).all(-1)
    return {
        "rotated queries": error_of(queries, wanted),
        "stored keys and values": error_of(last, small),
        "other cells": differences(last.cpu()[untouched], before.cpu()[untouched]),
    }


def check_copies(pool: torch.Tensor) -> dict[str, float]:
    """Between the first and the last blocks; to pinned memory and back."""
    end = pool.shape[0]
    pairs = [(0, end - 1, 9), (end - 2, 1, 16), (end - 3, 2, 0)]
    ends = [0, 1, 2, end - 3, end - 2, end - 1]
    wanted = pool[ends].clone()
    reference.copy_block_slots(wanted, [(0, 5, 9), (4, 1, 16)])
    copy_block_slots(pool, torch.tensor(pairs, device=DEVICE))
    result = {"copied slots": differences(pool[ends], wanted)}
    ids = torch.tensor([end - 1, -1, 3, end - 2], device=DEVICE)
    host = torch.zeros((4, *pool.shape[1:]), dtype=pool.dtype, pin_memory=True)
    gather_blocks(pool, ids, host)
    torch.cuda.synchronize()
    result["gathered"] = differences(host[[0, 2, 3]], pool[ids[[0, 2, 3]]].cpu())
    result["left alone"] = float(host[1].count_nonzero())
    scatter_blocks(pool, torch.tensor([5, -1, end - 5, end - 4], device=DEVICE), host)
    torch.cuda.synchronize()
    result["scattered"] = differences(pool[[5, end - 5, end - 4]].cpu(), host[[0, 2, 3]])
    return result


def check_sampling() -> dict[str, float]:
    """Tokens that are not those of float64; alone and in a graph they must be the same."""
    result: dict[str, float] = {}
    for is_flat in (False, True):
        logits = make_logits(48, is_flat=is_flat)
        rows = mixed_rows(48)
        logits[5, 77], logits[6, 9], logits[7] = torch.nan, torch.inf, -torch.inf
        found, unusable = sample_tokens(logits, rows)
        wanted = [reference_token(logits, rows, row) for row in range(48)]
        name = "flat" if is_flat else "peaked"
        pairs = zip(found.tolist(), wanted, strict=True)
        result[f"tokens, {name}"] = float(sum(a != b for a, b in pairs))
        flagged = unusable.nonzero().flatten().tolist()
        result[f"flags, {name}"] = 0.0 if flagged == [5, 6, 7] else 1.0
        alone = [sample_tokens(logits[i : i + 1], part(rows, i))[0] for i in range(48)]
        result[f"alone, {name}"] = differences(torch.cat(alone), found)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed, _ = sample_tokens(logits, rows)
        graph.replay()
        result[f"in a graph, {name}"] = differences(replayed, found)
    return result


def mixed_rows(rows: int) -> SamplingRows:
    """Every combination of filters comes up."""
    result, number = make_rows(rows, 0.9), torch.arange(rows, device=DEVICE)
    result.temperature[::7] = 0.0
    result.top_k.copy_(torch.where(number % 2 == 1, 3 + 37 * number, 0))
    result.top_p.copy_(torch.where(number % 3 == 1, 0.5 + number / 100, 1.0))
    result.min_p.copy_(torch.where(number % 5 == 2, 0.02, 0.0))
    return result


def part(rows: SamplingRows, row: int) -> SamplingRows:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "index")
    return SamplingRows(**{name: getattr(rows, name)[row : row + 1] for name in names})


def reference_token(logits: torch.Tensor, rows: SamplingRows, row: int) -> int:
    values = logits[row].float().cpu()
    if not torch.isfinite(values.max()):
        return 0
    if float(rows.temperature[row]) == 0:
        return int((values == values.max()).nonzero()[0])
    weights = reference.kept_weights(
        values,
        temperature=float(rows.temperature[row]),
        top_k=int(rows.top_k[row]),
        top_p=float(rows.top_p[row]),
        min_p=float(rows.min_p[row]),
    )
    return reference.choose(
        weights, random_bits(int(rows.seed[row]), int(rows.index[row])) * 2.0**-53
    )
