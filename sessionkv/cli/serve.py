"""``sessionkv serve``: the sidecar. Shows how far starting has come, then what it serves."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sessionkv.cli import output
from sessionkv.cli.progress import StartProgress
from sessionkv.cli.settings import config_from
from sessionkv.cli.usage import WrongUsage
from sessionkv.config import HttpConfig

if TYPE_CHECKING:
    from sessionkv.engine.messages import DrainReport


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C, drain, return 0; 143 or 130 for one before it is ready."""
    from sessionkv.actor.serve import run_serve

    config = config_from(args)
    http = None
    if args.http is not None:
        http = replace(
            HttpConfig.parse(args.http),
            cors_origins=tuple(args.cors_origin),
            steady_prompts=args.steady_prompts,
        )
    elif args.cors_origin or args.steady_prompts:
        flag = "--cors-origin" if args.cors_origin else "--steady-prompts"
        raise WrongUsage(f"{flag} is for --http")
    again = "Ctrl-C again" if sys.stdin.isatty() else "a second signal"
    with StartProgress() as progress:

        def ready(info: Mapping[str, Any]) -> None:
            progress.close()
            output.stdout().print(output.pairs(summary(info)))
            for note in info.get("notes", ()):
                output.stdout().print(f"note: {note}", markup=False)
            output.stdout().print("ready")
            sys.stdout.flush()

        def stopping(turns: int) -> None:
            output.stdout().print(waiting(turns, config.limits.drain_s, again=again), markup=False)
            sys.stdout.flush()

        code = run_serve(
            config,
            args.endpoint,
            on_ready=ready,
            on_progress=progress.update,
            on_stopping=stopping,
            on_drained=lambda left: output.stdout().print(ending(left), markup=False),
            http=http,
        )
    if code > 128:
        output.stderr().print("stopped before it was ready", markup=False)
    return code


def waiting(turns: int, drain_s: float, *, again: str) -> str:
    """The line at the begin of a drain that takes a while; ``again`` is what cuts it short."""
    if not turns:
        return f"stopping: KV is written for up to {drain_s:g} s; {again} ends it now"
    have, them = ("has", "it") if turns == 1 else ("have", "them")
    count = output.count(turns, "turn")
    return f"stopping: {count} {have} up to {drain_s:g} s; {again} ends {them} now"


def ending(left: DrainReport) -> str:
    """The last line: what the drain left undone."""
    undone, rest = [], ""
    if left.dropped_turns:
        undone.append(f"{output.count(left.dropped_turns, 'turn')} did not end")
    if left.unwritten_blocks:
        blocks = output.count(left.unwritten_blocks, "block")
        are = "is" if left.unwritten_blocks == 1 else "are"
        size = output.size(left.unwritten_bytes)
        undone.append(f"{blocks} ({size}) of sessions {are} not on disk")
        rest = "; the journal has their turns"
    if left.unanswered_commits:
        changes = output.count(left.unanswered_commits, "change")
        undone.append(f"the journal did not answer {changes}, which it may have stored or not")
    if not undone:
        return "stopped"
    return f"stopped after {left.drain_s:g} s: {' and '.join(undone)}{rest}"


def summary(info: Mapping[str, Any]) -> dict[str, str]:
    """What a person wants to know of an engine that is ready."""
    blocks = info.get("device_blocks")
    device = output.size(info.get("device_bytes"))
    if blocks is not None:
        device += f" in {blocks:,} blocks of {info.get('block_size')} tokens"
    where = {"socket": str(info.get("endpoint"))}
    if "http" in info:
        where["http"] = str(info["http"])
    return where | {
        "pid": str(info.get("pid")),
        "model": str(info.get("model")),
        "window": f"{info.get('max_model_len', 0):,} tokens",
        "weights": output.size(info.get("weights_bytes")),
        "device": device,
        "host": f"up to {output.size(info.get('host_bytes'))}",
        "disk": f"up to {output.size(info.get('disk_bytes'))}, in {info.get('store')}",
    }
