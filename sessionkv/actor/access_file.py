"""The file of API keys: read whole or refused, and changed by writing it anew.

::

    [[keys]]
    name = "web"
    sha256 = "9f86d0..."        # or: key = "the key itself"
    tenant = "acme"
    operator = false            # the rest may be left out
    host_bytes = "8GiB"
    turns = 64

    [[public]]
    file = "system.txt"         # or: text = "You are ..."; beside this file where relative

Whoever may read it may learn keys, and whoever may write it may come in, so a file that others
than its owner have any right to is refused.
"""

from __future__ import annotations

import os
import secrets
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from sessionkv.config import parse_bytes
from sessionkv.errors import ConfigError
from sessionkv.types.access import SERVICE_TENANT, Access, ApiKey, TenantQuota, key_digest

MAX_FILE_BYTES = 4 * 1024**2
MAX_NAME_BYTES = 256
KEY_PREFIX = "sk-sessionkv-"
_QUOTA_FIELDS = tuple(item.name for item in fields(TenantQuota))
_KEY_FIELDS = ("name", "sha256", "key", "tenant", "operator", *_QUOTA_FIELDS)


def read_access(path: Path | None) -> Access:
    """Keys and public prompts; None is an engine without keys.

    Raises:
        ConfigError: The file cannot be read, others may read or write it, it says something that is
            not allowed, or it has no key.
    """
    if path is None:
        return Access()
    tables = read_tables(path)
    keys = tuple(_key(f"keys[{i}]", table) for i, table in enumerate(tables["keys"]))
    if not keys:
        raise ConfigError("keys", str(path), "a file with at least one [[keys]] table")
    for what in ("name", "digest"):
        if len({getattr(key, what) for key in keys}) < len(keys):
            raise ConfigError("keys", str(path), f"a file that has each {what} once")
    public = tuple(
        _public(f"public[{i}]", table, path.parent) for i, table in enumerate(tables["public"])
    )
    return Access(keys, public)


def read_tables(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The file's tables as they stand; both lists are there.

    Raises:
        ConfigError: As :func:`read_access`, but for what the tables say.
    """
    try:
        with path.open("rb") as file:
            _check_mode(path, os.fstat(file.fileno()))
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError("keys", str(path), f"a file of at most {MAX_FILE_BYTES} bytes")
        found = tomllib.loads(text.decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("keys", str(path), f"a readable TOML file ({error})") from None
    for name, tables in found.items():
        if name not in ("keys", "public"):
            raise ConfigError("keys", name, "tables [[keys]] and [[public]]")
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise ConfigError("keys", name, f"tables [[{name}]]")
    return {"keys": found.get("keys", []), "public": found.get("public", [])}


def write_tables(path: Path, tables: Mapping[str, list[dict[str, Any]]]) -> None:
    """Replace the file at once, 0600; comments in it are lost.

    Raises:
        ConfigError: It cannot be written.
    """
    lines: list[str] = []
    for name, entries in tables.items():
        for entry in entries:
            lines += [f"[[{name}]]", *(f"{key} = {_toml(value)}" for key, value in entry.items())]
            lines.append("")
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write("\n".join(lines))
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError("keys", str(path), f"a file that can be written ({error})") from None


def new_key() -> str:
    """A key that nobody guesses: 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def _check_mode(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError("keys", str(path), "a file")
    if found.st_mode & 0o077:
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        raise ConfigError("keys", f"{path} with mode {mode}", f"mode 0600 (chmod 600 {path})")
    if found.st_uid not in (os.getuid(), 0):
        raise ConfigError("keys", f"{path} of user {found.st_uid}", "a file of your own")


def _key(field: str, table: Mapping[str, Any]) -> ApiKey:
    for name in table:
        if name not in _KEY_FIELDS:
            raise ConfigError(f"{field}.{name}", "there", f"only {', '.join(_KEY_FIELDS)}")
    if ("sha256" in table) == ("key" in table):
        raise ConfigError(field, "with none or both of them", "exactly one of sha256 and key")
    if "key" in table:
        digest = key_digest(_text(f"{field}.key", table["key"], most=4096))
    else:
        digest = _digest(f"{field}.sha256", table["sha256"])
    operator = table.get("operator", False)
    if not isinstance(operator, bool):
        raise ConfigError(f"{field}.operator", operator, "true or false")
    return ApiKey(
        name=_text(f"{field}.name", table.get("name")),
        digest=digest,
        tenant=_tenant(f"{field}.tenant", table.get("tenant")),
        operator=operator,
        quota=_quota(field, table),
    )


def _quota(field: str, table: Mapping[str, Any]) -> TenantQuota:
    values: dict[str, int] = {}
    for name in _QUOTA_FIELDS:
        if name not in table:
            continue
        value = table[name]
        if name.endswith("_bytes") and isinstance(value, str):
            value = parse_bytes(f"{field}.{name}", value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**50:
            raise ConfigError(f"{field}.{name}", value, "a whole number, 0 or more")
        values[name] = value
    return TenantQuota(**values)


def _public(field: str, table: Mapping[str, Any], folder: Path) -> str:
    if set(table) not in ({"text"}, {"file"}):
        raise ConfigError(field, sorted(table), "exactly one of text and file")
    if "text" in table:
        return _text(f"{field}.text", table["text"], most=MAX_FILE_BYTES)
    path = folder / _text(f"{field}.file", table["file"], most=4096)
    try:
        return _text(f"{field}.file", path.read_text(), most=MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}.file", str(path), f"a readable text file ({error})") from None


def _text(field: str, value: object, *, most: int = MAX_NAME_BYTES) -> str:
    if not isinstance(value, str) or not 1 <= len(value.encode(errors="replace")) <= most:
        raise ConfigError(field, value, f"text of 1 to {most} bytes")
    return value


def _tenant(field: str, value: object) -> str:
    found = _text(field, value)
    if found == SERVICE_TENANT:
        raise ConfigError(field, value, "another name")
    return found


def _digest(field: str, value: object) -> bytes:
    try:
        found = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        found = b""
    if len(found) != 32:
        raise ConfigError(field, value, "64 hexadecimal digits")
    return found


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    escaped = "".join(_ESCAPES.get(char, char) for char in str(value))
    return f'"{escaped}"'


_ESCAPES = {
    **{chr(code): f"\\u{code:04x}" for code in (*range(32), 127)},
    '"': '\\"',
    "\\": "\\\\",
}
