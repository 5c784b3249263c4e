"""Many streams at once, over one connection to the engine: each is whole and its own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from tests.builders.engine import engine_config, greedy
from tests.builders.gateway import MODEL, http_engine

STREAMS, TOKENS = 60, 40


async def read(client: httpx.AsyncClient, number: int) -> str:
    body: dict[str, Any] = {
        "model": MODEL, "prompt": f"{number}", "max_tokens": TOKENS, "stream": True,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    text, ends = "", 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                text += choice["text"]
                ends += choice["finish_reason"] is not None
    assert ends == 1
    return text


def test_no_event_is_lost_doubled_or_anothers() -> None:
    with http_engine(engine_config(blocks=2048)) as served:

        async def all_of_them() -> list[str]:
            limits = httpx.Limits(max_connections=STREAMS)
            async with httpx.AsyncClient(base_url=served.url, limits=limits, timeout=60) as client:
                return await asyncio.gather(*(read(client, number) for number in range(STREAMS)))

        texts = asyncio.run(all_of_them())
        with served.engine.client() as client:
            for number, text in enumerate(texts):
                assert text == client.generate(f"{number}", sampling=greedy(TOKENS)).text
