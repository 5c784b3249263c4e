from collections.abc import Sequence

import pytest

from sessionkv.cache import chain as chain_module
from sessionkv.cache.chain import full_key
from sessionkv.types import BlockHash
from tests.builders.checksum import cold_oracle, tokens
from tests.builders.engine import engine_config, greedy, open_engine, oracle
from tests.builders.mini_engine import MiniEngine

B = 4


@pytest.mark.parametrize("length", range(1, 14))
def test_tables_cover_what_is_written_and_full_blocks_are_hashed_once(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[tuple[BlockHash, tuple[int, ...]]] = []

    def counting(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
        hashed.append((parent, tuple(token_ids)))
        return full_key(parent, token_ids)

    monkeypatch.setattr(chain_module, "full_key", counting)
    for new_tokens in range(1, 10):
        engine = MiniEngine(8, block_size=B)
        prompt = tokens(length)
        hashed.clear()
        seq_id = engine.submit(prompt, new_tokens)
        table: list[int] = []
        chain = engine.scheduler.get(seq_id).chain
        while engine.step():
            plan = engine.plans[-1]
            for start in plan.starts:
                table += start.block_ids
            [step] = plan.steps
            table += step.new_block_ids
            written = step.start + len(step.token_ids)
            needed = -(-written // B)
            assert needed <= len(table) <= needed + 1
            assert len(set(table)) == len(table)
            assert len(chain.hashes) == len(chain) // B
            assert len(set(chain.hashes)) == len(chain.hashes)
        assert len(set(hashed)) == len(hashed)
        assert engine.outputs[seq_id] == cold_oracle(prompt, new_tokens)
        engine.assert_idle()


def test_any_length_of_prompt_and_reply_in_a_whole_engine() -> None:
    with open_engine(engine_config(blocks=6)) as engine:
        for length in range(1, 14):
            for count in range(1, 10):
                prompt = tokens(length, start=10 * length + count)
                result = engine.generate(tokens=prompt, sampling=greedy(count))
                assert list(result.tokens) == oracle(prompt, greedy(count))
        engine.assert_ledger()
