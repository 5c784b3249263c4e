"""An engine made of a dictionary, behind the transport seam: sessions with scripted replies.

For tests of what talks to an engine, not of engines. It answers in the caller's thread; a reply
that is ``HOLD`` waits for a cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sessionkv.client import Client
from sessionkv.errors import SessionKVError, SessionNotFound, TurnCancelled
from sessionkv.ipc import messages as wire
from sessionkv.ipc.reports import cache_to_map
from sessionkv.ipc.transport import ReplySink
from sessionkv.types import CacheReport, MissReason, MissReport

HOLD = "<hold>"
"""A reply that sends one delta and then waits for a cancel."""

REPORT = CacheReport(
    prompt_tokens=100, device_tokens=64, host_tokens=16, disk_tokens=0, computed_tokens=20,
    ttft_ms=12.0, decode_tokens_per_s=34.5,
)  # fmt: skip
EVICTED = replace(REPORT, miss=MissReport(MissReason.EVICTED, token=80))


class ScriptedEngine:
    """Sessions by name, each a list of texts.

    Attributes:
        replies: What turns answer, first to last; then the message itself, in capitals.
        log: Every request, in order.
    """

    def __init__(self, *replies: str | SessionKVError) -> None:
        self.replies = list(replies)
        self.stats: dict[str, Any] = {}
        self.sessions: dict[str, dict[str, Any]] = {}
        self.log: list[wire.Request] = []
        self._held_ids: set[int] = set()

    def client(self) -> Client:
        """A client of this engine."""
        return Client(transport=self)

    def start(self, sink: ReplySink) -> None:
        self._sink = sink

    def close(self) -> None:
        pass

    def send(self, request: wire.Request) -> None:
        self.log.append(request)
        try:
            self._answer(request)
        except SessionKVError as error:
            self._sink.deliver(wire.Failure(id=request.id, **error.to_wire()))

    def _answer(self, request: wire.Request) -> None:
        if isinstance(request, wire.Turn):
            self._turn(request)
        elif isinstance(request, wire.Cancel):
            self._cancel(request)
        else:
            self._sink.deliver(wire.Result(id=request.id, value=self._value(request)))

    def _value(self, request: Any) -> Any:
        match request:
            case wire.Open():
                self.sessions.setdefault(request.session, {"texts": [], "system": request.system})
            case wire.Fork():
                self.sessions[request.name] = {"texts": list(self._texts(request.session))}
                return self._info(request.name)
            case wire.Rename():
                self.sessions[request.name] = self.sessions.pop(request.session)
                return self._info(request.name)
            case wire.Rewind():
                del self._texts(request.session)[-request.turns :]
            case wire.Pin():
                pin = {"tier": request.tier, "expires_s": None, "priority": request.priority}
                self._texts(request.session)
                self.sessions[request.session]["pin"] = pin
            case wire.Unpin():
                self._texts(request.session)
                self.sessions[request.session]["pin"] = None
            case wire.List():
                return self._list(request)
            case wire.Close():
                self._texts(request.session)
                if not request.keep:
                    del self.sessions[request.session]
                return {"closed": True}
            case wire.Stats():
                return self.stats
            case wire.Info() if request.history:
                messages = self.sessions[request.session].get("messages", [])
                return self._info(request.session) | {"messages": messages}
            case _:
                pass
        return self._info(request.session) if hasattr(request, "session") else None

    def _list(self, request: wire.List) -> dict[str, Any]:
        """Names with ``~`` only where they are asked for."""
        is_unnamed = request.prefix.startswith("~")
        names = [n for n in sorted(self.sessions) if n.startswith(request.prefix)]
        names = [n for n in names if is_unnamed or not n.startswith("~")]
        names = [n for n in names if n > (request.after or "")]
        shown = names[: request.limit]
        rest = shown[-1] if len(names) > len(shown) else None
        return {"sessions": [self._info(name) for name in shown], "next": rest}

    def _texts(self, name: str) -> list[str]:
        if name not in self.sessions:
            raise SessionNotFound(f"there is no session named {name!r}")
        texts: list[str] = self.sessions[name]["texts"]
        return texts

    def _info(self, name: str) -> dict[str, Any]:
        turns = len(self._texts(name))
        return {
            "name": name, "node": str(turns), "turns": turns, "tokens": 10 * turns, "kind": "chat",
            "pin": self.sessions[name].get("pin"),
            "bytes": {"device": {"exclusive": 1024 * turns, "shared": 0}},
            "last_cache": cache_to_map(EVICTED) if turns else None,
        }  # fmt: skip

    def _turn(self, request: wire.Turn) -> None:
        texts = self._texts(request.session)
        reply = self.replies.pop(0) if self.replies else (request.text or "").upper()
        if isinstance(reply, SessionKVError):
            raise reply
        if reply == HOLD:
            self._sink.deliver(wire.Delta(id=request.id, tokens=(0,), text="so far"))
            self._held_ids.add(request.id)
            return
        for offset, character in enumerate(reply):
            delta = wire.Delta(id=request.id, offset=offset, tokens=(offset,), text=character)
            self._sink.deliver(delta)
        texts.append(reply)
        self._done(request.id, reply, "stop")

    def _cancel(self, request: wire.Cancel) -> None:
        self._sink.deliver(wire.Result(id=request.id, value={"found": True}))
        if request.request not in self._held_ids:
            return
        self._held_ids.remove(request.request)
        if request.keep:
            self._done(request.request, "so far, and a bit", "cancelled")
        else:
            error = TurnCancelled("cancelled")
            self._sink.deliver(wire.Failure(id=request.request, **error.to_wire()))

    def _done(self, request_id: int, text: str, reason: str) -> None:
        done = wire.Done(
            id=request_id, node="1", text=text, tokens=tuple(range(len(text))),
            finish_reason=reason, usage={"prompt_tokens": 100, "completion_tokens": len(text)},
            cache=cache_to_map(EVICTED),
        )  # fmt: skip
        self._sink.deliver(done)


def connects_to(engine: ScriptedEngine) -> Callable[[Any], Client]:
    """Stands in for :func:`sessionkv.cli.connect.connect`."""
    return lambda _args: engine.client()
