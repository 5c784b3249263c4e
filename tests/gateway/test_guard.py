"""Who gets in over HTTP: every route asks for a key where the engine has keys; see ``guard.py``."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.routing import Mount, Route

from sessionkv.gateway.app import create_app
from sessionkv.gateway.guard import is_loopback, key_of
from sessionkv.gateway.settings import GatewaySettings
from tests.builders.engine import engine_config, socket_engine
from tests.builders.gateway import Gateway, gateway, http_engine
from tests.builders.tenants import KEYS, access

SERVICE = "the-gateways-own"
APP = create_app(GatewaySettings("ipc:///nowhere", key=SERVICE))
BODY = {
    "model": "checksum",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 4,
    "temperature": 0,
}


def routes(of: Any = APP) -> list[tuple[str, str]]:
    """Method and a path of every route there is, those of other modules too."""
    found: list[tuple[str, str]] = []
    for route in of.routes:
        if (included := getattr(route, "original_router", None)) is not None:
            found += routes(included)
            continue
        assert isinstance(route, APIRoute | Route | Mount), route
        path = route.path
        for name in getattr(route, "param_convertors", {}):
            path = path.replace("{" + name + "}", "x").replace("{" + name + ":path}", "x")
        for method in sorted(getattr(route, "methods", None) or {"GET"}):
            found.append((method, path or "/"))
    return found


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("e")
    with (
        socket_engine(
            folder, engine_config(blocks=512), access=access().with_service(SERVICE)
        ) as engine,
        gateway(engine.endpoint, key=SERVICE) as served,
    ):
        for key in (*KEYS.values(), SERVICE, "nobody"):  # connections are made at their first use
            served.http.get("/ready", headers=bearer(key))
        yield served


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_the_routes_that_must_be_covered_are_among_them() -> None:
    paths = {path for _, path in routes()}
    assert paths >= {"/health", "/ready", "/version", "/metrics", "/openapi.json"}
    assert paths >= {"/v1/models", "/v1/chat/completions"}


@pytest.mark.parametrize("headers", [{}, bearer("nobody"), {"x-api-key": KEYS["bob"] + "x"}])
def test_every_route_asks_for_a_key(keyed: Gateway, headers: dict[str, str]) -> None:
    for method, path in [*routes(), ("GET", "/no/such"), ("PUT", "/metrics")]:
        answer = keyed.http.request(method, path, headers=headers)
        if path == "/health":
            assert answer.status_code == 200
            assert answer.json() == {"status": "ok"}
            continue
        if path in ("/", "/page/x"):  # files of the page, the same for everybody
            assert answer.status_code == (200 if path == "/" else 404)
            continue
        assert answer.status_code == 401, (method, path)
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        if method != "HEAD":
            assert set(answer.json()) <= {"error", "type"}


@pytest.mark.parametrize(
    "path", ["//metrics", "/health/", "/health/../metrics", "/%2e/metrics", "/page"]
)
def test_other_ways_to_write_a_path_open_nothing(keyed: Gateway, path: str) -> None:
    with httpx.Client() as client:
        assert client.send(httpx.Request("GET", f"{keyed.url}{path}")).status_code == 401


@pytest.mark.parametrize("path", ["/page/../metrics", "/page/%2e%2e/metrics", "/page//metrics"])
def test_the_pages_folder_leads_nowhere_else(keyed: Gateway, path: str) -> None:
    with httpx.Client() as client:
        url = httpx.URL(keyed.url).copy_with(raw_path=path.encode())
        answer = client.send(httpx.Request("GET", url))
    assert answer.status_code in (401, 404)
    assert "sessionkv_" not in answer.text


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEYS["bob"]),
        {"x-api-key": KEYS["bob"]},
        {"Authorization": f"bearer  {KEYS['bob']}"},
        {"Authorization": "Basic " + base64.b64encode(f"me:{KEYS['bob']}".encode()).decode()},
    ],
)
def test_a_key_opens_them_all(keyed: Gateway, headers: dict[str, str]) -> None:
    for path in ("/ready", "/version", "/metrics", "/openapi.json", "/v1/models"):
        assert keyed.http.get(path, headers=headers).status_code == 200, path
    answer = keyed.post("/v1/chat/completions", BODY, headers=headers)
    assert answer.status_code == 200


def test_the_gateways_own_key_can_do_nothing(keyed: Gateway) -> None:
    answer = keyed.post("/v1/chat/completions", BODY, headers=bearer(SERVICE))
    assert answer.status_code == 429


def test_hits_of_one_key_are_not_anothers(keyed: Gateway) -> None:
    """Tenants, over HTTP; the same key again is the control that caching is on."""
    body = BODY | {"messages": [{"role": "user", "content": "a secret of thirty-two tokens here"}]}
    cached = []
    for name in ("alice", "root", "alice", "root"):
        answer = keyed.post("/v1/chat/completions", body, headers=bearer(KEYS[name])).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[:2] == [0, 0]
    assert cached[2] == cached[3] > 0


def test_an_id_of_anothers_answer_is_not_known(keyed: Gateway) -> None:
    def ask(name: str, previous: str | None, system: str) -> dict[str, Any]:
        body = {
            "model": "checksum",
            "max_tokens": 2,
            "system": system,
            "messages": [{"role": "user", "content": "Hi"}],
            "diagnostics": {"previous_message_id": previous},
        }
        headers = bearer(KEYS[name]) | {"anthropic-beta": "x"}
        answer = keyed.post("/v1/messages", body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    hers = ask("alice", None, "secret")["id"]
    guesses = [ask("bob", hers, guess)["diagnostics"] for guess in ("secret", "other")]
    assert guesses == [{"cache_miss_reason": {"type": "previous_message_not_found"}}] * 2
    assert ask("alice", hers, "secret")["diagnostics"] is None
    assert ask("alice", hers, "x")["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/{}"),
        ("DELETE", "/v1/responses/{}"),
        ("GET", "/v1/responses/{}/input_items"),
    ],
)
def test_anothers_response_is_as_one_that_is_not_there(
    keyed: Gateway, method: str, path: str
) -> None:
    body = {"model": "checksum", "input": "Hi", "max_output_tokens": 16}
    made = keyed.post("/v1/responses", body, headers=bearer(KEYS["alice"])).json()["id"]
    never = made[:-4] + "0000"

    def answer(name: str, which: str) -> tuple[int, str]:
        found = keyed.http.request(method, path.format(which), headers=bearer(KEYS[name]))
        return found.status_code, found.text.replace(which, "ID")

    assert answer("bob", made) == answer("bob", never)
    assert answer("bob", made)[0] == 404
    chained = [
        keyed.post(
            "/v1/responses", body | {"previous_response_id": which}, headers=bearer(KEYS["bob"])
        )
        for which in (made, never)
    ]
    assert [one.status_code for one in chained] == [400, 400]
    assert chained[0].text.replace(made, never) == chained[1].text
    assert answer("alice", made)[0] == 200


@pytest.mark.parametrize(("accept", "asks"), [("text/html,*/*", True), ("*/*", False)])
def test_a_browser_asks_for_what_is_opened_in_it_alone(
    keyed: Gateway, accept: str, asks: bool
) -> None:
    answer = keyed.http.get("/openapi.json", headers={"Accept": accept})
    assert answer.status_code == 401
    assert ("Basic" in answer.headers["WWW-Authenticate"]) is asks


def test_errors_have_the_shape_of_their_api(keyed: Gateway) -> None:
    openai = keyed.http.get("/v1/models").json()["error"]
    assert (openai["type"], openai["code"]) == ("authentication_error", "unauthorized")
    anthropic = keyed.http.get("/v1/messages").json()
    assert anthropic["type"] == "error"
    assert anthropic["error"]["type"] == "authentication_error"


def test_a_flood_of_unknown_keys_takes_nobodys_place(tmp_path: Path) -> None:
    with (
        socket_engine(tmp_path, access=access().with_service(SERVICE)) as engine,
        gateway(engine.endpoint, key=SERVICE, clients=2) as served,
    ):
        for i in range(20):
            assert served.http.get("/ready", headers=bearer(f"guess-{i}")).status_code == 401
        assert served.http.get("/ready", headers=bearer(KEYS["bob"])).status_code == 200


def test_a_key_that_is_taken_back_and_given_again(tmp_path: Path) -> None:
    keys = access().with_service(SERVICE)
    fewer = type(keys)(tuple(key for key in keys.keys if key.name != "bob"))
    with (
        socket_engine(tmp_path, access=keys) as engine,
        gateway(engine.endpoint, key=SERVICE) as served,
        engine.client(KEYS["root"]) as root,
    ):

        def status(name: str) -> int:
            return served.http.get("/metrics", headers=bearer(KEYS[name])).status_code

        assert status("bob") == 200
        engine.host.renew_access(fewer)
        root.stats()
        assert {status("bob") for _ in range(50)} <= {401, 503}
        assert status("alice") == 200
        engine.host.renew_access(keys)
        root.stats()
        assert status("bob") == 200


# Without keys: this machine's users only


@pytest.fixture(scope="module")
def open_gateway() -> Iterator[Gateway]:
    with http_engine(hosts=["box.lan"], cors_origins=["https://app.example"]) as served:
        yield served


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:8000", 200),
        ("box.lan:8000", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("10.0.0.7", 403),
        ("", 403),
        ("[", 403),
        ("[::1", 403),
        ("]:1", 403),
        ("[evil]:8000", 403),
    ],
)
def test_only_names_of_this_machine_without_keys(
    open_gateway: Gateway, host: str, status: int
) -> None:
    assert open_gateway.http.get("/ready", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/openapi.json"])
def test_a_rebound_name_is_refused_on_every_route(open_gateway: Gateway, path: str) -> None:
    assert open_gateway.http.get(path, headers={"Host": "evil.example"}).status_code == 403


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("https://evil.example", 403),
        ("null", 403),
        ("http://[", 403),
        ("http://[::1", 403),
        ("://", 403),
        ("", 403),
        ("https://app.example", 200),
        ("http://app.example", 403),
    ],
)
def test_pages_of_other_origins_are_refused(
    open_gateway: Gateway, origin: str, status: int
) -> None:
    answer = open_gateway.http.get("/v1/models", headers={"Origin": origin})
    assert answer.status_code == status
    allowed = answer.headers.get("access-control-allow-origin")
    assert allowed == (origin if status == 200 else None)


def test_its_own_page_may_call(open_gateway: Gateway) -> None:
    answer = open_gateway.http.get("/v1/models", headers={"Origin": open_gateway.url})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


def test_cors_is_off_unless_asked_for(keyed: Gateway) -> None:
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    answer = keyed.http.options("/v1/models", headers=asked | bearer(KEYS["bob"]))
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


def test_a_page_that_is_allowed_asks_first(open_gateway: Gateway) -> None:
    asked = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    answer = open_gateway.http.options("/v1/chat/completions", headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, None),
        ({"authorization": ""}, None),
        ({"authorization": "Bearer"}, None),
        ({"authorization": "Bearer  "}, None),
        ({"authorization": "Token x"}, None),
        ({"authorization": "Basic %%%"}, None),
        ({"authorization": "Basic " + base64.b64encode(b"no-colon").decode()}, None),
        ({"authorization": "Bearer k"}, "k"),
        ({"authorization": "Bearer k", "x-api-key": "other"}, "k"),
        ({"x-api-key": " k "}, "k"),
        ({"x-api-key": "é"}, None),
        ({"x-api-key": "k" * 4097}, None),
    ],
)
def test_where_a_key_is_looked_for(headers: dict[str, str], key: str | None) -> None:
    assert key_of(Headers(headers)) == key


def test_which_names_are_this_machines() -> None:
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.9.9.9", "::1"]))
    assert not any(map(is_loopback, ["", "0.0.0.0", "::", "localhost.", "10.0.0.1", "x"]))
