"""A store that another tokenizer wrote, and a store that another engine has open."""

from pathlib import Path

import pytest

from sessionkv import launch
from sessionkv.errors import StoreInUse, TurnKind
from sessionkv.text.root import RootText
from sessionkv.types import MissReason
from tests.builders import text as built
from tests.builders.engine import CheckedEngine, engine_config, greedy, open_engine, oracle

SHORT = greedy(6)
ROOT = RootText("Be brief.", None, 0.0)


def log_of(engine: CheckedEngine, name: str) -> list[int]:
    tree = engine.parts.tree
    return list(tree.tokens_of(tree.head("local", name).node_id))


@pytest.mark.parametrize("history", ["keep", "follow"])
def test_a_conversation_is_encoded_anew_once_and_says_so(tmp_path: Path, history: str) -> None:
    config = engine_config(tmp_path / "store", blocks=512)
    with open_engine(config) as engine:
        session = engine.open("a", system="Be brief.", history=history)
        messages = [{"role": "system", "content": "Be brief."}]
        for question in ("one", "two"):
            messages.append({"role": "user", "content": question})
            sent = messages if history == "follow" else messages[-1:]
            reply = session.turn(messages=sent, sampling=SHORT)
            messages.append({"role": "assistant", "content": reply.text})
    text, folder = built.llama3(), tmp_path / "text"
    folder.mkdir()
    built.write_folder("llama3", folder)
    with open_engine(config, runner={"text_dir": folder}) as engine:
        session = engine.session("a")
        assert list(session.info(history=True).messages) == messages
        messages.append({"role": "user", "content": "three"})
        sent = messages if history == "follow" else messages[-1:]
        third = session.turn(messages=sent, sampling=SHORT)
        assert third.cache.miss.reason is MissReason.IDENTITY_CHANGED
        assert third.cache.cached_tokens == 0
        ids = text.full(ROOT, built.read(*messages[1:]))
        assert log_of(engine, "a") == [*ids, *third.tokens]
        assert list(third.tokens) == oracle(ids, SHORT, vocab_size=text.vocab_size)
        messages.append({"role": "assistant", "content": third.text})
        messages.append({"role": "user", "content": "four"})
        sent = messages if history == "follow" else messages[-1:]
        fourth = session.turn(messages=sent, sampling=SHORT)
        assert fourth.cache.miss.reason is not MissReason.IDENTITY_CHANGED
        assert fourth.cache.cached_tokens >= len(ids)
        messages.append({"role": "assistant", "content": fourth.text})
        assert list(session.info(history=True).messages) == messages
        engine.assert_ledger()


def test_a_raw_session_cannot_be_encoded_anew_and_is_left_as_it_is(tmp_path: Path) -> None:
    config = engine_config(tmp_path / "store")
    with open_engine(config) as engine:
        first = engine.open("a").turn(tokens=[1, 2, 3], sampling=SHORT)
    log = [1, 2, 3, *first.tokens]
    folder = tmp_path / "text"
    folder.mkdir()
    built.write_folder("llama3", folder)
    with open_engine(config, runner={"text_dir": folder}) as engine:
        session = engine.session("a")
        with pytest.raises(TurnKind, match="another tokenizer"):
            session.turn(tokens=[4], sampling=SHORT)
        with pytest.raises(TurnKind):
            session.turn("x")
        assert log_of(engine, "a") == log
        session.rewind()
        assert session.turn(tokens=[4], sampling=SHORT).tokens  # nothing of the old is left
        engine.assert_ledger()


def test_a_second_engine_on_a_store_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with launch("checksum", store=tmp_path / "real") as first:
        for path in (tmp_path / "real", tmp_path / "link", tmp_path / "real" / ".." / "real"):
            with pytest.raises(StoreInUse) as caught, open_engine(engine_config(path)):
                pass
            assert str(first.pid) in caught.value.message
        with pytest.raises(StoreInUse) as caught:
            launch("checksum", store=tmp_path / "real")
        assert caught.value.details["pid"] == first.pid
        assert first.client().open("a").turn("x", sampling=SHORT).tokens
    with open_engine(engine_config(tmp_path / "link")) as engine:
        assert engine.session("a").info().turns == 1
