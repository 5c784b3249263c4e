"""More turns than may wait: a request past that is told when to come back, at once."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, HttpEngine, http_engine

ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}


def narrow() -> Any:
    """One runs and one waits."""
    config = engine_config(blocks=1024)
    return replace(config, scheduler=replace(config.scheduler, max_running=1, max_queue=1))


def check(refused: httpx.Response) -> None:
    assert refused.status_code == 429, refused.text
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"


def settle(served: HttpEngine) -> None:
    with served.engine.client() as client:
        for _ in range(10_000):  # each question is a round through the core
            if not client.stats()["ledger"]["sequences"]:
                break
    assert served.engine.parts.kv.ledger().idle


@pytest.mark.parametrize("path", ASKED)
def test_answers_that_cannot_all_be_computed_are_given_up_together(path: str) -> None:
    with http_engine(narrow()) as served:
        body = {"model": MODEL, "ignore_eos": True, "max_tokens": 1500} | ASKED[path]
        check(served.post(path, body | {"n": 4}))
        settle(served)
        assert served.post(path, body | {"max_tokens": 3}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_to_a_full_engine_is_refused(stream: bool) -> None:
    path = "/v1/chat/completions"
    with http_engine(narrow()) as served:
        body = {"model": MODEL, "ignore_eos": True} | ASKED[path]

        def fill() -> None:
            while served.post(path, body | {"n": 2, "max_tokens": 2000}).status_code != 200:
                pass  # one of the small ones was there sooner

        filling = threading.Thread(target=fill)
        filling.start()
        refused = served.post(path, body | {"stream": stream, "max_tokens": 1})
        while refused.status_code == 200 and filling.is_alive():
            refused = served.post(path, body | {"stream": stream, "max_tokens": 1})
        check(refused)
        filling.join()
