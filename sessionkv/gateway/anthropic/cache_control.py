"""Breakpoints of a request, and what they ask to be kept for how long.

A breakpoint names a place up to which a prompt is to be cached. Here every prompt is cached
anyway; what a breakpoint adds is a pin in host memory on the whole conversation, for the longest
time that one of its breakpoints asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sessionkv.errors import InvalidRequest
from sessionkv.gateway.anthropic.schema import Block, CacheControl, CountTokensRequest

MOST = 4
"""Breakpoints of a request."""
TTL_S = {"5m": 300.0, "1h": 3600.0}


def longest_ttl(body: CountTokensRequest) -> str | None:
    """The longest time that a breakpoint asks for; None where there is none.

    Raises:
        InvalidRequest: Too many, one where none may be, or a longer time behind a shorter.
    """
    found = list(_breakpoints(body))
    if len(found) > MOST:
        at = found[MOST][0]
        raise InvalidRequest(at, f"breakpoint {MOST + 1} of {len(found)}", f"at most {MOST}")
    ttls = [control.ttl or "5m" for _, control in found]
    for (at, _), ttl, before in zip(found[1:], ttls[1:], ttls, strict=False):
        if TTL_S[ttl] > TTL_S[before]:
            raise InvalidRequest(f"{at}.ttl", ttl, f"at most {before}, as in the one before it")
    return max(ttls, key=TTL_S.__getitem__, default=None)


def _breakpoints(body: CountTokensRequest) -> Iterator[tuple[str, CacheControl]]:
    """All of them in the order of the prompt, with their fields."""
    for i, tool in enumerate(body.tools or ()):
        if tool.cache_control is not None:
            yield f"tools[{i}].cache_control", tool.cache_control
    if body.system is not None and not isinstance(body.system, str):
        for i, part in enumerate(body.system):
            if part.cache_control is not None:
                at = f"system[{i}].cache_control"
                _check_text(at, part.text)
                yield at, part.cache_control
    for i, message in enumerate(body.messages):
        if not isinstance(message.content, str):
            yield from _of_blocks(message.content, f"messages[{i}].content")
    if body.cache_control is not None:
        yield "cache_control", body.cache_control


def _of_blocks(blocks: Sequence[Block], at: str) -> Iterator[tuple[str, CacheControl]]:
    for j, block in enumerate(blocks):
        if isinstance(block.content, list):
            yield from _of_blocks(block.content, f"{at}[{j}].content")
        if block.cache_control is None:
            continue
        where = f"{at}[{j}].cache_control"
        if block.type in ("thinking", "redacted_thinking"):
            raise InvalidRequest(where, block.type, "absent on thinking")
        if block.type == "text":
            _check_text(where, block.text)
        yield where, block.cache_control


def _check_text(at: str, text: str | None) -> None:
    if not text:
        raise InvalidRequest(at, "on an empty text", "absent on empty text")
