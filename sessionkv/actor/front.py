"""The front: clients' messages in, terminal events out, and all text work in between.

Sans-IO and on one thread: whoever runs it feeds it requests, core messages and the time, and
takes from ``to_core`` and ``replies`` what is to be sent. It never touches a socket, the store,
or a KV block.

Every accepted turn ends in exactly one terminal event: a turn leaves ``_turns`` only in
:meth:`Front._end`, which sends it to whoever is subscribed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sessionkv.actor.blobs import kept_answer, request_digest
from sessionkv.actor.door import OWN, Door, Grant
from sessionkv.actor.front_turn import FrontTurn, Subscriber, new_attempt, progress_of
from sessionkv.actor.readable import readable
from sessionkv.actor.writer import Writer
from sessionkv.config import LimitsConfig
from sessionkv.engine.messages import (
    Call,
    CallDone,
    CancelTurn,
    CoreMessage,
    CoreStopped,
    FrontMessage,
    ImportSessions,
    KeyClaim,
    NewAccess,
    OpenSession,
    PublicPrefixes,
    RenderTurn,
    StepTokens,
    StopAt,
    TurnCommitted,
    TurnDropped,
    TurnFinished,
    TurnProgress,
    TurnReplayed,
    TurnTokens,
)
from sessionkv.errors import (
    DuplicateRequest,
    EngineClosed,
    IdempotencyConflict,
    Overloaded,
    SessionKVError,
    SlowReader,
    TurnFailed,
    Unauthorized,
)
from sessionkv.ipc import messages as wire
from sessionkv.types.access import Access

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a client is told at hello."""

    engine: str
    pid: int
    model: str
    limits: Mapping[str, Any]
    reply_style: Mapping[str, Any]


@dataclass(slots=True)
class _Connection:
    grant: Grant
    open_requests: dict[int, int] = field(default_factory=dict)  # request id -> turn or call id


