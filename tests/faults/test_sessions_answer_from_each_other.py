"""Many sessions through all tiers at once: each answers from its own history alone."""

from __future__ import annotations

import random
import threading
from pathlib import Path

from tests.builders.engine import CheckedEngine, engine_config, greedy, open_engine, oracle

SESSIONS, THREADS, TURNS = 12, 4, 200
REPLY = greedy(2)


def converse(engine: CheckedEngine, secrets: list[int], seed: int) -> None:
    """Turns of a few sessions in random order; each history is one token that no other has."""
    rng = random.Random(seed)
    logs: dict[int, list[int]] = {secret: [] for secret in secrets}
    for secret in secrets:
        engine.open(f"s{secret}")
    for _ in range(TURNS // THREADS):
        secret = rng.choice(secrets)
        if len(logs[secret]) > 50:
            engine.session(f"s{secret}").rewind(turns=3)
            del logs[secret][-3 * 8 :]
        prompt = [*logs[secret], *[secret] * 6]
        reply = engine.session(f"s{secret}").turn(tokens=prompt[-6:], sampling=REPLY)
        assert list(reply.tokens) == oracle(prompt, REPLY), f"session {secret}"
        logs[secret] = [*prompt, *reply.tokens]


def test_twelve_sessions_in_room_for_three(tmp_path: Path) -> None:
    config = engine_config(tmp_path / "store", blocks=48, host_blocks=16, disk_bytes=2**24)
    failures: list[BaseException] = []
    with open_engine(config) as engine:

        def work(number: int) -> None:
            try:
                converse(engine, [number + THREADS * i for i in range(SESSIONS // THREADS)], number)
            except BaseException as failure:  # noqa: BLE001 - raised again below
                failures.append(failure)

        crew = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        if failures:
            raise failures[0]
        found = engine.stats()["prefix_cache"]
        assert found["host_tokens"] > 0
        assert found["disk_tokens"] > 0
        engine.assert_ledger()
