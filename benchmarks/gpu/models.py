"""``python -m benchmarks.gpu.models NAME FOLDER``: random models in the shapes of real ones.

Arithmetic, memory and traffic are the real model's, the tokens are not words. Weights are drawn on
the GPU where there is one and written by a thread a file: 16 GB take a few seconds into memory.
:func:`add_text` puts another tokenizer over the same weights, in which every id has a text.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sessionkv.text.builtin import BYTE_VOCAB_SIZE, IM_END, write_byte_text

SHARD_BYTES = 4 * 2**30
STD = 0.02
"""Of the matrices. Norms are ones, so activations stay in the order of one in any depth."""
DONE = "written.json"
"""Made last: a folder that has it is whole."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3 of some size."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    max_len: int

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token in 16 bits."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2


SHAPES = {
    "8b": Shape(36, 4096, 32, 8, 128, 12288, 151_936, False, 40960),
    "0.6b": Shape(28, 1024, 16, 8, 128, 3072, 151_936, True, 40960),
    "tiny": Shape(2, 64, 2, 1, 64, 96, 512, True, 1024),
}


def write_model(name: str, folder: Path) -> Path:
    """Write the model of that name unless it is there; returns its folder.

    Args:
        name: One of :data:`SHAPES`.
        folder: To write into, with about twice its parameters in bytes free.

    Raises:
        OSError: There is no room.
    """
    if (folder / DONE).is_file():
        return folder
    shape = SHAPES[name]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=1), encoding="utf-8")
    _write_byte_tokenizer(folder)
    shards = list(_shards(shape))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        weight_map = {key: file for file, shard in zip(names, shards, strict=True) for key in shard}
        total = sum(2 * math.prod(size) for shard in shards for size in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with ThreadPoolExecutor(len(shards)) as pool:
        jobs = [
            pool.submit(_write_shard, folder / file, shard, seed)
            for seed, (file, shard) in enumerate(zip(names, shards, strict=True))
        ]
        for job in jobs:
            job.result()
    (folder / DONE).write_text(json.dumps({"name": name}), encoding="utf-8")
    return folder


def add_text(model: Path, folder: Path) -> Path:
    """A model folder over the same weight files in which each id stands for a word of its own.

    So a reply's text is as long as a real one's. The weights are linked, not copied.
    """
    from tokenizers import Tokenizer

    if (folder / DONE).is_file():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", DONE))
    for file in model.glob("*.safetensors"):
        (folder / file.name).symlink_to(file.resolve())
    size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    words = {f"Ġw{i:x}": i for i in range(BYTE_VOCAB_SIZE, size)}
    tokenizer["model"]["vocab"] |= special | words
    text = json.dumps(tokenizer, ensure_ascii=False)
    Tokenizer.from_str(text)  # before anything relies on it
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / DONE).write_text("{}", encoding="utf-8")
    return folder


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": IM_END,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_len,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": shape.tied,
        "use_sliding_window": False,
        "vocab_size": shape.vocab,
    }


def _write_byte_tokenizer(folder: Path) -> None:
    write_byte_text(folder)
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor, in the order of the layers."""
    hidden, queries = shape.hidden, shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab, hidden)
    for index in range(shape.layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{layer}.self_attn.q_norm.weight", (shape.head_dim,)
        yield f"{layer}.self_attn.k_norm.weight", (shape.head_dim,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (shape.intermediate, hidden)
        yield f"{layer}.mlp.up_proj.weight", (shape.intermediate, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, shape.intermediate)
    yield "model.norm.weight", (hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab, hidden)


def _shards(shape: Shape) -> Iterator[dict[str, tuple[int, ...]]]:
    """The tensors in files of :data:`SHARD_BYTES` at most."""
    shard: dict[str, tuple[int, ...]] = {}
    used = 0
    for name, size in _tensors(shape):
        nbytes = 2 * math.prod(size)
        if used + nbytes > SHARD_BYTES - 2**20:  # the header has room in the rest
            yield shard
            shard, used = {}, 0
        shard[name] = size
        used += nbytes
    yield shard


def _write_shard(path: Path, shard: Mapping[str, tuple[int, ...]], seed: int) -> None:
    """One safetensors file: length of the header, header, then the tensors as it says."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in shard.items():
        end = at + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text))
        for name, size in shard.items():
            tensor = torch.ones(size, dtype=torch.bfloat16, device=device)
            if not name.endswith("norm.weight"):
                tensor.normal_(0.0, STD, generator=generator)
            host = tensor.view(-1).view(torch.uint8).cpu()
            _write_all(file.fileno(), host.numpy().data)


def _write_all(fd: int, data: memoryview) -> None:
    """Also what is larger than the most that one call writes."""
    while data:
        data = data[os.write(fd, data) :]


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.models", description=__doc__)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    write_model(args.name, args.folder)


if __name__ == "__main__":
    main()
