"""The text folder: what a prepared model leaves for the front.

``tokenizer.json`` (Hugging Face tokenizers), ``chat_template.jinja`` (absent where the model has
none) and ``text.json``::

    {"format": 1, "vocab_size": int, "bos_token_id": int | null, "bos_token": str | null,
     "eos_token": str | null, "eos_token_ids": [int], "add_bos": bool,
     "special_tokens": {spelling: id}, "tokenizer_digest": str, "template_digest": str,
     "max_model_len": int}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sessionkv.errors import ModelBroken

TEXT_FORMAT = 1
_TOKENIZER, _TEMPLATE, _FACTS = "tokenizer.json", "chat_template.jinja", "text.json"


@dataclass(frozen=True, slots=True)
class TextFacts:
    """The content of ``text.json``; ``None`` tokens are empty strings here."""

    vocab_size: int
    bos_token_id: int | None
    bos_token: str
    eos_token: str
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    tokenizer_digest: str
    template_digest: str
    max_model_len: int


def read_text_folder(folder: Path) -> tuple[TextFacts, Tokenizer, str | None]:
    """Facts, tokenizer and template source.

    Raises:
        ModelBroken: A file is missing or unreadable, or the files contradict each other.
    """
    values = _read_values(folder)
    facts = _facts(values, folder)
    tokenizer = _tokenizer(_read(folder / _TOKENIZER), folder)
    for spelling, token_id in values.get("special_tokens", {}).items():
        if tokenizer.token_to_id(spelling) != token_id:
            raise ModelBroken(
                f"{folder / _FACTS} says {spelling!r} is token {token_id}; "
                f"the tokenizer says {tokenizer.token_to_id(spelling)}"
            )
    path = folder / _TEMPLATE
    return facts, tokenizer, _read(path) if path.exists() else None


def read_text_facts(folder: Path) -> TextFacts:
    """The facts alone, without loading the tokenizer.

    Raises:
        ModelBroken: The file is missing or unreadable.
    """
    return _facts(_read_values(folder), folder)


def write_text_folder(
    folder: Path, *, tokenizer_json: str, chat_template: str | None, facts: Mapping[str, Any]
) -> None:
    """Write a text folder, its digests worked out.

    Args:
        folder: Must exist.
        tokenizer_json: Content of ``tokenizer.json``.
        chat_template: None where the model has none.
        facts: The fields of ``text.json`` besides format and digests.

    Raises:
        OSError: The folder cannot be written.
    """
    (folder / _TOKENIZER).write_text(tokenizer_json, encoding="utf-8")
    if chat_template is not None:
        (folder / _TEMPLATE).write_text(chat_template, encoding="utf-8")
    digests = {
        "tokenizer_digest": hashlib.sha256(tokenizer_json.encode()).hexdigest(),
        "template_digest": hashlib.sha256((chat_template or "").encode()).hexdigest(),
    }
    content = {"format": TEXT_FORMAT, **facts, **digests}
    (folder / _FACTS).write_text(json.dumps(content, indent=2), encoding="utf-8")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelBroken(f"the text folder {path.parent} cannot be read: {error}") from None


def _read_values(folder: Path) -> Any:
    try:
        return json.loads(_read(folder / _FACTS))
    except ValueError as error:
        raise ModelBroken(f"{folder / _FACTS} is not JSON: {error}") from None


def _facts(values: Any, folder: Path) -> TextFacts:
    try:
        if values["format"] != TEXT_FORMAT:
            raise ModelBroken(f"{folder / _FACTS} has format {values['format']}, not {TEXT_FORMAT}")
        return TextFacts(
            vocab_size=values["vocab_size"],
            bos_token_id=values["bos_token_id"],
            bos_token=values["bos_token"] or "",
            eos_token=values["eos_token"] or "",
            eos_token_ids=tuple(values["eos_token_ids"]),
            add_bos=bool(values["add_bos"]) and values["bos_token_id"] is not None,
            tokenizer_digest=values["tokenizer_digest"],
            template_digest=values["template_digest"],
            max_model_len=values["max_model_len"],
        )
    except (KeyError, TypeError) as error:
        raise ModelBroken(f"{folder / _FACTS} lacks or misstates a field: {error}") from None


def _tokenizer(source: str, folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(source)
    except Exception as error:  # noqa: BLE001 - the library raises nothing more exact
        raise ModelBroken(f"{folder / _TOKENIZER} is not a tokenizer: {error}") from None
