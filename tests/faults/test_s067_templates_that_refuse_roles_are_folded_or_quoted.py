"""Templates without a system role, or with strict alternation."""

import pytest

from sessionkv.errors import TemplateRefused
from sessionkv.text.root import RootText
from tests.builders import text as built

SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "hello"}
ROOT = RootText(None, None, 0.0)


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_system_goes_into_the_first_user_message(name):
    text = built.ALL[name]()
    folded = text.full(ROOT, built.read("Be brief.\n\nHi"))
    assert text.full(ROOT, built.read(SYSTEM, "Hi")) == folded
    session = text.root("Be brief.", None, now_s=0.0)
    assert session.ids == ()
    assert text.delta(session, built.read("Hi"), first=True, closed=False) == folded


@pytest.mark.parametrize("name", ["gemma", "mistral"])
@pytest.mark.parametrize("items", [("a", "b"), (ASSISTANT, "a")])
def test_other_refusals_carry_the_templates_words(name, items):
    text = built.ALL[name]()
    with pytest.raises(TemplateRefused, match="must alternate user/assistant"):
        text.full(ROOT, built.read(*items))


def test_session_goes_on_after_a_refused_turn():
    text = built.gemma()
    root = text.root("Be brief.", None, now_s=0.0)
    with pytest.raises(TemplateRefused, match="must alternate"):
        text.delta(root, built.read("a", "b"), first=False, closed=True)
    assert "ok" in text.decode(text.delta(root, built.read("ok"), first=False, closed=True))
