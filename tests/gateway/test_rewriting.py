"""What agents move around goes where it costs no cache, and nothing else is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sessionkv.gateway.rewriting import MAX_PIECES, steady
from sessionkv.gateway.rewriting_places import MAX_DATES, Place, Placed, places_of, put_back
from sessionkv.gateway.transcript import Transcript, text_of
from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, HttpEngine, gateway, http_engine, replies, tools_folder

Messages = list[dict[str, Any]]
CHAT = "/v1/chat/completions"
STEADY = {"x-sessionkv-steady": "true"}


def note(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


def env(date: str) -> dict[str, Any]:
    about = f"You help.\n<env>\n  Platform: linux\n  Today's date: {date}\n</env>\n"
    return {"role": "system", "content": about}


def said(*texts: str) -> Messages:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def placed(messages: Messages, earlier: Placed | None = None) -> Placed:
    """As the next request of the conversation that ``earlier`` was; through its metadata."""
    kept = () if earlier is None else places_of(earlier.metadata or {})
    return put_back(steady(Transcript(messages)), kept)


def texts(result: Placed) -> list[str]:
    return [text_of(message) for message in result.transcript.messages]


def test_a_date_goes_behind_the_newest_message_and_stays_there() -> None:
    first = placed([env("Mon Nov 30 2026"), *said("Hi")])
    about = "You help.\n<env>\n  Platform: linux\n</env>\n"
    monday = "\n\n<env>\nToday's date: Mon Nov 30 2026\n</env>"
    assert texts(first) == [about, "Hi" + monday]
    told = {"field": "messages[0]", "moved": "Today's date: Mon Nov 30 2026", "to": "messages[1]"}
    assert first.rewrites == [told]
    second = placed([env("Mon Nov 30 2026"), *said("Hi", "Ho", "And?")], first)
    assert texts(second) == [*texts(first), "Ho", "And?"]
    third = placed([env("Tue Dec 01 2026"), *said("Hi", "Ho", "And?", "So", "Yes")], second)
    tuesday = "\n\n<env>\nToday's date: Tue Dec 01 2026\n</env>"
    assert texts(third) == [*texts(second), "So", "Yes" + tuesday]
    # A day that comes again is said again.
    fourth = placed(
        [env("Mon Nov 30 2026"), *said("Hi", "Ho", "And?", "So", "Yes", ".", "?")], third
    )
    assert texts(fourth) == [*texts(third), ".", "?" + monday]


def test_a_reminder_that_moves_stays_where_it_was_said_first() -> None:
    plan = note("Plan mode is active.")
    first = placed(said(f"Hi\n\n{plan}"))
    assert texts(first) == [f"Hi\n\n{plan}"]
    assert first.rewrites == []
    second = placed(said("Hi", "Ho", f"And? {plan}"), first)
    assert texts(second) == [f"Hi\n\n{plan}", "Ho", "And?"]
    told = {"field": "messages[2]", "moved": "system-reminder", "to": "messages[0]"}
    assert second.rewrites == [told]
    # Once the client sends it no more, the model does not see it any more.
    assert texts(placed(said("Hi", "Ho", "And?", "So", "Go"), second)) == [
        "Hi",
        "Ho",
        "And?",
        "So",
        "Go",
    ]


def test_reminders_that_stay_are_left_where_they_are() -> None:
    todo = note("The list is empty.")
    messages = said(f"{todo}\nHi", "Ho", f"And?\n{todo}", "So", f"{note('a')}\n\n{note('b')}")
    first = placed(messages[:3])
    assert texts(first) == [message["content"] for message in messages[:3]]
    second = placed(messages, first)
    assert texts(second) == [message["content"] for message in messages]
    assert (first.rewrites, second.rewrites) == ([], [])


def test_a_reminder_in_a_message_of_its_own_can_move_too() -> None:
    plan, call = note("Plan."), {"role": "assistant", "content": "look"}
    result = {"role": "tool", "tool_call_id": "a", "content": "rain"}
    own = {"role": "user", "content": plan}
    start = [*said("Hi"), call, result]
    first = placed([*start, own])
    assert texts(first) == ["Hi", "look", "rain", plan]
    second = placed([*start, call, result, own], first)
    assert texts(second) == ["Hi", "look", "rain", plan, "look", "rain"]
    assert [m["role"] for m in second.transcript.messages][-1] == "tool"
    # Where it alone is what the user says, it stays: else the assistant would have spoken last.
    assert texts(placed([*start, call, own], first))[-1] == plan


def test_the_date_that_claude_code_tells_in_a_reminder_is_one_too() -> None:
    def context(date: str) -> str:
        return note(f"# claudeMd\nTest.\n# currentDate\nToday's date is {date}.\n\nIt may matter.")

    first = placed(said(f"{context('2026-11-30')}\n\nHi"))
    head = note("# claudeMd\nTest.\n# currentDate\n\nIt may matter.")
    assert texts(first) == [f"{head}\n\nHi\n\n<env>\nToday's date is 2026-11-30.\n</env>"]
    second = placed(said(f"{context('2026-12-01')}\n\nHi", "Ho", "And?"), first)
    assert texts(second)[:2] == [*texts(first), "Ho"]
    assert texts(second)[2] == "And?\n\n<env>\nToday's date is 2026-12-01.\n</env>"


UNTOUCHED = (
    [{"role": "system", "content": "Today's date: Mon Nov 30 2026\nBe brief."}],
    [{"role": "system", "content": "<env>\nPlatform: linux\n</env>\nToday's date: Monday\n"}],
    [{"role": "system", "content": "It is <env>\nToday's date: Mon Nov 30 2026\n</env>"}],
    [{"role": "system", "content": "<env>\nToday's date: Mon Nov 30 2026\n"}],
    said("<env>\nToday's date: Mon Nov 30 2026\n</env>"),
    said("Today's date is 2026-11-30.\nWhat day is it?"),
    said(f"What does {note('Plan.')} mean?"),
    said("</system-reminder> and <system-reminder>"),
    said("Hi <system-reminder>a"),
    said("Hi", note("An answer that looks like one.")),
    said(f"<system-reminder>a{note('nested')}"),
    said("Hi", "Ho", f"{note('Today is quiet.')} Today's date is 2026-11-30.\n"),
)


@pytest.mark.parametrize("messages", UNTOUCHED)
def test_what_nobody_s_program_wrote_is_not_moved(messages: Messages) -> None:
    result = placed(messages)
    assert texts(result) == [message["content"] for message in messages]
    assert result.rewrites == []


PIECES = st.sampled_from(
    ["Hi", " ", "\n\n", note("a"), note("b"), "<system-reminder>", "</system-reminder>", "<env>\n",
     "Today's date is 2026-11-30.\n", "Today's date: Mon Nov 30 2026\n", "</env>\n"]
)  # fmt: skip
CONTENT = st.lists(PIECES, max_size=5).map("".join)


@example([("user", "Hi"), ("user", note("a")), ("user", note("b"))])
@given(st.lists(st.tuples(st.sampled_from(["user", "tool", "assistant"]), CONTENT), min_size=1))
def test_without_dates_a_new_conversation_is_as_it_was_sent(parts: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": text} for role, text in parts]
    found = steady(Transcript(messages))
    if all(piece.kind == "reminder" for piece in found.pieces):
        result = put_back(found, ())
        assert [(m["role"], text_of(m)) for m in result.transcript.messages] == parts
        assert result.rewrites == []


@given(st.lists(CONTENT, min_size=1), st.lists(CONTENT, min_size=1))
def test_the_model_sees_each_reminder_as_often_as_it_was_sent(
    before: list[str], after: list[str]
) -> None:
    result = placed(said(*after), placed(said(*before)))
    for text in (note("a"), note("b")):
        assert "".join(texts(result)).count(text) == "".join(after).count(text)


TURNS = st.lists(st.tuples(st.sampled_from(["user", "tool", "assistant"]), CONTENT), max_size=6)


@given(TURNS, TURNS, TURNS)
def test_whatever_is_edited_nothing_is_put_into_an_answer(
    shared: list[tuple[str, str]], before: list[tuple[str, str]], after: list[tuple[str, str]]
) -> None:
    def sent(parts: list[tuple[str, str]], date: str) -> Messages:
        first = [env(date), {"role": "user", "content": "Hi"}]
        return first + [{"role": role, "content": text} for role, text in parts]

    earlier = placed(sent(shared + before, "Mon Nov 30 2026"))
    result = placed(sent(shared + after, "Tue Dec 01 2026"), earlier)
    answers = [text for role, text in shared + after if role == "assistant"]
    seen = result.transcript.messages
    assert [text_of(m) for m in seen if m["role"] == "assistant"] == answers
    assert "".join(texts(result)).count("Today's date: Tue Dec 01 2026") == 1
    for text in (note("a"), note("b")):
        told = "".join(text for _, text in shared + after).count(text)
        assert "".join(texts(result)).count(text) == told


def test_behind_an_edit_all_is_put_as_in_a_new_conversation() -> None:
    plan, monday, tuesday = note("Plan."), env("Mon Nov 30 2026"), env("Tue Dec 01 2026")
    first = placed([monday, *said("q0")])
    second = placed([tuesday, *said("q0", "a0", f"q1\n\n{plan}")], first)
    told = "\n\n<env>\nToday's date: Tue Dec 01 2026\n</env>"
    assert texts(second)[3] == f"q1\n\n{plan}{told}"
    # One message fewer before the answer that is now where the reminder was.
    cut = [tuesday, *said("q0"), *said("(summary)", "a1", f"q2\n\n{plan}")]
    result = placed(cut, second)
    assert texts(result)[1:] == [texts(first)[1], "(summary)", "a1", f"q2\n\n{plan}{told}"]
    # Without the edit it stays where it was.
    whole = placed([tuesday, *said("q0", "a0", "q1", "a1", f"q2\n\n{plan}")], second)
    assert texts(whole) == [*texts(second), "a1", "q2"]


def test_where_no_date_is_told_those_of_another_conversation_are_not() -> None:
    earlier = placed([env("Mon Nov 30 2026"), *said("Hi")])
    system = {"role": "system", "content": texts(earlier)[0]}
    assert texts(placed([system, *said("Hi", "Ho", "And?")], earlier))[1:] == ["Hi", "Ho", "And?"]


def test_past_the_most_reminders_later_ones_stay_and_nothing_before_them_changes() -> None:
    messages = [env("Mon Nov 30 2026"), *said(f"Hi {note('0')}")]
    earlier, seen = placed(messages), steady(Transcript(messages)).transcript
    for i in range(1, MAX_PIECES + 3):
        day = f"{'Mon' if i < MAX_PIECES // 2 else 'Tue'} 2026"
        messages = [env(day), *messages[1:], *said(f"{i} {note(str(i))}", f"Ho {i}")[::-1]]
        if i % 100 and i < MAX_PIECES - 3:
            continue
        found = steady(Transcript(messages))
        assert seen.all_digests() == found.transcript.all_digests()[: len(seen.all_digests())]
        assert len(found.pieces) == min(i + 2, MAX_PIECES)
        result = put_back(found, places_of(earlier.metadata or {}))
        assert texts(result)[: len(texts(earlier))] == texts(earlier)
        earlier, seen = result, found.transcript


def test_metadata_stays_bounded() -> None:
    space = "\n" * 8
    system = env("\u263e" * 40)
    many = [system, *said(*(f"Hi{space}{note(str(i))}{space}" for i in range(3 * MAX_PIECES)))]
    found = steady(Transcript(many))
    digest = found.transcript.all_digests()[0][:16]
    places = [
        Place("date", f"Today's date: {i:\u263e>40}", 1, "tail", "\n\n", "", digest)
        for i in range(MAX_DATES + 1)
    ]
    full = put_back(found, places[: MAX_DATES - 1])
    assert len(full.places) == MAX_DATES + MAX_PIECES - 1
    assert len(json.dumps(full.metadata)) < 65_536
    over = put_back(found, places[:MAX_DATES])
    assert [place.kind for place in over.places].count("date") == 1
    assert places_of({"places": [["date"], 3, None]}) == ()


def ask(served: HttpEngine, messages: Messages, **headers: str) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "temperature": 0}
    answer = served.post(CHAT, body, headers=STEADY | headers)
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def test_places_are_found_again_after_a_restart(tmp_path: Path) -> None:
    plan = note("Plan mode is active.")
    runner = {"text_dir": tools_folder(tmp_path / "text"), "script": replies("Ho.", "So.", "Yes.")}
    config = engine_config(tmp_path / "store", blocks=512, disk_bytes=50_000_000)
    with http_engine(config, runner=runner) as served:
        first = ask(served, [env("Mon Nov 30 2026"), *said(f"Hi\n{plan}")])
        assert len(first["sessionkv"]["rewrites"]) == 1
    with http_engine(config, runner=runner) as served:
        second = ask(served, [env("Tue Dec 01 2026"), *said("Hi", "Ho.", f"And?\n{plan}")])
    report = second["sessionkv"]["cache"]
    assert report["miss"]["reason"] == "none"
    assert report["cached_tokens"] == first["usage"]["total_tokens"] - 1
    tos = [rewrite["to"] for rewrite in second["sessionkv"]["rewrites"]]
    assert tos == ["messages[1]", "messages[3]"]


def test_conversations_that_differ_in_their_date_alone_keep_their_own(tmp_path: Path) -> None:
    runner = {"text_dir": tools_folder(tmp_path), "script": replies("Ho.", "Ho.", "So.", "Yes.")}
    monday, tuesday = env("Mon Nov 30 2026"), env("Tue Dec 01 2026")
    with http_engine(engine_config(blocks=512), runner=runner) as served:
        ask(served, [monday, *said("Hi")])
        first = ask(served, [tuesday, *said("Hi")])
        with gateway(served.engine.endpoint) as restarted:
            for http, system in ((restarted, tuesday), (served, monday)):
                second = ask(http, [system, *said("Hi", "Ho.", "And?")])
                assert second["sessionkv"]["cache"]["miss"]["reason"] == "none"
                cached = second["sessionkv"]["cache"]["cached_tokens"]
                assert cached == first["usage"]["total_tokens"] - 1
                assert [told["to"] for told in second["sessionkv"]["rewrites"]] == ["messages[1]"]


def test_it_is_off_unless_asked_for(tmp_path: Path) -> None:
    runner = {"text_dir": tools_folder(tmp_path), "script": replies("Ho.", "So.")}
    with http_engine(engine_config(blocks=512), runner=runner) as served:
        messages = [env("Mon Nov 30 2026"), *said("Hi")]
        off = served.post(CHAT, {"model": MODEL, "messages": messages}).json()
        on = ask(served, messages)
        assert "rewrites" not in off["sessionkv"]
        assert on["sessionkv"]["rewrites"]
        last = served.stream(
            CHAT, {"model": MODEL, "messages": messages, "stream": True}, headers=STEADY
        )
        assert last[-2]["sessionkv"]["rewrites"] == on["sessionkv"]["rewrites"]
    with http_engine(engine_config(blocks=512), runner=runner, steady_prompts=True) as served:
        body = {"model": MODEL, "messages": messages}
        assert "rewrites" in served.post(CHAT, body).json()["sessionkv"]
        off = served.post(CHAT, body, headers={"x-sessionkv-steady": "false"}).json()
        assert "rewrites" not in off["sessionkv"]


def test_what_is_counted_is_what_is_sent(tmp_path: Path) -> None:
    runner = {"text_dir": tools_folder(tmp_path), "script": replies("Ho.", "So.")}
    with http_engine(engine_config(blocks=512), runner=runner, steady_prompts=True) as served:
        system, first = env("Mon Nov 30 2026")["content"], said(f"Hi {note('Plan.')}")
        moved = [*said("Hi", "Ho."), {"role": "user", "content": f"And? {note('Plan.')}"}]
        for messages in (first, moved):
            body = {"model": MODEL, "system": system, "messages": messages}
            counted = served.post("/v1/messages/count_tokens", body).json()
            answer = served.post("/v1/messages", body | {"max_tokens": 9}).json()
            usage = answer["usage"]
            prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
            assert counted == {"input_tokens": prompt}
            assert answer["sessionkv"]["rewrites"]


def test_responses_that_are_not_stored_are_rewritten_and_say_so(tmp_path: Path) -> None:
    runner = {"text_dir": tools_folder(tmp_path), "script": replies("Ho.", "So.")}
    plan, url = note("Plan."), "/v1/responses"
    monday = {"field": "messages[0]", "moved": "Today's date: Mon Nov 30 2026", "to": "messages[1]"}
    moved = {"field": "messages[3]", "moved": "system-reminder", "to": "messages[1]"}
    with http_engine(engine_config(blocks=512), runner=runner, steady_prompts=True) as served:
        body: dict[str, Any] = {"model": MODEL, "store": False}
        body["instructions"] = env("Mon Nov 30 2026")["content"]
        first, again = said(f"Hi {plan}"), said("Hi", "Ho.", f"And? {plan}")
        for messages, rewrites in ((first, [monday]), (again, [moved, monday])):
            asked = body | {"input": messages}
            counted = served.post(f"{url}/input_tokens", asked).json()["input_tokens"]
            answer = served.post(url, asked).json()
            assert answer["sessionkv"]["rewrites"] == rewrites
            assert counted == answer["usage"]["input_tokens"]
        streamed = served.stream(url, asked | {"stream": True})[-1]["response"]
        assert streamed["sessionkv"]["rewrites"] == rewrites
        assert answer["sessionkv"]["cache"]["miss"]["reason"] == "none"
        # What is stored, and what asks for nothing of it, the model sees as it was sent.
        for fields, headers in (({"store": True}, {}), ({}, {"x-sessionkv-steady": "false"})):
            plain = served.post(url, asked | fields, headers=headers).json()
            assert "rewrites" not in plain["sessionkv"]
