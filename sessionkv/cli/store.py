"""``sessionkv store``: verify, stats and purge of the store of a stopped engine."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sessionkv.cli import output
from sessionkv.cli.progress import StartProgress
from sessionkv.cli.usage import WrongUsage
from sessionkv.cli.values import age_s
from sessionkv.config import user_data_dir
from sessionkv.engine.stopped_kv import retained_keys
from sessionkv.engine.stopped_sessions import StoppedSessions, journal_damage, open_sessions
from sessionkv.errors import ConfigError, InvalidRequest
from sessionkv.store.directory import StoreDirectory, disk_bytes
from sessionkv.store.set_aside import set_aside
from sessionkv.store.stopped import StoredBlocks, identity_folders, open_stopped
from sessionkv.store.verify import Verified, repair_blocks, verify_store
from sessionkv.types import HeadRecord

_SHOWN_PROBLEMS = 50


def run(args: argparse.Namespace) -> int:
    """Carry out one action."""
    with open_stopped(args.store or user_data_dir()) as directory:
        match args.action:
            case "verify":
                return _verify(args, directory)
            case "stats":
                return _stats(args, directory)
            case _:
                return _purge(args, directory)


# Verify --------------------------------------------------------------------------------------


def _verify(args: argparse.Namespace, directory: StoreDirectory) -> int:
    repaired = 0
    with StartProgress() as progress:

        def tell(stage: str, done: int, total: int | None) -> None:
            progress.update({"stage": stage, "done": done, "total": total})

        found = verify_store(directory, progress=tell)
        if args.repair and found.problems:
            repaired = repair_blocks(directory)
            found = verify_store(directory, progress=tell)
    if args.json:
        output.print_json({"directory": directory.path, "repaired": repaired, **asdict(found)})
    else:
        _print_verified(directory, found, repaired)
    return 1 if found.problems else 0


def _print_verified(directory: StoreDirectory, found: Verified, repaired: int) -> None:
    console = output.stdout()
    for problem in found.problems[:_SHOWN_PROBLEMS]:
        console.print(f"{problem.place}: {problem.what}", markup=False)
    more = len(found.problems) - _SHOWN_PROBLEMS
    if more > 0:
        console.print(f"and {more:,} more")
    if repaired:
        records = output.count(repaired, "damaged KV record")
        console.print(f"{records} removed; their turns are computed again")
    console.print(
        f"{directory.path}: {output.count(found.sessions, 'session')}, "
        f"{output.count(found.turns, 'turn')}, {output.count(found.keys, 'key')}, "
        f"{output.count(found.blocks, 'KV block')} in "
        f"{output.count(found.block_stores, 'block store')}: "
        + (output.count(len(found.problems), "problem") if found.problems else "all sound"),
        markup=False,
    )


# Stats ---------------------------------------------------------------------------------------


def _stats(args: argparse.Namespace, directory: StoreDirectory) -> int:
    with open_sessions(directory) as sessions:
        uses = [head.updated_s for head in sessions.all_heads]
        stats = {
            "directory": str(directory.path),
            "sessions": len(sessions.heads),
            "unnamed_branches": len(sessions.all_heads) - len(sessions.heads),
            "turns": sessions.num_turns,
            "keys": sessions.num_keys,
            "oldest_use_s": min(uses, default=None),
            "newest_use_s": max(uses, default=None),
            "identities": [
                _identity_stats(directory, sessions, identity)
                for identity, _ in identity_folders(directory)
            ],
            "set_aside_journals": {
                str(moved.path): moved.moved_at for moved in set_aside(directory.journal_path)
            },
            "bytes": _file_bytes(directory.path),
        }
    if args.json:
        output.print_json(stats)
    else:
        _print_stats(stats)
    return 0


def _identity_stats(
    directory: StoreDirectory, sessions: StoppedSessions, identity: bytes
) -> dict[str, Any]:
    """Blocks of one identity; a block is retained where a session's log leads to it."""
    with StoredBlocks(directory, identity) as stored:
        stats: dict[str, Any] = {
            "identity": identity.hex(),
            "damage": stored.damage,
            "bytes": disk_bytes(stored.path),
            "last_written_s": _last_written_s(stored.path),
        }
        if stored.damage is not None:
            return stats
        keys = retained_keys(sessions, sessions.all_heads, stored)
        retained = unretained = 0
        for entry in stored.entries():
            is_retained = entry.key in keys
            retained += is_retained
            unretained += not is_retained
        stats |= {
            "blocks": retained + unretained,
            "retained_blocks": retained,
            "unretained_blocks": unretained,
            "block_size": stored.block_size,
        }
        if stored.geometry is not None:
            stats |= {"block_bytes": stored.geometry.block_bytes, "dtype": stored.geometry.dtype}
    return stats


