"""More turns than may wait: a request past that is told when to come back, at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from sessionkv.types import StepPlan
from tests.builders.apis import ALL, MESSAGES, Api
from tests.builders.doors import Hold
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


class Slow(Hold):
    """Goes on for two minutes at least with what is held."""

    def gate(self, plan: StepPlan) -> None:
        self._released.wait(0.1)


@pytest.fixture(scope="module")
def held() -> Iterator[HttpEngine]:
    """One turn runs and one waits, until the end."""
    hold = Slow()
    runner = {"script": hold.script}
    with (
        http_engine(narrow(), gate=hold.gate, runner=runner) as served,
        ThreadPoolExecutor(2) as pool,
        served.engine.client() as client,
    ):
        body = {"model": MODEL, "max_tokens": 1500} | ASKED["/v1/completions"]
        filling = []
        for there in ((1, 0), (1, 1)):  # the second may come only when the first runs
            filling.append(pool.submit(served.post, "/v1/completions", body))
            for _ in range(10_000):  # each question is a round through the core
                stats = client.stats()
                if (stats["requests_running"], stats["requests_waiting"]) == there:
                    break
        yield served
        hold.release()
        assert [one.result().status_code for one in filling] == [200, 200]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", ALL, ids=repr)
def test_a_request_to_a_full_engine_waits(held: HttpEngine, api: Api, stream: bool) -> None:
    body = api.body("Hi", limit=1)
    refused = held.post(api.path, body | {"stream": stream})
    assert refused.status_code == (529 if api is MESSAGES else 429), refused.text
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert error["type"] == ("overloaded_error" if api is MESSAGES else "rate_limit_error")
    assert error["code"] == "overloaded"
