"""Every parameter that is honoured reaches the model, under each API's name of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from sessionkv.gateway.conversations import NAMES
from sessionkv.gateway.openai.sampling import PRIORITY
from sessionkv.types import SamplingParams
from tests.builders.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Api
from tests.builders.engine import engine_config
from tests.builders.gateway import HttpEngine, http_engine, tools_folder

SAME: dict[str, Any] = {"temperature": 0.5, "top_p": 0.75, "top_k": 5}
GIVEN = SAME | {
    "min_p": 0.125,
    "presence_penalty": 0.25,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "seed": 7,
    "min_tokens": 1,
    "ignore_eos": True,
}
STOP = {"stop": ["zz", "y"]}
BIAS = {"logit_bias": {"65": 3.5}}
ASKED: list[tuple[Api, dict[str, Any]]] = [
    (CHAT, GIVEN | STOP | BIAS),
    (COMPLETIONS, GIVEN | STOP | BIAS),
    (RESPONSES, GIVEN),
    (MESSAGES, SAME | STOP),
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def seen() -> list[SamplingParams]:
    """What the model was given for each answer of one token."""
    return []


@pytest.fixture(scope="module")
def served(
    seen: list[SamplingParams], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpEngine]:
    def sampler(logits: Any, sampling: SamplingParams, known: Any, count: int) -> int:
        seen.append(sampling)
        return 97

    folder = tools_folder(tmp_path_factory.mktemp("text"))
    config = engine_config(blocks=512, host_blocks=512)
    with http_engine(config, runner={"text_dir": folder, "sampler": sampler}) as engine:
        yield engine


@pytest.mark.parametrize(("api", "fields"), ASKED)
@pytest.mark.parametrize("stream", [False, True])
def test_all_of_them_arrive(
    served: HttpEngine, seen: list[SamplingParams], api: Api, fields: Any, stream: bool
) -> None:
    api.say(served, api.body("Hi", limit=1, **fields), stream=stream)
    expected = {name: value for name, value in fields.items() if name not in ("stop", "logit_bias")}
    if "stop" in fields:
        expected["stop"] = tuple(fields["stop"])
    if "logit_bias" in fields:
        expected["logit_bias"] = {65: 3.5}
    wanted = SamplingParams(**expected, max_tokens=1, fit_window=api is not COMPLETIONS)
    assert replace(seen[-1], seed=wanted.seed) == wanted
    if "seed" in fields:
        assert seen[-1].seed == 7


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS], ids=repr)
def test_the_answers_of_one_request_have_seeds_in_turn(
    served: HttpEngine, seen: list[SamplingParams], api: Api
) -> None:
    seen.clear()
    body = api.body("Hi", limit=1, n=3, seed=2**64 - 2)
    assert len(served.post(api.path, body).json()["choices"]) == 3
    assert sorted(sampling.seed or 0 for sampling in seen) == [0, 2**64 - 2, 2**64 - 1]


@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES], ids=repr)
def test_what_is_to_be_called_changes_no_prompt(served: HttpEngine, api: Api) -> None:
    choices: dict[Api, list[Any]] = {
        CHAT: ["none", "required", {"type": "function", "function": {"name": "f"}}],
        RESPONSES: ["none", "required", {"type": "function", "name": "f"}],
        MESSAGES: [{"type": "none"}, {"type": "any"}, {"type": "tool", "name": "f"}],
    }
    first = api.say(served, api.body("Tools?", tools=TOOLS, limit=1), stream=False)
    for choice in choices[api]:
        body = api.body("Tools?", tools=TOOLS, tool_choice=choice, limit=1)
        said = api.say(served, body, stream=False)
        assert said.usage[:2] == (first.usage[0], first.usage[0] - 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"modalities": ["text"]},
        {"verbosity": "medium"},
        {"store": False},
        {"reasoning_effort": "high"},
        {"prediction": {"type": "content", "content": "x"}},
        {"user": "u", "safety_identifier": "s"},
        {"metadata": {"a": "b"}},
        {"stream_options": {"include_obfuscation": True}},
    ],
)
def test_what_has_no_effect_has_none(
    served: HttpEngine, seen: list[SamplingParams], fields: dict[str, Any]
) -> None:
    plain = CHAT.body("Hi", limit=1, seed=1)
    CHAT.say(served, plain, stream=False)
    said = CHAT.say(served, plain | fields, stream=False)
    assert said.usage[1] == said.usage[0] - 1
    assert seen[-1] == seen[-2]


@pytest.mark.parametrize("tier", ["flex", "priority", "auto", "default", None])
@pytest.mark.parametrize("api", [CHAT, COMPLETIONS, RESPONSES], ids=repr)
def test_a_service_tier_is_told_as_it_was_given(
    served: HttpEngine, api: Api, tier: str | None
) -> None:
    answer = served.post(api.path, api.body("Hi", limit=1, service_tier=tier)).json()
    assert answer["service_tier"] == (tier if tier in PRIORITY else "default")


def test_a_conversation_is_kept_where_it_is_wanted(served: HttpEngine) -> None:
    body = CHAT.body("Keep this", limit=1, prompt_cache_retention="in_memory")
    before = time.time()
    CHAT.say(served, body, stream=False)
    with served.engine.client() as client:
        for _ in range(2000):  # it is pinned behind the answer
            pins = [info.pin for info in client.sessions(NAMES) if info.pin is not None]
            if pins:
                break
    (pin,) = pins
    assert pin.tier == "host"
    assert before <= pin.expires_s - 600 <= time.time()
