"""Conversations of any length hold few sessions: sums take the place of what happened long ago."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sessionkv.gateway.openai import conversation_log, conversation_store, conversation_sums
from sessionkv.gateway.openai.conversation_log import ConversationLog
from sessionkv.gateway.openai.conversation_sums import (
    PIECE_CHARS,
    ConversationEvent,
    in_force,
    packed,
    unpacked,
)
from tests.builders.engine import engine_config, socket_engine
from tests.builders.gateway import MODEL, Gateway, HttpEngine, gateway, http_engine

URL = "/v1/conversations"
FOLD_AT = 6


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_store, "FOLD_AT", FOLD_AT)


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with http_engine(engine_config(blocks=1024)) as engine:
        yield engine


def event(number: int, kind: str) -> ConversationEvent:
    return ConversationEvent(number, kind, f"c.{number:08}.{kind}", "n-1")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([(0, "m"), (1, "i"), (2, "r")], [(0, "m"), (1, "i"), (2, "r")]),
        # A sum counts when it is whole; what is before it counts no more.
        ([(0, "m"), (1, "i"), (2, "r"), (2, "s0000-0002")], [(0, "m"), (1, "i"), (2, "r")]),
        ([(1, "i"), (2, "r"), (2, "s0001-0002"), (2, "s0000-0002"), (3, "d")],
         [(2, "s0000-0002"), (2, "s0001-0002"), (2, "r"), (3, "d")]),
        # Of two sums the newer one.
        ([(2, "s0000-0001"), (2, "r"), (4, "r"), (4, "s0000-0001")],
         [(4, "s0000-0001"), (4, "r")]),
        ([(2, "s0000-0001"), (2, "r"), (4, "r"), (4, "s0000-0002")],
         [(2, "s0000-0001"), (2, "r"), (4, "r")]),
        ([(3, "s0000-0002")], []),
    ],
)  # fmt: skip
def test_the_newest_whole_sum_counts(
    found: list[tuple[int, str]], expected: list[tuple[int, str]]
) -> None:
    assert in_force([event(*each) for each in found]) == [event(*each) for each in expected]


def test_a_document_of_any_size_is_kept_in_pieces() -> None:
    document = {
        "items": [
            {"id": str(i), "text": "é" + random.Random(i).randbytes(8).hex()} for i in range(9000)
        ]
    }
    pieces = packed(document)
    assert len(pieces) > 1
    assert all(piece.isascii() and len(piece) <= PIECE_CHARS for piece in pieces)
    assert unpacked(pieces) == document


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def items(served: Gateway, conversation: str) -> list[dict[str, Any]]:
    params: dict[str, str | int] = {"order": "asc", "limit": 100}
    found: list[dict[str, Any]] = served.http.get(
        f"{URL}/{conversation}/items", params=params
    ).json()["data"]
    return found


def ask(served: Gateway, conversation: str, text: str) -> dict[str, Any]:
    body = {"model": MODEL, "input": text, "conversation": conversation, "max_output_tokens": 4}
    answer = served.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def sessions(served: HttpEngine, conversation: str) -> list[str]:
    with served.engine.client() as client:
        return [info.name for info in client.sessions(f"http:conv:{conversation}.")]


def test_a_long_conversation_holds_few_sessions_and_all_of_its_items(served: HttpEngine) -> None:
    conversation = served.post(URL, {"metadata": {"a": "b"}, "items": [user("zero")]}).json()["id"]
    expected = items(served, conversation)
    for number in range(3 * FOLD_AT):
        body = ask(served, conversation, f"question {number}")
        assert body["usage"]["input_tokens_details"]["cached_tokens"] > 0 or number == 0
        assert body["sessionkv"]["cache"]["miss"]["reason"] in ("none", "first_turn")
        listed = items(served, conversation)
        assert listed[: len(expected)] == expected
        assert len(listed) == len(expected) + 2
        expected = listed
    assert served.http.get(f"{URL}/{conversation}").json()["metadata"] == {"a": "b"}
    for _ in range(2000):  # the last sum may still be under way
        if len(found := sessions(served, conversation)) <= FOLD_AT:
            break
    assert len(found) <= FOLD_AT
    # An item that is in the sum is found, and taken out.
    first, *rest = expected
    assert served.http.get(f"{URL}/{conversation}/items/{first['id']}").json() == first
    assert served.http.delete(f"{URL}/{conversation}/items/{first['id']}").status_code == 200
    assert items(served, conversation) == rest
    ask(served, conversation, "and now?")
    assert items(served, conversation)[: len(rest)] == rest
    assert served.http.delete(f"{URL}/{conversation}").status_code == 200
    for _ in range(2000):
        if not sessions(served, conversation):
            break
    assert sessions(served, conversation) == []


def test_what_is_only_added_by_hand_is_summed_up_too(served: HttpEngine) -> None:
    conversation = served.post(URL, {}).json()["id"]
    ask(served, conversation, "one")
    for number in range(2 * FOLD_AT):
        served.post(f"{URL}/{conversation}/items", {"items": [user(f"item {number}")]})
    served.post(f"{URL}/{conversation}", {"metadata": {"c": "d"}})
    expected = items(served, conversation)
    assert len(expected) == 2 + 2 * FOLD_AT
    body = ask(served, conversation, "two")
    assert items(served, conversation)[:-2] == expected
    assert served.http.get(f"{URL}/{conversation}").json()["metadata"] == {"c": "d"}
    own = served.http.get(f"/v1/responses/{body['id']}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in own] == ["two"]


def test_a_sum_that_a_crash_cut_off_changes_nothing(tmp_path: Path) -> None:
    config = engine_config(tmp_path / "store", blocks=256)
    with socket_engine(tmp_path, config) as engine:
        with gateway(engine.endpoint) as served:
            conversation = served.post(URL, {"items": [user("zero")]}).json()["id"]
            ask(served, conversation, "one")
            expected = items(served, conversation)
        with engine.client() as client:
            client.open(
                f"http:conv:{conversation}.00000002.s0000-0002",
                metadata={"conversation": {"piece": "x"}, "mark": "0"},
            )
    with socket_engine(tmp_path, config) as engine, gateway(engine.endpoint) as served:
        assert items(served, conversation) == expected
        for number in range(FOLD_AT):
            ask(served, conversation, str(number))
        assert items(served, conversation)[: len(expected)] == expected


class HeldFold:
    """Keeps a fold where it has read the conversation and has written nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_there, self.goes_on = threading.Event(), threading.Event()
        monkeypatch.setattr(conversation_log, "packed", self._packed)

    def _packed(self, document: Mapping[str, Any]) -> list[str]:
        self.is_there.set()
        assert self.goes_on.wait(60)
        return packed(document)


