"""The answers to one request, side by side: at once, or as a stream of chunks.

Chat Completions and Completions differ in what a piece of a reply tells, which each of them says as
a :class:`Choice`; the rest is here. A whole answer is a stream read to its end.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from sessionkv.client import AsyncStream, StreamEvent, TurnResult
from sessionkv.gateway.openai.sampling import tier_of
from sessionkv.gateway.openai.schema import Sampling
from sessionkv.gateway.openai.usage import usage_map
from sessionkv.gateway.reports import extension
from sessionkv.gateway.services import ServedModel
from sessionkv.gateway.side_by_side import merged
from sessionkv.gateway.sse import data, progress

Part = dict[str, Any]
"""What a chunk tells of one answer, in its API's form; the last one has a ``finish_reason``."""


class Choice(ABC):
    """One answer under way: its turn, and how its API tells of it."""

    @abstractmethod
    def turn(self) -> AsyncGenerator[StreamEvent, None] | AsyncStream:
        """Run it; asked for once. Closing what it gives ends it."""

    @abstractmethod
    async def opening(self) -> list[Part]:
        """What is told before anything of the reply."""

    @abstractmethod
    async def told(self, event: StreamEvent) -> list[Part]:
        """What an event tells. By the last one, what is to be kept of the answer is kept."""

    @abstractmethod
    def whole(self, parts: Sequence[Part]) -> Part:
        """All parts as one."""

    def reasoning_tokens(self, completion: int) -> int:
        """How many of the generated tokens are reasoning."""
        return 0

    @property
    def rewrites(self) -> Sequence[Mapping[str, str]]:
        """What the model was not given as the client sent it, once the turn is over."""
        return ()

    @abstractmethod
    async def close(self) -> None:
        """Whatever became of it, nothing of it goes on."""


@dataclass(frozen=True, slots=True)
class Names:
    """An API's own.

    Attributes:
        prefix: Of an answer's id.
        whole: Of a whole answer.
        chunk: Of a piece of one.
    """

    prefix: str
    whole: str
    chunk: str


class Answers:
    """One request under way; answer it once: :meth:`whole` or :meth:`events`."""

    def __init__(
        self,
        body: Sampling,
        served: ServedModel,
        names: Names,
        choices: Sequence[Choice],
    ) -> None:
        """Ask nothing yet.

        Args:
            body: The request.
            served: The model.
            names: The API's.
            choices: The answers in order, those to one prompt behind one another.
        """
        self._names = names
        self._choices = choices
        self._each = body.n or 1
        self._results: dict[int, TurnResult] = {}
        options = body.stream_options
        self._has_usage = options is not None and bool(options.include_usage)
        self._head = {
            "id": f"{names.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": served.id,
            "service_tier": tier_of(body),
        }

    async def whole(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            SessionKVError: A turn failed.
        """
        parts: list[list[Part]] = [[] for _ in self._choices]
        async with aclosing(self._told()) as told:
            async for index, _, more in told:
                parts[index] += more
        choices = [
            {"index": index, **choice.whole(parts[index])}
            for index, choice in enumerate(self._choices)
        ]
        return {**self._head, "object": self._names.whole, "choices": choices, **self._rest()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events; closing the generator ends its turns.

        Raises:
            SessionKVError: A turn failed.
        """
        async with aclosing(self._told()) as told:
            async for index, event, parts in told:
                if event.progress is not None:
                    yield progress(event.progress)
                for part in parts:
                    yield self._chunk(index, part, event.result)
        if self._has_usage:
            yield data({**self._head, "object": self._names.chunk, "choices": [], **self._rest()})
        yield b"data: [DONE]\n\n"

    async def _told(self) -> AsyncGenerator[tuple[int, StreamEvent, list[Part]], None]:
        """Events of all turns as they come, and what each tells."""
        turns = [choice.turn() for choice in self._choices]
        together = merged(turns)
        begun: set[int] = set()
        try:
            async for index, event in together:
                choice, parts = self._choices[index], []
                if event.progress is None:
                    if index not in begun:
                        begun.add(index)
                        parts += await choice.opening()
                    parts += await choice.told(event)
                if event.result is not None:
                    self._results[index] = event.result
                yield index, event, parts
        finally:
            await together.aclose()
            for turn in turns:
                await turn.aclose()
            for choice in self._choices:
                await choice.close()

    def _rest(self) -> dict[str, Any]:
        results = [self._results[index] for index in range(len(self._choices))]
        thoughts = sum(
            choice.reasoning_tokens(result.usage.completion_tokens)
            for choice, result in zip(self._choices, results, strict=True)
        )
        usage = usage_map(results, each=self._each, reasoning_tokens=thoughts)
        return {"usage": usage, "sessionkv": extension(results, self._choices[0].rewrites)}

    def _chunk(self, index: int, part: Part, result: TurnResult | None) -> bytes:
        value: dict[str, Any] = {
            **self._head,
            "object": self._names.chunk,
            "choices": [{"index": index, **part}],
        }
        if self._has_usage:
            value["usage"] = None
        if result is not None and part["finish_reason"] is not None:
            value["sessionkv"] = extension([result], self._choices[index].rewrites)
        return data(value)
