"""Whatever the served OpenAPI document allows, and what it does not, is answered without a 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck

from sessionkv.gateway.app import create_app
from sessionkv.gateway.settings import GatewaySettings
from tests.builders.gateway import HttpEngine, http_engine

# The document is the same whatever engine is served.
_DOCUMENT = create_app(GatewaySettings("ipc:///nowhere")).openapi()
_WAYS = {"/v1/chat/completions": "POST", "/v1/completions": "POST", "/v1/models": "GET"}
schema = schemathesis.openapi.from_dict(_DOCUMENT).include(path=list(_WAYS))


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with http_engine() as engine:
        yield engine


@schema.parametrize()
@hypothesis.settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_no_request_is_a_server_error(case: Any, served: HttpEngine) -> None:
    if isinstance(case.body, dict):
        if case.body.get("model"):
            case.body["model"] = "checksum"  # an unknown model would end every request alike
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], 8)
        case.body.setdefault("max_tokens", 4)
    response = case.call(base_url=served.url)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert response.json()["error"]["message"]
