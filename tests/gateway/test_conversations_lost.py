"""What becomes of a conversation beside others, after a pause and a restart, and what is told.

The other half of ``test_prefix_breakers.py``: here nothing of the conversation's text is changed,
or all of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.builders.engine import engine_config, socket_engine
from tests.builders.gateway import (
    TOOLS,
    HttpEngine,
    gateway,
    http_engine,
    replies,
    tools_folder,
)
from tests.builders.talks import CHAT, Talk, system, tool, user
from tests.builders.tenants import KEYS, access
from tests.builders.text import chatml_words, write_folder

CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Oslo", "n": 2}}\n</tool_call>'
THOUGHT = "<think>\nIt may rain. Let me look it up.\n</think>\n\n"
SAID = (CALL, "It rains in Oslo.", THOUGHT + CALL, "Yes.", "Certainly.")
DISK = 50_000_000


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tools_folder(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def served(text: Path) -> Iterator[HttpEngine]:
    """An engine with room for some conversations of these."""
    runner = {"text_dir": text, "script": replies(*SAID)}
    with http_engine(engine_config(blocks=1000), runner=runner) as engine:
        yield engine


def begun(served: Any, label: str, *, about: str = "Be brief.", **fields: Any) -> Talk:
    body = {"messages": [system(about)], "tools": [tool("look", f"Looks. {label}")], **fields}
    talk = Talk(served, body)
    talk.ask(CALL, user(f"What is the weather in Oslo? ({label})"))
    talk.ask(SAID[1], talk.result_of_call("rain"))
    return talk


def went_on(talk: Talk, *more: dict[str, Any]) -> dict[str, Any]:
    """The report of the conversation's next request."""
    talk.body["messages"] += more or (user("Sure?"),)
    report: dict[str, Any] = talk.send(talk.body)["sessionkv"]["cache"]
    return report


def finds_all(talk: Talk, *more: dict[str, Any]) -> None:
    report = went_on(talk, *more)
    assert report["miss"]["reason"] == "none"
    assert report["cached_tokens"] == len(talk.log) - 1


def test_thoughts_that_the_client_leaves_out_do_no_harm(served: HttpEngine) -> None:
    talk = begun(served, "thoughts")
    talk.ask(SAID[2], user("And tomorrow?"))
    assert talk.body["messages"][-1].pop("reasoning_content")
    finds_all(talk, talk.result_of_call("sun"))


def test_thoughts_that_the_template_drops_are_told(served: HttpEngine) -> None:
    talk = begun(served, "dropped")
    talk.ask(SAID[2], user("And tomorrow?"))
    talk.ask(SAID[3], talk.result_of_call("sun"))
    talk.body["messages"].append(user("Sure?"))
    parting = talk.parting()
    miss = talk.send(talk.body)["sessionkv"]["cache"]["miss"]
    assert (miss["reason"], miss["part"]) == ("template_rewrote", "messages[6]")
    assert (miss["token"], miss["expected"], miss["found"]) == (
        parting.token,
        parting.expected,
        parting.found,
    )


def test_a_summary_in_place_of_the_history_is_told_where_the_conversation_has_a_name(
    served: HttpEngine,
) -> None:
    for key, reason, part in (("one", "history_edited", "messages[1]"), (None, "first_turn", None)):
        named = {} if key is None else {"prompt_cache_key": key}
        talk = begun(served, f"summary {key}", **named)
        talk.body["messages"] = [system("Be brief."), user("Before: it rained in Oslo.")]
        parting = talk.parting()
        report = talk.send(talk.body)["sessionkv"]["cache"]
        assert (report["miss"]["reason"], report["miss"]["part"]) == (reason, part)
        assert report["miss"]["token"] == (parting.token if part else None)
        assert report["cached_tokens"] == parting.token  # the system prompt is found all the same


def test_helpers_and_other_agents_beside_a_conversation_do_no_harm(served: HttpEngine) -> None:
    talk = begun(served, "main", prompt_cache_key="two")
    title = {"messages": [user("Generate a title for this chat.")], "max_tokens": 9}
    beside = Talk(served, {})
    assert beside.send(title)["sessionkv"]["cache"]["miss"]["reason"] == "first_turn"
    other = begun(served, "sub", about="You search files.", prompt_cache_key="two")
    assert other.last["sessionkv"]["cache"]["miss"]["reason"] == "none"
    finds_all(talk)
    finds_all(other)


def test_a_first_request_of_another_agent_under_the_same_name_is_no_edit(
    served: HttpEngine,
) -> None:
    begun(served, "main", prompt_cache_key="three")
    other = Talk(served, {"messages": [system("You search files.")], "prompt_cache_key": "three"})
    answer = other.ask(CALL, user("Where is it?"))
    assert answer["sessionkv"]["cache"]["miss"]["reason"] == "first_turn"


def push_out(served: HttpEngine) -> None:
    """Fill the device with something else."""
    body = {"model": "checksum", "prompt": "x" * 3900, "max_tokens": 1}
    assert served.post("/v1/completions", body).status_code == 200


def test_what_was_evicted_in_a_pause_is_told(served: HttpEngine) -> None:
    talk = begun(served, "evicted")
    push_out(served)
    report = went_on(talk)
    assert (report["miss"]["reason"], report["miss"]["token"]) == (
        "evicted",
        report["cached_tokens"],
    )
    assert report["cached_tokens"] < len(talk.log) - 1
    assert report["miss_tokens"] == {"evicted": len(talk.log) - 1 - report["cached_tokens"]}


