"""A tokenizer and template that need no model files: one token a byte, and ChatML turns.

Ids 0 to 255 are the bytes; then ``<|endoftext|>``, ``<|im_start|>`` and ``<|im_end|>``.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sessionkv.text.folder import TextFiles
from sessionkv.text.vocabulary import byte_alphabet

BYTE_VOCAB_SIZE = 259
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
CHATML_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def byte_text(*, max_model_len: int = 32_768) -> TextFiles:
    """The text of a model that reads and writes bytes.

    Args:
        max_model_len: Most positions of one sequence.
    """
    vocabulary = byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    return TextFiles.make(
        tokenizer_json=tokenizer.to_str(),
        chat_template=CHATML_TEMPLATE,
        facts={
            "vocab_size": BYTE_VOCAB_SIZE,
            "bos_token_id": None,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "eos_token_ids": [IM_END, END_OF_TEXT],
            "add_bos": False,
            "special_tokens": {s: 256 + i for i, s in enumerate(specials)},
            "max_model_len": max_model_len,
        },
    )


def write_byte_text(folder: Path, *, max_model_len: int = 32_768) -> None:
    """Write :func:`byte_text` into a folder, made where it is missing.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    byte_text(max_model_len=max_model_len).write(folder)
