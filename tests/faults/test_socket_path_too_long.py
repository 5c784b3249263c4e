"""A socket path over 107 bytes: both ends agree on a short one, or the error says everything."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from sessionkv import launch
from sessionkv.client import Client
from sessionkv.config import LimitsConfig
from sessionkv.errors import ConfigError
from sessionkv.ipc.endpoint import MAX_PATH_BYTES, default_endpoint, socket_path
from tests.builders.engine import greedy
from tests.builders.fake_engine import FakeEngine, short_endpoint


@pytest.mark.parametrize("name", ["d" * 120, "ü" * 60], ids=["ascii", "umlauts"])
def test_a_long_runtime_folder_falls_back_to_one_short_path(tmp_path, monkeypatch, name):
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    endpoint = default_endpoint()
    assert len(str(socket_path(endpoint)).encode()) <= MAX_PATH_BYTES
    assert endpoint == default_endpoint()
    with FakeEngine(endpoint), Client() as client:
        assert client.generate(prompt="found").text == "found"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("e" * 120)))
    assert default_endpoint() != endpoint


def test_a_given_path_that_is_too_long_is_named_with_length_and_limit():
    path = "/tmp/" + "ü" * 51 + "a"
    assert len(path) < MAX_PATH_BYTES < len(path.encode())
    for use in (lambda: Client(f"ipc://{path}"), lambda: FakeEngine(f"ipc://{path}")._run()):
        with pytest.raises(ConfigError) as caught:
            use()
        assert "107" in caught.value.message
        assert "108" in caught.value.message
        assert "/tmp/" in caught.value.message


def test_the_longest_path_that_fits_works():
    with short_endpoint() as short:
        folder = str(socket_path(short).parent)
        endpoint = f"ipc://{folder}/{'x' * (MAX_PATH_BYTES - len(folder) - 1)}"
        with FakeEngine(endpoint, limits=LimitsConfig()), Client(endpoint) as client:
            assert client.generate(prompt="fits").text == "fits"


@pytest.mark.parametrize("name", ["d" * 120, "ü" * 60], ids=["ascii", "umlauts"])
def test_a_private_engine_finds_a_short_path_and_leaves_none(tmp_path, monkeypatch, name):
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(folder))
    short = Path(f"/tmp/sessionkv-{os.getuid()}")
    before = set(short.iterdir()) if short.exists() else set()
    with launch("checksum") as engine:
        assert len(os.fsencode(socket_path(engine.endpoint))) <= MAX_PATH_BYTES
        assert engine.client().generate(tokens=[1], sampling=greedy(2)).tokens
    with launch("checksum") as engine:
        engine.kill()
    assert set(short.iterdir()) <= before
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(tempfile, "tempdir", None)
