"""Everything clients ask of sessions and of the engine that is not a turn.

A call that changes something is answered when the change is in the journal; a question at once. The
sessions that a call names (:func:`sessions_named`) are known to the tree by then. Core thread only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sessionkv.cache.tree_view import no_node
from sessionkv.cache.turns import Change, HeadId, NewNode, Opening, format_node_id, parse_node_id
from sessionkv.engine.commits import Commits, PendingCommit
from sessionkv.engine.exports import export
from sessionkv.engine.messages import Call, CallDone, ImportSessions, OpenSession, SubmitTurn
from sessionkv.engine.parts import CoreParts
from sessionkv.engine.places import PlacesDesk
from sessionkv.engine.rendering import check_kind, render_request
from sessionkv.engine.stats import engine_stats
from sessionkv.engine.turns import TurnDesk
from sessionkv.errors import (
    EngineClosed,
    InvalidRequest,
    SessionBusy,
    SessionKVError,
    TurnCancelled,
)
from sessionkv.ipc import messages as wire
from sessionkv.ipc.reports import cache_to_map
from sessionkv.store.answers import Checked, Held
from sessionkv.store.questions import SessionPage
from sessionkv.types import BlockHash, NodeRecord, SessionRow, Tier
from sessionkv.types.node_ids import number_of
from sessionkv.types.portable_tree import PortableTree


def sessions_named(message: object) -> tuple[HeadId, ...]:
    """Sessions that a message of the front is about."""
    if isinstance(message, SubmitTurn):
        sessions = (message.session, message.changed_from)
        return tuple((message.tenant, name) for name in sessions if name is not None)
    if isinstance(message, OpenSession):
        return ((message.tenant, message.session),)
    if isinstance(message, ImportSessions):
        return tuple((message.tenant, session.name) for session in message.sessions)
    if isinstance(message, Call):
        request = message.request
        names = (getattr(request, "session", None), getattr(request, "name", None))
        return tuple((message.tenant, name) for name in names if name is not None)
    return ()


class CallDesk:
    """Answers calls; replies go to ``turns.out``.

    Attributes:
        places: Says where the blocks of sessions are.
    """

    def __init__(self, parts: CoreParts, commits: Commits, turns: TurnDesk) -> None:
        self._parts = parts
        self._tree = parts.tree
        self._commits = commits
        self._turns = turns
        self.places = PlacesDesk(parts)
        self._flushing: dict[int, str | None] = {}  # those that wait for the store: whose blocks
        self._flushes: list[tuple[int, tuple[BlockHash, ...] | None]] = []  # None: all blocks

    def open(self, ask: OpenSession, wall: float) -> None:
        """Create or resume a session."""
        root = NewNode(
            kind="root",
            token_ids=(),
            num_incoming_tokens=0,
            hashes=(),
            num_messages=1 if ask.system_blob or ask.tools_blob else 0,
            incoming_blob=ask.root_blob,
            tokenizer_digest=self._parts.tokenizer_digest,
            template_digest=self._parts.template_digest,
        )
        opening = Opening(ask.system_blob, ask.tools_blob, ask.history, ask.budget_bytes)
        try:
            if self._turns.draining:
                raise EngineClosed("the engine is shutting down")
            change = self._tree.open(ask.tenant, ask.session, root=root, opening=opening, now=wall)
            self._change(ask.call_id, change, self._describe_head((ask.tenant, ask.session)))
        except SessionKVError as error:
            self._answer(CallDone(ask.call_id, error=error))

    def take_in(self, ask: ImportSessions) -> None:
        """Add sessions from elsewhere."""
        try:
            if self._turns.draining:
                raise EngineClosed("the engine is shutting down")
            change = self._tree.graft(ask.tenant, PortableTree.of(ask.nodes, ask.sessions))
            value = {
                "sessions": [session.name for session in ask.sessions],
                "turns": sum(node.kind != "root" for node in ask.nodes),
                "other_tokenizer": self._foreign(ask),
            }
            self._change(ask.call_id, change, value)
        except SessionKVError as error:
            self._answer(CallDone(ask.call_id, error=error))

    def _foreign(self, ask: ImportSessions) -> list[str]:
        """Sessions that do not go on by their own ids here."""
        own = self._parts.tokenizer_digest
        others = {
            node.node_id
            for node in ask.nodes
            if node.kind != "root" and node.tokenizer_digest != own
        }
        return [session.name for session in ask.sessions if session.node_id in others]

    def call(self, ask: Call, now: float, wall: float) -> None:
        """Carry out one call."""
        request, tenant = ask.request, ask.tenant
        try:
            if isinstance(request, wire.Info):
                value = self._info((tenant, request.session), history=request.history)
                self._answer(CallDone(ask.call_id, value))
            elif isinstance(request, wire.Node):
                self._answer(CallDone(ask.call_id, self._node(tenant, request)))
            elif isinstance(request, wire.Export):
                self._answer(CallDone(ask.call_id, export(self._tree, tenant, request)))
            elif isinstance(request, wire.Stats):
                found = self._brief(tenant) if request.brief else self._stats(ask, now)
                self._answer(CallDone(ask.call_id, found))
            elif isinstance(request, wire.Count):
                self._count(ask.call_id, (tenant, request.session or ""))
            elif isinstance(request, wire.Places):
                self.places.ask(ask.call_id, (tenant, request.session))
            elif isinstance(request, wire.Flush):
                self._flushing[ask.call_id] = None if ask.operator else tenant
                self._parts.store.check(ask.call_id)
            elif isinstance(request, wire.Close):
                self._close(ask.call_id, (tenant, request.session), request, now)
            else:
                self._edit(ask.call_id, tenant, request, wall)
        except SessionKVError as error:
            self._answer(CallDone(ask.call_id, error=error))

    def _edit(self, call_id: int, tenant: str, request: wire.Request, wall: float) -> None:
        tree = self._tree
        if isinstance(request, wire.Fork):
            node_id = None if request.node is None else parse_node_id(request.node)
            change = tree.fork(tenant, request.session, request.name, now=wall, node_id=node_id)
            head = (tenant, request.name)
        elif isinstance(request, wire.Rename):
            self._require_idle(tenant, request.session)
            change = tree.rename(tenant, request.session, request.name, now=wall)
            head = (tenant, request.name)
        elif isinstance(request, wire.Rewind):
            head = (tenant, request.session)
            self._require_idle(*head)
            change = tree.rewind(tenant, request.session, request.turns, now=wall)
        elif isinstance(request, wire.Pin):
            head = (tenant, request.session)
            change = tree.pin(
                tenant,
                request.session,
                tier=request.tier,
                now=wall,
                ttl_s=request.ttl_s,
                priority=request.priority,
            )
        elif isinstance(request, wire.Unpin):
            head = (tenant, request.session)
            change = tree.unpin(tenant, request.session, now=wall)
        else:
            raise InvalidRequest("type", request.TYPE, "a known call")
        self._change(call_id, change, self._describe_head(head))

    def _require_idle(self, tenant: str, session: str) -> None:
        if self._turns.is_running((tenant, session)):
            raise SessionBusy("a turn of this session is running", session=session)

    def _close(self, call_id: int, head: HeadId, request: wire.Close, now: float) -> None:
        if request.keep or not self._tree.is_damaged(head):
            self._tree.head(*head)  # SessionNotFound
        self._turns.drop_session(head, TurnCancelled("the session was closed"), now)
        if request.keep:
            self._answer(CallDone(call_id, {"closed": True}))
            return
        self._change(call_id, self._tree.delete(*head), {"closed": True})

    def _change(self, call_id: int, change: Change, value: Any) -> None:
        reply = CallDone(call_id, value)
        # What changes nothing may still rest on something that is not durable yet.
        if change.ops or self._commits:
            self._commits.submit(PendingCommit(change, reply, call_id=call_id))
        else:
            self._answer(reply)

    def _answer(self, reply: CallDone) -> None:
        self._turns.out.append(reply)

    # Flushing --------------------------------------------------------------------------------

    def flush(self, checked: Checked) -> None:
        """Have all blocks in memory written, where there is somewhere to write them."""
        if checked.error is not None:
            self._flushing.pop(checked.ticket)
            self._answer(CallDone(checked.ticket, error=checked.error))
            return
        tenant, keys = self._flushing.pop(checked.ticket), None
        if tenant is not None:
            keys = tuple(self._tree.keys_of_tenant(tenant))
        self._parts.kv.request_clean(self._parts.kv.resident_keys() if keys is None else keys)
        self._flushes.append((checked.ticket, keys))

    def finish_flushes(self) -> None:
        """Answer flushes once nothing is left to be written."""
        if not self._flushes:
            return
        kv, waiting = self._parts.kv, []
        for flush in self._flushes:
            call_id, keys = flush
            if kv.dirty_count() and (keys is None or kv.any_unwritten(keys)):
                waiting.append(flush)
            else:
                self._answer(CallDone(call_id, {"dirty_blocks": 0}))
        self._flushes = waiting

    def _stats(self, ask: Call, now: float) -> dict[str, Any]:
        """A tenant's own figures; for an operator those of the engine and of each tenant."""
        if not ask.operator:
            return {"tenant": ask.tenant, **self._of_tenant(ask.tenant)}
        values = {**engine_stats(self._parts, now), "draining": self._turns.draining}
        tenants = self._parts.tenants.tenants
        if tenants:
            values["tenants"] = {tenant: self._of_tenant(tenant) for tenant in tenants}
        return values

    def _brief(self, tenant: str) -> dict[str, Any]:
        turns, computing = self._turns.num_of(tenant), self._turns.num_computing(tenant)
        return {
            "draining": self._turns.draining,
            "requests_running": computing,
            "requests_waiting": turns - computing,
        }

    def _of_tenant(self, tenant: str) -> dict[str, Any]:
        return {
            **self._brief(tenant),
            **self._parts.tenants.snapshot(tenant),
            "quota": self._tree.retention.quotas.figures(tenant),
        }

    # Questions -------------------------------------------------------------------------------

    def placed(self, held: Held) -> None:
        """Answer where a session's blocks are, now that the disk has said what it has."""
        self._answer(self.places.answer(held))

    def list(self, call_id: int, page: SessionPage) -> None:
        """Answer with a page of sessions, as the journal has them."""
        value = {"sessions": [self._describe(row) for row in page.rows], "next": page.after}
        self._answer(CallDone(call_id, value))

    def _info(self, head_id: HeadId, *, history: bool = False) -> dict[str, Any]:
        """Everything about one session. O(history): its blocks are looked up in every tier."""
        head = self._tree.head(*head_id)
        value = self._describe_head(head_id)
        keys = self._tree.session_keys(*head_id)
        exclusive, shared = self._bytes_by_tier(keys.exclusive), self._bytes_by_tier(keys.shared)
        value["bytes"] = {
            tier.value: {"exclusive": exclusive[tier], "shared": shared[tier]} for tier in Tier
        }
        if history:
            value["nodes"] = [
                (node.node_id, node.kind, node.incoming_blob, node.reply_blob)
                for node in self._tree.path(head.node_id)
            ]
        return value

    def _node(self, tenant: str, request: wire.Node) -> dict[str, Any]:
        """Everything that is kept of one turn of a session, or of all up to it. O(turns)."""
        path = self._tree.path(self._tree.head(tenant, request.session).node_id)
        if request.node is not None:
            number = parse_node_id(request.node)
            places = [i for i, node in enumerate(path) if number_of(node.node_id) == number]
            if not places:
                raise no_node(number)
            path = path[: places[0] + 1]
        root = (path[0].node_id, path[0].incoming_blob)
        if request.path:
            turns = [self._describe_node(node, i) for i, node in enumerate(path)]
            return {"root": root, "path": turns}
        return {"root": root, **self._describe_node(path[-1], len(path) - 1)}

    def _count(self, call_id: int, head_id: HeadId) -> None:
        """Let the front count what a turn's prompt would be: it is told all that it consists of."""
        check_kind(self._parts, self._tree.head(*head_id).node_id, raw=False)
        asked = render_request(self._parts, call_id, head_id, with_path=True)
        self._turns.out.append(asked)

    def _describe_node(self, record: NodeRecord, num_turns: int) -> dict[str, Any]:
        cache = self._turns.last_cache.get(record.node_id)
        return {
            "node": format_node_id(record.node_id),
            "parent": None if record.parent_id is None else format_node_id(record.parent_id),
            "kind": record.kind,
            "turns": num_turns,
            "finish_reason": record.finish_reason or None,
            "created_s": record.created_s,
            "cache": None if cache is None else cache_to_map(cache),
            "stored": (record.node_id, record.incoming_blob, record.reply_blob),
        }

    def _describe_head(self, head_id: HeadId) -> dict[str, Any]:
        """What is said of a session that is in memory. O(1)."""
        head, tree = self._tree.head(*head_id), self._tree
        row = SessionRow(
            head,
            kind=tree.record(head.node_id).kind,
            num_turns=tree.num_turns(head.node_id),
            num_tokens=tree.num_tokens(head.node_id),
        )
        return {**self._describe(row), "budget_bytes": tree.budget_of(head.node_id)}

    def _describe(self, row: SessionRow) -> dict[str, Any]:
        head = row.head
        head_id = (head.tenant, head.name)
        last = self._turns.last_cache.get(head.node_id)
        pin = None
        if head.pin_tier:
            pin = {
                "tier": head.pin_tier,
                "expires_s": head.pin_expires_s,
                "priority": head.pin_priority,
            }
        return {
            "name": head.name,
            "node": format_node_id(head.node_id),
            "turns": row.num_turns,
            "tokens": row.num_tokens,
            "kind": row.kind,
            "history": head.history,
            "created_s": head.created_s,
            "updated_s": head.updated_s,
            "pin": pin,
            "running": self._turns.is_running(head_id),
            "queued": self._turns.num_in_line(head_id),
            "last_cache": None if last is None else cache_to_map(last),
        }

    def _bytes_by_tier(self, keys: Iterable[BlockHash]) -> dict[Tier, int]:
        sizes = dict.fromkeys(Tier, 0)
        block_bytes = self._parts.runner.geometry.block_bytes
        for key in keys:
            for tier in self._parts.kv.tiers_of(key):
                sizes[tier] += block_bytes
        return sizes
