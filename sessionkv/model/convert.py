"""Child process that turns one GGUF file into a Hugging Face folder in fp32.

``python -m sessionkv.model.convert FILE FOLDER`` writes ``model.safetensors``, ``config.json``,
``generation_config.json`` and the tokenizer's files into the empty FOLDER. On standard output:
one JSON object per line, ``{"done": n, "total": m}`` for progress, ``{"code": ..., "message":
...}`` for a model that is refused. A process of its own, because reading GGUF needs transformers
and several copies of the weights, which the engine's process must not keep.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sessionkv.errors import ModelBroken, ModelError
from sessionkv.model.spec import spec_from_config

_STEPS = 4
_LAYER_PARTS = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output",
    "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Convert; 0 when the folder is complete, 3 when the model is refused."""
    source, folder = Path(arguments[0]), Path(arguments[1])
    try:
        convert(source, folder)
    except ModelError as error:
        _say(code=error.code, message=error.message)
        return 3
    return 0


def convert(source: Path, folder: Path) -> None:
    """Write the folder.

    Raises:
        ModelError: The model is not supported, or the file is not complete.
    """
    import gguf
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    at = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    _step(0)
    reader = gguf.GGUFReader(source)
    check_complete(source, reader)
    config = AutoConfig.from_pretrained(**at)
    plain = _plain_config(config.to_diff_dict() | {"architectures": None}, config)
    spec = spec_from_config(plain, str(source))
    _step(1)
    model = AutoModelForCausalLM.from_pretrained(**at, dtype=torch.float32)
    _step(2)
    tensors = {
        name: tensor.to(torch.float32).contiguous()
        for name, tensor in model.state_dict().items()
        if not (spec.tied_embeddings and name == "lm_head.weight")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plain["architectures"] = [type(model).__name__]
    _write_json(folder / "config.json", plain)
    _write_json(folder / "generation_config.json", model.generation_config.to_diff_dict())
    _step(3)
    _write_tokenizer(source, folder, reader.fields)
    _step(_STEPS)


def check_complete(source: Path, reader: Any) -> None:
    """Are all tensors there? transformers would fill what is missing with random numbers.

    Raises:
        ModelBroken: Naming what is missing.
    """
    fields = reader.fields
    architecture = fields["general.architecture"].contents()
    layers = fields.get(f"{architecture}.block_count")
    if layers is None:
        raise ModelBroken(f"{source} has no {architecture}.block_count")
    wanted = ["token_embd.weight", "output_norm.weight"]
    wanted += [f"blk.{i}.{part}.weight" for i in range(layers.contents()) for part in _LAYER_PARTS]
    missing = sorted(set(wanted) - {tensor.name for tensor in reader.tensors})
    if missing:
        raise ModelBroken(f"{source} has no tensor {missing[0]} ({len(missing)} are missing)")


def _plain_config(values: dict[str, Any], config: Any) -> dict[str, Any]:
    """The configuration without traces of the file it came from."""
    values = {**values, "model_type": config.model_type}
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(key, None)
    return values


def _write_tokenizer(source: Path, folder: Path, fields: Mapping[str, Any]) -> None:
    """Save the tokenizer, with what transformers leaves out of a GGUF file's metadata.

    It drops ``add_bos_token`` and, for the ``smollm`` pre-tokenizer, the splitting of digits, which
    changes ids where spaces stand before a number.
    """
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    add_bos = fields.get("tokenizer.ggml.add_bos_token")
    if add_bos is not None:
        settings["add_bos_token"] = bool(add_bos.contents())
    _write_json(folder / "tokenizer_config.json", settings)
    kind = fields.get("tokenizer.ggml.pre")
    if kind is not None and kind.contents() == "smollm":
        fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
        fast.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        fast.save(str(folder / "tokenizer.json"))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True), encoding="utf-8")


def _step(done: int) -> None:
    _say(done=done, total=_STEPS)


def _say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
