from __future__ import annotations

from typing import Any

import pytest
import torch

from sessionkv.kernels import reference_pointwise as reference
from sessionkv.kernels.rotary_store import rotate_and_store

HEADS, KV_HEADS, LAYERS, BLOCK_SIZE, NUM_BLOCKS = 5, 2, 3, 4, 4
SLOTS = [9, -1, 3, 12, 6]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def case(head_dim: int, dtype: torch.dtype, *, norms: bool, layer: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(head_dim)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    angles = torch.outer(torch.arange(40.0), 1.0 / 100 ** torch.linspace(0, 1, head_dim // 2))
    return {
        "qkv": randn(len(SLOTS), HEADS + 2 * KV_HEADS, head_dim).to(dtype),
        "positions": torch.tensor([7, 0, 0, 39, 12]),
        "slots": torch.tensor(SLOTS),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], 1),
        "q_norm": randn(head_dim).to(dtype) if norms else None,
        "k_norm": randn(head_dim).to(dtype) if norms else None,
        "eps": 1e-6,
        "pool": randn(NUM_BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_SIZE, head_dim).to(dtype),
        "layer": layer,
    }


def on(device: torch.device, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.to(device).clone() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def run(arguments: dict[str, Any], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    given = on(device, arguments)
    queries = rotate_and_store(given.pop("qkv"), **given)
    return queries.cpu(), given["pool"].cpu()


@pytest.mark.parametrize(
    ("head_dim", "dtype", "norms", "layer"),
    [
        (64, torch.float32, False, 0),
        (80, torch.float32, True, 1),
        (96, torch.bfloat16, False, 2),
        (128, torch.bfloat16, True, 1),
        (256, torch.float32, True, 2),
    ],
    ids=str,
)
def test_equals_the_reference(
    device: torch.device, head_dim: int, dtype: torch.dtype, norms: bool, layer: int
) -> None:
    arguments = case(head_dim, dtype, norms=norms, layer=layer)
    queries, pool = run(arguments, device)
    expected = on(torch.device("cpu"), arguments)
    expected_queries = reference.rotate_and_store(expected.pop("qkv"), **expected)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(queries, expected_queries, **tolerance)
    torch.testing.assert_close(pool, expected["pool"], **tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_values_are_exact_and_nothing_else_is_touched(
    device: torch.device, dtype: torch.dtype
) -> None:
    arguments = case(80, dtype, norms=True)
    _, pool = run(arguments, device)
    before, values = arguments["pool"], arguments["qkv"][:, -KV_HEADS:]
    untouched = torch.ones(pool.shape[:5], dtype=torch.bool)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            block, at = divmod(slot, BLOCK_SIZE)
            assert torch.equal(pool[block, 1, 1, :, at], values[token])
            assert not torch.equal(pool[block, 1, 0, :, at], before[block, 1, 0, :, at])
            untouched[block, 1, :, :, at] = False
    assert torch.equal(pool[untouched], before[untouched])


def test_position_zero_leaves_queries_as_they_are(device: torch.device) -> None:
    arguments = case(64, torch.float32, norms=False)
    arguments["positions"] = torch.zeros(len(SLOTS), dtype=torch.int64)
    queries, _ = run(arguments, device)
    assert torch.equal(queries, arguments["qkv"][:, :HEADS])


def test_no_tokens(device: torch.device) -> None:
    arguments = case(64, torch.float32, norms=False)
    for name in ("qkv", "positions", "slots"):
        arguments[name] = arguments[name][:0]
    queries, pool = run(arguments, device)
    assert queries.shape == (0, HEADS, 64)
    assert torch.equal(pool, arguments["pool"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"qkv": torch.zeros(5, 4, 64)}, "qkv has 4 heads, of which 2"),
        ({"qkv": torch.zeros(5, 9, 32)}, r"qkv has shape \[5, 9, 32\], not \[any, any, 64\]"),
        ({"qkv": torch.zeros(5, 9, 64).half()}, "qkv is torch.float16, not torch.float32"),
        ({"positions": torch.zeros(4).long()}, r"positions has shape \[4\]"),
        ({"slots": torch.zeros(5).int()}, "slots is torch.int32, not torch.int64"),
        ({"cos_sin": torch.zeros(40, 32)}, "cos_sin has shape"),
        ({"layer": 3}, "layer 3 is not one of the pool's 3"),
        ({"q_norm": torch.ones(64)}, "given or absent together"),
    ],
)
def test_wrong_arguments(changed: dict[str, Any], message: str) -> None:
    arguments = case(64, torch.float32, norms=False) | changed
    with pytest.raises(ValueError, match=message):
        rotate_and_store(arguments.pop("qkv"), **arguments)
