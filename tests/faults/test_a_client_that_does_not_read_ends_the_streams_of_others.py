"""A client that stops reading holds back what its connection's other streams are sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from sessionkv.gateway.sse import EventStream


def test_its_stream_ends_and_is_left_where_nothing_is_read() -> None:
    closed = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            closed.append(True)

    async def talk() -> None:
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) > 5:
                await asyncio.Event().wait()  # its buffers are full, for good

        async def receive() -> Any:
            await asyncio.Event().wait()

        stream = EventStream(events(), ping_s=60, stall_s=0.01)
        await stream({"type": "http", "path": "/"}, receive, send)
        assert all(message.get("more_body", True) for message in sent)  # it looks like no end

    asyncio.run(talk())
    assert closed == [True]
