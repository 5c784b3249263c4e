"""Hits over HTTP tell a key of nobody else's prompts, whatever it says that it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders.apis import ALL, COMPLETIONS, MESSAGES, RESPONSES, Api
from tests.builders.engine import engine_config, socket_engine
from tests.builders.gateway import Gateway, gateway
from tests.builders.tenants import KEYS, access

SERVICE = "the-gateways-own"
CLAIMS: dict[str, Any] = {
    "user": "alice",
    "prompt_cache_key": "alices",
    "session_id": "alices",
    "safety_identifier": "alice",
    "cache_salt": "alice",
    "tenant": "alice",
}
CLAIMED = {"x-session-id": "alices", "session_id": "alices", "x-tenant": "alice"}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder: Path = tmp_path_factory.mktemp("engine")
    granted = access().with_service(SERVICE)
    runner = {"script": lambda ids: 97}
    with (
        socket_engine(folder, engine_config(blocks=512), access=granted, runner=runner) as engine,
        gateway(engine.endpoint, key=SERVICE) as served,
    ):
        for key in ("alice", "bob"):  # each has its connection from here on
            cached(served, MESSAGES, key, MESSAGES.body("Hi", limit=1), stream=False)
        yield served


def cached(served: Gateway, api: Api, key: str, body: dict[str, Any], *, stream: bool) -> int:
    """Tokens found, as the API and the engine's report tell them."""
    headers = CLAIMED | {"authorization": f"Bearer {KEYS[key]}"}
    if stream:
        events = served.stream(api.path, body | api.streaming, headers=headers)
        last = events[-1] if api in (RESPONSES, MESSAGES) else events[-2]
        found, report = api.gather(events), last.get("response", last)["sessionkv"]
    else:
        answer = served.post(api.path, body, headers=headers)
        assert answer.status_code == 200, answer.text
        found, report = api.read(answer.json()), answer.json()["sessionkv"]
    assert report["cache"]["cached_tokens"] == found.usage[1]
    return found.usage[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ALL, ids=repr)
def test_anothers_prompt_is_found(keyed: Gateway, api: Api, stream: bool) -> None:
    """Both keys have asked the same so far, so they find the same; the one that asks again is the
    control that caching is on."""
    system = {"role": "system", "content": f"{api} {stream} a secret of thirty-two tokens here"}
    said = [system["content"]] if api is COMPLETIONS else [system, "Hi"]
    body = api.body(*said, limit=2, **CLAIMS)
    asked = ("alice", "bob", "alice", "bob")
    found = [cached(keyed, api, key, body, stream=stream) for key in asked]
    assert found[0] == found[1] < found[2] - 32
    assert found[2] == found[3]
