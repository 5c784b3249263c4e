"""All text work of the front: from messages to ids before a turn, from ids to the log after it.

Roots of sessions are immutable, so what is worked out for them is kept by node id in a bounded
cache. Raw turns pass through untouched.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import Any

from sessionkv.actor.blobs import pack, pack_reply, pack_response, pack_sampling
from sessionkv.actor.front_turn import FrontTurn, StopFound
from sessionkv.actor.history import render_history
from sessionkv.actor.imports import ImportDesk
from sessionkv.cache.turns import format_node_id
from sessionkv.config import LimitsConfig
from sessionkv.engine.messages import (
    PathWanted,
    RenderTurn,
    SubmitTurn,
    TurnFinished,
    TurnRefused,
    TurnRendered,
    Verdict,
)
from sessionkv.errors import InvalidRequest, PromptTooLong, SessionKVError, TemplateRefused
from sessionkv.ipc import messages as wire
from sessionkv.ipc.reports import cache_to_map, usage_to_map
from sessionkv.text.follow import Followed, follow_ids
from sessionkv.text.messages import (
    Message,
    check_system,
    dump_messages,
    freeze_tools,
    normalise,
    user_message,
)
from sessionkv.text.model import TextModel
from sessionkv.text.replies import ReplyEnding
from sessionkv.text.reply_memory import ReplyMemory
from sessionkv.text.root import RootText
from sessionkv.text.stored import read_root
from sessionkv.types import FinishReason, Usage
from sessionkv.types.sampling import MAX_PROMPT_LOGPROBS

_MAX_ROOTS = 1024


class Writer:
    """The front's text work for one model. One thread.

    Attributes:
        imports: Turns that clients have sent to be imported.
    """

    def __init__(self, text: TextModel, limits: LimitsConfig, max_model_len: int) -> None:
        self._text = text
        self._limits = limits
        self._max_model_len = max_model_len
        self._roots: OrderedDict[int, RootText] = OrderedDict()
        self._memory = ReplyMemory()
        self.imports = ImportDesk(text)

    # Before a turn ---------------------------------------------------------------------------

    def root_blobs(self, request: wire.Open) -> tuple[bytes | None, bytes | None, bytes]:
        """Digests of system prompt and tools, and both with the metadata as the root's blob.

        A digest is None for what was not said, and empty for tools that were said to be none.

        Raises:
            InvalidRequest: Naming the field.
        """
        checked = check_system(request.system)
        tools_json = freeze_tools(request.tools, self._limits)
        self._check_bytes("system", len((checked or "").encode()))
        self._check_bytes("tools", len((tools_json or "").encode()))
        said: dict[str, object] = {"system": checked, "tools": tools_json}
        if request.metadata:
            said["metadata"] = request.metadata
        no_tools = None if request.tools is None else b""
        return _digest(checked), _digest(tools_json) or no_tools, pack(said)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """Bytes that each id stands for.

        Raises:
            InvalidRequest: Naming the position of an id that is not in the vocabulary.
        """
        self._text.check_tokens(ids)
        return self._text.pieces(ids)

    def public_prefixes(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Ids that prompts begin with which have one of the texts as system prompt, or are it."""
        now_s = time.time()
        found: list[tuple[int, ...]] = []
        for text in texts:
            found.append(self._text.encode_prompt(text))
            root = RootText(text, None, now_s)
            with suppress(TemplateRefused):
                one, other = (self._text.full(root, (user_message(said),)) for said in ("a", "?"))
                alike = takewhile(lambda ids: ids[0] == ids[1], zip(one, other, strict=False))
                found.append(tuple(token_id for token_id, _ in alike))
        return tuple(found)

    def submit(self, turn: FrontTurn, request: wire.Turn | wire.Generate) -> SubmitTurn:
        """Check a request's content and make it core's. Sets what the turn needs for its text.

        Raises:
            InvalidRequest: Naming the field, the value and what is allowed.
            TemplateRefused: With the template's own words.
        """
        sampling = request.sampling
        self._text.check_tokens(sampling.stop_token_ids, field="sampling.stop_token_ids")
        self._text.check_tokens(tuple(sampling.logit_bias), field="sampling.logit_bias")
        session = request.session if isinstance(request, wire.Turn) else None
        self._check_length(request)
        ids = self._ids(turn, request)
        if isinstance(request, wire.Turn):
            turn.metadata = request.metadata
        turn.stream = self._text.reply_stream(
            sampling.stop,
            min_tokens=sampling.min_tokens,
            continues=turn.continues,
            prompt=turn.prompt_tail,
        )
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops.update(self._text.eos_ids)
        return SubmitTurn(
            turn_id=turn.turn_id,
            tenant=turn.tenant,
            session=session,
            token_ids=ids,
            num_messages=len(turn.messages),
            incoming_blob=dump_messages(turn.messages) if turn.messages else b"",
            sampling_blob=pack_sampling(sampling) if session is not None else b"",
            sampling=sampling,
            stop_token_ids=frozenset(stops),
            queue_when_busy=isinstance(request, wire.Turn) and request.when_busy == "queue",
            priority=request.priority,
            deadline_s=request.deadline_s,
            use_cache=request.cache if isinstance(request, wire.Generate) else True,
            prompt_logprobs=_prompt_logprobs(request, ids),
            claim=turn.claim,
            wants_progress=request.stream and request.progress,
            changed_from=request.changed_from if isinstance(request, wire.Turn) else None,
        )

    def count(self, tenant: str, request: wire.Count) -> int:
        """How many tokens a generation's prompt has. O(prompt), as for the generation itself.

        Raises:
            InvalidRequest: Naming the field, the value and what is allowed.
            TemplateRefused: With the template's own words.
        """
        if request.prompt is not None:
            self._check_bytes("prompt", len(request.prompt.encode()))
            return len(self._prompt_ids(request.prompt))
        self._check_bytes("messages", sum(map(_content_bytes, request.messages or ())))
        messages = normalise(request.messages, self._limits)
        return len(self._followed(tenant, messages, request.tools).ids)

    def _check_length(self, request: wire.Turn | wire.Generate) -> None:
        """Refuse what cannot fit before any work is done on it: others wait for this thread."""
        if request.tokens is not None:
            count, most = len(request.tokens), self._max_model_len
            if count > most:
                raise PromptTooLong(count, request.sampling.max_tokens, most)
        elif request.messages is not None:
            self._check_bytes("messages", sum(map(_content_bytes, request.messages)))
        elif isinstance(request, wire.Turn):
            self._check_bytes("text", len((request.text or "").encode()))
        else:
            self._check_bytes("prompt", len((request.prompt or "").encode()))

    def _check_bytes(self, field: str, size: int) -> None:
        """No tokenizer makes fewer tokens of a text than its bytes over its longest token's."""
        most = self._max_model_len * self._text.max_token_bytes
        if size > most:
            allowed = f"at most {most} bytes: {self._max_model_len} tokens of the longest kind"
            raise InvalidRequest(field, f"{size} bytes long", allowed)

    def _ids(self, turn: FrontTurn, request: wire.Turn | wire.Generate) -> Sequence[int] | None:
        """Ids of a raw turn or a generation; None for a chat turn, whose messages are noted."""
        if request.tokens is not None:
            self._text.check_tokens(request.tokens)
            return turn.continue_from(tuple(request.tokens), raw=isinstance(request, wire.Turn))
        if isinstance(request, wire.Generate):
            if request.prompt is not None:
                return turn.continue_from(self._prompt_ids(request.prompt), raw=False)
            turn.kind = "chat"
            turn.messages = normalise(request.messages, self._limits)
            followed = self._followed(turn.tenant, turn.messages, request.tools)
            turn.prompt_raw = followed.raw
            return followed.ids
        turn.kind = "chat"
        if request.text is not None:
            turn.messages = (user_message(request.text),)
        else:
            turn.messages = normalise(request.messages, self._limits)
        return None

    def _prompt_ids(self, prompt: str) -> Sequence[int]:
        ids = self._text.encode_prompt(prompt)
        if not ids:
            raise InvalidRequest("prompt", prompt, "text of at least one token")
        return ids

    def _followed(self, tenant: str, messages: Sequence[Message], tools: object) -> Followed:
        """A conversation without a session."""
        root = RootText(None, freeze_tools(tools, self._limits), time.time())
        return follow_ids(self._text, root, messages, memory=self._memory, tenant=tenant)

    def render(self, turn: FrontTurn, ask: RenderTurn) -> TurnRendered | TurnRefused | PathWanted:
        """Ids that a chat turn adds to its head."""
        try:
            if self._is_whole(ask) and not ask.path and ask.num_turns:
                return PathWanted(turn.turn_id)
            rendered, turn.prompt_raw = self._rendered(turn.tenant, turn.messages, ask)
        except SessionKVError as error:
            return TurnRefused(turn.turn_id, error)
        return rendered

    def count_in(self, tenant: str, request: wire.Count, ask: RenderTurn) -> int:
        """How many tokens the prompt of a turn of a session has. O(session), as its rendering.

        Args:
            tenant: Whose session.
            request: With messages, as the turn would have them.
            ask: With the path.

        Raises:
            InvalidRequest: Naming the field, the value and what is allowed.
            SessionDamaged: A stored turn cannot be read.
            TemplateRefused: With the template's own words.
        """
        if request.tools is not None:
            raise InvalidRequest("tools", "given", "absent with a session, which has its own")
        self._check_bytes("messages", sum(map(_content_bytes, request.messages or ())))
        messages = normalise(request.messages, self._limits)
        rendered, _ = self._rendered(tenant, messages, ask)
        ids = [node.node_id for node in ask.path]
        before = ask.path[: ids.index(rendered.base_node_id) + 1]
        return sum(len(node.token_ids) for node in before) + len(rendered.token_ids)

    def _is_whole(self, ask: RenderTurn) -> bool:
        """Whether a turn's conversation is rendered whole, not what is new alone."""
        return ask.foreign or ask.history == "follow" or not self._root(ask).append_only

    def _rendered(
        self, tenant: str, messages: tuple[Message, ...], ask: RenderTurn
    ) -> tuple[TurnRendered, str]:
        """What a turn adds, and where it is rendered whole its prompt's raw text."""
        root = self._root(ask)
        if self._is_whole(ask):
            return render_history(
                self._text, root, ask, messages, memory=self._memory, tenant=tenant
            )
        ids = self._text.delta(root, messages, first=ask.num_turns == 0, closed=ask.closed)
        if ask.num_turns == 0:
            ids = (*root.ids, *ids)
        added = dump_messages(messages)
        return TurnRendered(ask.turn_id, ids, ask.node_id, added, len(messages)), ""

    def _root(self, ask: RenderTurn) -> RootText:
        root = self._roots.get(ask.root_id)
        if root is None:
            system, tools_json = read_root(ask.root_id, ask.root_blob)
            root = self._text.root(system, tools_json, now_s=ask.created_s)
            self._roots[ask.root_id] = root
            if len(self._roots) > _MAX_ROOTS:
                self._roots.popitem(last=False)
        self._roots.move_to_end(ask.root_id)
        return root

    # After a turn ----------------------------------------------------------------------------

    def judge(self, turn: FrontTurn, finished: TurnFinished) -> tuple[Verdict, str]:
        """What the log keeps of a reply, its whole answer, and text that was held back till now."""
        stream = turn.stream
        if stream is None:
            raise InvalidRequest("turn", turn.turn_id, "a turn that was submitted")
        sampled = turn.token_ids[: finished.num_output_tokens]
        held = "" if turn.stop is not None else stream.finish().text
        if turn.stop is None:
            turn.note_stop()
        ending = self._ending(turn, finished, sampled)
        reason = finished.reason
        text = stream.text
        stop: str | int | None = None
        if turn.stop is not None:
            stop, text = turn.stop.stop, text[: turn.stop.start]
            reason = FinishReason.CANCELLED if stop is None else FinishReason.STOP
        elif finished.stop_token_id is not None and finished.stop_token_id not in (
            self._text.eos_ids
        ):
            stop = finished.stop_token_id
        # Core may have gone on behind the stop string before it heard of it: that is nobody's use.
        num_used = finished.num_output_tokens
        if turn.stop is not None:
            num_used = min(num_used, turn.stop.num_tokens)
        logprobs = turn.logprobs[: ending.keep_n] if turn.wants_logprobs else None
        turn.answer = wire.Done(
            id=0,
            attempt=turn.attempt,
            node=None if finished.node_id is None else format_node_id(finished.node_id),
            text=text,
            tokens=list(ending.ids(sampled)),
            finish_reason=reason.value,
            stop=stop,
            usage=usage_to_map(Usage(finished.num_prompt_tokens, num_used)),
            cache=cache_to_map(finished.cache),
            logprobs=logprobs,
            prompt_logprobs=finished.prompt_logprobs or None,
        )
        verdict = Verdict(
            turn_id=turn.turn_id,
            keep_tokens=ending.keep_n,
            replacement_ids=ending.replacement_ids,
            closed=ending.closed,
            finish_reason=reason,
            reply_blob=pack_reply(turn.answer, finished.cache.cached_tokens, turn.metadata),
            response_blob=pack_response(turn.answer) if turn.claim is not None else b"",
            calls_tool=turn.kind == "chat" and self._text.calls_tool(text),
        )
        return verdict, held

    def cut(self, turn: FrontTurn, num_chars: int) -> StopFound | None:
        """Where a reply ends that is to have so many characters; None where it has fewer yet."""
        num_tokens = self._text.tokens_of(
            turn.token_ids, num_chars, continues=turn.continues, prompt=turn.prompt_tail
        )
        return None if num_tokens is None else StopFound(None, num_chars, num_tokens)

    def _ending(
        self, turn: FrontTurn, finished: TurnFinished, sampled: Sequence[int]
    ) -> ReplyEnding:
        if turn.stop is not None:
            return self._text.cut_at_stop(
                sampled, turn.stop.start, continues=turn.continues, prompt=turn.prompt_tail
            )
        if turn.kind != "chat":
            return ReplyEnding(len(sampled))
        stop_id = finished.stop_token_id
        if stop_id is None or stop_id in self._text.eos_ids:
            return self._text.close_reply(sampled)
        return ReplyEnding(len(sampled) - 1)  # the client's own stop id is no part of the reply

    def remember(self, turn: FrontTurn) -> None:
        """A turn was committed: keep what a later stateless history may repeat."""
        if turn.prompt_raw and isinstance(turn.answer, wire.Done):
            self._memory.put(turn.tenant, turn.prompt_raw, turn.answer.tokens)


def _prompt_logprobs(request: wire.Turn | wire.Generate, ids: Sequence[int] | None) -> int | None:
    """How many are asked for, of a prompt that is not too long for them."""
    if not isinstance(request, wire.Generate) or request.prompt_logprobs is None:
        return None
    count, num_tokens = request.prompt_logprobs, len(ids or ())
    if num_tokens * (1 + count) > MAX_PROMPT_LOGPROBS:
        allowed = f"{MAX_PROMPT_LOGPROBS} in all; the prompt has {num_tokens} tokens, each its own"
        raise InvalidRequest("prompt_logprobs", count, allowed)
    return count


def _content_bytes(message: Mapping[str, Any]) -> int:
    """Bytes of a message's text, as it was sent."""
    content = message.get("content")
    if isinstance(content, str):
        return len(content.encode())
    return sum(len(part["text"].encode()) for part in content or ())


def _digest(value: str | None) -> bytes | None:
    return None if value is None else hashlib.sha256(value.encode()).digest()
