"""Whatever the schema, what is generated under it is valid JSON that satisfies it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sessionkv import FinishReason, SamplingParams
from tests.builders.checksum import tokens
from tests.builders.engine import CheckedEngine, engine_config, open_engine

NAMES = st.text('abcxyz_é"\\ ', min_size=1, max_size=6)
"""Of properties: with what JSON has to escape."""
SCALARS = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.tuples(st.integers(-99, 99), st.integers(0, 99)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": sum(pair)}
    ),
    st.lists(st.one_of(NAMES, st.integers(-9, 9)), min_size=1, max_size=4, unique=True).map(
        lambda values: {"enum": values}
    ),
    st.integers(0, 5).map(lambda most: {"type": "string", "maxLength": most}),
    st.just({"type": "string", "pattern": "^[a-f]{2,5}$"}),
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(NAMES, inner, max_size=3).map(
        lambda found: {
            "type": "object",
            "properties": found,
            "required": list(found),
            "additionalProperties": False,
        }
    )


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(inner, st.integers(0, 1), st.integers(1, 3)).map(
        lambda parts: {
            "type": "array", "items": parts[0], "minItems": parts[1], "maxItems": parts[2],
        }
    )  # fmt: skip


SCHEMAS = objects(
    st.recursive(
        SCALARS,
        lambda inner: objects(inner) | arrays(inner) | st.lists(inner, min_size=1, max_size=2).map(
            lambda some: {"anyOf": some}
        ),
        max_leaves=5,
    )
)  # fmt: skip


def satisfies(value: Any, schema: dict[str, Any]) -> bool:
    """What these schemas say, in as many words."""
    if "anyOf" in schema:
        return any(satisfies(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    kind = schema["type"]
    if kind == "null":
        return value is None
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "integer":
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return is_number and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        if not isinstance(value, str) or "pattern" not in schema:
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        return 2 <= len(value) <= 5 and set(value) <= set("abcdef")
    if kind == "array":
        if not isinstance(value, list):
            return False
        fits = schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(satisfies(item, schema["items"]) for item in value)
    properties = schema["properties"]
    if not isinstance(value, dict) or value.keys() != properties.keys():
        return False
    return all(satisfies(value[name], inner) for name, inner in properties.items())


@pytest.fixture(scope="module")
def engine() -> Iterator[CheckedEngine]:
    with open_engine(engine_config(blocks=2000)) as opened:
        yield opened


@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_reply_satisfies_its_schema_warm_and_cold(
    engine: CheckedEngine, schema: dict[str, Any], seed: int
) -> None:
    sampling = SamplingParams(seed=seed, grammar={"json_schema": json.dumps(schema)})
    prompt = tokens(20, start=seed % 7)
    warm = engine.generate(tokens=prompt, sampling=sampling)
    assert warm.finish_reason is FinishReason.STOP
    assert satisfies(json.loads(warm.text), schema), warm.text
    cold = engine.generate(tokens=prompt, sampling=sampling, cache=False)
    assert cold.tokens == warm.tokens
