"""A template that writes a BOS on a tokenizer that adds one."""

import pytest

from sessionkv.text.root import RootText
from tests.builders import text as built
from tests.builders.engine import engine_config, greedy, open_engine


@pytest.mark.parametrize("name", ["llama3", "mistral", "gemma"])
def test_rendered_prompt_has_one(name):
    text = built.ALL[name]()
    bos = text.facts.bos_token_id
    ids = text.full(RootText(None, None, 0.0), built.read("hi"))
    assert ids[0] == bos
    assert ids.count(bos) == 1


@pytest.mark.parametrize("name", ["llama3", "mistral", "gemma"])
def test_session_has_one_over_all_its_turns(name):
    text = built.ALL[name]()
    root = text.root(None, None, now_s=0.0)
    log = text.delta(root, built.read("hi"), first=True, closed=False)
    log += text.delta(root, built.read("more"), first=False, closed=False)
    assert (root.ids + log).count(text.facts.bos_token_id) == 1


@pytest.mark.parametrize("name", ["llama3", "mistral", "gemma"])
def test_raw_prompt_has_one_whether_spelled_or_not(name):
    text = built.ALL[name]()
    bos = text.facts.bos_token_id
    plain, spelled = text.encode_prompt("hi"), text.encode_prompt(text.facts.bos_token + "hi")
    assert plain[0] == spelled[0] == bos
    assert plain.count(bos) == spelled.count(bos) == 1


def test_no_bos_where_the_tokenizer_has_no_such_rule():
    assert built.chatml().encode_prompt("hi") == (104, 105)


@pytest.mark.parametrize("name", ["llama3", "mistral", "gemma"])
def test_engine_writes_one_at_every_door(name, tmp_path):
    text, folder = built.ALL[name](), built.write_folder(name, tmp_path)
    bos = text.facts.bos_token_id
    runner = {"text_dir": folder, "never_sample": {bos}}
    with open_engine(engine_config(blocks=256), runner=runner) as engine:
        raw = engine.generate("hi", sampling=greedy(1))
        spelled = engine.generate(text.facts.bos_token + "hi", sampling=greedy(1))
        assert raw.usage == spelled.usage
        assert spelled.cache.computed_tokens == 1
        session = engine.open("a", system="Be brief.")
        for question in ("hi", "more", "and more"):
            session.turn(question, sampling=greedy(3))
        log = engine.parts.tree.tokens_of(engine.parts.tree.head("local", "a").node_id)
        assert (log[0], log.count(bos)) == (bos, 1)
        engine.assert_ledger()
