"""The text folder: all that rendering and tokenising need of a model, and nothing else.

Written once, under a name made from its content, so that two processes may write it at once and
no reader ever sees half of it: ``tokenizer.json``, ``chat_template.jinja`` (absent where the model
has none) and ``text.json`` (see :func:`build_text_json`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sessionkv.errors import ModelBroken
from sessionkv.model.spec import ModelSpec, read_json

FORMAT = 1


def write_text_folder(model_folder: Path, parent: Path, spec: ModelSpec) -> Path:
    """Write the text folder of a model below ``parent``, unless it is there; returns its path.

    Raises:
        ModelBroken: The tokenizer is missing or cannot be read.
    """
    tokenizer_path = model_folder / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise ModelBroken(f"{tokenizer_path} is missing", path=str(tokenizer_path))
    tokenizer_bytes = tokenizer_path.read_bytes()
    settings = _optional_json(model_folder / "tokenizer_config.json")
    template = _chat_template(model_folder, settings)
    info = build_text_json(model_folder, tokenizer_bytes, template, settings=settings, spec=spec)
    files = {
        "tokenizer.json": tokenizer_bytes,
        "text.json": json.dumps(info, indent=1, sort_keys=True).encode(),
    }
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    return _write_folder(parent / digest.hexdigest()[:32], files)


def build_text_json(
    model_folder: Path,
    tokenizer_bytes: bytes,
    template: str | None,
    *,
    settings: Mapping[str, Any],
    spec: ModelSpec,
) -> dict[str, Any]:
    """The content of ``text.json``.

    Keys: ``format`` (1), ``vocab_size``, ``max_model_len``, ``bos_token_id`` and ``bos_token``,
    ``eos_token`` (each null where there is none), ``eos_token_ids`` (of tokenizer, configuration
    and generation configuration, ascending), ``add_bos`` (raw text gets a BOS), ``special_tokens``
    (content -> id), ``tokenizer_digest`` and ``template_digest`` (SHA-256 in hex).
    """
    try:
        tokenizer = Tokenizer.from_str(tokenizer_bytes.decode("utf-8"))
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises bare Exception
        path = model_folder / "tokenizer.json"
        raise ModelBroken(f"{path} cannot be read: {error}", path=str(path)) from None
    special = {
        item["content"]: item["id"]
        for item in json.loads(tokenizer_bytes).get("added_tokens", ())
        if item.get("special")
    }
    config = read_json(model_folder / "config.json")
    generation = _optional_json(model_folder / "generation_config.json")
    bos_token, eos_token = _token_text(settings, "bos_token"), _token_text(settings, "eos_token")
    bos_id = tokenizer.token_to_id(bos_token) if bos_token is not None else None
    eos_id = tokenizer.token_to_id(eos_token) if eos_token is not None else None
    eos_ids = {eos_id} | _ids(config.get("eos_token_id")) | _ids(generation.get("eos_token_id"))
    return {
        "format": FORMAT,
        "vocab_size": spec.vocab_size,
        "max_model_len": spec.max_model_len,
        "bos_token_id": bos_id,
        "bos_token": bos_token if bos_id is not None else None,
        "eos_token": eos_token if eos_id is not None else None,
        "eos_token_ids": sorted(i for i in eos_ids if i is not None and i < spec.vocab_size),
        "add_bos": bos_id is not None and _adds_bos(tokenizer, settings, bos_id),
        "special_tokens": special,
        "tokenizer_digest": hashlib.sha256(tokenizer_bytes).hexdigest(),
        "template_digest": hashlib.sha256((template or "").encode()).hexdigest(),
    }


def _adds_bos(tokenizer: Tokenizer, settings: Mapping[str, Any], bos_id: int) -> bool:
    """Whether raw text gets a BOS: the explicit setting, else what the tokenizer itself does."""
    if isinstance(settings.get("add_bos_token"), bool):
        return bool(settings["add_bos_token"])
    ids: list[int] = tokenizer.encode("a").ids
    return ids[:1] == [bos_id]


def _token_text(settings: Mapping[str, Any], key: str) -> str | None:
    """A special token's text; older files wrap it in a map."""
    value = settings.get(key)
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _ids(value: object) -> set[int | None]:
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int)}


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template: its own file, else the tokenizer's settings (the default one of several)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if value is None:
        value = _optional_json(folder / "chat_template.json").get("chat_template")
    if isinstance(value, list):
        named = {item["name"]: item["template"] for item in value if isinstance(item, Mapping)}
        value = named.get("default")
    return value if isinstance(value, str) and value else None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _write_folder(target: Path, files: Mapping[str, bytes]) -> Path:
    """Write the files into a new folder and rename it into place; the first writer wins."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=".tmp-"))
    try:
        for name, data in files.items():
            with (draft / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target
