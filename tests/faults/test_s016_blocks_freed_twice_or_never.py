import pytest

from sessionkv.cache.block_pool import LeaseError
from tests.builders.checksum import cold_oracle, tokens
from tests.builders.mini_engine import MiniEngine


@pytest.mark.parametrize("block_size", [1, 4])
def test_the_ledger_is_exact_after_a_long_reply(block_size: int) -> None:
    engine = MiniEngine(256 // block_size, block_size=block_size)
    seq_id = engine.submit(tokens(3), 200)
    engine.run()
    assert engine.outputs[seq_id] == cold_oracle(tokens(3), 200)
    engine.assert_idle()
    ledger = engine.kv.ledger().device
    assert ledger.free + ledger.cached == ledger.total
    assert ledger.cached == -(-202 // block_size)


@pytest.mark.parametrize("block_size", [1, 4])
def test_the_ledger_is_exact_after_two_that_share_blocks(block_size: int) -> None:
    engine = MiniEngine(64, block_size=block_size)
    shared = tokens(2 * block_size)
    ids = [engine.submit([*shared, 90 + i], 6) for i in range(2)]
    engine.run()
    for i, seq_id in enumerate(ids):
        assert engine.outputs[seq_id] == cold_oracle([*shared, 90 + i], 6)
    engine.assert_idle()


def test_a_second_release_raises() -> None:
    engine = MiniEngine(8)
    seq_id = engine.submit(tokens(3), 2)
    engine.run()
    with pytest.raises(KeyError):
        engine.scheduler.release(seq_id)
    with pytest.raises(LeaseError):
        engine.kv.finish(seq_id)
    engine.assert_idle()
