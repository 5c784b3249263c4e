"""Counted are the very tokens that a prompt has, and what the engine serves is told to clients."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sessionkv import AsyncClient, Client
from sessionkv.errors import InvalidRequest, Overloaded, SessionNotFound, TurnKind
from sessionkv.ipc.endpoint import socket_path
from sessionkv.types.reply_style import ReplyStyle
from tests.builders import text as texts
from tests.builders.doors import Later
from tests.builders.engine import StepGate, engine_config, greedy, open_engine, socket_engine
from tests.builders.fake_engine import short_endpoint
from tests.builders.tenants import access, tenants

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the weather? é"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_as_many_tokens_as_the_prompt_has(tmp_path: Path, name: str) -> None:
    folder = texts.write_folder(name, tmp_path)
    with open_engine(engine_config(blocks=400), runner={"text_dir": folder}) as engine:
        for fields in (
            {"prompt": "Hello é"},
            {"messages": MESSAGES},
            {"messages": MESSAGES, "tools": TOOLS},
        ):
            result = engine.generate(**fields, sampling=greedy(1))
            assert engine.count(**fields) == result.usage.prompt_tokens


def test_replies_count_as_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    folder = texts.write_folder("llama3", tmp_path)
    runner = {"text_dir": folder, "script": lambda known: 40 + len(known) % 5}
    with open_engine(engine_config(blocks=400), runner=runner) as engine:
        first = engine.generate(messages=MESSAGES, sampling=greedy(9))
        assert len(first.tokens) > len(texts.llama3().encoder.encode(first.text)) - 5
        more = [*MESSAGES, {"role": "assistant", "content": first.text}, MESSAGES[1]]
        counted = engine.count(messages=more)
        assert engine.generate(messages=more, sampling=greedy(1)).usage.prompt_tokens == counted


@pytest.mark.parametrize("history", ["keep", "follow"])
@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_a_turn_of_a_session_has_as_many_as_were_counted(
    tmp_path: Path, name: str, history: str
) -> None:
    folder = texts.write_folder(name, tmp_path)
    runner = {"text_dir": folder, "script": lambda known: 40 + len(known) % 5}
    with open_engine(engine_config(blocks=400), runner=runner) as engine:
        session = engine.open("a", system="Be brief.", tools=TOOLS, history=history)
        said: list[dict[str, object]] = []
        for text in ("What is it? é", "And now?", "Then?"):
            said.append({"role": "user", "content": text})
            messages = said if history == "follow" else said[-1:]
            counted = session.count(messages=messages)
            if history == "keep":
                assert session.count(text) == counted
            result = session.turn(messages=messages, sampling=greedy(9))
            assert result.usage.prompt_tokens == counted
            said.append({"role": "assistant", "content": result.text})
        assert session.info().turns == 3
        with pytest.raises(SessionNotFound):
            engine.session("b").count("x")
        engine.open("raw").turn(tokens=[5], sampling=greedy(1))
        with pytest.raises(TurnKind):
            engine.session("raw").count("x")


def test_a_count_needs_a_place_of_the_tenants_quota(tmp_path: Path) -> None:
    gate = StepGate()
    with tenants(tmp_path, access=access(alice={"turns": 1}), gate=gate) as (_, alice, bob):
        assert alice.count("Hi") == bob.count("Hi") == 2
        running = Later(lambda: alice.open("a").turn("Hi", sampling=greedy(3)))
        gate.reached()
        for count in (lambda: alice.count("Hi"), lambda: alice.session("a").count("Hi")):
            with pytest.raises(Overloaded, match="your quota") as caught:
                count()
            assert caught.value.details["retry_after_s"] > 0
        assert bob.count("Hi") == 2
        gate.open()
        counted = running.result().usage.prompt_tokens
        assert alice.session("a").count("Hi") > counted


def test_what_does_not_fit_is_counted_and_what_never_could_is_refused() -> None:
    with open_engine(engine_config(blocks=16)) as engine:
        most = engine.served().max_model_len
        assert engine.count("x" * (most + 10)) == most + 10
        limit = most * engine.served().vocab_size
        for fields in (
            {"prompt": "x" * limit},
            {"messages": [{"role": "user", "content": "x" * limit}]},
        ):
            with pytest.raises(InvalidRequest, match="bytes long"):
                engine.count(**fields)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt | messages"),
        ({"prompt": "x", "messages": MESSAGES}, "prompt | messages"),
        ({"prompt": ""}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        ({"messages": MESSAGES, "tools": [1]}, "tools[0]"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(fields: dict[str, object], field: str) -> None:
    with open_engine(engine_config()) as engine, pytest.raises(InvalidRequest) as caught:
        engine.count(**fields)
    assert caught.value.details["field"] == field


def test_both_clients_over_a_socket(tmp_path: Path) -> None:
    folder = texts.write_folder("llama3", tmp_path)
    runner = {"text_dir": folder}
    with (
        short_endpoint() as endpoint,
        socket_engine(socket_path(endpoint).parent, engine_config(), runner=runner) as engine,
    ):
        with Client(engine.endpoint) as client:
            found = client.served()
            assert found.reply_style == ReplyStyle("llama3")
            assert (found.tenant, found.max_model_len) == ("local", found.limits["max_model_len"])
            counted = client.count(messages=MESSAGES)

        async def ask() -> tuple[object, int]:
            async with AsyncClient(engine.endpoint) as other:
                return await other.served(), await other.count(messages=MESSAGES)

        assert asyncio.run(ask()) == (found, counted)


def test_pieces_are_the_bytes_of_tokens_with_control_tokens_spelled_out() -> None:
    with open_engine() as engine:
        assert engine.pieces([65, 0xE3, 258]) == [b"A", b"\xe3", b"<|im_end|>"]
        with pytest.raises(InvalidRequest, match=r"tokens\[1\]"):
            engine.pieces([65, 259])
