"""A change near the top loses the cache; it must be right, and said."""

from sessionkv.text.follow import follow_ids
from sessionkv.text.history import StoredMessage
from sessionkv.text.messages import freeze_tools
from sessionkv.text.root import RootText
from sessionkv.types import MissReason
from tests.builders import text as built
from tests.builders.engine import GREEDY, engine_config, open_engine, oracle


def test_system_added_later_is_rendered_and_reported():
    text = built.chatml_words()
    root = RootText(None, None, 0.0)
    first = text.full(root, built.read("hi"))
    reply = built.reply(text, "hello")
    log = first + reply
    answer = built.read({"role": "assistant", "content": "hello"})[0]
    stored = [
        StoredMessage(built.read("hi")[0], 1, len(first)),
        StoredMessage(answer, 1, len(log), reply),
    ]
    sent = (*built.read({"role": "system", "content": "Be brief."}, "hi"), answer, *built.read("x"))
    followed = follow_ids(text, root, sent, stored=stored, log=log)
    assert followed.ids == text.full(root, sent)
    assert followed.miss.reason is MissReason.HISTORY_EDITED
    assert (followed.miss.message, followed.miss.turn) == (0, 1)
    assert followed.miss.token < len(first)
    assert "You" in followed.miss.expected
    assert "Be" in followed.miss.found


def test_tools_keep_the_clients_order():
    text = built.llama3()
    names = ["zeta", "alpha", "mid"]
    tools = [{"type": "function", "function": {"name": n, "b": 1, "a": 2}} for n in names]
    frozen = freeze_tools(tools, built.LIMITS)
    shown = text.decode(text.full(RootText(None, frozen, 0.0), built.read("x")))
    places = [shown.index(f'{{"name": "{name}", "b": 1, "a": 2}}') for name in names]
    assert places == sorted(places)


def test_engine_says_what_a_later_system_prompt_cost(tmp_path):
    text, folder = built.chatml_words(), built.write_folder("chatml_words", tmp_path)
    with open_engine(engine_config(blocks=512), runner={"text_dir": folder}) as engine:
        session = engine.open("a", history="follow")
        messages = [{"role": "user", "content": "hi"}]
        first = session.turn(messages=messages, sampling=GREEDY)
        messages += [
            {"role": "assistant", "content": first.text}, {"role": "user", "content": "more"},
        ]  # fmt: skip
        system = {"role": "system", "content": "Be brief."}
        second = session.turn(messages=[system, *messages], sampling=GREEDY)
        miss = second.cache.miss
        assert (miss.reason, miss.turn, miss.message) == (MissReason.HISTORY_EDITED, 0, 0)
        assert second.cache.device_tokens == miss.token < first.usage.prompt_tokens
        assert ("You" in miss.expected, "Be" in miss.found) == (True, True)
        log = engine.parts.tree.tokens_of(engine.parts.tree.head("local", "a").node_id)
        prompt = log[: -len(second.tokens)]
        assert list(second.tokens) == oracle(prompt, vocab_size=text.vocab_size)
        assert "Be brief." in text.decode(log)
        engine.assert_ledger()
