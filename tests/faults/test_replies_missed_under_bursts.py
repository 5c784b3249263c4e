"""Many clients, bursts of tiny requests: every reply arrives, each once."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from sessionkv.client import AsyncClient, Client
from sessionkv.ipc import messages as m
from tests.builders.engine import engine_config, greedy, oracle, socket_engine
from tests.builders.fake_engine import FakeEngine, short_endpoint

CLIENTS = 20
REQUESTS = 500
ON_AN_ENGINE = 100


def turns_of(engine: FakeEngine) -> list[str]:
    return sorted(r.prompt for _, r in engine.requests if isinstance(r, m.Generate))


def expected() -> list[str]:
    return sorted(f"{c}-{i}" for c in range(CLIENTS) for i in range(REQUESTS))


def test_asyncio_clients_in_bursts():
    async def one(endpoint: str, number: int) -> list[str]:
        async with AsyncClient(endpoint) as client:
            texts: list[str] = []
            for start in range(0, REQUESTS, 100):
                burst = [client.generate(prompt=f"{number}-{start + i}") for i in range(100)]
                texts += [r.text for r in await asyncio.gather(*burst)]
            return texts

    async def main(endpoint: str) -> list[list[str]]:
        return await asyncio.gather(*[one(endpoint, c) for c in range(CLIENTS)])

    with short_endpoint() as endpoint, FakeEngine(endpoint) as engine:
        answers = asyncio.run(main(endpoint))
        assert answers == [[f"{c}-{i}" for i in range(REQUESTS)] for c in range(CLIENTS)]
        assert turns_of(engine) == expected()


def test_blocking_clients_in_threads():
    answers: dict[int, list[str]] = {}

    def one(endpoint: str, number: int) -> None:
        with Client(endpoint) as client:
            answers[number] = [
                client.generate(prompt=f"{number}-{i}").text for i in range(REQUESTS)
            ]

    with short_endpoint() as endpoint, FakeEngine(endpoint) as engine:
        threads = [threading.Thread(target=one, args=(endpoint, c)) for c in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert turns_of(engine) == expected()
    assert answers == {c: [f"{c}-{i}" for i in range(REQUESTS)] for c in range(CLIENTS)}


@pytest.mark.slow
def test_two_thousand_turns_of_twenty_clients_on_an_engine():
    sampling = greedy(1)

    async def one(endpoint: str, number: int) -> list[tuple[int, ...]]:
        async with AsyncClient(endpoint) as client:
            answers: list[tuple[int, ...]] = []
            for start in range(0, ON_AN_ENGINE, 50):
                burst = [
                    client.generate(tokens=[number, (start + i) % 256], sampling=sampling)
                    for i in range(50)
                ]
                answers += [r.tokens for r in await asyncio.gather(*burst)]
            return answers

    async def main(endpoint: str) -> list[list[tuple[int, ...]]]:
        return await asyncio.gather(*[one(endpoint, c) for c in range(CLIENTS)])

    with short_endpoint() as endpoint:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        with socket_engine(folder, engine_config(blocks=4096)) as engine:
            answers = asyncio.run(main(engine.endpoint))
            engine.parts.kv.check()
    for number, tokens in enumerate(answers):
        expected = [tuple(oracle([number, i % 256], sampling)) for i in range(256)]
        assert tokens == [expected[i % 256] for i in range(ON_AN_ENGINE)]