def _print_stats(stats: dict[str, Any]) -> None:
    console = output.stdout()
    console.print(
        output.pairs(
            {
                "store": stats["directory"],
                "sessions": f"{stats['sessions']:,}",
                "unnamed branches": f"{stats['unnamed_branches']:,}",
                "turns": f"{stats['turns']:,}",
                "idempotency keys": f"{stats['keys']:,}",
                "last used": f"{_ago(stats['newest_use_s'])}, the oldest "
                f"{_ago(stats['oldest_use_s'])}",
                "damaged journals": "; ".join(
                    f"{path}, set aside on {when}"
                    for path, when in stats["set_aside_journals"].items()
                )
                or "none",
            }
        )
    )
    columns = ("KV identity", ">blocks", ">retained", ">on disk", ">written", "dtype")
    rows = (
        (
            item["identity"][:16],
            f"{item['blocks']:,}" if "blocks" in item else "damaged",
            f"{item['retained_blocks']:,}" if "blocks" in item else "-",
            output.size(item["bytes"]),
            _ago(item["last_written_s"]),
            item.get("dtype", "-"),
        )
        for item in stats["identities"]
    )
    console.print(output.table(columns, rows))
    files = ((name, output.size(size)) for name, size in stats["bytes"].items())
    console.print(output.table(("file", ">on disk"), files))


def _file_bytes(top: Path) -> dict[str, int]:
    """Bytes of each file as allocated."""
    return {
        str(path.relative_to(top)): path.lstat().st_blocks * 512
        for path in sorted(top.rglob("*"))
        if path.is_file()
    }


# Purge ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    folders: list[Path]
    num_bytes: int
    heads: list[HeadRecord]
    journal_damage: str | None


def _purge(args: argparse.Namespace, directory: StoreDirectory) -> int:
    if args.sessions and args.identity:
        raise InvalidRequest("--identity", args.identity, "absent beside --sessions")
    until_s = None if args.older_than is None else time.time() - _age_s(args.older_than)
    folders = _folders_to_purge(directory, args.identity, until_s)
    with ExitStack() as stack:
        heads: list[HeadRecord] = []
        if args.sessions:
            sessions = stack.enter_context(open_sessions(directory))
            heads = [h for h in sessions.all_heads if until_s is None or h.updated_s <= until_s]
        damage = None if args.sessions else journal_damage(directory)
        plan = _Plan(folders, sum(map(disk_bytes, folders)), heads, damage)
        if (plan.folders or plan.heads) and not args.yes and not _is_wanted(plan):
            output.stderr().print("nothing was deleted")
            return 1
        for folder in plan.folders:
            shutil.rmtree(folder)
        if plan.heads:
            sessions.delete(plan.heads)
    _print_purged(args, plan)
    return 0


def _folders_to_purge(
    directory: StoreDirectory, identity: str | None, until_s: float | None
) -> list[Path]:
    """Folders of block stores that match."""
    folders = identity_folders(directory)
    if identity is not None:
        folders = [item for item in folders if item[0].hex().startswith(identity.lower())]
        if len(folders) != 1:
            allowed = "the first digits of one identity; `sessionkv store stats --json` lists them"
            raise InvalidRequest("--identity", identity, allowed)
    return [
        path for _, path in folders if until_s is None or (_last_written_s(path) or 0.0) <= until_s
    ]


def _is_wanted(plan: _Plan) -> bool:
    """Ask the terminal.

    Raises:
        WrongUsage: There is none.
    """
    if not sys.stdin.isatty():
        raise WrongUsage("nobody can be asked here; give --yes")
    what = f"{output.size(plan.num_bytes)} of KV in "
    what += output.count(len(plan.folders), "block store")
    if plan.heads:
        what += f" and {output.count(len(plan.heads), 'session').upper()} with all their turns"
    output.stderr().print(f"delete {what}? [y/N] ", end="", markup=False)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _print_purged(args: argparse.Namespace, plan: _Plan) -> None:
    if args.json:
        output.print_json(
            {
                "identities": [folder.name for folder in plan.folders],
                "bytes": plan.num_bytes,
                "sessions": len(plan.heads),
                "journal_damage": plan.journal_damage,
            }
        )
        return
    text = f"deleted {output.size(plan.num_bytes)} of KV in {len(plan.folders):,} block stores"
    if args.sessions:
        text += f" and {output.count(len(plan.heads), 'session')}"
    elif plan.journal_damage is None:
        text += "; all sessions stay"
    else:
        text += f"; the journal is damaged ({plan.journal_damage}) and was left as it is"
    output.stdout().print(text, markup=False)


# All -----------------------------------------------------------------------------------------


def _last_written_s(folder: Path) -> float | None:
    """When a block store was last written, by its newest file."""
    return max((path.stat().st_mtime for path in folder.rglob("*") if path.is_file()), default=None)


def _age_s(text: str) -> float:
    """Seconds of ``12h`` or ``30d``.

    Raises:
        ConfigError: It is neither.
    """
    age = age_s(text)
    if age is None:
        raise ConfigError("--older-than", text, "a number and one of s, m, h, d, w, as in 30d")
    return age


def _ago(wall_s: float | None) -> str:
    return "-" if wall_s is None else f"{output.duration(max(0.0, time.time() - wall_s))} ago"
