"""``sessionkv keys`` and ``sessionkv public``: who may use an engine, and what its tenants share.

Changes the file that ``serve --keys`` reads; a running engine reads it anew on SIGHUP.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from sessionkv.actor.access_file import new_key, read_access, read_tables, write_tables
from sessionkv.cli import output
from sessionkv.cli.usage import WrongUsage
from sessionkv.config import load_config, user_config_dir
from sessionkv.types.access import Access, key_digest

_RELOAD = "a running engine reads the file anew on SIGHUP"


def run(args: argparse.Namespace) -> int:
    """Carry one action out."""
    path = _path(args)
    action = {
        "keys add": _add,
        "keys ls": _list,
        "keys rm": _remove,
        "public add": _add_public,
        "public ls": _list_public,
    }[args.action]
    return action(args, path)


def _path(args: argparse.Namespace) -> Path:
    """The file named, else that of the configuration, else the user's own."""
    if args.keys is not None:
        return Path(args.keys).expanduser()
    return load_config().keys or user_config_dir() / "keys.toml"


def _tables(path: Path) -> dict[str, list[dict[str, Any]]]:
    return read_tables(path) if path.exists() else {"keys": [], "public": []}


def _add(args: argparse.Namespace, path: Path) -> int:
    tables, key = _tables(path), new_key()
    if any(table.get("name") == args.name for table in tables["keys"]):
        raise WrongUsage(f"{path} has a key named {args.name!r}: remove it first, or take another")
    entry: dict[str, Any] = {
        "name": args.name,
        "sha256": key_digest(key).hex(),
        "tenant": args.tenant or args.name,
    }
    if args.operator:
        entry["operator"] = True
    for name in ("device_bytes", "host_bytes", "disk_bytes", "turns"):
        if getattr(args, name) is not None:
            entry[name] = getattr(args, name)
    tables["keys"].append(entry)
    _write(path, tables)
    output.stderr().print(
        f"the key of {args.name!r} (tenant {entry['tenant']!r}) is shown this once; {_RELOAD}",
        markup=False,
    )
    sys.stdout.write(f"{key}\n")
    return 0


def _list(args: argparse.Namespace, path: Path) -> int:
    access = read_access(path) if path.exists() else Access()
    rows: list[dict[str, Any]] = [
        {
            "name": key.name,
            "tenant": key.tenant,
            "operator": key.operator,
            "sha256": key.digest.hex(),
            "device_bytes": key.quota.device_bytes,
            "host_bytes": key.quota.host_bytes,
            "disk_bytes": key.quota.disk_bytes,
            "turns": key.quota.turns,
        }
        for key in access.keys
    ]
    if args.json:
        output.print_json(rows)
        return 0
    columns = ("name", "tenant", "operator", ">device", ">host", ">disk", ">turns", "sha256")
    shown = (
        (
            row["name"],
            row["tenant"],
            "yes" if row["operator"] else "-",
            *(output.size(row[f"{tier}_bytes"]) for tier in ("device", "host", "disk")),
            "-" if row["turns"] is None else row["turns"],
            str(row["sha256"])[:12],
        )
        for row in rows
    )
    output.stdout().print(output.table(columns, shown))
    return 0


def _remove(args: argparse.Namespace, path: Path) -> int:
    tables = _tables(path)
    left = [table for table in tables["keys"] if table.get("name") != args.name]
    if len(left) == len(tables["keys"]):
        raise WrongUsage(f"{path} has no key named {args.name!r}")
    if not left:
        raise WrongUsage(f"{args.name!r} is the last key: serve without --keys to ask for none")
    tables["keys"] = left
    _write(path, tables)
    output.stderr().print(f"removed; {_RELOAD}, and cuts its connections", markup=False)
    return 0


def _add_public(args: argparse.Namespace, path: Path) -> int:
    tables = _tables(path)
    entry = {"file": str(Path(args.file).resolve())}
    if entry not in tables["public"]:
        tables["public"].append(entry)
    _write(path, tables)
    output.stderr().print(f"all tenants may share the KV of this prompt; {_RELOAD}", markup=False)
    return 0


def _list_public(args: argparse.Namespace, path: Path) -> int:
    tables = _tables(path)["public"]
    if args.json:
        output.print_json(tables)
    else:
        rows = (("file" if "file" in t else "text", next(iter(t.values()))) for t in tables)
        output.stdout().print(output.table(("", ""), rows))
    return 0


def _write(path: Path, tables: dict[str, list[dict[str, Any]]]) -> None:
    """Replace the file, unless an engine would refuse what it says."""
    before = path.read_bytes() if path.exists() else None
    write_tables(path, tables)
    try:
        if tables["keys"]:
            read_access(path)
    except BaseException:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)  # the file is 0600 already
        raise
