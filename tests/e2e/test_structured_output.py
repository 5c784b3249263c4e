"""The default model under grammars: what it says anyway, in the form that was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from sessionkv import Engine, EngineConfig, FinishReason, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Oslo", "Rome", "Paris"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(smollm2: str) -> Iterator[Engine]:
    with Engine(EngineConfig(model=smollm2, offline=True, max_model_len=512)) as opened:
        yield opened


def said(engine: Engine, grammar: Any, **fields: Any) -> str:
    result = engine.generate(
        messages=[{"role": "user", "content": "Describe a person of your choice."}],
        sampling=SamplingParams(grammar=grammar, max_tokens=150, **fields),
    )
    assert result.finish_reason is FinishReason.STOP
    return result.text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_person_as_json(engine: Engine, temperature: float) -> None:
    schema = {"json_schema": json.dumps(PERSON)}
    person = json.loads(said(engine, schema, temperature=temperature, seed=1))
    assert person.keys() == PERSON["properties"].keys()
    assert len(person["name"]) <= 30
    assert person["age"] in range(121)


def test_an_expression_and_a_choice(engine: Engine) -> None:
    pattern = r"(yes|no), because [a-z ]{5,40}\."
    assert re.fullmatch(pattern, said(engine, {"regex": pattern}, seed=1))
    assert said(engine, {"choice": ["red", "blue"]}, seed=1) in ("red", "blue")


def test_a_prompt_that_makes_sense_is_likelier(engine: Engine) -> None:
    def likelihood(prompt: str) -> float:
        result = engine.generate(
            prompt=prompt, sampling=SamplingParams(max_tokens=1), prompt_logprobs=0
        )
        assert result.prompt_logprobs is not None
        return result.prompt_logprobs[-1][0].logprob

    right, wrong = (f"The capital of France is {name}" for name in ("Paris", "blue"))
    assert likelihood(right) > likelihood(wrong) + 3
