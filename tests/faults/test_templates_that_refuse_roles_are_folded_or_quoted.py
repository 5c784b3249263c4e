"""Templates without a system role, or with strict alternation."""

import pytest

from sessionkv.errors import TemplateRefused
from sessionkv.text.root import RootText
from sessionkv.types import MissReason
from tests.builders import text as built
from tests.builders.doors import Script
from tests.builders.engine import engine_config, greedy, open_engine, oracle

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
def test_messages_of_the_user_in_a_row_are_one(name):
    text = built.ALL[name]()
    assert text.full(ROOT, built.read("a", "b")) == text.full(ROOT, built.read("a\n\nb"))


@pytest.mark.parametrize("name", ["gemma", "mistral"])
@pytest.mark.parametrize("items", [(ASSISTANT, "a"), ("a", ASSISTANT, ASSISTANT, "b")])
def test_other_refusals_carry_the_templates_words(name, items):
    text = built.ALL[name]()
    with pytest.raises(TemplateRefused, match="must alternate user/assistant"):
        text.full(ROOT, built.read(*items))


def test_session_goes_on_after_a_refused_turn():
    text = built.gemma()
    root = text.root("Be brief.", None, now_s=0.0)
    with pytest.raises(TemplateRefused, match="must alternate"):
        text.delta(root, built.read(ASSISTANT, "b"), first=False, closed=True)
    assert "ok" in text.decode(text.delta(root, built.read("ok"), first=False, closed=True))


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_engine_quotes_the_template_and_goes_on(name, tmp_path):
    folder = built.write_folder(name, tmp_path)
    with open_engine(engine_config(blocks=512), runner={"text_dir": folder}) as engine:
        for messages in (
            [{"role": "user", "content": "a"}, ASSISTANT, ASSISTANT],
            [ASSISTANT, {"role": "user", "content": "a"}],
        ):
            with pytest.raises(TemplateRefused, match="must alternate user/assistant"):
                engine.generate(messages=messages)
            with pytest.raises(TemplateRefused, match="refuses this: "):
                engine.open("a", system="Be brief.").turn(messages=messages)
        folded = engine.generate(
            messages=[{"role": "user", "content": "Be brief.\n\nHi"}], sampling=greedy(1)
        )
        session = engine.open("a", system="Be brief.")
        first = session.turn("Hi", sampling=greedy(4))
        assert first.usage.prompt_tokens == folded.usage.prompt_tokens
        # A turn that was cancelled leaves no user message behind to come twice in a row.
        stream = session.stream("never mind", sampling=greedy(100))
        assert stream.cancel() is None
        again = session.turn("And now?", sampling=greedy(4))
        assert again.cache.miss.reason in (MissReason.NONE, MissReason.TEMPLATE_REWROTE)
        roles = [message["role"] for message in session.info(history=True).messages]
        assert roles == ["system", "user", "assistant", "user", "assistant"]
        engine.assert_ledger()


JOINED = {
    "gemma": (
        "<s><start_of_turn>user\nBe brief.\n\na\n\nb<end_of_turn>\n<start_of_turn>model\n"
        "hello<end_of_turn>\n<start_of_turn>user\nc\n\nNow.\n\nd<end_of_turn>\n"
        "<start_of_turn>model\n"
    ),
    "mistral": "<s> [INST] Be brief.\n\na\n\nb [/INST] hello</s> [INST] c\n\nNow.\n\nd [/INST]",
}


# The space that the template writes before a reply is the model's own to sample.
@pytest.mark.parametrize(("name", "said"), [("gemma", "hello"), ("mistral", " hello")])
def test_a_kept_history_joins_what_each_turn_brings(name, said, tmp_path):
    text, script = built.ALL[name](), Script()
    folder = built.write_folder(name, tmp_path)
    now = {"role": "system", "content": "Now."}
    whole = built.read(SYSTEM, "a", "b", ASSISTANT, "c", now, "d")
    runner = {"text_dir": folder, "script": script}

    def maps(*items):
        return [message.to_map() for message in built.read(*items)]

    with open_engine(engine_config(blocks=512), runner=runner) as engine:
        session = engine.open("a", system="Be brief.", history="keep")

        def cancelled():
            stream = session.stream(messages=maps("never", "mind"), sampling=greedy(2000))
            assert stream.cancel() is None

        cancelled()
        script.add(built.reply(text, said))
        first = session.turn(messages=maps("a", "b"), sampling=greedy(9, ignore_eos=False))
        assert first.text == "hello"
        cancelled()
        second = session.turn(messages=maps("c", now, "d"), sampling=greedy(4))
        log = engine.parts.tree.tokens_of(engine.parts.tree.head("local", "a").node_id)
        prompt = log[: second.usage.prompt_tokens]
        assert text.decode(prompt, special=True) == JOINED[name]
        assert text.decode(text.full(ROOT, whole), special=True) == JOINED[name]
        # The reply is a hash of the prompt: warm equals cold.
        assert second.cache.cached_tokens > 0
        assert list(second.tokens) == oracle(prompt, greedy(4), vocab_size=text.vocab_size)
        engine.assert_ledger()
