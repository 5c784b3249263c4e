"""A turn that does not fit is refused with the numbers, and the session is as it was."""

import pytest

from sessionkv.errors import PromptTooLong
from tests.builders.checksum import tokens
from tests.builders.engine import engine_config, greedy, open_engine, oracle


def test_session_is_unchanged_and_its_next_turn_finds_everything():
    with open_engine(engine_config(max_model_len=64)) as engine:
        session = engine.open("a")
        first = session.turn(tokens=tokens(32), sampling=greedy(8))
        before = session.info()
        assert before.tokens == 40
        for asked in (None, 1, 20):
            with pytest.raises(PromptTooLong) as caught:
                session.turn(tokens=tokens(30), sampling=greedy(asked))
            details = {"n_prompt": 70, "max_tokens": asked, "n_ctx": 64}
            assert caught.value.details == details
            assert all(str(number) in caught.value.message for number in (70, 64, asked))
        assert session.info() == before
        log = [*tokens(32), *first.tokens, *tokens(5)]
        result = session.turn(tokens=tokens(5), sampling=greedy(8))
        assert list(result.tokens) == oracle(log)
        assert result.cache.device_tokens == 39
        engine.assert_ledger()
