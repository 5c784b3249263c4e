"""More requests than may wait: each one past that is told when to come back, at once."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.builders.engine import StepGate, engine_config
from tests.builders.gateway import MODEL, http_engine

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 3,
}


@pytest.mark.parametrize("stream", [True, False])
def test_429_with_a_time_to_come_back(stream: bool) -> None:
    config = engine_config(blocks=64)
    config = replace(config, scheduler=replace(config.scheduler, max_running=1, max_queue=1))
    gate = StepGate()
    with http_engine(config, gate=gate) as served:
        statuses: list[int] = []

        def ask() -> None:
            statuses.append(served.post(CHAT, BODY).status_code)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        threads[0].start()
        gate.reached()
        threads[1].start()
        refused = served.post(CHAT, BODY | {"stream": stream})
        while refused.status_code == 200:  # it was sooner than the second, and waited
            refused = served.post(CHAT, BODY | {"stream": stream})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        gate.open()
        for thread in threads:
            thread.join(30)
        assert statuses == [200, 200]
