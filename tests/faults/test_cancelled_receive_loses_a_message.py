"""Cancelling a wait for the next event takes nothing off the queue and warns of nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sessionkv.client import AsyncClient
from sessionkv.client.async_stream import Awaited
from sessionkv.ipc import messages as m
from tests.builders.engine import engine_config, greedy, socket_engine
from tests.builders.fake_engine import FakeEngine, deltas, done, short_endpoint

COUNT = 1000


def test_a_thousand_events_arrive_through_cancelled_waits():
    problems: list[object] = []

    async def main(endpoint: str, engine: FakeEngine) -> tuple[list[int], int]:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: problems.append(context)
        )
        offsets: list[int] = []
        cancelled = 0
        async with AsyncClient(endpoint) as client:
            fields = {"session": "a", "text": "hold", "stream": True}
            awaited = Awaited(client._core, m.Turn, fields)
            ((conn, turn),) = await asyncio.to_thread(engine.wait_for, m.Turn)
            replies = [*deltas(turn.id, "x" * COUNT), done(turn.id, "x" * COUNT)]
            while True:
                try:
                    item, _ = await asyncio.wait_for(awaited.get(), 0.001)
                except TimeoutError:
                    cancelled += 1
                    for reply in replies[:100]:
                        engine.send(conn, reply)
                    del replies[:100]
                    continue
                if isinstance(item, m.Done):
                    return offsets, cancelled
                offsets.append(item.offset)

    with short_endpoint() as endpoint, FakeEngine(endpoint) as engine:
        offsets, cancelled = asyncio.run(main(endpoint, engine))
    assert offsets == list(range(COUNT))
    assert cancelled >= COUNT / 100
    assert problems == []


def test_an_engines_answers_arrive_through_cancelled_waits():
    problems: list[object] = []

    async def main(endpoint: str) -> tuple[int, int]:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: problems.append(context)
        )
        answered = cancelled = 0
        async with AsyncClient(endpoint) as client:
            session = await client.open("a")
            for i in range(COUNT):
                try:
                    # Shorter and longer than an answer takes: from never to always in time.
                    await asyncio.wait_for(client.stats(), 0.00001 * i)
                    answered += 1
                except TimeoutError:
                    cancelled += 1
            for i in range(50):
                try:
                    turn = session.turn(tokens=[i], sampling=greedy(50))
                    await asyncio.wait_for(turn, 0.0005 * i)
                    answered += 1
                except TimeoutError:
                    cancelled += 1
            info = await session.info()
            assert not info.running
            assert (await session.turn(tokens=[1], sampling=greedy(3))).tokens
        return answered, cancelled

    with short_endpoint() as endpoint:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        with socket_engine(folder, engine_config(blocks=4096)) as engine:
            answered, cancelled = asyncio.run(main(engine.endpoint))
    assert answered + cancelled == COUNT + 50
    assert min(answered, cancelled) > 0
    assert problems == []