class Front:
    """One engine's front. See the module's docstring.

    Attributes:
        to_core: Messages for core, oldest first; the caller empties it.
        replies: ``(connection, reply)`` for clients, oldest first; the caller empties it.
    """

    def __init__(
        self, writer: Writer, limits: LimitsConfig, info: EngineInfo, *, access: Access
    ) -> None:
        self.to_core: list[FrontMessage] = []
        self.replies: list[tuple[bytes, wire.Reply]] = []
        self._writer = writer
        self._limits = limits
        self._info = info
        self._next_id = 1
        self._connections: dict[bytes, _Connection] = {}
        self._turns: dict[int, FrontTurn] = {}
        self._keyed: dict[tuple[str, str], FrontTurn] = {}
        self._calls: dict[int, tuple[bytes, int]] = {}  # call id -> connection, request id
        self._counts: dict[int, tuple[str, wire.Count]] = {}  # by call id, with the tenant
        self._closed: SessionKVError | None = None
        self._door = Door(access)
        self._tell_public(access)

    # Clients ---------------------------------------------------------------------------------

    def greet(self, connection: bytes, hello: wire.Hello) -> None:
        """Let a connection in, and welcome it.

        Raises:
            Unauthorized, Forbidden: The greeting does not allow it; nothing is known of it.
        """
        grant = self._door.admit(hello)
        state = self._connections.setdefault(connection, _Connection(grant))
        if state.grant != grant:
            raise Unauthorized("this connection was greeted with another key or tenant")
        info = self._info
        welcome = wire.Welcome(
            id=hello.id,
            engine=info.engine,
            pid=info.pid,
            model=info.model,
            tenant=grant.tenant,
            operator=grant.operator,
            limits=info.limits,
            reply_style=info.reply_style,
        )
        self.replies.append((connection, welcome))

    def take_revoked(self) -> list[bytes]:
        """Connections that the present keys do not allow any more; forgotten here."""
        revoked = [
            connection
            for connection, state in self._connections.items()
            if not self._door.still_allows(state.grant)
        ]
        for connection in revoked:
            self.on_disconnect(connection)
        return revoked

    def _tell_public(self, access: Access) -> None:
        if access.public:
            self.to_core.append(PublicPrefixes(self._writer.public_prefixes(access.public)))

    def on_request(self, connection: bytes, request: wire.Request) -> None:
        """Take in one validated request."""
        try:
            if isinstance(request, wire.Hello):
                self.greet(connection, request)
                return
            state = self._connections.get(connection)
            if state is None:
                if not self._door.is_open:
                    raise Unauthorized("this connection has not been greeted with a key")
                state = self._connections[connection] = _Connection(OWN)
            self._accept(connection, state, request)
        except SessionKVError as error:
            self.on_bad_request(connection, request.id, error)
        except Exception as failure:  # noqa: BLE001 - one bad request must not end the engine
            _log.exception("a %s request could not be handled", request.TYPE)
            self.on_bad_request(connection, request.id, _unexpected(failure))

    def on_bad_request(self, connection: bytes, request_id: int, error: SessionKVError) -> None:
        """Answer a request that could not be taken in; ``request_id`` -1 when it is unknown."""
        state = self._connections.get(connection)
        if state is not None and request_id in state.open_requests:
            request_id = -1  # the open request of that id goes on undisturbed
        self.replies.append((connection, wire.Failure.of(request_id, error)))

    def on_disconnect(self, connection: bytes) -> None:
        """A client is gone: its turns without idempotency key are cancelled."""
        state = self._connections.pop(connection, None)
        if state is None:
            return
        self._writer.imports.drop(connection)
        for turn_id in list(state.open_requests.values()):
            turn = self._turns.get(turn_id)
            if turn is not None:
                turn.unsubscribe(connection)
                if turn.claim is None and not turn.subscribers:
                    self.to_core.append(CancelTurn(turn_id))
            self._calls.pop(turn_id, None)
            self._counts.pop(turn_id, None)

    def give_up_reader(self, connection: bytes, request_id: int) -> None:
        """End one request's turn with ``slow_reader``: its events were not read in time."""
        state = self._connections.get(connection)
        turn_id = None if state is None else state.open_requests.get(request_id)
        if turn_id is not None and turn_id in self._turns:
            limit_s = self._limits.unread_timeout_s
            error = SlowReader(f"no event was read for {limit_s:g} s", seconds=limit_s)
            self.to_core.append(CancelTurn(turn_id, error=error))

    def _accept(self, connection: bytes, state: _Connection, request: wire.Request) -> None:
        if isinstance(request, wire.Ping):
            self.replies.append((connection, wire.Result(id=request.id)))
            return
        if request.id in state.open_requests:
            raise DuplicateRequest(
                f"request id {request.id} is in use on this connection", request=request.id
            )
        if isinstance(request, wire.Cancel):
            self._cancel(connection, state, request)
            return
        if isinstance(request, wire.Pieces):
            value = {"pieces": self._writer.pieces(request.tokens)}
            self.replies.append((connection, wire.Result(id=request.id, value=value)))
            return
        if self._closed is not None:
            raise self._closed
        if isinstance(request, wire.Turn | wire.Generate):
            self._start_turn(connection, state, request)
            return
        if isinstance(request, wire.Count):
            self._require_turn(state.grant.tenant)
            if request.session is None:
                tokens = self._writer.count(state.grant.tenant, request)
                counted = wire.Result(id=request.id, value={"tokens": tokens})
                self.replies.append((connection, counted))
                return
        call_id = self._new_id()
        tenant = state.grant.tenant
        message: FrontMessage = Call(call_id, tenant, request, state.grant.operator)
        if isinstance(request, wire.Open):
            message = self._open_message(call_id, tenant, request)
        elif isinstance(request, wire.Import):
            tree = self._writer.imports.add(connection, tenant, request)
            if not request.commit:
                held = wire.Result(id=request.id, value={"held": len(tree.nodes)})
                self.replies.append((connection, held))
                return
            message = ImportSessions(call_id, tenant, tree.nodes, tree.sessions)
        state.open_requests[request.id] = call_id
        self._calls[call_id] = (connection, request.id)
        if isinstance(request, wire.Count):
            self._counts[call_id] = (tenant, request)
        self.to_core.append(message)

    def _require_turn(self, tenant: str) -> None:
        """A count costs what reading a turn's prompt does, so it needs a turn's place.

        Raises:
            Overloaded: The tenant has none left.
        """
        limit = self._door.turns_of(tenant)
        if limit is None:
            return
        turns = sum(turn.tenant == tenant for turn in self._turns.values())
        if turns + sum(owner == tenant for owner, _ in self._counts.values()) >= limit:
            raise Overloaded(f"{limit} turns of yours run or wait: your quota", queued=limit)

    def _open_message(self, call_id: int, tenant: str, request: wire.Open) -> OpenSession:
        system, tools, root = self._writer.root_blobs(request)
        return OpenSession(
            call_id,
            tenant,
            request.session,
            system,
            tools,
            root,
            request.history,
            request.budget_bytes,
        )

    def _cancel(self, connection: bytes, state: _Connection, request: wire.Cancel) -> None:
        turn = self._turns.get(state.open_requests.get(request.request, 0))
        # The same again would change nothing, and core is told no more than it takes.
        if turn is not None and request.keep not in turn.cancelled_keeping:
            turn.cancelled_keeping.add(request.keep)
            if not (request.keep and self._cut(turn, request.chars)):
                self.to_core.append(CancelTurn(turn.turn_id, keep=request.keep))
        found = turn is not None
        self.replies.append((connection, wire.Result(id=request.id, value={"found": found})))

    def _cut(self, turn: FrontTurn, chars: int | None) -> bool:
        """End a reply that runs behind so much of its text, as a stop string would."""
        if chars is None or turn.stop is not None or isinstance(turn.answer, wire.Done):
            return False
        turn.stop = self._writer.cut(turn, chars)
        if turn.stop is None:
            return False
        self.to_core.append(StopAt(turn.turn_id, turn.stop.num_tokens))
        return True

    # Turns -----------------------------------------------------------------------------------

    def _start_turn(
        self, connection: bytes, state: _Connection, request: wire.Turn | wire.Generate
    ) -> None:
        claim = None
        if request.idempotency_key is not None:
            claim = KeyClaim(request.idempotency_key, request_digest(request))
            running = self._keyed.get((state.grant.tenant, claim.key))
            if running is not None:
                self._attach(running, claim, connection, state, request)
                return
        turn_id = self._new_id()
        attempt = 1 if claim is None else new_attempt()
        turn = FrontTurn(
            turn_id,
            state.grant.tenant,
            claim,
            request.sampling,
            attempt=attempt,
            is_kept=claim is not None or isinstance(request, wire.Turn),
        )
        message = self._writer.submit(turn, request)
        turn.subscribe(connection, request)
        self._turns[turn_id] = turn
        if claim is not None:
            self._keyed[turn.tenant, claim.key] = turn
        state.open_requests[request.id] = turn_id
        self.to_core.append(message)

    def _attach(
        self,
        turn: FrontTurn,
        claim: KeyClaim,
        connection: bytes,
        state: _Connection,
        request: wire.Turn | wire.Generate,
    ) -> None:
        """A retry while the first attempt runs: hear all of it from the start."""
        if turn.claim != claim:
            raise IdempotencyConflict(
                "the idempotency key is in use for another request", key=claim.key
            )
        state.open_requests[request.id] = turn.turn_id
        subscriber = turn.subscribe(connection, request)
        self._send_progress(turn, subscriber)
        if request.stream and turn.token_ids:
            self._deliver(subscriber, turn.delta_so_far(request.id))

    # Core ------------------------------------------------------------------------------------

    def on_core(self, message: CoreMessage) -> None:
        """Take in one message from core."""
        if isinstance(message, StepTokens):
            self._step_tokens(message)
        elif isinstance(message, CallDone):
            self._call_done(message)
        elif isinstance(message, CoreStopped):
            self._core_stopped(message)
        elif isinstance(message, NewAccess):
            self._door = Door(message.access)
            self._tell_public(message.access)
        elif message.turn_id in self._counts and isinstance(message, RenderTurn):
            self._call_done(CallDone(message.turn_id, message))
        elif message.turn_id in self._turns:
            turn = self._turns[message.turn_id]
            with self._ending_on_failure(turn):
                self._on_turn(turn, message)

    @contextmanager
    def _ending_on_failure(self, turn: FrontTurn) -> Iterator[None]:
        """Text that cannot be made ends its turn, not the engine."""
        try:
            yield
        except Exception as failure:  # noqa: BLE001 - the front's one boundary beside requests
            _log.exception("the text of turn %d could not be made", turn.turn_id)
            error = _unexpected(failure)
            # Core may have ended it by then: a turn of which nothing is kept waits for no verdict.
            turn.is_broken, turn.answer = True, wire.Failure.of(0, error)
            self.to_core.append(CancelTurn(turn.turn_id, error=error))

    def _on_turn(
        self,
        turn: FrontTurn,
        message: RenderTurn
        | TurnProgress
        | TurnFinished
        | TurnCommitted
        | TurnReplayed
        | TurnDropped,
    ) -> None:
        if isinstance(message, RenderTurn):
            self.to_core.append(self._writer.render(turn, message))
        elif isinstance(message, TurnProgress):
            turn.progress = message
            for subscriber in turn.subscribers:
                self._send_progress(turn, subscriber)
        elif isinstance(message, TurnFinished):
            if not turn.is_broken:
                self._judge(turn, message)
        elif isinstance(message, TurnCommitted):
            self._writer.remember(turn)
            self._end(turn, turn.answer)
        elif isinstance(message, TurnReplayed):
            self._end(turn, kept_answer(message.response_blob))
        else:
            self._end(turn, wire.Failure.of(0, message.error))

    def _judge(self, turn: FrontTurn, finished: TurnFinished) -> None:
        verdict, held_text = self._writer.judge(turn, finished)
        if held_text:
            self._send_delta(turn, len(turn.token_ids), (), held_text, None)
        if turn.is_kept:
            self.to_core.append(verdict)

    def _step_tokens(self, message: StepTokens) -> None:
        for new in message.turns:
            turn = self._turns.get(new.turn_id)
            if turn is None or turn.stop is not None or turn.is_broken:
                continue
            with self._ending_on_failure(turn):
                self._push(turn, new)

    def _push(self, turn: FrontTurn, new: TurnTokens) -> None:
        text = turn.push(new)
        if turn.stop is not None:
            self.to_core.append(StopAt(turn.turn_id, turn.stop.num_tokens))
        logprobs = turn.logprobs[new.offset :] if turn.wants_logprobs else None
        self._send_delta(turn, new.offset, new.token_ids, text, logprobs)

    def _send_delta(
        self, turn: FrontTurn, offset: int, token_ids: Any, text: str, logprobs: Any
    ) -> None:
        for subscriber in turn.subscribers:
            if subscriber.stream:
                delta = wire.Delta(
                    id=subscriber.request_id,
                    attempt=turn.attempt,
                    offset=offset,
                    tokens=token_ids,
                    text=text,
                    logprobs=logprobs,
                )
                self._deliver(subscriber, delta)

    def _send_progress(self, turn: FrontTurn, subscriber: Subscriber) -> None:
        progress = turn.progress_so_far(subscriber.request_id)
        if subscriber.wants_progress and progress is not None:
            self._deliver(subscriber, progress)

    def _deliver(self, subscriber: Subscriber, reply: wire.Delta | wire.Progress) -> None:
        """Send part of a stream; before the first of another run than is known there, say so."""
        if subscriber.attempt not in (0, reply.attempt):
            restarted = wire.Restarted(id=subscriber.request_id, attempt=reply.attempt)
            self.replies.append((subscriber.connection, restarted))
        subscriber.attempt = reply.attempt
        self.replies.append((subscriber.connection, reply))

    def _end(self, turn: FrontTurn, terminal: wire.Done | wire.Failure) -> None:
        """The one place where a turn ends."""
        del self._turns[turn.turn_id]
        if turn.claim is not None:
            self._keyed.pop((turn.tenant, turn.claim.key), None)
        for subscriber in turn.subscribers:
            state = self._connections.get(subscriber.connection)
            if state is None:
                continue
            state.open_requests.pop(subscriber.request_id, None)
            reply = turn.addressed(terminal, subscriber.request_id)
            if isinstance(reply, wire.Done) and reply.replayed and subscriber.stream:
                self._replay(subscriber, reply)
            self.replies.append((subscriber.connection, reply))

    def _replay(self, subscriber: Subscriber, done: wire.Done) -> None:
        """The stream of an answer that was kept: all at once."""
        if subscriber.wants_progress:
            self._deliver(subscriber, progress_of(done))
        whole = wire.Delta(
            id=done.id,
            attempt=done.attempt,
            tokens=done.tokens,
            text=done.text,
            logprobs=done.logprobs,
        )
        self._deliver(subscriber, whole)

    def _call_done(self, message: CallDone) -> None:
        asked = self._calls.pop(message.call_id, None)
        if asked is None:
            return
        connection, request_id = asked
        state = self._connections.get(connection)
        if state is not None:
            state.open_requests.pop(request_id, None)
        error = message.error
        counted = self._counts.pop(message.call_id, None)
        try:
            if error is not None:
                value = None
            elif counted is not None:
                value = {"tokens": self._writer.count_in(*counted, message.value)}
            else:
                value = readable(message.value)
        except SessionKVError as damage:
            error = damage
        except Exception as failure:  # noqa: BLE001 - nor may what a call found
            _log.exception("what a call found could not be made readable")
            error = _unexpected(failure)
        if error is not None:
            self.on_bad_request(connection, request_id, error)
        else:
            self.replies.append((connection, wire.Result(id=request_id, value=value)))

    def _core_stopped(self, message: CoreStopped) -> None:
        error = message.error or EngineClosed("the engine is closed")
        self._closed = error
        undecided = frozenset(message.undecided)  # whose clients learn it from the connection's end
        for turn in [t for i, t in self._turns.items() if i not in undecided]:
            self._end(turn, wire.Failure.of(0, error))
        for call_id in self._calls.keys() - undecided:
            self._call_done(CallDone(call_id, error=error))

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1


def _unexpected(failure: Exception) -> TurnFailed:
    """An error for the client that tells nothing of the inside but its kind."""
    return TurnFailed(f"the engine could not do this ({type(failure).__name__})")