def folding(served: Gateway, held: HeldFold) -> str:
    """A conversation that is being summed up."""
    conversation: str = served.post(URL, {}).json()["id"]
    for number in range(FOLD_AT - 1):
        served.post(f"{URL}/{conversation}/items", {"items": [user(f"item {number}")]})
    assert held.is_there.wait(60)
    return conversation


def test_a_deletion_waits_for_the_sum_that_is_being_made(
    served: HttpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, done, waits = HeldFold(monkeypatch), [], threading.Event()
    conversation = folding(served, held)
    lock, drop = conversation_store.ConversationStore._lock, ConversationLog._drop

    def seen_lock(self: Any, conversation_id: str) -> Any:
        waits.set()
        return lock(self, conversation_id)

    async def seen_drop(self: Any, event: ConversationEvent) -> None:
        done.append(event.kind)
        await drop(self, event)

    monkeypatch.setattr(conversation_store.ConversationStore, "_lock", seen_lock)
    monkeypatch.setattr(ConversationLog, "_drop", seen_drop)
    with ThreadPoolExecutor(1) as beside:
        deleting = beside.submit(served.http.delete, f"{URL}/{conversation}")
        assert waits.wait(60)
        assert done == []
        held.goes_on.set()
        assert deleting.result(60).json()["deleted"] is True
    # First the fold took away what is in the sum, then the deletion the witness and the sum.
    assert sorted(done[: FOLD_AT - 1]) == [*"iiii", "m"]
    assert done[FOLD_AT - 1 :] == ["i", "s0000-0001"]
    assert sessions(served, conversation) == []


def test_a_deletion_by_another_gateway_leaves_nothing_of_a_sum_either(
    served: HttpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldFold(monkeypatch)
    with gateway(served.engine.endpoint) as other:
        conversation = folding(served, held)
        assert other.http.delete(f"{URL}/{conversation}").json()["deleted"] is True
    held.goes_on.set()
    # Waits for the fold, which has seen that its witness is gone.
    assert served.http.delete(f"{URL}/{conversation}").status_code == 404
    assert sessions(served, conversation) == []


def test_a_sum_of_many_pieces_is_made_no_more_often(
    served: HttpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_sums, "PIECE_CHARS", 32)
    fold, ends = ConversationLog.fold, []

    async def seen(
        self: Any, conversation_id: str, witness: ConversationEvent, document: Mapping[str, Any]
    ) -> None:
        ends.append(witness.number)
        await fold(self, conversation_id, witness, document)

    monkeypatch.setattr(ConversationLog, "fold", seen)
    conversation, events = served.post(URL, {}).json()["id"], 4 * FOLD_AT
    for number in range(1, events):
        served.post(f"{URL}/{conversation}/items", {"items": [user(f"item {number}")]})
    listed = items(served, conversation)
    assert [item["content"][0]["text"] for item in listed] == [
        f"item {n}" for n in range(1, events)
    ]
    assert any(kind.startswith("s") for kind in kinds(served, conversation))
    assert len(sessions(served, conversation)) > 2 * FOLD_AT  # of which most are pieces
    # Each sum takes in all but the last of at least so many events.
    assert ends
    assert all(end - start >= FOLD_AT - 1 for start, end in zip([0, *ends], ends, strict=False))
    assert served.http.delete(f"{URL}/{conversation}").status_code == 200
    assert sessions(served, conversation) == []


def kinds(served: HttpEngine, conversation: str) -> list[str]:
    return [name.rpartition(".")[2] for name in sessions(served, conversation)]
