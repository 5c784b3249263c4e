"""Clients that send everything each time find what was computed for them before."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sessionkv import LimitsConfig
from sessionkv.client import StreamEvent
from sessionkv.client.results import SessionPage
from sessionkv.errors import SessionDamaged, SessionNotFound
from sessionkv.gateway.conversations import NAMES, RUNNING, Conversations
from sessionkv.gateway.keeping import Keeping
from sessionkv.gateway.transcript import Transcript
from tests.builders.engine import engine_config
from tests.builders.gateway import (
    MODEL,
    HttpEngine,
    gateway,
    http_engine,
    replies,
    tools_folder,
)

CHAT = "/v1/chat/completions"
THOUGHT = "<think>\nIt may rain. Let me look it up before I say anything.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "look", "arguments": {"city":"Oslo","n":2}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


NEW_TURN = len("\nuser\n\nassistant\n") + 3 + 1
"""Tokens of a turn that are none of its text: with three marks, and one that is always computed."""


def ask(served: HttpEngine, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    answer = served.post(CHAT, {"model": MODEL, "messages": messages} | fields)
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def names(served: HttpEngine) -> list[str]:
    """Of all sessions, once no turn has one: the gateway removes those behind its answers."""
    with served.engine.client() as client:
        for _ in range(10_000):
            found = [session.name for session in client.sessions("~http:")]
            if not any(name.startswith(RUNNING) for name in found):
                return found
    raise AssertionError(f"left of turns that have ended: {found}")


def cached(answer: dict[str, Any]) -> int:
    value: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return value


@contextmanager
def serving(folder: Path, *said: str) -> Iterator[HttpEngine]:
    runner = {"text_dir": tools_folder(folder), "script": replies(*said)}
    with http_engine(engine_config(blocks=2048), runner=runner) as engine:
        yield engine


@pytest.fixture
def served(tmp_path: Path) -> Iterator[HttpEngine]:
    with serving(tmp_path, CALL, "It rains in Oslo.", "Yes.", "Certainly.") as engine:
        yield engine


def conversation(served: HttpEngine) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A user's turn with a tool call and its answer; messages as the client got them, answers."""
    messages, answers = [user("What is the weather in Oslo?")], []
    for more in ({"role": "tool", "content": "rain"}, None):
        answers.append(ask(served, messages, tools=[TOOL]))
        message = answers[-1]["choices"][0]["message"]
        messages.append(message)
        if more is not None:
            messages.append(more | {"tool_call_id": message["tool_calls"][0]["id"]})
    return messages, answers


def whole_but_new(answer: dict[str, Any], before: dict[str, Any], kept_reply: int) -> None:
    """Everything up to the end of what both share was found."""
    assert cached(answer) >= before["usage"]["prompt_tokens"] + kept_reply - 1, answer["sessionkv"]


def test_the_next_turn_finds_the_conversation_and_each_exchange_has_one_name(
    served: HttpEngine,
) -> None:
    messages, answers = conversation(served)
    assert answers[0]["choices"][0]["finish_reason"] == "tool_calls"
    assert answers[1]["choices"][0]["message"]["content"] == "It rains in Oslo."
    last = ask(served, [*messages, user("Sure?")], tools=[TOOL])
    assert last["choices"][0]["message"]["content"] == "Yes."
    whole_but_new(last, answers[0], 0)
    found = names(served)
    assert len(found) == 3
    with served.engine.client() as client:
        assert sorted(info.turns for info in client.sessions(NAMES)) == [1, 2, 3]


def renamed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a client that makes ids of its own writes it."""
    text = json.dumps(messages)
    for number, call in enumerate(messages[1]["tool_calls"]):
        text = text.replace(call["id"], f"call_{number}")
    value: list[dict[str, Any]] = json.loads(text)
    return value


def rewritten(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments in another order and spacing, white space at the ends, no thoughts."""
    changed = json.loads(json.dumps(messages))
    for message in changed:
        thoughts = message.pop("reasoning_content", None)
        if thoughts is not None and not message.get("tool_calls"):
            message["content"] = f"\n{message['content']}  "
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(
                dict(reversed(arguments.items())), separators=(" ,", ": ")
            )
    value: list[dict[str, Any]] = changed
    return value


