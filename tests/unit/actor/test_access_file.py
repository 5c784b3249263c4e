"""The file of keys is read whole or refused by name; what it says becomes keys and quotas."""

import hashlib
import os
import stat
from pathlib import Path

import pytest

from sessionkv.actor.access_file import new_key, read_access, read_tables, write_tables
from sessionkv.errors import ConfigError
from sessionkv.types.access import Access, ApiKey, TenantQuota

DIGEST = hashlib.sha256(b"a-key").hexdigest()
KEY = f'[[keys]]\nname = "a"\nsha256 = "{DIGEST}"\ntenant = "t"\n'


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_no_file_is_an_engine_without_keys() -> None:
    assert read_access(None) == Access()


def test_keys_with_tenant_and_quota(tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("Be kind.")
    path = written(
        tmp_path,
        KEY
        + '[[keys]]\nname = "b"\nkey = "another"\ntenant = "t"\noperator = true\n'
        + 'device_bytes = "1GiB"\nhost_bytes = 5\nturns = 2\n'
        + '[[public]]\nfile = "system.txt"\n[[public]]\ntext = "Hi."\n',
    )
    access = read_access(path)
    assert access.keys == (
        ApiKey("a", bytes.fromhex(DIGEST), "t"),
        ApiKey("b", hashlib.sha256(b"another").digest(), "t", True, TenantQuota(2**30, 5, None, 2)),
    )
    assert access.public == ("Be kind.", "Hi.")
    assert access.tenants == ("t",)
    assert access.find("a-key") == access.keys[0]
    assert access.find("another") == access.keys[1]
    assert access.find("a-key ") is access.find("") is None


def test_quotas_of_a_tenant_are_the_smaller_where_two_keys_say() -> None:
    keys = tuple(
        ApiKey(name, name.encode(), "t", quota=quota)
        for name, quota in {
            "a": TenantQuota(host_bytes=5, turns=1),
            "b": TenantQuota(host_bytes=3, disk_bytes=7),
            "c": TenantQuota(),
        }.items()
    )
    assert Access(keys).quotas == {"t": TenantQuota(None, 3, 7, 1)}
    assert Access(keys[2:]).quotas == {}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602, 0o610, 0o777])
def test_a_file_that_others_have_a_right_to_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, KEY, mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600"):
        read_access(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"at least one \[\[keys\]\]"),
        ("[keys]\n", r"tables \[\[keys\]\]"),
        ("x = 1\n" + KEY, "keys is 'x'"),
        (KEY + KEY, "each name once"),
        (KEY + KEY.replace('"a"', '"b"'), "each digest once"),
        (KEY + "quota = 1\n", r"keys\[0\].quota"),
        (KEY + 'key = "x"\n', r"keys\[0\].*exactly one of sha256 and key"),
        (KEY.replace(DIGEST, DIGEST[1:]), r"keys\[0\].sha256.*64 hexadecimal"),
        (KEY.replace('tenant = "t"\n', ""), r"keys\[0\].tenant"),
        (KEY.replace('tenant = "t"', 'tenant = ""'), r"keys\[0\].tenant"),
        (KEY + "operator = 1\n", r"keys\[0\].operator"),
        (KEY + "turns = true\n", r"keys\[0\].turns"),
        (KEY + 'disk_bytes = "1 parsec"\n', r"keys\[0\].disk_bytes"),
        (KEY + '[[public]]\nfile = "no.txt"\n', r"public\[0\].file"),
        (KEY + "[[public]]\n", r"public\[0\].*exactly one of text and file"),
        ("not toml", "readable TOML"),
    ],
)
def test_what_cannot_be_meant_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_access(written(tmp_path, text))


def test_a_file_that_is_not_there_or_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="keys is"):
            read_access(path)


def test_what_is_written_is_private_and_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "new" / "keys.toml"
    odd = 'quo"te \\ back\nline \x7f é'
    tables = {
        "keys": [{"name": odd, "sha256": DIGEST, "tenant": "t", "operator": True, "turns": 3}],
        "public": [{"text": odd}],
    }
    old = os.umask(0)
    try:
        write_tables(path, tables)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_tables(path) == tables
    assert list(path.parent.iterdir()) == [path]


def test_new_keys_differ() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert min(map(len, keys)) > 43
