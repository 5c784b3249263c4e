"""Responses and conversations belong to whoever's key made them: to others they are not there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders.engine import engine_config, socket_engine
from tests.builders.gateway import MODEL, Gateway, gateway
from tests.builders.tenants import KEYS, access

SERVICE = "the-gateways-own"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    keys = access().with_service(SERVICE)
    folder = tmp_path_factory.mktemp("e")
    config = engine_config(blocks=512)
    with (
        socket_engine(folder, config, access=keys) as engine,
        gateway(engine.endpoint, key=SERVICE) as served,
    ):
        for key in (*KEYS.values(), SERVICE):  # connections are made at their first use
            served.http.get("/ready", headers=bearer(key))
        yield served


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_another_tenant_finds_nothing(served: Gateway) -> None:
    owner, other, *_ = KEYS.values()

    def ask(method: str, path: str, key: str, body: Any = None) -> Any:
        return served.http.request(method, f"/v1{path}", json=body, headers=bearer(key))

    body = {"model": MODEL, "input": "secret", "max_output_tokens": 4}
    first = ask("POST", "/responses", owner, body).json()
    conversation = ask("POST", "/conversations", owner, {}).json()["id"]
    item = {"items": [{"role": "user", "content": "secret"}]}
    added = ask("POST", f"/conversations/{conversation}/items", owner, item).json()
    paths = (
        ("GET", f"/responses/{first['id']}"),
        ("GET", f"/responses/{first['id']}/input_items"),
        ("DELETE", f"/responses/{first['id']}"),
        ("GET", f"/conversations/{conversation}"),
        ("GET", f"/conversations/{conversation}/items"),
        ("GET", f"/conversations/{conversation}/items/{added['first_id']}"),
        ("DELETE", f"/conversations/{conversation}"),
    )
    for method, path in paths:
        assert ask(method, path, other).status_code == 404, path
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    for fields, status in (
        ({"previous_response_id": first["id"]}, 400),
        ({"conversation": conversation}, 404),
        ({"input": [reference]}, 404),
    ):
        assert ask("POST", "/responses", other, body | fields).status_code == status
    for method, path in paths:
        assert ask(method, path, owner).status_code == 200, path
