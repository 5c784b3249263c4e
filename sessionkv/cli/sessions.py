"""``sessionkv sessions``: list, show, fork, rewind, pin, unpin and remove."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from sessionkv.cli import output
from sessionkv.cli.connect import connect

if TYPE_CHECKING:
    from sessionkv.client import Client


def run(args: argparse.Namespace) -> int:
    """Carry out one action and print what came of it."""
    with connect(args) as client:
        value = _act(client, args)
    if args.json:
        output.print_json(value)
    elif args.action == "ls":
        output.stdout().print(sessions_table(value))
    elif args.action == "rm":
        output.stdout().print(f"removed {output.one_line(args.session)}", markup=False)
    else:
        print_info(output.stdout(), value)
    return 0


def _act(client: Client, args: argparse.Namespace) -> Any:
    match args.action:
        case "ls":
            return list(client.sessions(prefix=args.prefix))
        case "show":
            return client.info(args.session)
        case "fork":
            return client.fork(args.session, args.name)
        case "rewind":
            return client.rewind(args.session, turns=args.turns)
        case "pin":
            return client.pin(args.session, tier=args.tier, ttl_s=args.ttl, priority=args.priority)
        case "unpin":
            return client.unpin(args.session)
        case _:
            return client.remove(args.session)


def sessions_table(sessions: Iterable[Mapping[str, Any]]) -> Table:
    """One row for each session."""
    columns = (
        "session", ">turns", ">tokens", ">device", ">host", ">disk", "pin", ">idle", "last miss"
    )  # fmt: skip
    return output.table(columns, (_row(info) for info in sessions))


def _row(info: Mapping[str, Any]) -> tuple[Any, ...]:
    held = info.get("bytes") or {}
    return (
        info.get("session", "?"),
        f"{info.get('turns', 0):,}",
        f"{info.get('tokens', 0):,}",
        *(output.size(held.get(tier)) for tier in ("device", "host", "disk")),
        _pin(info.get("pin")),
        _idle(info.get("updated_s")),
        info.get("last_miss") or "-",
    )


def print_info(console: Console, info: Mapping[str, Any]) -> None:
    """All that is known of one session."""
    plain = {key: value for key, value in info.items() if not isinstance(value, Mapping | list)}
    console.print(output.pairs(plain))
    for key, value in info.items():
        if isinstance(value, Mapping):
            console.print(output.pairs(value, title=key))


def _pin(pin: Mapping[str, Any] | None) -> str:
    if not pin:
        return "-"
    left = "" if pin.get("ttl_s") is None else f", {output.duration(pin['ttl_s'])}"
    return f"{pin.get('tier')}{left}"


def _idle(updated_s: float | None) -> str:
    return "-" if updated_s is None else output.duration(max(0.0, time.time() - updated_s))