@pytest.mark.parametrize("change", [list, renamed, rewritten])
def test_what_clients_do_to_a_history_does_not_lose_it(served: HttpEngine, change: Any) -> None:
    messages, _ = conversation(served)
    sessions = len(names(served))
    changed = ask(served, [*change(messages), user("Really sure?")], tools=[TOOL])
    usage = changed["usage"]
    assert cached(changed) >= usage["prompt_tokens"] - NEW_TURN - len("Really sure?")
    assert changed["sessionkv"]["cache"]["miss"]["reason"] == "none"
    assert len(names(served)) == sessions + 1  # the same conversation went on


def without_thoughts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in message.items() if k != "reasoning_content"} for message in messages]


@pytest.mark.parametrize("change", [list, without_thoughts])
def test_thoughts_are_lost_where_the_template_drops_them_and_nowhere_else(
    tmp_path: Path, change: Any
) -> None:
    with serving(tmp_path, THOUGHT + CALL, THOUGHT + "It rains in Oslo.", "Yes.") as served:
        messages, answers = conversation(served)
        assert messages[1]["reasoning_content"].strip() == THOUGHT[8:-10].strip()
        first, second = (answer["usage"] for answer in answers)
        # Within a turn of the user's the template keeps them, and so does the cache.
        looked = ask(served, change(messages[:3]), tools=[TOOL])
        assert cached(looked) == second["prompt_tokens"] - 1
        assert looked["sessionkv"]["cache"]["miss"]["reason"] == "none"
        # With the user's next turn it drops them: all before the first one is found.
        last = ask(served, [*change(messages), user("Sure?")], tools=[TOOL])
        assert cached(last) >= first["prompt_tokens"]
        assert last["sessionkv"]["cache"]["miss"]["reason"] == "template_rewrote"
        assert last["sessionkv"]["cache"]["miss"]["turn"] == 1


def test_an_edited_history_goes_on_from_where_it_was_edited(served: HttpEngine) -> None:
    messages, answers = conversation(served)
    edited = [*messages[:2], {**messages[2], "content": "snow"}]
    answer = ask(served, edited, tools=[TOOL])
    assert answer["choices"][0]["message"]["content"] == "It rains in Oslo."
    assert cached(answer) >= answers[0]["usage"]["prompt_tokens"]


def history(served: HttpEngine, system: str) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": system}, user("What is the weather in Oslo?")]
    for _ in range(2):
        messages += [ask(served, messages)["choices"][0]["message"], user("Sure?")]
    return messages


def test_what_a_client_changed_at_the_top_is_said(tmp_path: Path) -> None:
    with serving(tmp_path, "Rain.", "Yes.", "Yes!") as served:
        messages = history(served, "It is Monday. Be brief.")
        changed = [{"role": "system", "content": "It is Tuesday. Be brief."}, *messages[1:]]
        miss = ask(served, changed)["sessionkv"]["cache"]["miss"]
        assert (miss["reason"], miss["turn"], miss["message"]) == ("history_edited", 0, 0)
        assert miss["expected"].startswith("Mon")
        assert miss["found"].startswith("Tues")


def test_what_a_client_changed_further_down_is_said(tmp_path: Path) -> None:
    with serving(tmp_path, "Rain.", "Yes.", "Yes!") as served:
        messages = history(served, "Be brief.")
        changed = [*messages[:3], user("Is it?"), *messages[4:]]
        answer = ask(served, changed)
        miss = answer["sessionkv"]["cache"]["miss"]
        assert miss["reason"] == "history_edited"
        assert (miss["expected"][:4], miss["found"][:2]) == ("Sure", "Is")
        assert cached(answer) >= miss["token"] - 1


def test_another_conversation_that_begins_the_same_is_no_changed_one(tmp_path: Path) -> None:
    with serving(tmp_path, "Rain.", "Yes.", "Yes!") as served:
        history(served, "Be brief.")
        other = [{"role": "system", "content": "Be long."}, user("What is the weather in Oslo?")]
        assert ask(served, other)["sessionkv"]["cache"]["miss"]["reason"] == "first_turn"


