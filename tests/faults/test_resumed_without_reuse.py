"""A session that is resumed after a restart reuses its history, or says why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from sessionkv import MissReason
from tests.builders.checksum import tokens
from tests.builders.engine import engine_config, greedy, open_engine, oracle

REPLY = greedy(5)


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 40, 61])
def test_the_next_turn_after_a_restart_reuses_the_history(tmp_path: Path, length: int) -> None:
    config = engine_config(tmp_path / "store", disk_bytes=2**24)
    with open_engine(config) as engine:
        log = tokens(length)
        log += engine.open("a").turn(tokens=log, sampling=REPLY).tokens
        engine.flush()
    with open_engine(config) as engine:
        result = engine.session("a").turn(tokens=[9], sampling=REPLY)
        assert list(result.tokens) == oracle([*log, 9], REPLY)
        report = result.cache
        # All that was computed: the last token sampled has no KV yet.
        assert (report.cached_tokens, report.disk_tokens) == (len(log) - 1, len(log) - 1)
        assert report.miss.reason is MissReason.NONE


def test_a_history_that_was_not_kept_is_said_to_be_computed(tmp_path: Path) -> None:
    with open_engine(engine_config(tmp_path / "store")) as engine:
        log = tokens(40)
        log += engine.open("a").turn(tokens=log, sampling=REPLY).tokens
    with open_engine(engine_config(tmp_path / "store", disk_bytes=2**24)) as engine:
        result = engine.session("a").turn(tokens=[9], sampling=REPLY)
        assert list(result.tokens) == oracle([*log, 9], REPLY)
        assert (result.cache.cached_tokens, result.cache.computed_tokens) == (0, len(log) + 1)
        assert result.cache.miss.reason is MissReason.NOT_STORED
        assert result.cache.miss.token == 0
