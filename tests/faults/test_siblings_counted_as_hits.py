"""Several answers to one cold prompt read each other's blocks; that is no hit of the request."""

from __future__ import annotations

import pytest

from tests.builders.checksum import tokens
from tests.builders.engine import StepGate, engine_config, greedy, open_engine, oracle
from tests.builders.gateway import MODEL, http_engine

QUESTION = {"role": "user", "content": "a question that nobody has asked before this one"}
ASKED = {
    "chat/completions": {"messages": [QUESTION]},
    "completions": {"prompt": "a beginning that nobody has written before this one"},
}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [False, True])
def test_three_answers_report_the_hits_of_their_prompt(path: str, stream: bool) -> None:
    body = {"model": MODEL, "n": 3, "max_tokens": 4, "stream": stream, **ASKED[path]}
    if stream:
        body["stream_options"] = {"include_usage": True}
    with http_engine() as served:
        usages = []
        for _ in range(2):
            if stream:
                usages.append(served.stream(f"/v1/{path}", body)[-2]["usage"])
            else:
                usages.append(served.post(f"/v1/{path}", body).json()["usage"])
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        (prompt,) = {usage["prompt_tokens"] for usage in usages}
        assert cached == [0, prompt - 1]


def test_of_siblings_in_the_engine_the_first_computes_and_the_rest_share() -> None:
    """Each report is true: a sibling is told of the blocks that it did not have to compute."""
    gate = StepGate()
    with open_engine(engine_config(blocks=64), gate=gate) as engine:
        first = engine.stream_generate(tokens=[7], sampling=greedy(1))
        gate.reached()
        streams = [engine.stream_generate(tokens=tokens(13), sampling=greedy(4)) for _ in range(3)]
        engine.await_messages(3)
        gate.open()
        reports = []
        for stream in (first, *streams):
            list(stream)
            assert stream.result is not None
            reports.append(stream.result.cache)
        assert [list(s.result.tokens) for s in streams if s.result] == [
            oracle(tokens(13), greedy(4))
        ] * 3
        assert [report.cached_tokens for report in reports] == [0, 0, 12, 12]
        assert [report.computed_tokens for report in reports] == [1, 13, 1, 1]
        cache = engine.stats()["prefix_cache"]
        assert (cache["queries_tokens"], cache["hits_tokens"]) == (1 + 3 * 13, 24)
        engine.assert_ledger()