def test_nothing_is_left_of_a_turn_that_failed(served: HttpEngine) -> None:
    answer = served.post(CHAT, {"model": MODEL, "messages": [user("x" * 9000)]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert answer.json()["error"]["n_ctx"] == 8193
    assert names(served) == []


def test_the_same_asked_twice_is_one_conversation(served: HttpEngine) -> None:
    for _ in range(2):
        ask(served, [user("Hi")], temperature=0)
    assert len(names(served)) == 1


def test_helpers_leave_nothing(served: HttpEngine) -> None:
    title = user("Generate a concise, 3-5 word title for this chat.")
    ask(served, [title], max_tokens=20)
    ask(served, [user("Hi")], metadata={"sessionkv_helper": "true"})
    assert names(served) == []


def test_answers_side_by_side_are_each_continued(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        answer = ask(served, [user("Hi")], n=3, max_tokens=5, seed=7, temperature=1.0)
        choices = answer["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        assert len(answer["sessionkv"]["choices"]) == 3
        assert answer["usage"]["completion_tokens"] == 15
        assert len(names(served)) == len({choice["message"]["content"] for choice in choices}) > 1
        for choice in choices:
            going_on = ask(served, [user("Hi"), choice["message"], user("And?")], max_tokens=1)
            assert cached(going_on) >= answer["usage"]["prompt_tokens"] + 5 - 1


def test_conversations_are_found_after_a_restart(tmp_path: Path) -> None:
    store, text = tmp_path / "store", tools_folder(tmp_path / "text")
    runner = {"text_dir": text, "script": replies("It rains.", "Yes.")}
    config = engine_config(store, blocks=256, disk_bytes=2**20)
    with http_engine(config, runner=runner) as engine:
        first = ask(engine, [user("What is the weather?")])
    with http_engine(config, runner=runner) as engine:
        history = [user("What is the weather?"), first["choices"][0]["message"], user("Sure?")]
        second = ask(engine, history)
        assert second["choices"][0]["message"]["content"] == "Yes."
        report = second["sessionkv"]["cache"]
        assert report["disk_tokens"] >= first["usage"]["total_tokens"] - 4
        assert len(names(engine)) == 2


def test_exchanges_take_no_place_of_sessions_with_names() -> None:
    config = engine_config(blocks=512, limits=LimitsConfig(sessions=2))
    with http_engine(config) as served:
        for number in range(5):
            ask(served, [user(f"Hi {number}")], max_tokens=1)
        assert len(names(served)) == 5
        with served.engine.client() as client:
            client.open("a").close()
            client.open("b").close()


def test_another_gateway_of_the_same_engine_ends_no_turn(tmp_path: Path) -> None:
    with serving(tmp_path) as served, gateway(served.engine.endpoint) as other:
        long = {"model": MODEL, "messages": [user("Hi")], "max_tokens": 3000, "ignore_eos": True}
        statuses: list[int] = []
        thread = threading.Thread(
            target=lambda: statuses.append(served.post(CHAT, long).status_code)
        )
        thread.start()
        while thread.is_alive():
            assert other.post(CHAT, long | {"max_tokens": 1}).status_code == 200
        assert statuses == [200]


class Forgetful:
    """A client of an engine whose sessions can be neither copied nor read, but for new ones."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    async def open(self, name: str, **fields: Any) -> None:
        self.opened.append(name)

    async def delete(self, name: str) -> None:
        pass

    async def session_page(self, prefix: str, *, limit: int) -> SessionPage:
        return SessionPage((), None)

    def session(self, name: str) -> Any:
        return Forgotten(self, name)


class Forgotten:
    def __init__(self, client: Forgetful, name: str) -> None:
        self._client = client
        self._name = name

    async def fork(self, name: str) -> None:
        raise SessionDamaged("a turn cannot be read")

    @asynccontextmanager
    async def stream(self, **fields: Any) -> AsyncIterator[AsyncIterator[StreamEvent]]:
        yield self._events()

    async def _events(self) -> AsyncIterator[StreamEvent]:
        if self._name not in self._client.opened:
            raise SessionNotFound("there is no such session")
        yield StreamEvent("done")


def test_a_damaged_conversation_costs_cache_not_the_answer() -> None:
    async def talk() -> None:
        client = Forgetful()
        messages = [user("Hi"), {"role": "assistant", "content": "Ho"}, user("Hi")]
        exchange = Conversations(client).begin(Transcript(messages), Keeping())  # type: ignore[arg-type]
        assert [event.text async for event in exchange.stream()] == ["done"]
        assert len(client.opened) == 1

    asyncio.run(talk())
