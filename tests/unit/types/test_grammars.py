import json
from typing import Any

import pytest

from sessionkv.config import LimitsConfig
from sessionkv.errors import InvalidRequest
from sessionkv.ipc import messages as m
from sessionkv.ipc.codec import decode_request, encode_request
from sessionkv.types import SamplingParams
from sessionkv.types.grammars import MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_SCHEMA_BYTES

GOOD: list[Any] = [
    {"json_schema": "{}"},
    {"json_object": True},
    {"regex": "a|b"},
    {"lark": 'start: "é"'},
    {"choice": ["a", "b"]},
]


@pytest.mark.parametrize("grammar", GOOD, ids=lambda grammar: next(iter(grammar)))
def test_every_kind_survives_the_wire_and_is_nobody_elses(grammar: dict[str, Any]) -> None:
    sampling = SamplingParams(grammar=grammar)
    frame = encode_request(m.Generate(1, prompt="p", sampling=sampling), LimitsConfig())
    read = decode_request([frame], LimitsConfig())
    assert isinstance(read, m.Generate)
    assert read.sampling == sampling
    before = SamplingParams(grammar=dict(grammar))
    grammar["more"] = grammar
    assert sampling == before


@pytest.mark.parametrize(
    ("grammar", "field"),
    [
        ({}, "grammar"),
        ("a+", "grammar"),
        ({"regex": "a", "lark": "b"}, "grammar"),
        ({"gbnf": "a"}, "grammar"),
        ({"regex": ""}, "grammar.regex"),
        ({"regex": 5}, "grammar.regex"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "grammar.regex"),
        ({"lark": "a" * (MAX_GRAMMAR_BYTES + 1)}, "grammar.lark"),
        ({"json_schema": {"type": "object"}}, "grammar.json_schema"),
        ({"json_schema": "é" * (MAX_SCHEMA_BYTES // 2 + 1)}, "grammar.json_schema"),
        ({"json_object": False}, "grammar.json_object"),
        ({"json_object": 1}, "grammar.json_object"),
        ({"lark": "\ud800"}, "grammar.lark"),
        ({"choice": []}, "grammar.choice"),
        ({"choice": "yes"}, "grammar.choice"),
        ({"choice": ["a", ""]}, "grammar.choice[1]"),
        ({"choice": ["a" * MAX_SCHEMA_BYTES, "b"]}, "grammar.choice[1]"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "grammar.choice"),
    ],
)
def test_what_is_wrong_is_named(grammar: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(grammar=grammar)
    assert refused.value.details["field"] == f"sampling.{field}"


def test_schemas_in_a_lark_grammar_do_not_count_as_rules() -> None:
    schema = json.dumps({"enum": ["v" * 30] * 4000})
    SamplingParams(grammar={"lark": f"start: %json {schema}\n"})
    for rules in (schema, f"%json x{schema}", '%json "' + "a" * MAX_GRAMMAR_BYTES):
        with pytest.raises(InvalidRequest, match="besides its %json schemas"):
            SamplingParams(grammar={"lark": f"start: {rules}\n"})


def test_a_reply_under_a_grammar_ends_where_it_ends() -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.ignore_eos is True"):
        SamplingParams(grammar={"regex": "a"}, ignore_eos=True)
