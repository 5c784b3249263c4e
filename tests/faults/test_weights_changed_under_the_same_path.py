"""New weights under an old name or path must never meet KV of the old ones."""

from __future__ import annotations

import os
from pathlib import Path

from sessionkv import MissReason, SamplingParams
from sessionkv.engine.model_runner import kv_fingerprint
from sessionkv.model.prepare import prepare_model
from tests.builders.tiny_engine import tiny_engine
from tests.builders.tiny_models import hugging_face_model, save_model


def fingerprint(folder: Path, cache: Path) -> str:
    prepared = prepare_model(str(folder), cache_dir=cache, offline=True)
    return kv_fingerprint(prepared.spec, prepared.fingerprint, numerics="n")


def test_other_weights_in_the_same_folder_have_another_identity(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    save_model(hugging_face_model("llama", seed=1), folder)
    first = fingerprint(folder, cache)
    assert fingerprint(folder, cache) == first
    save_model(hugging_face_model("llama", seed=2), folder)
    second = fingerprint(folder, cache)
    assert second != first
    save_model(hugging_face_model("llama", seed=1), folder)
    assert fingerprint(folder, cache) == first


def test_a_single_changed_byte_of_the_same_size_is_seen(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    save_model(hugging_face_model("llama"), folder)
    first = fingerprint(folder, cache)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert fingerprint(folder, cache) != first


def test_another_rope_on_the_same_weights_has_another_identity(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    save_model(hugging_face_model("llama"), folder)
    first = fingerprint(folder, cache)
    config = folder / "config.json"
    text = config.read_text()
    assert '"rope_theta": 10000.0' in text
    config.write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    assert fingerprint(folder, cache) != first


def test_sessions_survive_other_weights_as_logs_and_their_kv_does_not(tmp_path: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompt = [(7 * i + 3) % 90 + 5 for i in range(13)]
    with tiny_engine(tmp_path, seed=1, disk_bytes=50_000_000) as engine:
        first = engine.open("a").turn(tokens=prompt, sampling=greedy)
    log = [*prompt, *first.tokens]
    with tiny_engine(tmp_path, seed=2, disk_bytes=50_000_000) as engine:
        assert engine.session("a").info().tokens == len(log)
        result = engine.session("a").turn(tokens=[7], sampling=greedy)
        cold = engine.generate(tokens=[*log, 7], sampling=greedy, cache=False)
        assert result.tokens == cold.tokens
        assert result.cache.cached_tokens == 0
        assert result.cache.miss.reason is MissReason.IDENTITY_CHANGED
        assert result.cache.miss.token == 0
        engine.session("a").rewind()
        engine.assert_ledger()
    with tiny_engine(tmp_path, seed=1, disk_bytes=50_000_000) as engine:
        # The first weights again: what they wrote is still theirs.
        result = engine.session("a").turn(tokens=[7], sampling=greedy)
        cold = engine.generate(tokens=[*log, 7], sampling=greedy, cache=False)
        assert result.tokens == cold.tokens
        assert result.cache.disk_tokens == len(log) - 1
