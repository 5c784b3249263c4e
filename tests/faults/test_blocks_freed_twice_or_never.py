import threading

import pytest

from sessionkv.cache.block_pool import LeaseError
from sessionkv.cache.invariants import InvariantBroken
from tests.builders.checksum import cold_oracle, tokens
from tests.builders.doors import Later
from tests.builders.engine import engine_config, greedy, open_engine, oracle
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


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_whole_engine_at_rest(block_size: int) -> None:
    config = engine_config(blocks=256 // block_size, block_size=block_size)
    with open_engine(config) as engine:
        result = engine.generate(tokens=tokens(3), sampling=greedy(200))
        assert list(result.tokens) == oracle(tokens(3), greedy(200))
        engine.assert_ledger()
        ledger = engine.stats()["ledger"]["device"]
        assert ledger["cached"] == -(-202 // block_size)
        assert ledger["free"] + ledger["cached"] == ledger["total"]
        shared = tokens(2 * block_size)
        turns = [
            Later(lambda i=i: engine.generate(tokens=[*shared, i], sampling=greedy(6)))
            for i in (90, 91)
        ]
        for i, turn in zip((90, 91), turns, strict=True):
            assert list(turn.result().tokens) == oracle([*shared, i], greedy(6))
        engine.assert_ledger()


def test_books_that_do_not_balance_are_counted_and_end_nothing() -> None:
    with open_engine() as engine:
        right, looked = engine.parts.kv.check, threading.Event()

        def wrong() -> None:
            looked.set()
            raise InvariantBroken("told to be wrong")

        engine.parts.kv.check = wrong
        engine.generate(tokens=tokens(3), sampling=greedy(2))
        assert looked.wait(30)
        assert engine.stats()["book_errors"] == 1
        engine.parts.kv.check = right
        result = engine.generate(tokens=tokens(5), sampling=greedy(2))
        assert list(result.tokens) == oracle(tokens(5), greedy(2))
