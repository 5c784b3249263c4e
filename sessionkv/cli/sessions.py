"""``sessionkv sessions``: list, show, fork, rewind, pin, unpin and remove."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from sessionkv.cli import output
from sessionkv.cli.connect import connect
from sessionkv.cli.session_tree import nested, session_trees
from sessionkv.cli.unnamed import tell_unlisted
from sessionkv.errors import RequestError
from sessionkv.types import Tier

if TYPE_CHECKING:
    from sessionkv.client import Client, PinInfo, SessionInfo

TIERS = tuple(tier.value for tier in Tier)


def run(args: argparse.Namespace) -> int:
    """Carry out one action and print what came of it."""
    with connect(args) as client:
        if args.action == "tree":
            _print_tree(client, args.prefix, as_json=args.json)
        elif args.action == "ls":
            _print_list(client.sessions(args.prefix), args.prefix, as_json=args.json)
        elif args.action == "rm":
            _remove(client, args.session, as_json=args.json)
        else:
            info = _act(client, args)
            if args.json:
                output.print_json(asdict(info))
            else:
                print_info(output.stdout(), info)
        if args.action in ("ls", "tree") and not (args.prefix or args.json):
            tell_unlisted(client)
    return 0


def _act(client: Client, args: argparse.Namespace) -> SessionInfo:
    """What is known of the session after the action."""
    session = client.session(args.session)
    match args.action:
        case "fork":
            session = session.fork(args.name)
        case "rewind":
            session.rewind(args.turns)
        case "pin":
            session.pin(tier=args.tier, ttl_s=args.ttl, priority=args.priority)
        case "unpin":
            session.unpin()
        case _:
            pass
    return session.info()  # what it holds in each tier comes with this answer alone


def _print_list(sessions: list[SessionInfo], prefix: str, *, as_json: bool) -> None:
    if as_json:
        output.print_json([asdict(info) for info in sessions])
    elif sessions:
        output.stdout().print(sessions_table(sessions))
    else:
        which = f" that start with {prefix!r}" if prefix else ""
        output.stdout().print(f"no sessions{which}", markup=False)


def _print_tree(client: Client, prefix: str, *, as_json: bool) -> None:
    from sessionkv.client.portable import session_path

    paths = {info.name: session_path(client, info.name) for info in client.sessions(prefix)}
    if as_json:
        output.print_json(nested(paths))
        return
    for tree in session_trees(paths):
        output.stdout().print(tree)


def _remove(client: Client, names: Sequence[str], *, as_json: bool) -> None:
    """Remove all that can be; what went wrong with the others is said when these are gone.

    Raises:
        SessionKVError: The last thing that went wrong; what did before it is printed.
    """
    removed: list[str] = []
    failed: list[RequestError] = []
    for name in names:
        try:
            client.delete(name)
        except RequestError as error:
            failed.append(error)
        else:
            removed.append(name)
    if as_json:
        output.print_json({"removed": removed})
    else:
        for name in removed:
            output.stdout().print(f"removed {output.one_line(name)}", markup=False)
    for earlier in failed[:-1]:
        output.stderr().print(earlier.message, markup=False)
    if failed:
        raise failed[-1]


def sessions_table(sessions: Sequence[SessionInfo]) -> Table:
    """One row for each session, with its bytes in each tier (shared ones too) where they came."""
    tiers = [tier for tier in TIERS if any(tier in info.bytes for info in sessions)]
    columns = (
        "session", ">turns", ">tokens", *(f">{tier}" for tier in tiers), "pin", ">idle", "last miss"
    )  # fmt: skip
    return output.table(columns, (_row(info, tiers) for info in sessions))


def _row(info: SessionInfo, tiers: Sequence[str]) -> tuple[str, ...]:
    return (
        info.name,
        f"{info.turns:,}",
        f"{info.tokens:,}",
        *(_held(info, tier) for tier in tiers),
        _pin(info.pin),
        "running" if info.running else _age(info.updated_s),
        info.last_cache.miss.reason.value if info.last_cache else "-",
    )


def print_info(console: Console, info: SessionInfo) -> None:
    """All that is known of one session."""
    values = {
        "session": info.name,
        "turns": f"{info.turns:,}",
        "tokens": f"{info.tokens:,}",
        "kind": info.kind,
        "node": info.node,
        "created": f"{_age(info.created_s)} ago",
        "last used": "running" if info.running else f"{_age(info.updated_s)} ago",
        "queued turns": f"{info.queued:,}",
        "pin": _pin(info.pin),
    }
    for tier in TIERS:
        values[f"KV in {tier}"] = _held(info, tier, apart=True)
    if info.last_cache:
        values["last turn"] = str(info.last_cache)
    console.print(output.pairs(values))


def _held(info: SessionInfo, tier: str, *, apart: bool = False) -> str:
    held = info.bytes.get(tier)
    if held is None:
        return "-"
    text = output.size(held.exclusive + held.shared)
    return f"{text}, {output.size(held.shared)} of it shared" if apart and held.shared else text


def _pin(pin: PinInfo | None) -> str:
    if pin is None:
        return "-"
    until = "" if pin.expires_s is None else f", {output.duration(pin.expires_s - time.time())}"
    return f"{pin.tier} ({pin.priority}{until})"


def _age(wall_s: float) -> str:
    return output.duration(max(0.0, time.time() - wall_s))
