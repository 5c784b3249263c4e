"""Whoever waits for an engine that cannot start is told why, in time, and nothing is left."""

from pathlib import Path
from typing import Any

import pytest

from sessionkv import Engine, EngineConfig, launch
from sessionkv.errors import (
    ConfigError,
    EngineStartFailed,
    ModelError,
    ModelNotFound,
    SessionKVError,
)
from tests.builders.engine import engine_config, greedy, open_engine
from tests.builders.processes import tampered_start
from tests.builders.tiny_models import prepare_tiny


@pytest.mark.parametrize("name", ["missing", "missing.gguf"])
def test_missing_model_path_is_named(tmp_path: Path, name: str) -> None:
    config = EngineConfig(model=str(tmp_path / name), store=tmp_path / "store", offline=True)
    with pytest.raises(ModelNotFound, match=name):
        launch(config=config)
    with pytest.raises(ModelNotFound, match=name):
        Engine(config)
    assert not (tmp_path / "store").exists()
    with open_engine(engine_config(tmp_path / "store")) as engine:
        assert engine.open("a").turn("x", sampling=greedy(1)).tokens


@pytest.mark.parametrize("fields", [{"device": "cuda:99"}, {"max_model_len": 10**9}])
def test_what_cannot_be_served_leaves_no_store(tmp_path: Path, fields: dict[str, Any]) -> None:
    model = prepare_tiny("llama", tmp_path).folder
    config = EngineConfig(
        model=str(model), model_cache=tmp_path / "cache", store=tmp_path / "store", **fields
    )
    with pytest.raises(ConfigError):
        Engine(config)
    assert not (tmp_path / "store").exists()


def test_a_failure_in_load_carries_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", tampered_start(tmp_path, "fail"))
    with pytest.raises(EngineStartFailed, match="RuntimeError: no such luck"):
        launch("checksum", store=tmp_path / "store")


def test_a_load_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", tampered_start(tmp_path, "hang_deaf"))
    with pytest.raises(EngineStartFailed, match="not ready in time"):
        launch("checksum", store=tmp_path / "store", timeout_s=3.0)
    # The child is gone: the store's lock is free.
    with open_engine(engine_config(tmp_path / "store")) as engine:
        assert engine.open("a").info().turns == 0


def test_an_embedded_engine_that_fails_late_gives_everything_back(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "text.json").write_text('{"vocab_size": 9, "tokenizer_digest": "", '
                                      '"template_digest": ""}')  # fmt: skip
    config = engine_config(tmp_path / "store")
    for _ in range(2):
        with pytest.raises(ModelError), open_engine(config, runner={"text_dir": folder}):
            pass
    with open_engine(config) as engine:
        assert engine.open("a").turn("x", sampling=greedy(1)).tokens


def test_a_model_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF but not really")
    (tmp_path / "folder").mkdir()
    for name in ("bad.gguf", "folder"):
        with pytest.raises(SessionKVError) as caught:
            launch(config=EngineConfig(model=str(tmp_path / name), offline=True))
        assert name in caught.value.message
