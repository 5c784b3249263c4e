"""Connections by key: who is used keeps its own, however many keys there are."""

import asyncio
from pathlib import Path

from sessionkv.gateway.clients import IDLE_S, ClientPool
from sessionkv.types.access import Access, ApiKey, key_digest
from tests.builders.engine import StepGate, engine_config, greedy, socket_engine

KEYS = [f"key-{i}" for i in range(4)]
ACCESS = Access(tuple(ApiKey(key, key_digest(key), key) for key in KEYS))


def test_a_stream_keeps_its_connection_and_idle_ones_go(tmp_path: Path) -> None:
    gate = StepGate()
    with socket_engine(tmp_path, engine_config(), access=ACCESS, gate=gate) as engine:

        async def use() -> None:
            now = 0.0
            pool = ClientPool(engine.endpoint, most=1, clock=lambda: now)
            streaming = (await pool.get(KEYS[0])).client
            turn = asyncio.create_task(streaming.generate(tokens=[1, 2], sampling=greedy(4)))
            await asyncio.to_thread(gate.reached)
            idle = (await pool.get(KEYS[1])).client
            now += IDLE_S / 2
            fresh = (await pool.get(KEYS[2])).client  # more than there should be: all are in use
            assert not idle.has_ended
            now += IDLE_S / 2 + 1
            await pool.get(KEYS[3])  # sees that they were greeted
            assert not idle.has_ended
            now += IDLE_S + 1
            await fresh.welcome()  # by somebody who has had it all the time
            (await pool.get(KEYS[3])).used_s = now
            pool._close_idle()
            while not idle.has_ended:
                await asyncio.sleep(0)
            assert not fresh.has_ended
            assert not streaming.has_ended
            gate.open()
            assert len((await turn).tokens) == 4
            again = (await pool.get(KEYS[1])).client
            assert again is not idle
            assert (await again.sessions()) == []
            await pool.close()
            assert all(one.has_ended for one in (streaming, fresh, again))

        asyncio.run(use())