def test_what_was_evicted_after_its_pin_had_run_out_is_told(served: HttpEngine) -> None:
    talk = begun(served, "expired")
    with served.engine.client() as client:
        session = max(client.sessions("~http:chat:"), key=lambda found: found.created_s)
        client.session(session.name).pin(tier="device", ttl_s=0.001)
        while client.session(session.name).info().pin is not None:
            threading.Event().wait(0.01)
    push_out(served)
    report = went_on(talk)
    assert (report["miss"]["reason"], report["miss"]["token"]) == (
        "expired",
        report["cached_tokens"],
    )


def test_after_a_restart_everything_is_found_or_the_reason_is_told(
    text: Path, tmp_path: Path
) -> None:
    """With the same model, another system prompt, another template and other weights, in turn."""
    config = engine_config(tmp_path / "store", blocks=400, disk_bytes=DISK)
    script = replies(*SAID)
    with http_engine(config, runner={"text_dir": text, "script": script}) as served:
        talk = begun(served, "restart")
    with http_engine(config, runner={"text_dir": text, "script": script}) as served:
        talk.served = served
        finds_all(talk)
        assert talk.last["sessionkv"]["cache"]["disk_tokens"] > 0
        del talk.body["messages"][-1]
    with http_engine(config, runner={"text_dir": text, "script": script}) as served:
        # All that the gateway knew is gone, and the system prompt is another one.
        talk.served = served
        talk.body["messages"][0] = system("Be long.")
        parting = talk.parting()
        report = went_on(talk)
        assert (report["miss"]["reason"], report["miss"]["part"]) == (
            "history_edited",
            "messages[0]",
        )
        assert report["miss"]["token"] == parting.token == report["cached_tokens"]
        del talk.body["messages"][-1]
        talk.body["messages"][0] = system("Be brief.")
    other = tools_folder(tmp_path / "other")
    template = other / "chat_template.jinja"
    template.unlink()
    said = "content + ('.' if message.role == 'tool' else '')"
    template.write_text(TOOLS.replace("{{- content -}}", f"{{{{- {said} -}}}}"))
    with http_engine(config, runner={"text_dir": other, "script": script}) as served:
        talk.served = served
        report = served.post(CHAT, {"model": "checksum", **talk.body}).json()["sessionkv"]["cache"]
        miss = report["miss"]
        assert (miss["reason"], miss["part"]) == ("template_rewrote", "messages[3]")
    with http_engine(
        config, runner={"text_dir": text, "script": script, "fingerprint": "two"}
    ) as served:
        talk.served = served
        report = went_on(talk)
        assert report["cached_tokens"] == 0
        assert (report["miss"]["reason"], report["miss"]["token"]) == ("identity_changed", 0)


def test_another_tenant_finds_and_hears_nothing(text: Path, tmp_path: Path) -> None:
    service = "service"
    with ExitStack() as open_now:
        engine = open_now.enter_context(
            socket_engine(
                tmp_path,
                engine_config(blocks=400),
                access=access().with_service(service),
                runner={"text_dir": text, "script": replies(*SAID)},
            )
        )
        served = open_now.enter_context(gateway(engine.endpoint, key=service))
        served.http.headers["Authorization"] = f"Bearer {KEYS['alice']}"
        talk = begun(served, "tenant")
        served.http.headers["Authorization"] = f"Bearer {KEYS['bob']}"
        report = went_on(talk)
        assert (report["miss"]["reason"], report["cached_tokens"]) == ("first_turn", 0)
        assert report["miss"]["expected"] is None
        served.http.headers["Authorization"] = f"Bearer {KEYS['alice']}"
        del talk.body["messages"][-1]
        finds_all(talk)


def letter_by_letter() -> Callable[[Sequence[int]], int]:
    """A script: each answer says the same, in tokens of one letter each."""
    text = chatml_words()
    opening = list(text.encoder.encode(text.renderer.habits.opening))
    letters = [i for c in "the fox jumps" for i in text.encoder.encode_text_inside(c)]
    assert list(text.encoder.encode_text_inside("the fox jumps")) != letters
    closing = text.closing_id
    assert closing is not None

    def script(ids: Sequence[int]) -> int:
        size = len(opening)
        start = max(i for i in range(len(ids) - size + 1) if list(ids[i : i + size]) == opening)
        return [*letters, closing][len(ids) - start - size]

    return script


def test_an_answer_in_other_tokens_than_its_text_encodes_to_does_no_harm(tmp_path: Path) -> None:
    """Also behind an edit, where it is sent along with what came in."""
    folder = write_folder("chatml_words", tmp_path)
    runner = {"text_dir": folder, "script": letter_by_letter()}
    with http_engine(engine_config(blocks=1024), runner=runner) as served:
        messages, known = [user("one")], 0
        for number in range(5):
            if number == 3:
                messages[0] = user("another one")
            answer = Talk(served, {}).send({"messages": messages})
            usage, report = answer["usage"], answer["sessionkv"]["cache"]
            assert answer["choices"][0]["message"]["content"] == "the fox jumps"
            if number in (1, 2, 4):
                assert (report["miss"]["reason"], report["cached_tokens"]) == ("none", known)
            known = usage["prompt_tokens"] + usage["completion_tokens"] - 1
            messages += [answer["choices"][0]["message"], user("And then?")]
