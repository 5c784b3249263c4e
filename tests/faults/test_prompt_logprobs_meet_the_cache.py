"""Log-probabilities of a prompt whose KV is cached: all of them are there, and right."""

from __future__ import annotations

from pathlib import Path

import pytest

from sessionkv import MissReason
from sessionkv.client import TurnResult
from sessionkv.errors import InvalidRequest
from tests.builders.checksum import tokens
from tests.builders.engine import (
    GREEDY,
    CheckedEngine,
    StepGate,
    engine_config,
    greedy,
    open_engine,
    oracle,
    socket_engine,
)
from tests.builders.gateway import MODEL, http_engine

PROMPT = tokens(11)


def asked(engine: CheckedEngine, count: int = 1, prompt: list[int] = PROMPT) -> TurnResult:
    result = engine.generate(tokens=prompt, sampling=GREEDY, prompt_logprobs=count)
    assert list(result.tokens) == oracle(prompt)
    assert result.prompt_logprobs is not None
    assert [entry[0].token_id for entry in result.prompt_logprobs] == prompt[1:]
    assert {len(entry) for entry in result.prompt_logprobs} == {1 + count}
    assert result.cache.cached_tokens == 0
    assert result.cache.miss.reason is MissReason.BYPASSED
    return result


def test_warm_they_are_what_they_were_cold() -> None:
    with open_engine() as engine:
        cold, warm = asked(engine), asked(engine)
        assert warm.prompt_logprobs == cold.prompt_logprobs
        plain = engine.generate(tokens=PROMPT, sampling=GREEDY)  # what was computed is cached
        assert plain.cache.device_tokens == 10
        assert plain.prompt_logprobs is None
        assert asked(engine).prompt_logprobs == cold.prompt_logprobs
        engine.assert_ledger()


def test_a_request_beside_it_still_finds_the_cache() -> None:
    with open_engine() as engine:
        cold = asked(engine)
        streams = [
            engine.stream_generate(tokens=PROMPT, sampling=GREEDY, prompt_logprobs=1),
            engine.stream_generate(tokens=PROMPT, sampling=GREEDY),
            engine.stream_generate(tokens=PROMPT, sampling=GREEDY, cache=False, prompt_logprobs=1),
        ]
        for stream in streams:
            list(stream)
        both, plain, bypassing = [stream.result for stream in streams]
        assert both is not None
        assert plain is not None
        assert bypassing is not None
        assert both.prompt_logprobs == cold.prompt_logprobs == bypassing.prompt_logprobs
        assert both.cache.cached_tokens == bypassing.cache.cached_tokens == 0
        assert plain.cache.device_tokens == 10
        engine.assert_ledger()


@pytest.mark.parametrize("step_tokens", [1, 4, 7])
def test_in_any_chunks(step_tokens: int) -> None:
    with open_engine() as whole, open_engine(engine_config(step_tokens=step_tokens)) as chunked:
        prompt = tokens(30)
        expected = asked(whole, 3, prompt).prompt_logprobs
        assert asked(chunked, 3, prompt).prompt_logprobs == expected


def test_computed_again_after_a_preemption_they_are_there_once() -> None:
    """Two turns of 60 tokens in 20 blocks of 4."""
    with open_engine() as engine:
        alone = [asked(engine, 2, tokens(30, start=n)).prompt_logprobs for n in range(2)]
    gate = StepGate()
    with open_engine(engine_config(blocks=20), gate=gate) as engine:
        streams = []
        for number in range(2):
            asking = engine.stream_generate(
                tokens=tokens(30, start=number), sampling=greedy(30), prompt_logprobs=2
            )
            streams.append(asking)
            gate.reached()
        engine.await_messages(1)
        gate.open()
        for stream, expected in zip(streams, alone, strict=True):
            list(stream)
            assert stream.result is not None
            assert stream.result.prompt_logprobs == expected
        assert engine.stats()["preemptions"] > 0
        engine.assert_ledger()


def test_a_prompt_of_one_token_has_none() -> None:
    with open_engine() as engine:
        result = engine.generate(tokens=[7], sampling=GREEDY, prompt_logprobs=0)
        assert not result.prompt_logprobs


def test_over_a_socket_and_replayed(tmp_path: Path) -> None:
    with socket_engine(tmp_path) as served, served.client() as client:
        first, again = (
            client.generate(tokens=PROMPT, sampling=GREEDY, prompt_logprobs=2, idempotency_key="k")
            for _ in range(2)
        )
        assert first.prompt_logprobs is not None
        assert len(first.prompt_logprobs) == 10
        assert (again.replayed, again.prompt_logprobs) == (True, first.prompt_logprobs)


@pytest.mark.parametrize("count", [-1, 21, True, 1.5])
def test_how_many_is_checked(count: object) -> None:
    with open_engine() as engine, pytest.raises(InvalidRequest, match="prompt_logprobs is"):
        engine.generate(tokens=PROMPT, sampling=GREEDY, prompt_logprobs=count)


def test_what_would_be_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sessionkv.actor.writer.MAX_PROMPT_LOGPROBS", 33)
    with open_engine() as engine:
        asked(engine, 2)
        with pytest.raises(InvalidRequest, match="the prompt has 11 tokens"):
            asked(engine, 3)


def test_over_http_warm_they_are_what_they_were_cold() -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    with http_engine() as served:

        def told(**fields: object) -> tuple[list[object], int]:
            answer = served.post("/v1/completions", body | fields).json()
            logprobs = answer["choices"][0]["logprobs"]
            prompt = [] if logprobs is None else list(zip(*logprobs.values(), strict=True))
            return prompt, answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        cold, warm = (told(echo=True, logprobs=1) for _ in range(2))
        assert cold == warm
        assert (len(cold[0]), cold[0][0][1], cold[1]) == (len(PROMPT) + 2, None, 0)
        assert told() == ([], len(PROMPT) - 1)
        assert told(echo=True, logprobs=1) == cold
