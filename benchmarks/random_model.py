"""``python -m benchmarks.random_model FOLDER``: a random model of SmolLM2-135M's shape.

For speed on machines that cannot fetch a model: arithmetic and memory traffic are the real one's,
the tokens are not words. Needs transformers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sessionkv.text.builtin import write_byte_text


def write_random_model(folder: Path) -> None:
    """Write weights (fp32, seeded), config, tokenizer and chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    write_byte_text(folder)
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": template}), encoding="utf-8"
    )


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_model", description=__doc__)
    parser.add_argument("folder", type=Path)
    write_random_model(parser.parse_args().folder)


if __name__ == "__main__":
    main()
