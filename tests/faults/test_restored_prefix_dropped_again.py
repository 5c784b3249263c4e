from pathlib import Path

import pytest

from sessionkv.types import Tier
from tests.builders.checksum import cold_oracle, tokens
from tests.builders.engine import engine_config, greedy, open_engine, oracle
from tests.builders.mini_engine import DictDisk, MiniEngine


def test_only_what_is_lacking_is_evicted_and_none_of_the_restored() -> None:
    engine = MiniEngine(8, disk=DictDisk())
    session = tokens(17)
    engine.submit(session, 1)
    engine.run()
    others = [tokens(8, start=50 + 40 * i) for i in range(4)]
    for other in others:
        engine.submit(other, 1)
        engine.run()
    for _ in range(5):
        engine.step()
    before = dict(engine.kv.usage().counters.evicted)
    free = engine.kv.ledger().device.free
    longer = [*session, *tokens(7, start=300)]
    seq_id = engine.submit(longer, 1)
    engine.run()
    assert engine.outputs[seq_id] == cold_oracle(longer, 1)
    report = engine.reports[seq_id]
    restored = report.disk_tokens // 4
    assert report.disk_tokens >= 4
    assert report.computed_tokens == 24 - report.cached_tokens
    # Six blocks hold the 24 tokens; those it found on the device were not evicted first.
    lacking = 6 - report.device_tokens // 4 - free
    evicted = engine.kv.usage().counters.evicted[Tier.DEVICE] - before[Tier.DEVICE]
    assert evicted == max(lacking, 0)
    assert restored + report.device_tokens // 4 >= 4
    engine.assert_idle()


@pytest.mark.parametrize("others", ["on disk too", "only there"])
def test_a_restored_session_evicts_only_what_it_lacks(tmp_path: Path, others: str) -> None:
    config = engine_config(tmp_path, blocks=8, disk_bytes=50_000_000)
    log = tokens(16)
    with open_engine(config) as engine:
        log += engine.open("a").turn(tokens=log, sampling=greedy(1)).tokens
    with open_engine(config) as engine:
        # Five blocks of others: of eight blocks three are free, and the turn needs six.
        for i in range(5):
            if others == "on disk too":
                engine.open(f"b{i}").turn(tokens=[200 + i] * 4, sampling=greedy(1))
            else:
                engine.generate(tokens=[200 + i] * 4, sampling=greedy(1))
        engine.flush()
        assert engine.stats()["ledger"]["device"]["free"] == 3
        result = engine.session("a").turn(tokens=tokens(6, start=300), sampling=greedy(2))
        assert list(result.tokens) == oracle([*log, *tokens(6, start=300)], greedy(2))
        assert (result.cache.disk_tokens, result.cache.computed_tokens) == (16, 7)
        assert engine.stats()["kv"]["device"]["evictions"] == 3
        engine.assert_ledger()
