"""``sessionkv top``: what a running engine does, now."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table

from sessionkv.cli import output
from sessionkv.cli.connect import connect
from sessionkv.cli.sessions import sessions_table
from sessionkv.cli.watching import watch
from sessionkv.types import Tier

if TYPE_CHECKING:
    from sessionkv.client import Client, SessionInfo

_BAR_CELLS = 24
_PAGE = 500
_HTTP = "http:"


def run(args: argparse.Namespace) -> int:
    """Show it until ``q`` or Ctrl-C."""
    with connect(args) as client:
        return watch(lambda: _frame(client, args.sessions), every_s=args.interval)


def _frame(client: Client, most: int) -> RenderableType:
    stats = client.stats()
    found = sorted(_listed(client), key=lambda info: info.updated_s, reverse=True)
    found.sort(key=lambda info: not info.running)
    return frame(stats, found, most=most)


def _listed(client: Client) -> list[SessionInfo]:
    """Sessions to choose from: some, by name, as there may be many thousands.

    Those of stateless HTTP clients are passed over: they are as many as answers.
    """
    first = client.session_page(limit=_PAGE)
    found = [info for info in first.sessions if not info.name.startswith(_HTTP)]
    if first.next is not None and (first.next.startswith(_HTTP) or len(found) < _PAGE):
        found += client.session_page(after=f"{_HTTP}\U0010ffff", limit=_PAGE).sessions
    return found


def frame(
    stats: Mapping[str, Any], sessions: Sequence[SessionInfo], *, most: int
) -> RenderableType:
    """All of it, from figures and sessions, those to be shown first first."""
    parts: list[RenderableType] = [output.pairs(_summary(stats))]
    if "kv" in stats:  # an operator's
        parts += ["", _tiers(stats)]
    tenants = stats.get("tenants")
    if tenants:
        parts += ["", _tenants(tenants)]
    parts += ["", output.pairs(_misses(stats), title="history computed again")]
    for advice in stats.get("advice", ()):
        parts += ["", f"note: {advice}"]
    if sessions:
        parts += ["", sessions_table(sessions[:most])]
        if len(sessions) > most:
            parts.append(f"and {len(sessions) - most:,} more sessions")
    return Group(*parts)


def _summary(stats: Mapping[str, Any]) -> dict[str, str]:
    latency, cache = stats.get("latency", {}), stats.get("prefix_cache", {})
    throughput = stats.get("throughput", {})
    state = ", draining" if stats.get("draining") else ""
    values = {
        "turns": f"{stats['requests_running']:,} running, {stats['requests_waiting']:,} "
        f"waiting{state}",
        "hit rate": f"{cache.get('hit_rate', 0.0):.1%} of {cache.get('queries_tokens', 0):,} "
        "prompt tokens",
    }
    if throughput:
        prompt, sampled = (
            throughput[f"{name}_tokens_per_second_10s"] for name in ("prompt", "generation")
        )
        values["throughput"] = f"{prompt:,.0f} prompt tokens/s, {sampled:,.0f} sampled/s"
    for name, title in (("ttft", "first token"), ("inter_token", "next token"), ("e2e", "turn")):
        if name in latency:
            found = latency[name]
            values[title] = " · ".join(
                f"{p} {found[f'{p}_ms']:,.1f} ms" for p in ("p50", "p90", "p99")
            )
    return values


def _tiers(stats: Mapping[str, Any]) -> Table:
    rows = []
    for tier in Tier:
        kv, larger = stats["kv"][tier.value], stats["larger_cache"][tier.value]
        if not kv["cap_bytes"]:
            rows.append((tier.value, "off", "", "", "", "", ""))
            continue
        rows.append(
            (
                tier.value,
                bar(kv["usage_rate"]),
                f"{output.size(kv['used_bytes'])} of {output.size(kv['cap_bytes'])}",
                f"{stats['prefix_cache'][f'{tier.value}_tokens']:,}",
                f"{kv['evictions']:,}",
                f"{kv['evictions_waited']:,}",
                f"{larger['wanted_blocks']:,}",
            )
        )
    columns = ("tier", "", ">used", ">tokens found", ">evicted", ">waited", ">wanted back")
    return output.table(columns, rows)


def _tenants(tenants: Mapping[str, Any]) -> Table:
    rows = (
        (
            name,
            f"{values['requests_running']:,}",
            f"{values['requests_waiting']:,}",
            f"{values['prompt_tokens']:,}",
            f"{values['generation_tokens']:,}",
            f"{values['prefix_cache']['hit_rate']:.1%}",
        )
        for name, values in tenants.items()
    )
    columns = ("tenant", ">running", ">waiting", ">prompt tokens", ">sampled", ">hit rate")
    return output.table(columns, rows)


def _misses(stats: Mapping[str, Any]) -> dict[str, str]:
    found = {
        reason: f"{count:,} tokens"
        for reason, count in stats.get("miss_tokens", {}).items()
        if count
    }
    return found or {"none": ""}


def bar(rate: float) -> str:
    """A gauge of blocks."""
    filled = min(_BAR_CELLS, max(0, round(rate * _BAR_CELLS)))
    return "█" * filled + "░" * (_BAR_CELLS - filled)
