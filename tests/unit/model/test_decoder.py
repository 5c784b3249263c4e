from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sessionkv.model.attention import AttentionBatch, make_segment
from sessionkv.model.decoder import Decoder
from sessionkv.model.mirror import MirrorPool
from sessionkv.model.prepare import PreparedModel
from sessionkv.model.weights import WeightFiles
from tests.builders.tiny_models import MAX_LEN, VARIANTS, VOCAB, hugging_face_model, prepare_tiny

BLOCK = 4
NUM_BLOCKS = 64


def tokens(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()


class Bench:
    """A decoder with a pool and one sequence on a shuffled block table."""

    def __init__(self, prepared: PreparedModel, *, mirrored: bool) -> None:
        spec = prepared.spec
        self.spec = spec
        self.decoder = Decoder(spec, WeightFiles(prepared.folder, spec), max_model_len=MAX_LEN)
        shape = (NUM_BLOCKS, spec.num_layers, 2, spec.num_kv_heads, BLOCK, spec.head_dim)
        self.pool = torch.full(shape, float("nan"))
        self.table = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
        mirrors = MirrorPool(
            num_layers=spec.num_layers,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            max_tokens=MAX_LEN,
            budget_bytes=2**30,
        )
        self.mirror = mirrors.create(MAX_LEN) if mirrored else None

    def logits(self, token_ids: list[int], start: int) -> torch.Tensor:
        count = len(token_ids)
        positions = torch.arange(start, start + count)
        segment = make_segment(
            row=0,
            num_rows=count,
            start=start,
            block_table=self.table,
            mirror=self.mirror,
            block_size=BLOCK,
            windows=set(self.spec.windows),
        )
        batch = AttentionBatch(
            positions=positions,
            block_ids=torch.tensor(self.table)[positions // BLOCK],
            slots=positions % BLOCK,
            segments=[segment],
        )
        hidden = self.decoder.forward(torch.tensor(token_ids), pool=self.pool, batch=batch)
        if self.mirror is not None:
            self.mirror.num_tokens = start + count
        return self.decoder.logits(hidden)


@pytest.mark.parametrize("mirrored", [True, False], ids=["mirror", "blocks"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, mirrored: bool, tmp_path: Path) -> None:
    prompt = tokens(41)
    with torch.no_grad():
        expected = hugging_face_model(variant)(torch.tensor([prompt])).logits[0]
    bench = Bench(prepare_tiny(variant, tmp_path), mirrored=mirrored)
    parts = [
        bench.logits(prompt[a:b], a) for a, b in ((0, 9), (9, 10), (10, 30), (30, 40), (40, 41))
    ]
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mirrored", [True, False], ids=["mirror", "blocks"])
@pytest.mark.parametrize("variant", ["llama", "mistral-window", "llama-yarn"])
def test_long_chunks_equal_transformers(variant: str, mirrored: bool, tmp_path: Path) -> None:
    """Long enough for the history and the chunk itself to be computed apart."""
    prompt = tokens(250)
    with torch.no_grad():
        expected = hugging_face_model(variant)(torch.tensor([prompt])).logits[0]
    bench = Bench(prepare_tiny(variant, tmp_path), mirrored=mirrored)
    parts = [bench.logits(prompt[a:b], a) for a, b in ((0, 5), (5, 134), (134, 250))]
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)
    whole = Bench(prepare_tiny(variant, tmp_path), mirrored=mirrored).logits(prompt, 0)
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mirrored", [True, False], ids=["mirror", "blocks"])
@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen3"])
def test_every_split_of_a_prompt_gives_the_same_logits(
    variant: str, mirrored: bool, tmp_path: Path
) -> None:
    prepared = prepare_tiny(variant, tmp_path)
    prompt = tokens(40)
    whole = Bench(prepared, mirrored=mirrored).logits(prompt, 0)
    for split in range(1, 40):
        bench = Bench(prepared, mirrored=mirrored)
        first, second = bench.logits(prompt[:split], 0), bench.logits(prompt[split:], split)
        torch.testing.assert_close(torch.cat([first, second]), whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("blas", [False, True])
@pytest.mark.parametrize("variant", ["llama", "llama-biases", "qwen2"])
def test_what_it_holds_is_known_before(variant: str, blas: bool, tmp_path: Path) -> None:
    prepared = prepare_tiny(variant, tmp_path)
    files = WeightFiles(prepared.folder, prepared.spec)
    decoder = Decoder(prepared.spec, files, max_model_len=MAX_LEN, blas=blas)
    assert prepared.spec.cpu_weights_bytes(blas=blas) == decoder.nbytes
