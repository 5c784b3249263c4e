"""``keys`` and ``public``: the file they write is the one that ``serve`` takes."""

import hashlib
import json
import stat
from pathlib import Path

import pytest

from sessionkv.actor.access_file import read_access
from sessionkv.cli.main import main
from sessionkv.types.access import TenantQuota

WRONG = 2
Capture = pytest.CaptureFixture[str]


def keys(path: Path, *argv: str) -> int:
    return main([*argv, "--keys", str(path)])


def test_a_key_is_shown_once_and_kept_as_its_digest(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "keys.toml"
    quota = ["--tenant", "acme", "--host-bytes", "2GiB", "--turns", "3"]
    assert keys(path, "keys", "add", "web", *quota) == 0
    shown = capsys.readouterr()
    key = shown.out.strip()
    assert "this once" in shown.err
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = read_access(path).find(key)
    assert found is not None
    assert (found.name, found.tenant, found.operator) == ("web", "acme", False)
    assert found.quota == TenantQuota(host_bytes=2**31, turns=3)
    assert keys(path, "keys", "add", "ops", "--operator") == 0
    capsys.readouterr()
    assert keys(path, "keys", "ls", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["tenant"], row["operator"]) for row in listed] == [
        ("web", "acme", False),
        ("ops", "ops", True),
    ]
    assert listed[0]["sha256"] == hashlib.sha256(key.encode()).hexdigest()
    assert keys(path, "keys", "ls") == 0
    assert "acme" in capsys.readouterr().out


def test_keys_are_removed_but_the_last(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "keys.toml"
    for name in ("a", "b"):
        keys(path, "keys", "add", name)
    assert keys(path, "keys", "add", "a") == WRONG
    assert keys(path, "keys", "rm", "nobody") == WRONG
    assert keys(path, "keys", "rm", "a") == 0
    assert keys(path, "keys", "rm", "b") == WRONG
    assert "the last key" in capsys.readouterr().err
    assert [key.name for key in read_access(path).keys] == ["b"]


def test_a_quota_that_is_none_changes_nothing(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "keys.toml"
    keys(path, "keys", "add", "a")
    before = path.read_bytes()
    assert keys(path, "keys", "add", "b", "--disk-bytes", "plenty") == WRONG
    assert "disk_bytes" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert keys(tmp_path / "new.toml", "keys", "add", "b", "--turns", "-1") == WRONG
    assert not (tmp_path / "new.toml").exists()


def test_public_prompts(tmp_path: Path, capsys: Capture) -> None:
    path, prompt = tmp_path / "keys.toml", tmp_path / "system.txt"
    prompt.write_text("Be kind.")
    keys(path, "keys", "add", "a")
    for _ in range(2):
        assert keys(path, "public", "add", str(prompt)) == 0
    assert read_access(path).public == ("Be kind.",)
    capsys.readouterr()
    assert keys(path, "public", "ls") == 0
    assert str(prompt) in capsys.readouterr().out
    assert keys(path, "public", "add", str(tmp_path / "none")) == WRONG


def test_without_a_file_named_it_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["keys", "add", "a"]) == 0
    assert (tmp_path / "sessionkv" / "keys.toml").exists()
