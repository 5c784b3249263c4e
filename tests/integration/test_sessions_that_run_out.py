"""Sessions whose names begin with ``~``: past so many the oldest go, as fast as they are made."""

from __future__ import annotations

import pytest

from sessionkv.engine.housekeeping import Housekeeping
from tests.builders.engine import engine_config, open_engine


def test_the_oldest_make_room_all_of_them_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[float] = []
    expire = Housekeeping.expire

    def only_once(chores: Housekeeping, wall: float) -> None:
        if chores._tree.max_unnamed == 4 and not rounds:
            rounds.append(wall)
            expire(chores, wall)

    monkeypatch.setattr(Housekeeping, "expire", only_once)
    with open_engine(engine_config()) as engine:
        engine.open("stays")
        for i in range(100):
            engine.open(f"~{i:03}")
        assert len(engine.sessions("~")) == 100
        engine.parts.tree.max_unnamed = 4
        for _ in range(50_000):
            if len(engine.sessions("~")) == 4:
                break
        assert [s.name for s in engine.sessions("~")] == [f"~{i:03}" for i in range(96, 100)]
        assert [s.name for s in engine.sessions()] == ["stays"]
        assert len(rounds) == 1
