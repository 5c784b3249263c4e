"""``sessionkv explain``: why a turn computed what its conversation had computed before."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sessionkv.cli import output
from sessionkv.cli.connect import connect
from sessionkv.cli.usage import WrongUsage
from sessionkv.errors import SessionNotFound
from sessionkv.types import CacheReport, MissReason

if TYPE_CHECKING:
    from sessionkv.client import Client
    from sessionkv.client.client import Session
    from sessionkv.client.results import NodeInfo

_NODE = re.compile(r"n-\d+")
_REASONS: Mapping[MissReason, tuple[str, str]] = {
    MissReason.NONE: ("nothing of the known history was computed again", ""),
    MissReason.FIRST_TURN: ("there was no history: everything is new", ""),
    MissReason.EVICTED: (
        "the blocks had to make room for others",
        "a larger tier (cache.host_bytes, cache.disk_bytes), or a pin: sessions pin",
    ),
    MissReason.EXPIRED: ("evicted after their pin had lapsed", "a longer pin: sessions pin --ttl"),
    MissReason.NOT_STORED: (
        "the blocks never reached a tier that outlived the engine, such as the end of a turn "
        "before a crash",
        "cache.durability idle or turn, or a flush before the engine ends",
    ),
    MissReason.NOT_MATCHED: (
        "the blocks were there and the history did not lead to them, or the disk did not say in "
        "time what it has",
        "the same tokens again: history follow; for a slow disk scheduler.min_lookup_wait_ms",
    ),
    MissReason.CORRUPT: (
        "a block on disk failed its checksum and was dropped",
        "a look at the disk: sessionkv store verify",
    ),
    MissReason.IDENTITY_CHANGED: (
        "KV of other weights, another dtype, block size or version, or from before a prompt was "
        "declared public",
        "nothing: from this turn on it is cached again",
    ),
    MissReason.TENANT: (
        "the conversation came from another tenant, whose blocks are never shared",
        "nothing: from this turn on it is cached again; `sessionkv public add` for system prompts",
    ),
    MissReason.TEMPLATE_REWROTE: (
        "the chat template renders old turns differently now",
        "history keep, which sends only what is new",
    ),
    MissReason.HISTORY_EDITED: (
        "the client's history differs from the stored one",
        "sending the history as it was answered: the first difference is shown",
    ),
    MissReason.RECOMPUTE_WAS_SOONER: (
        "the blocks were found, and computing them was sooner than loading them",
        "nothing: loading would have been slower",
    ),
    MissReason.CACHE_OFF: ("cache.prefix_cache is off", "cache.prefix_cache=true"),
    MissReason.BYPASSED: ("the request asked not to use the cache", "cache=True in the request"),
}


def run(args: argparse.Namespace) -> int:
    """Explain the turn that is asked for, or the last ones."""
    with connect(args) as client:
        session = _session(client, args.target)
        node = args.target if _NODE.fullmatch(args.target) else None
        turns = list(_turns(session, node=node, number=args.turn, most=args.last))
        stats = client.stats()
    if args.json:
        output.print_json([_plain(turn) for turn in turns])
        return 0
    console = output.stdout()
    for number, turn in enumerate(turns):
        if number:
            console.print()
        for line in explained(turn, stats):
            console.print(line, markup=False)
    return 0


def _session(client: Client, target: str) -> Session:
    """The session of that name, or that has a turn of that id.

    Raises:
        SessionNotFound: There is none.
    """
    if not _NODE.fullmatch(target):
        return client.session(target)
    from sessionkv.client.portable import session_path

    sessions = [*client.sessions(), *client.sessions("~")]  # also those that HTTP makes
    by_head = {info.node: info.name for info in sessions}
    if target in by_head:
        return client.session(by_head[target])
    for info in sessions:
        if int(target[2:]) in session_path(client, info.name):
            return client.session(info.name)
    raise SessionNotFound(f"no session has the turn {target}")


def _turns(
    session: Session, *, node: str | None, number: int | None, most: int
) -> Iterator[NodeInfo]:
    """The turn asked for, or the last ones, newest first."""
    turn = session.node(node)
    if number is None:
        for _ in range(1 if node else most):
            if turn.parent is None:
                return
            yield turn
            turn = session.node(turn.parent)
        return
    if not 1 <= number <= turn.turns:
        raise WrongUsage(f"the session has turns 1 to {turn.turns}; there is no turn {number}")
    while turn.turns != number and turn.parent is not None:
        turn = session.node(turn.parent)
    yield turn


def explained(turn: NodeInfo, stats: Mapping[str, Any]) -> Iterator[str]:
    """Lines about one turn."""
    report = turn.cache
    if report is None:
        yield f"turn {turn.turns} ({turn.node}): not known any more; reports end with the engine"
        return
    found = ", ".join(
        f"{count:,} {tier}"
        for tier, count in (
            ("device", report.device_tokens),
            ("host", report.host_tokens),
            ("disk", report.disk_tokens),
        )
        if count
    )
    yield (
        f"turn {turn.turns} ({turn.node}): prompt of {report.prompt_tokens:,} tokens, "
        f"{report.cached_tokens:,} found{f' ({found})' if found else ''}, "
        f"{report.computed_tokens:,} computed"
    )
    yield from _missed(report)
    if report.miss.reason in (MissReason.EVICTED, MissReason.EXPIRED):
        yield from _larger(stats)


_PARTS = {"tools": "tools", "system": "system prompt"}


def _missed(report: CacheReport) -> Iterator[str]:
    miss = report.miss
    what, helps = _REASONS[miss.reason]
    yield f"  reason: {miss.reason.value}: {what}"
    if miss.token is not None and miss.reason not in (MissReason.NONE, MissReason.FIRST_TURN):
        where = f"  position: token {miss.token:,}"
        where += "" if miss.turn is None else f", in turn {miss.turn}"
        if miss.part in ("tools", "system"):
            yield f"{where}, in the {_PARTS[miss.part]}"
        else:
            yield where + ("" if miss.message is None else f", message {miss.message}")
    if miss.expected is not None or miss.found is not None:
        yield f"  stored:   {output.one_line(miss.expected or '')!r}"
        yield f"  request:  {output.one_line(miss.found or '')!r}"
    if len(report.miss_tokens) > 1:
        counts = ", ".join(f"{name} {count:,}" for name, count in report.miss_tokens.items())
        yield f"  tokens computed again, by reason: {counts}"
    if helps:
        yield f"  helps: {helps}"


def _larger(stats: Mapping[str, Any]) -> Iterator[str]:
    """How much larger each tier would have to be for half of what it was asked for in vain."""
    for tier, larger in stats.get("larger_cache", {}).items():
        wanted = larger["wanted_blocks"]
        enough = [size for size, hits in larger["by_more_bytes"].items() if 2 * hits >= wanted > 0]
        if enough:
            size = min(enough, key=int)
            yield (
                f"  larger: {output.size(int(size))} more of {tier} would have had "
                f"{larger['by_more_bytes'][size]:,} of the {wanted:,} blocks that were looked for "
                "after they had left, over all turns"
            )


def _plain(turn: NodeInfo) -> dict[str, Any]:
    report = None if turn.cache is None else asdict(turn.cache)
    reason = None if turn.cache is None else turn.cache.miss.reason
    what, helps = ("", "") if reason is None else _REASONS[reason]
    return {
        "turn": turn.turns,
        "node": turn.node,
        "cache": report,
        "meaning": what,
        "helps": helps,
    }
