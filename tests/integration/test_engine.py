"""A whole engine, embedded, over the checksum runner: every answer equals the cold oracle."""

from pathlib import Path

from tests.builders.checksum import tokens
from tests.builders.engine import GREEDY, engine_config, open_engine, oracle


def test_raw_turns_reuse_the_device_and_answer_as_cold() -> None:
    with open_engine() as engine:
        session = engine.open("a")
        first = session.turn(tokens=tokens(13), sampling=GREEDY)
        assert list(first.tokens) == oracle(tokens(13))
        log = tokens(13) + list(first.tokens)
        second = session.turn(tokens=[7, 8, 9], sampling=GREEDY)
        assert list(second.tokens) == oracle([*log, 7, 8, 9])
        assert second.cache.device_tokens == len(log) - 1
        assert second.cache.computed_tokens == 4
        engine.assert_ledger()


def test_a_restart_resumes_from_disk(tmp_path: Path) -> None:
    config = engine_config(tmp_path, disk_bytes=50_000_000)
    with open_engine(config) as engine:
        first = engine.open("a").turn(tokens=tokens(13), sampling=GREEDY)
        engine.flush()
    log = tokens(13) + list(first.tokens)
    with open_engine(config) as engine:
        second = engine.open("a").turn(tokens=[7], sampling=GREEDY)
        assert list(second.tokens) == oracle([*log, 7])
        assert second.cache.disk_tokens == len(log) - 1
        engine.assert_ledger()
