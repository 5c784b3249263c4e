"""The developer role, and several system messages at the start."""

import pytest

from sessionkv.text.root import RootText
from tests.builders import text as built
from tests.builders.engine import GREEDY, engine_config, open_engine

ROOT = RootText(None, None, 0.0)


def ids(text, *items):
    return text.full(ROOT, built.read(*items))


@pytest.mark.parametrize("name", built.ALL)
def test_developer_gives_the_ids_of_system(name):
    text = built.ALL[name]()
    developer = ids(text, {"role": "developer", "content": "Say only 42"}, "hi")
    assert developer == ids(text, {"role": "system", "content": "Say only 42"}, "hi")
    assert "developer" not in text.decode(developer, special=True)


def test_several_are_merged_first():
    text = built.chatml_words()
    merged = ids(text, {"role": "system", "content": "a\n\nb\n\nc"}, "hi")
    parts = [{"role": r, "content": c} for r, c in (("system", "a"), ("developer", "b"))]
    assert ids(text, *parts, {"role": "system", "content": "c"}, "hi") == merged
    assert "You are helpful" not in text.decode(merged)


@pytest.mark.parametrize("door", ["generate", "turn"])
def test_engine_answers_developer_as_system(door):
    with open_engine(engine_config(blocks=256)) as engine:
        results = []
        for number, role in enumerate(("system", "developer")):
            messages = [
                {"role": role, "content": "Say only 42"}, {"role": "user", "content": "hi"},
            ]  # fmt: skip
            if door == "generate":
                results.append(engine.generate(messages=messages, sampling=GREEDY))
            else:
                session = engine.open(f"s{number}", history="follow")
                results.append(session.turn(messages=messages, sampling=GREEDY))
        first, second = results
        assert second.tokens == first.tokens
        assert second.cache.computed_tokens == 1
        engine.assert_ledger()
