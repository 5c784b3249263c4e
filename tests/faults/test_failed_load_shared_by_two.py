import pytest

from sessionkv.types import BlockMove, MoveOutcome, Tier, Transfer
from tests.builders.checksum import cold_oracle, tokens
from tests.builders.mini_engine import DictDisk, MiniEngine


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("outcome", [MoveOutcome.CORRUPT, MoveOutcome.MISSING])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_both_are_right_when_a_shared_block_cannot_be_loaded(
    tier: Tier, outcome: MoveOutcome, bad: int
) -> None:
    broken: list[tuple[int, ...]] = []

    def fault(transfer: Transfer, move: BlockMove) -> MoveOutcome | None:
        if transfer.dst is Tier.DEVICE and move.record.token_ids == tuple(shared[4 * bad :][:4]):
            broken.append(move.record.token_ids)
            return outcome
        return None

    shared = tokens(12)
    host = tier is Tier.HOST
    engine = MiniEngine(
        8, host_blocks=16 if host else 0, disk=None if host else DictDisk(), fault=fault
    )
    engine.submit(shared, 1)
    engine.run()
    engine.submit(tokens(30, start=50), 1)
    engine.run()
    ids = [engine.submit([*shared, 90 + i], 3) for i in range(2)]
    engine.run()
    assert len(broken) == 1
    for i, seq_id in enumerate(ids):
        assert engine.outputs[seq_id] == cold_oracle([*shared, 90 + i], 3)
        assert engine.ends[seq_id].error is None
    assert engine.kv.usage().counters.corrupt == (outcome is MoveOutcome.CORRUPT)
    engine.assert_idle()
