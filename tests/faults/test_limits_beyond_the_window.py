"""A length past the window is refused with the numbers, at every door and over the wire."""

from pathlib import Path

import pytest

from sessionkv.errors import PromptTooLong
from tests.builders.checksum import tokens
from tests.builders.engine import engine_config, greedy, open_engine, oracle, socket_engine
from tests.builders.fake_engine import short_endpoint
from tests.builders.wire_client import WireClient

CONFIG = engine_config(max_model_len=64)


@pytest.mark.parametrize("asked", [0, -1, 1, 4, 5, 10_000, 2**31, 2**64 - 1, 1.5, "4", None])
def test_over_the_wire(asked):
    with short_endpoint() as endpoint:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        with socket_engine(folder, CONFIG) as engine, WireClient(engine.endpoint) as wire:
            sampling = {"temperature": 0, "max_tokens": asked, "ignore_eos": True}
            reply = wire.call("generate", 1, tokens=tokens(60), sampling=sampling)
            if asked in (1, 4, None):
                assert reply["tokens"] == oracle(tokens(60), greedy(asked or 4))
                assert reply["finish_reason"] == "length"
            elif asked in (5, 10_000):
                assert reply["code"] == "prompt_too_long"
                assert reply["details"] == {"n_prompt": 60, "max_tokens": asked, "n_ctx": 64}
            else:
                assert reply["code"] == "invalid_request"
                assert reply["details"]["field"] == "sampling.max_tokens"
            again = wire.call("generate", 2, tokens=tokens(60), sampling={"max_tokens": 1})
            assert again["t"] == "done"


def test_a_ceiling_is_no_reason_to_refuse():
    with open_engine(CONFIG) as engine:
        for asked, given in ((10_000, 4), (4, 4), (3, 3)):
            sampling = greedy(asked, fit_window=True)
            result = engine.generate(tokens=tokens(60), sampling=sampling)
            assert list(result.tokens) == oracle(tokens(60), greedy(given))
            assert result.finish_reason.value == "length"
        with pytest.raises(PromptTooLong):
            engine.generate(tokens=tokens(64), sampling=greedy(10_000, fit_window=True))
    with open_engine(engine_config(blocks=4, block_size=4)) as engine:  # nor more than memory has
        result = engine.generate(tokens=tokens(10), sampling=greedy(10_000, fit_window=True))
        assert len(result.tokens) == 4 * 4 + 1 - 10


def test_the_head_of_a_long_prompt_is_never_dropped():
    with open_engine(CONFIG) as engine:
        session = engine.open("a")
        for run in (session.turn, engine.generate):
            with pytest.raises(PromptTooLong) as caught:
                run(tokens=tokens(500))
            assert caught.value.details == {"n_prompt": 500, "max_tokens": None, "n_ctx": 64}
        with pytest.raises(PromptTooLong):
            session.turn("x" * 500)
        assert session.info().turns == 0
        result = engine.generate(tokens=tokens(50), sampling=greedy(None))
        assert list(result.tokens) == oracle(tokens(50), greedy(14))
        engine.assert_ledger()
