"""The developer role, and several system messages at the start."""

import pytest

from sessionkv.text.root import RootText
from tests.builders import text as built

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
