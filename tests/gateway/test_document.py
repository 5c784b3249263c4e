"""The OpenAPI document says what is answered: the statuses, and what a stream is."""

from typing import Any

import pytest

from sessionkv.gateway.app import create_app
from sessionkv.gateway.settings import GatewaySettings

PATHS: dict[str, dict[str, Any]] = create_app(GatewaySettings("ipc:///nowhere")).openapi()["paths"]


def kinds(method: str, path: str) -> set[str]:
    return set(PATHS[path][method]["responses"]["200"]["content"])


def test_what_is_at_fault_is_400_in_the_errors_own_shape() -> None:
    for path, methods in PATHS.items():
        for operation in methods.values():
            answers = operation["responses"]
            assert "422" not in answers, path
            schema = answers["400"]["content"]["application/json"]["schema"]
            assert schema["required"] == ["error"], path


def test_metrics_are_text() -> None:
    assert kinds("get", "/metrics") == {"text/plain"}


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
)
def test_an_answer_may_be_a_stream(path: str) -> None:
    assert kinds("post", path) == {"application/json", "text/event-stream"}


def test_a_stored_response_may_be_a_stream() -> None:
    assert kinds("get", "/v1/responses/{response_id}") == {"application/json", "text/event-stream"}


@pytest.mark.parametrize("name", ["input_tokens", "compact"])
def test_what_responses_are_asked_of_beside_is_described(name: str) -> None:
    operation = PATHS[f"/v1/responses/{name}"]["post"]
    assert operation["requestBody"]["required"]
    assert "application/json" in operation["responses"]["200"]["content"]


@pytest.mark.parametrize(("method", "name"), [("get", "events"), ("post", "turn")])
def test_what_is_a_stream_always(method: str, name: str) -> None:
    assert kinds(method, f"/sessionkv/v1/{name}") == {"text/event-stream"}
