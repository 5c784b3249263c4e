"""An error behind the first byte: no last event, or one that looks like the answer's own end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.builders.gateway import MODEL, http_engine

ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": [1, 2, 3]},
}
PROMPT = {"/v1/chat/completions": 33, "/v1/completions": 3}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("n", [1, 2])
def test_one_error_event_ends_the_stream(path: str, n: int) -> None:
    fails = {"fail_sequence": lambda _, ids: len(ids) >= PROMPT[path] + 3}
    body = {"model": MODEL, "stream": True, "n": n, "temperature": 0, "ignore_eos": True}
    with http_engine(runner=fails) as served:
        *chunks, error = served.stream(path, body | ASKED[path])
        assert chunks
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert error["error"]["code"] == "turn_failed"
        assert error["error"]["type"] == "server_error"
        whole = served.post(path, body | ASKED[path] | {"stream": False})
        assert whole.status_code == 500
        assert whole.json()["error"]["code"] == "turn_failed"


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("bad", [{"n": 0}, {"max_tokens": 10**7}, {"temperature": -1}])
def test_an_error_before_the_first_byte_is_a_status(path: str, bad: dict[str, Any]) -> None:
    with http_engine() as served:
        answer = served.post(path, {"model": MODEL, "stream": True} | ASKED[path] | bad)
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/json"
