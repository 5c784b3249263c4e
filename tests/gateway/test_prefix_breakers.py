"""What clients do to a conversation that breaks prefixes elsewhere, each with what is told of it.

Each row changes the next request of a conversation. Either that is told, with the exact reason, the
first token that differs, both sides there and the field of the request; or it does no harm, and all
that was computed is found. Where the ids part is worked out by the test itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies, tools_folder
from tests.builders.talks import Talk, system, tool, user

CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Oslo", "n": 2}}\n</tool_call>'
THOUGHT = "<think>\nIt may rain. Let me look it up.\n</think>\n\n"
SAID = (CALL, "It rains in Oslo.", THOUGHT + CALL, "Yes.", "Certainly.")
SYSTEM = (
    "You are an agent.\nToday's date: Mon Nov 30 2026\nWorking directory: /home/a/project\n"
    "Memory: the user likes tea.\nBe brief."
)
REMINDER = "<system-reminder>\nThe list of things to do is empty.\n</system-reminder>\n"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = tools_folder(tmp_path_factory.mktemp("text"))
    with http_engine(
        engine_config(blocks=8192), runner={"text_dir": folder, "script": replies(*SAID)}
    ) as engine:
        yield engine


def begun(served: HttpEngine, label: str) -> Talk:
    """A conversation of two answers, the first of which calls a tool."""
    tools = [tool("look", f"Looks. {label}"), tool("read", "Reads."), tool("edit", "Edits.")]
    talk = Talk(served, {"messages": [system(SYSTEM)], "tools": tools})
    talk.ask(CALL, user(f"{REMINDER}What is the weather in Oslo? ({label})"))
    talk.ask(SAID[1], talk.result_of_call("rain"))
    return talk


@dataclass(frozen=True)
class Breaker:
    """One row.

    Attributes:
        label: What the client does.
        change: Does it to the body of the next request.
        field: The request's field that the report names; None where it does no harm.
        message: The index that it names.
    """

    label: str
    change: Callable[[dict[str, Any]], None]
    field: str | None = None
    message: int | None = None

    def __str__(self) -> str:
        return self.label


def in_system(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        assert old in SYSTEM
        body["messages"][0] = system(SYSTEM.replace(old, new))

    return change


def moved_reminder(body: dict[str, Any]) -> None:
    first, last = body["messages"][1], body["messages"][-1]
    body["messages"][1] = user(first["content"].removeprefix(REMINDER))
    body["messages"][-1] = user(REMINDER + last["content"])


def edited(body: dict[str, Any]) -> None:
    body["messages"][3] = body["messages"][3] | {"content": "snow"}


def edited_answer(body: dict[str, Any]) -> None:
    body["messages"][4] = body["messages"][4] | {"content": "It snows in Oslo."}


def cut_out(body: dict[str, Any]) -> None:
    del body["messages"][2:4]


def cut_answer(body: dict[str, Any]) -> None:
    del body["messages"][4]


def put_behind(body: dict[str, Any]) -> None:
    body["messages"].insert(2, user("In Celsius, please."))


def summed_up(body: dict[str, Any]) -> None:
    body["messages"][2:4] = [user("Summary: you looked it up.")]


def rewritten_json(body: dict[str, Any]) -> None:
    function = body["messages"][2]["tool_calls"][0]["function"]
    arguments = dict(reversed(json.loads(function["arguments"]).items()))
    function["arguments"] = json.dumps(arguments, separators=(" ,", " : "))


def trimmed(body: dict[str, Any]) -> None:
    body["messages"][4] = body["messages"][4] | {"content": "\n  It rains in Oslo. \n"}


def renamed_calls(body: dict[str, Any]) -> None:
    body["messages"][2]["tool_calls"][0]["id"] = "call_0"
    body["messages"][3] = body["messages"][3] | {"tool_call_id": "call_0"}


def retrieved(body: dict[str, Any]) -> None:
    body["messages"][-1] = user(
        "Found in the notes: tea is hot.\n" + body["messages"][-1]["content"]
    )


def set_of(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.update(fields)


BREAKERS = (
    Breaker(
        "a line of the system prompt that differs with each request",
        in_system("You are", "x-request: 0f3a\nYou are"),
        "messages[0]",
        0,
    ),
    Breaker(
        "the date in the system prompt", in_system("Mon Nov 30", "Tue Dec 01"), "messages[0]", 0
    ),
    Breaker("the folder in the system prompt", in_system("/home/a", "/tmp"), "messages[0]", 0),
    Breaker(
        "memory put into the system prompt", in_system("likes tea", "has a cat"), "messages[0]", 0
    ),
    Breaker(
        "thinking switched in the system prompt",
        in_system("You", "/no_think You"),
        "messages[0]",
        0,
    ),
    Breaker(
        "a system prompt more",
        lambda body: body["messages"].insert(0, system("Hear:")),
        "messages[0]",
        0,
    ),
    Breaker("the system prompt left out", lambda body: body["messages"].pop(0), "system"),
    Breaker("a reminder that moves to the newest message", moved_reminder, "messages[1]", 1),
    Breaker("tools in another order", lambda body: body["tools"].reverse(), "tools"),
    Breaker("a tool more", lambda body: body["tools"].append(tool("fetch", "Fetches.")), "tools"),
    Breaker("a tool less", lambda body: body["tools"].pop(), "tools"),
    Breaker("no tools any more", lambda body: body.pop("tools"), "tools"),
    Breaker("an old message edited", edited, "messages[3]", 3),
    Breaker("an old answer edited", edited_answer, "messages[4]", 4),
    Breaker("old messages cut out", cut_out, "messages[2]", 2),
    Breaker("an answer cut out", cut_answer, "messages[4]", 4),
    Breaker("a message put behind the user's", put_behind, "messages[2]", 2),
    Breaker("old messages replaced by a summary", summed_up, "messages[2]", 2),
    Breaker("the JSON of a tool call written anew", rewritten_json),
    Breaker("white space at the ends of an answer", trimmed),
    Breaker("other ids of tool calls", renamed_calls),
    Breaker("retrieved text put into the newest message", retrieved),
    Breaker("thinking switched by a parameter", set_of(reasoning_effort="low")),
    Breaker("another choice of tools", set_of(tool_choice="none")),
    Breaker("another sampling, user and key", set_of(temperature=0.5, seed=7, user="b")),
)


@pytest.mark.parametrize("breaker", BREAKERS, ids=str)
def test_what_breaks_a_prefix_is_told_or_does_no_harm(served: HttpEngine, breaker: Breaker) -> None:
    talk = begun(served, breaker.label)
    talk.body["messages"].append(user("Sure?"))
    unchanged = talk.parting()
    assert unchanged.token is None
    harmless = breaker.field is None
    breaker.change(talk.body)
    parting = unchanged if harmless else talk.parting()
    report = talk.send(talk.body)["sessionkv"]["cache"]
    miss = report["miss"]
    assert (miss["reason"], miss["part"], miss["message"]) == (
        "none" if harmless else "history_edited",
        breaker.field,
        breaker.message,
    )
    assert (miss["token"], miss["expected"], miss["found"]) == (
        parting.token,
        parting.expected,
        parting.found,
    )
    # What is found ends there; of a whole log all but its last token, which has no KV yet.
    assert report["cached_tokens"] == (len(talk.log) - 1 if harmless else parting.token)


def test_messages_are_told_in_their_own_fields(served: HttpEngine) -> None:
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("look", "read")]
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 2000,
        "system": [{"type": "text", "text": "Be brief. Over Messages."}],
        "tools": tools,
        "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
    }

    def ask(**changed: Any) -> dict[str, Any]:
        answer = served.post("/v1/messages", body | changed)
        assert answer.status_code == 200, answer.text
        value: dict[str, Any] = answer.json()
        return value

    def part(**changed: Any) -> tuple[str, str]:
        miss = ask(**changed)["sessionkv"]["cache"]["miss"]
        return miss["reason"], miss["part"]

    called = ask()["content"]
    result = {"type": "tool_result", "tool_use_id": called[-1]["id"], "content": "rain"}
    said = [
        *body["messages"],
        {"role": "assistant", "content": called},
        {"role": "user", "content": [result]},
    ]
    assert part(messages=said) == ("none", None)
    said += [
        {"role": "assistant", "content": "It rains in Oslo."},
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
    ]
    snow = {"role": "user", "content": [result | {"content": "snow"}]}
    edited = ("history_edited", "messages[2].content[0]")
    assert part(messages=[*said[:2], snow, *said[3:]]) == edited
    assert part(messages=said, system="Be long.") == ("history_edited", "system")
    assert part(messages=said, tools=tools[::-1]) == ("history_edited", "tools")
    assert part(messages=said, thinking={"type": "enabled", "budget_tokens": 1024}) == (
        "none",
        None,
    )
