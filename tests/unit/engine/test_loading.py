"""Who waits for whom while sessions are looked up."""

from __future__ import annotations

from typing import Any

import pytest

from sessionkv.engine.loading import Loader
from sessionkv.errors import Overloaded, StoreUnavailable
from sessionkv.store.questions import FindKey, FindSession
from sessionkv.store.worker import Answered
from sessionkv.types import BlockHash
from tests.builders.tree import TENANT, B, Sessions, key_record

A, C, NOBODY = ((TENANT, name) for name in ("a", "c", "nobody"))
QUESTION = FindKey(TENANT, "k")


class FakeStore:
    """Remembers what it was asked, until a test answers."""

    def __init__(self) -> None:
        self.asked: dict[int, Any] = {}
        self.full = False

    def ask(self, ticket: int, question: Any) -> None:
        if self.full:
            raise Overloaded("full")
        self.asked[ticket] = question


class World:
    """Three sessions, none of them in memory."""

    def __init__(self) -> None:
        self.s = Sessions()
        for name in ("a", "b", "c"):
            self.s.open(name)
            self.s.turn(name, [1, 2, 3, 4, 5])
        self.s.tree = self.s.fresh_tree()
        self.store = FakeStore()
        self.loader = Loader(self.s.tree, self.store, BlockHash(b"r" * 32), B)  # type: ignore[arg-type]

    def questions(self) -> list[Any]:
        return list(self.store.asked.values())

    def answer(self, question: Any, error: StoreUnavailable | None = None) -> None:
        """The journal answers a question that was asked."""
        ticket = next(ticket for ticket, asked in self.store.asked.items() if asked == question)
        del self.store.asked[ticket]
        reply: Any = key_record("k", 1.0)
        if isinstance(question, FindSession):
            reply = self.s.journal.find((question.tenant, question.name))
        self.loader.answered(Answered(ticket, None if error else reply, error))

    def served(self) -> list[object]:
        found = []
        while (ready := self.loader.next_ready()) is not None:
            assert ready.error is None
            found.append(ready.item)
        return found


def test_a_cold_session_is_asked_for_once_and_has_its_blocks_known() -> None:
    w = World()
    w.loader.submit("first", [A])
    w.loader.submit("second", [A])
    assert (w.questions(), w.served(), len(w.loader)) == ([FindSession(*A)], [], 1)
    assert w.loader.is_awaited(A)
    w.answer(FindSession(*A))
    assert w.served() == ["first", "second"]
    assert not w.loader.is_awaited(A)
    head = w.s.tree.head(*A)
    assert w.s.tree.tokens_of(head.node_id) == [1, 2, 3, 4, 5]
    assert len(w.s.tree.keys_of(head.node_id)) == 1
    assert w.s.tree.retention.num_keys == 1
    w.loader.submit("third", [A])
    assert (w.served(), w.questions()) == (["third"], [])


def test_a_name_that_is_not_there_is_remembered() -> None:
    w = World()
    w.loader.submit("first", [NOBODY])
    w.answer(FindSession(*NOBODY))
    assert w.served() == ["first"]
    w.loader.submit("second", [NOBODY])
    assert w.served() == ["second"]


def test_requests_that_name_one_session_keep_their_order() -> None:
    w = World()
    w.s.look_up("a")
    w.loader.submit("fork a to nobody", [A, NOBODY])
    w.loader.submit("rewind a", [A])
    w.loader.submit("turn on nobody", [NOBODY])
    w.loader.submit("turn on c", [C])
    assert w.questions() == [FindSession(*NOBODY), FindSession(*C)]
    w.answer(FindSession(*C))
    assert w.served() == ["turn on c"]
    w.answer(FindSession(*NOBODY))
    assert w.served() == ["fork a to nobody", "rewind a", "turn on nobody"]


def test_a_question_is_asked_when_all_before_it_was_served() -> None:
    w = World()
    w.loader.submit("open", [NOBODY])
    w.loader.submit("list", w.loader.waiting_names(TENANT), QUESTION)
    assert w.loader.waiting_names("other") == ()
    w.answer(FindSession(*NOBODY))
    ready = w.loader.next_ready()
    assert ready is not None
    assert (ready.item, w.questions()) == ("open", [])
    assert w.loader.next_ready() is None
    assert w.questions() == [QUESTION]
    w.loader.submit("turn", [NOBODY])
    assert w.served() == []
    w.answer(QUESTION)
    ready = w.loader.next_ready()
    assert ready is not None
    assert (ready.item, ready.reply) == ("list", key_record("k", 1.0))
    assert w.served() == ["turn"]


def test_what_cannot_be_read_fails_who_asked_and_the_next_asks_again() -> None:
    w = World()
    w.loader.submit("first", [A])
    w.loader.submit("second", [A])
    w.answer(FindSession(*A), error=StoreUnavailable("bad"))
    ready = w.loader.next_ready()
    assert ready is not None
    assert ready.item == "first"
    assert isinstance(ready.error, StoreUnavailable)
    assert w.served() == []
    w.answer(FindSession(*A))
    assert w.served() == ["second"]


def test_a_store_that_takes_no_more_fails_the_request_alone() -> None:
    w = World()
    w.store.full = True
    w.loader.submit("first", [A])
    ready = w.loader.next_ready()
    assert ready is not None
    assert isinstance(ready.error, Overloaded)
    assert w.served() == []
    w.store.full = False
    w.loader.submit("second", [A])
    w.answer(FindSession(*A))
    assert w.served() == ["second"]


def test_an_answer_that_comes_late_does_not_undo_what_memory_knows() -> None:
    """The journal was asked before a change of the same session was durable."""
    w = World()
    w.loader.submit("first", [A])
    w.s.look_up("a")
    w.s.turn("a", [6, 7])
    stale = w.s.journal.find(A)
    w.s.commit(w.s.tree.delete(TENANT, "a"))
    assert not w.s.tree.take_in(A, stale)
    w.answer(FindSession(*A))
    assert w.served() == ["first"]
    with pytest.raises(Exception, match="no session named"):
        w.s.tree.head(*A)
