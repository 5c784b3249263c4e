"""The routes of the page: sessions, tree, places, figures, turns and what is done to sessions."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sessionkv.engine.messages import CancelTurn
from sessionkv.gateway.page_files import FOLDER, HEADERS
from tests.builders.engine import StepGate, engine_config
from tests.builders.gateway import HttpEngine, http_engine, replies

V1 = "/sessionkv/v1"
ODD = 'a/b?c=d&e #%2F "<img src=x onerror=alert(1)>" ü \u202e'


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with http_engine(runner={"script": replies("Hello there.", "And again.")}) as engine:
        yield engine


def get(served: HttpEngine, path: str, **query: Any) -> Any:
    answer = served.http.get(f"{V1}/{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def post(served: HttpEngine, path: str, **body: Any) -> Any:
    answer = served.post(f"{V1}/{path}", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def say(served: HttpEngine, session: str, text: str, **body: Any) -> list[tuple[str, Any]]:
    """Events of a turn."""
    with served.http.stream(
        "POST", f"{V1}/turn", json={"session": session, "text": text, **body}
    ) as answer:
        return events(answer.read().decode(), answer.status_code)


def events(text: str, status: int) -> list[tuple[str, Any]]:
    assert status == 200, text
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def error(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_turn_streams_and_ends_with_its_report(served: HttpEngine) -> None:
    post(served, "open", session="turn", system="Be kind.")
    *deltas, (last, done) = say(served, "turn", "Hi")
    assert {name for name, _ in deltas} == {"delta"}
    assert last == "done"
    assert "".join(delta["text"] for _, delta in deltas) == done["text"] == "Hello there."
    assert done["finish_reason"] == "stop"
    cache = done["cache"]
    assert cache["cached_tokens"] + cache["computed_tokens"] == cache["prompt_tokens"]
    assert cache["miss"]["reason"] == "first_turn"
    again = say(served, "turn", "More")[-1][1]
    assert again["cache"]["device_tokens"] > 0
    assert again["text"] == "And again."
    assert get(served, "session", session="turn")["last_cache"] == again["cache"]


def until_told_to_cancel(served: HttpEngine) -> None:
    for _ in range(30_000):
        if any(
            isinstance(message, CancelTurn) for message in list(served.engine.host.inbox._items)
        ):
            return
        threading.Event().wait(0.001)
    raise AssertionError("no cancel came to the core")


def test_a_turn_can_be_stopped_by_its_name_and_kept() -> None:
    gate = StepGate(lambda plan: plan.num_tokens == 1)
    with http_engine(gate=gate, runner={"script": replies("Hello there.")}) as served:
        post(served, "open", session="a")
        with ThreadPoolExecutor(2) as pool:
            told = pool.submit(say, served, "a", "Hi", turn="mine")
            gate.reached()  # the core stands before the second token
            stopped = pool.submit(post, served, "stop", turn="mine")
            until_told_to_cancel(served)
            gate.open()
            assert stopped.result() == {"found": True}
            name, done = told.result()[-1]
        assert name == "done"
        assert done["finish_reason"] == "cancelled"
        assert "Hello there.".startswith(done["text"])
        assert get(served, "session", session="a")["turns"] == 1
        assert post(served, "stop", turn="mine") == {"found": False}


def test_history_has_each_message_with_its_turn(served: HttpEngine) -> None:
    post(served, "open", session="told", system="Be kind.")
    node = say(served, "told", "Hi")[-1][1]["node"]
    told = get(served, "history", session="told")
    assert told["session"]["turns"] == 1
    assert [(m["role"], m["content"]) for m in told["messages"]] == [
        ("system", "Be kind."),
        ("user", "Hi"),
        ("assistant", "Hello there."),
    ]
    assert [m["node"] == node for m in told["messages"]] == [False, True, True]


def test_forks_and_rewinds_show_in_the_tree(served: HttpEngine) -> None:
    post(served, "open", session="tree a")
    first = say(served, "tree a", "one")[-1][1]["node"]
    second = say(served, "tree a", "two")[-1][1]["node"]
    forked = post(served, "fork", session="tree a", name="tree b", node=first)
    assert (forked["name"], forked["node"], forked["turns"]) == ("tree b", first, 1)
    other = say(served, "tree b", "other")[-1][1]["node"]
    tree = get(served, "tree", prefix="tree ")
    assert [session["name"] for session in tree["sessions"]] == ["tree a", "tree b"]
    root, *nodes = tree["nodes"]
    assert root["parent"] is None
    assert nodes == [
        {"node": first, "parent": root["node"], "turn": 1, "heads": []},
        {"node": second, "parent": first, "turn": 2, "heads": ["tree a"]},
        {"node": other, "parent": first, "turn": 2, "heads": ["tree b"]},
    ]
    alone = get(served, "tree", session="tree b")
    assert [node["node"] for node in alone["nodes"]] == [root["node"], first, other]

    rewound = post(served, "rewind", session="tree a", turns=1)
    assert (rewound["node"], rewound["turns"]) == (first, 1)
    beyond = served.post(f"{V1}/rewind", {"session": "tree a", "turns": 9})
    assert error(beyond) == (400, "rewind_beyond_root")


def test_pins_come_and_go(served: HttpEngine) -> None:
    post(served, "open", session="pinned")
    pinned = post(served, "pin", session="pinned", tier="device", ttl_s=60, priority=7)
    assert (pinned["pin"]["tier"], pinned["pin"]["priority"]) == ("device", 7)
    assert pinned["pin"]["expires_s"] is not None
    assert post(served, "unpin", session="pinned")["pin"] is None


def test_places_follow_the_blocks() -> None:
    config = engine_config(blocks=64, host_blocks=16)
    with http_engine(config, runner={"script": replies("x" * 30)}) as served:
        post(served, "open", session="a")
        say(served, "a", "Hi")
        places = get(served, "places", session="a")
        assert places["counts"] == {"device": places["blocks"]}
        assert places["runs"] == [["device", places["blocks"]]]
        post(served, "open", session="b")
        say(served, "b", "y" * 170)
        pressed = get(served, "places", session="a")
        assert pressed["blocks"] == places["blocks"]
        assert pressed["counts"] != places["counts"]


def test_closing_keeps_or_deletes(served: HttpEngine) -> None:
    post(served, "open", session="closed")
    assert post(served, "close", session="closed") == {"closed": True}
    assert get(served, "session", session="closed")["turns"] == 0
    post(served, "close", session="closed", keep=False)
    gone = served.http.get(f"{V1}/session", params={"session": "closed"})
    assert error(gone) == (404, "session_not_found")


def test_lists_come_by_pages(served: HttpEngine) -> None:
    for number in range(5):
        post(served, "open", session=f"page {number}")
    names: list[str] = []
    after: str | None = None
    while True:
        query = {"prefix": "page ", "limit": 2} | ({} if after is None else {"after": after})
        page = get(served, "sessions", **query)
        assert len(page["sessions"]) <= 2
        names += [session["name"] for session in page["sessions"]]
        after = page["next"]
        if after is None:
            break
    assert names == [f"page {number}" for number in range(5)]


def test_names_may_hold_anything(served: HttpEngine) -> None:
    opened = post(served, "open", session=ODD)
    assert opened["name"] == ODD
    say(served, ODD, "Hi")
    for path in ("session", "history", "places", "tree"):
        get(served, path, session=ODD)
    assert get(served, "sessions", prefix=ODD)["sessions"][0]["name"] == ODD
    post(served, "close", session=ODD, keep=False)


def test_a_watcher_is_told_of_figures_and_of_its_session(served: HttpEngine) -> None:
    post(served, "open", session="watched")
    with served.http.stream("GET", f"{V1}/events", params={"session": "watched"}) as answer:
        text = ""
        for piece in answer.iter_text():
            text += piece
            if text.count("event: stats") == 2:
                break
    told = events(text[: text.rindex("event: stats")], answer.status_code)
    assert [name for name, _ in told] == ["engine", "stats", "session"]  # nothing changed since
    assert told[0][1]["model"] == "checksum"
    assert "kv" in told[1][1]
    assert told[2][1]["session"]["name"] == "watched"
    assert told[2][1]["places"]["blocks"] == 0


def test_a_watcher_of_a_session_that_is_gone_is_told_so(served: HttpEngine) -> None:
    with served.http.stream("GET", f"{V1}/events", params={"session": "never"}) as answer:
        text = ""
        for piece in answer.iter_text():
            text += piece
            if "event: session" in text and text.endswith("\n\n"):
                break
    assert events(text, answer.status_code)[-1] == (
        "session",
        {"name": "never", "session": None, "places": None},
    )


def test_figures_are_those_of_the_engine(served: HttpEngine) -> None:
    with served.engine.client() as client:
        assert get(served, "stats").keys() == client.stats().keys()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("open", {}, "session"),
        ("open", {"session": ""}, "session"),
        ("open", {"session": "x\0"}, "session"),
        ("open", {"session": "x", "history": "some"}, "history"),
        ("turn", {"session": "x"}, "text"),
        ("turn", {"session": "x", "text": "t", "sampling": {"temperature": -1}}, "temperature"),
        ("turn", {"session": "x", "text": "t", "sampling": {"max_tokens": 0}}, "max_tokens"),
        ("turn", {"session": "x", "text": "t", "when_busy": "no"}, "when_busy"),
        ("fork", {"session": "x", "name": "y" * 5000}, "name"),
        ("fork", {"session": "x", "name": "y", "node": "zzz"}, "node"),
        ("rewind", {"session": "x", "turns": 0}, "turns"),
        ("pin", {"session": "x", "tier": "moon"}, "tier"),
        ("pin", {"session": "x", "priority": 101}, "priority"),
        ("pin", {"session": "x", "ttl_s": -1}, "ttl_s"),
        ("close", {"session": "x", "keep": 5}, "keep"),
        ("open", {"session": "\ud800"}, "session"),
        ("open", {"session": "x", "budget_bytes": 2**70}, "budget_bytes"),
        ("turn", {"session": "x", "text": "\ud800"}, "text"),
        ("turn", {"session": "x", "text": "t", "sampling": {"seed": -1}}, "seed"),
        ("turn", {"session": "x", "text": "t", "sampling": {"stop": ["x" * 300]}}, "stop[0]"),
        ("rewind", {"session": "x", "turns": 2**40}, "turns"),
        ("pin", {"session": "x", "ttl_s": 1e300}, "ttl_s"),
    ],
)
def test_bad_input_is_named(served: HttpEngine, path: str, body: Any, param: str) -> None:
    if path in ("fork", "turn"):
        post(served, "open", session="x")
    headers = {"Content-Type": "application/json"}
    answer = served.http.post(f"{V1}/{path}", content=json.dumps(body), headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].split(".")[-1] == param


@pytest.mark.parametrize("path", ["history", "session", "places", "tree"])
def test_an_unknown_session_is_not_found(served: HttpEngine, path: str) -> None:
    answer = served.http.get(f"{V1}/{path}", params={"session": "nobody"})
    assert error(answer) == (404, "session_not_found")


def test_a_turn_of_an_unknown_session_has_a_true_status(served: HttpEngine) -> None:
    answer = served.post(f"{V1}/turn", {"session": "nobody", "text": "Hi"})
    assert error(answer) == (404, "session_not_found")


def test_a_name_that_is_taken_is_a_conflict(served: HttpEngine) -> None:
    post(served, "open", session="taken")
    answer = served.post(f"{V1}/fork", {"session": "taken", "name": "taken"})
    assert error(answer) == (409, "session_exists")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Host": "evil.example"},
        {"Origin": "null"},
    ],
)
def test_other_sites_change_nothing(served: HttpEngine, headers: dict[str, str]) -> None:
    answer = served.post(f"{V1}/open", {"session": "foreign"}, headers=headers)
    assert answer.status_code == 403
    assert get(served, "sessions", prefix="foreign")["sessions"] == []


def test_the_page_itself_may(served: HttpEngine) -> None:
    own = {"Sec-Fetch-Site": "same-origin", "Origin": served.url}
    answer = served.post(f"{V1}/open", {"session": "own"}, headers=own)
    assert answer.status_code == 200


def test_files_of_the_page_are_closed_to_anything_else(served: HttpEngine) -> None:
    for path in ("/", *(f"/page/{file.name}" for file in FOLDER.iterdir())):
        answer = served.http.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert dict(answer.headers).items() >= {k.lower(): v for k, v in HEADERS.items()}.items()
        again = served.http.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for path in ("/page/nothing.js", "/page/..%2Fadmin.py", "/page/%2Fetc%2Fpasswd"):
        assert served.http.get(path).status_code == 404


def test_no_file_of_the_page_names_another_site() -> None:
    for file in FOLDER.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, file.name
        assert "innerHTML" not in text, file.name
        assert "eval(" not in text, file.name
