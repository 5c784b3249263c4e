"""What a response gives out: its items, and the events that tell a stream's reader of them.

Pure. Events are numbered from 0 without gaps, each item is added before it is spoken of and done
before the next one is added, and the last event is the only one that ends the response.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sessionkv.gateway.openai.response_ids import item_ids
from sessionkv.gateway.openai.response_items import output_part, reasoning_part, sealed
from sessionkv.gateway.openai.text_logprobs import ToldText
from sessionkv.gateway.replies import (
    CallArguments,
    CallBegins,
    CallEnds,
    Reasoning,
    ReplyEvent,
    Text,
)

ResponseEvent = dict[str, Any]
_LISTED = {"message": output_part, "reasoning": reasoning_part}
_SPOKEN = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseWriter:
    """One response, from its first event to its last.

    Attributes:
        output: The items so far, the last one perhaps still growing.
        namespaces: Of functions that are in one, by their whole name: it and their own name.
    """

    def __init__(self, response_id: str, *, seals: bool = False, calls_once: bool = False) -> None:
        """Start before the reply.

        Args:
            response_id: Names the items.
            seals: Reasoning also goes out in a form that clients carry as it is.
            calls_once: What comes behind the first whole call is left out.
        """
        self.output: list[dict[str, Any]] = []
        self.namespaces: Mapping[str, tuple[str, str]] = {}
        self._new_id = item_ids(response_id, "o")
        self._seals = seals
        self._number = 0
        self._text = ""  # of the open item
        self._logprobs: list[dict[str, Any]] = []  # of the open item
        self._is_open = False
        self._calls_once = calls_once

    @property
    def is_over(self) -> bool:
        """The first call is complete, and it was to be the last thing."""
        return self._calls_once and any(
            item["type"] == "function_call" and item["status"] == "completed"
            for item in self.output
        )

    def begin(self, body: Mapping[str, Any]) -> list[ResponseEvent]:
        """The first events: that it is there, and whether it waits or is being made.

        Args:
            body: The response as it is now.
        """
        return [self._event("response.created", response=body), self.become(body)]

    def become(self, body: Mapping[str, Any]) -> ResponseEvent:
        """The event that tells of the response's new status; the last one where that is final."""
        return self._event(f"response.{body['status']}", response=body)

    def feed(self, pieces: Iterable[ReplyEvent | ToldText]) -> list[ResponseEvent]:
        """Take what the reply says next."""
        return [event for piece in pieces if not self.is_over for event in self._take(piece)]

    def end(self, *, is_cut: bool) -> list[ResponseEvent]:
        """The reply is over.

        Args:
            is_cut: It had to end where it did: its last item is not complete.
        """
        events = []
        if not self.output:
            events += self._open("message", role="assistant", content=[])
        last = self.output[-1]
        unfinished = is_cut or last["type"] == "function_call"
        return [*events, *self._close("incomplete" if unfinished else "completed")]

    def _take(self, piece: ReplyEvent | ToldText) -> Iterator[ResponseEvent]:
        match piece:
            case Text(text):
                yield from self._say("message", text, logprobs=[])
            case ToldText(text, logprobs):
                yield from self._say("message", text, logprobs=list(logprobs))
            case Reasoning(text):
                yield from self._say("reasoning", text)
            case CallBegins(_, call_id, name):
                fields = {"call_id": call_id, "name": name, "arguments": ""}
                if name in self.namespaces:
                    fields["namespace"], fields["name"] = self.namespaces[name]
                yield from self._open("function_call", **fields)
            case CallArguments(_, text):
                self._text += text
                yield self._about("response.function_call_arguments.delta", delta=text)
            case CallEnds(_):
                yield from self._close("completed")

    def _say(self, kind: str, text: str, **beside: Any) -> Iterator[ResponseEvent]:
        if not self._is_open or self.output[-1]["type"] != kind:
            yield from self._open(kind, **_blank(kind))
        self._text += text
        self._logprobs += beside.get("logprobs", ())
        yield self._about(f"{_SPOKEN[kind]}.delta", content_index=0, delta=text, **beside)

    def _open(self, kind: str, **fields: Any) -> list[ResponseEvent]:
        events = self._close("incomplete" if self._in_call() else "completed")
        item_id = self._new_id(kind, len(self.output))
        self.output.append({"id": item_id, "type": kind, "status": "in_progress", **fields})
        self._is_open, self._text, self._logprobs = True, "", []
        index = len(self.output) - 1
        events.append(
            self._event("response.output_item.added", output_index=index, item=self._copy())
        )
        if kind in _LISTED:
            part = _LISTED[kind]("")
            events.append(self._about("response.content_part.added", content_index=0, part=part))
        return events

    def _close(self, status: str) -> list[ResponseEvent]:
        if not self._is_open:
            return []
        self._is_open = False
        item, text = self.output[-1], self._text
        item["status"] = status
        kind, events = item["type"], []
        if kind in _LISTED:
            part = _LISTED[kind](text)
            beside = {"logprobs": self._logprobs} if kind == "message" else {}
            item["content"] = [{**part, **beside}]
            said = self._about(f"{_SPOKEN[kind]}.done", content_index=0, text=text, **beside)
            events = [
                said,
                self._about("response.content_part.done", content_index=0, part={**part, **beside}),
            ]
            if kind == "reasoning" and self._seals:
                item["encrypted_content"] = sealed(text)
        else:
            item["arguments"] = text
            events = [
                self._about(
                    "response.function_call_arguments.done", arguments=text, name=item["name"]
                )
            ]
        index = len(self.output) - 1
        done = self._event("response.output_item.done", output_index=index, item=self._copy())
        return [*events, done]

    def _in_call(self) -> bool:
        return self._is_open and self.output[-1]["type"] == "function_call"

    def _copy(self) -> dict[str, Any]:
        return dict(self.output[-1])

    def _about(self, kind: str, **fields: Any) -> ResponseEvent:
        """An event about the open item."""
        place = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event


def _blank(kind: str) -> dict[str, Any]:
    return {"role": "assistant", "content": []} if kind == "message" else {"summary": []}


def output_of(
    response_id: str,
    pieces: Iterable[ReplyEvent],
    *,
    is_cut: bool,
    seals: bool = False,
    calls_once: bool = False,
    namespaces: Mapping[str, tuple[str, str]] | None = None,
) -> list[dict[str, Any]]:
    """The items of a whole reply."""
    writer = ResponseWriter(response_id, seals=seals, calls_once=calls_once)
    writer.namespaces = namespaces or {}
    writer.feed(pieces)
    writer.end(is_cut=is_cut)
    return writer.output
