"""The text folder: what a prepared model leaves for the front.

``tokenizer.json`` (Hugging Face tokenizers), ``chat_template.jinja`` (absent where the model has
none) and ``text.json``::

    {"format": 1, "vocab_size": int, "bos_token_id": int | null, "bos_token": str | null,
     "eos_token": str | null, "eos_token_ids": [int], "add_bos": bool,
     "special_tokens": {spelling: id}, "tokenizer_digest": str, "template_digest": str,
     "max_model_len": int}

What these files hold may also be in memory alone (:class:`TextFiles`).
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


@dataclass(frozen=True, slots=True)
class TextFiles:
    """What the files of a text folder hold. A folder that nobody has to remove.

    Attributes:
        tokenizer: Of ``tokenizer.json``.
        template: Of ``chat_template.jinja``; None where the model has none.
        facts: Of ``text.json``.
        folder: Where they were read; for errors.
    """

    tokenizer: str
    template: str | None
    facts: str
    folder: Path = Path("built-in")

    @classmethod
    def make(
        cls, *, tokenizer_json: str, chat_template: str | None, facts: Mapping[str, Any]
    ) -> TextFiles:
        """Those of a model, its digests worked out.

        Args:
            tokenizer_json: Content of ``tokenizer.json``.
            chat_template: None where the model has none.
            facts: The fields of ``text.json`` besides format and digests.
        """
        digests = {
            "tokenizer_digest": hashlib.sha256(tokenizer_json.encode()).hexdigest(),
            "template_digest": hashlib.sha256((chat_template or "").encode()).hexdigest(),
        }
        content = {"format": TEXT_FORMAT, **facts, **digests}
        return cls(tokenizer_json, chat_template, json.dumps(content, indent=2))

    @classmethod
    def read(cls, folder: Path) -> TextFiles:
        """Those of a folder.

        Raises:
            ModelBroken: One is missing or unreadable.
        """
        path = folder / _TEMPLATE
        template = _read(path) if path.exists() else None
        return cls(_read(folder / _TOKENIZER), template, _read(folder / _FACTS), folder)

    def write(self, folder: Path) -> None:
        """Write them into a folder that is there.

        Raises:
            OSError: It cannot be written.
        """
        (folder / _TOKENIZER).write_text(self.tokenizer, encoding="utf-8")
        if self.template is not None:
            (folder / _TEMPLATE).write_text(self.template, encoding="utf-8")
        (folder / _FACTS).write_text(self.facts, encoding="utf-8")


def read_text(source: Path | TextFiles) -> tuple[TextFacts, Tokenizer, str | None]:
    """Facts, tokenizer and template source.

    Raises:
        ModelBroken: A file is missing or unreadable, or the files contradict each other.
    """
    files = source if isinstance(source, TextFiles) else TextFiles.read(source)
    values = _values(files.facts, files.folder)
    facts = _facts(values, files.folder)
    tokenizer = _tokenizer(files.tokenizer, files.folder)
    for spelling, token_id in values.get("special_tokens", {}).items():
        if tokenizer.token_to_id(spelling) != token_id:
            raise ModelBroken(
                f"{files.folder / _FACTS} says {spelling!r} is token {token_id}; "
                f"the tokenizer says {tokenizer.token_to_id(spelling)}"
            )
    return facts, tokenizer, files.template


def read_text_facts(source: Path | TextFiles) -> TextFacts:
    """The facts alone, without loading the tokenizer.

    Raises:
        ModelBroken: The file is missing or unreadable.
    """
    if isinstance(source, TextFiles):
        return _facts(_values(source.facts, source.folder), source.folder)
    return _facts(_values(_read(source / _FACTS), source), source)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelBroken(f"the text folder {path.parent} cannot be read: {error}") from None


def _values(facts: str, folder: Path) -> Any:
    try:
        return json.loads(facts)
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
