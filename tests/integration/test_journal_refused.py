"""A change that the journal refuses is an error to whoever asked for it, and nothing else is."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sessionkv.errors import SessionNotFound, StoreUnavailable
from tests.builders.checksum import tokens
from tests.builders.doors import Later
from tests.builders.engine import GREEDY, CheckedEngine, engine_config, open_engine, oracle
from tests.builders.store import Gates


class FailingJournal:
    """In front of the journal: refuses what it is told to."""

    def __init__(self, engine: CheckedEngine) -> None:
        thread = engine.parts.store._journal
        self._journal = thread._journal
        self.refuses: Callable[[Sequence[Any]], bool] = lambda ops: False
        thread._journal = self

    def commit(self, batches: Sequence[Sequence[Any]]) -> None:
        if any(self.refuses(ops) for ops in batches):
            raise StoreUnavailable("told to fail")
        self._journal.commit(batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)


def always(ops: Sequence[Any]) -> bool:
    return True


def never(ops: Sequence[Any]) -> bool:
    return False


def turn(engine: CheckedEngine, name: str, ids: list[int], **options: Any) -> list[int]:
    return list(engine.session(name).turn(tokens=ids, sampling=GREEDY, **options).tokens)


def counts(engine: CheckedEngine, name: str) -> tuple[int, int]:
    info = engine.session(name).info()
    return info.turns, info.tokens


def test_a_refused_turn_leaves_its_session_as_it_was() -> None:
    with open_engine() as engine:
        journal = FailingJournal(engine)
        engine.open("a")
        log = tokens(13) + turn(engine, "a", tokens(13))
        journal.refuses = always
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match="told to fail"):
                turn(engine, "a", [7])
            assert counts(engine, "a") == (1, 21)
        journal.refuses = never
        result = engine.session("a").turn(tokens=[8], sampling=GREEDY)
        assert list(result.tokens) == oracle([*log, 8])
        assert result.cache.device_tokens >= 20
        assert counts(engine, "a") == (2, 30)
        engine.assert_ledger()


def test_a_refused_first_turn_and_a_refused_opening() -> None:
    with open_engine() as engine:
        journal = FailingJournal(engine)
        journal.refuses = always
        with pytest.raises(StoreUnavailable):
            engine.open("a")
        with pytest.raises(SessionNotFound):
            engine.session("a").info()
        journal.refuses = never
        engine.open("a")
        journal.refuses = always
        with pytest.raises(StoreUnavailable):
            turn(engine, "a", tokens(13))
        journal.refuses = never
        assert counts(engine, "a") == (0, 0)
        assert turn(engine, "a", tokens(13)) == oracle(tokens(13))
        engine.assert_ledger()


@pytest.mark.parametrize(
    "change",
    [
        lambda session: session.fork("b"),
        lambda session: session.rewind(),
        lambda session: session.pin(tier="device"),
        lambda session: session.close(keep=False),
    ],
    ids=["fork", "rewind", "pin", "delete"],
)
def test_a_refused_change_of_a_session(change: Callable[[Any], Any]) -> None:
    with open_engine() as engine:
        journal = FailingJournal(engine)
        engine.open("a")
        log = tokens(13) + turn(engine, "a", tokens(13))
        before = engine.session("a").info()
        journal.refuses = always
        with pytest.raises(StoreUnavailable):
            change(engine.session("a"))
        journal.refuses = never
        assert engine.session("a").info() == before
        assert [info.name for info in engine.sessions()] == ["a"]
        result = engine.session("a").turn(tokens=[8], sampling=GREEDY)
        assert list(result.tokens) == oracle([*log, 8])
        assert result.cache.device_tokens == 20
        change(engine.session("a"))
        engine.assert_ledger()


def test_everything_behind_a_refused_change_is_taken_back_with_it() -> None:
    gates = Gates("before_commit")
    with open_engine(gates=gates) as engine:
        gates.open("before_commit")
        journal = FailingJournal(engine)
        engine.open("a")
        log = tokens(13) + turn(engine, "a", tokens(13))
        gates.__init__("before_commit")
        journal.refuses = lambda ops: any("new" in repr(op) for op in ops)
        waiting = [Later(lambda: engine.open("new"))]
        gates.reached["before_commit"].wait(30)
        waiting.append(Later(lambda: turn(engine, "a", [7])))
        running(engine)
        # A second opening changes nothing, but what it would acknowledge is not durable.
        waiting.append(Later(lambda: engine.open("new")))
        waiting.append(Later(lambda: engine.session("a").fork("b")))
        waited_for(engine, 4)
        gates.open("before_commit")
        for later in waiting:
            assert isinstance(later.error(), StoreUnavailable)
        journal.refuses = never
        assert counts(engine, "a") == (1, 21)
        assert [info.name for info in engine.sessions()] == ["a"]
        engine.open("new")
        assert turn(engine, "new", [3, 4]) == oracle([3, 4])
        assert turn(engine, "a", [8]) == oracle([*log, 8])
        engine.assert_ledger()


def running(engine: CheckedEngine) -> None:
    while not engine.stats()["requests_finished"] or engine.stats()["requests_running"]:
        pass


def waited_for(engine: CheckedEngine, count: int) -> None:
    """Wait until so many changes are on their way to the journal."""
    thread = engine.parts.store._journal
    while len(thread._waiting) < count - 1:  # the first one is at the gate
        engine.stats()


def test_a_turn_in_line_goes_on_from_the_head_as_it_was() -> None:
    gates = Gates("before_commit")
    with open_engine(gates=gates) as engine:
        gates.open("before_commit")
        journal = FailingJournal(engine)
        engine.open("a")
        log = tokens(13) + turn(engine, "a", tokens(13))
        gates.__init__("before_commit")
        first = [True]
        journal.refuses = lambda ops: first and first.pop()
        refused = Later(lambda: turn(engine, "a", [7]))
        gates.reached["before_commit"].wait(30)
        behind = Later(lambda: turn(engine, "a", [8], when_busy="queue"))
        while not engine.session("a").info().queued:
            pass
        first.append(True)  # once for the group, once for the turn alone
        gates.open("before_commit")
        assert isinstance(refused.error(), StoreUnavailable)
        assert behind.result() == oracle([*log, 8])
        assert counts(engine, "a") == (2, 30)
        engine.assert_ledger()


@pytest.mark.parametrize("refused", [False, True], ids=["durable", "refused"])
def test_a_session_deleted_while_its_turn_is_on_its_way_to_the_journal(refused: bool) -> None:
    gates = Gates("before_commit")
    with open_engine(gates=gates) as engine:
        gates.open("before_commit")
        journal = FailingJournal(engine)
        engine.open("a")
        log = tokens(13) + turn(engine, "a", tokens(13))
        gates.__init__("before_commit")
        late = Later(lambda: turn(engine, "a", [7]))
        gates.reached["before_commit"].wait(30)
        deleted = Later(lambda: engine.delete("a"))
        waited_for(engine, 2)
        journal.refuses = always if refused else never
        gates.open("before_commit")
        if refused:
            assert isinstance(late.error(), StoreUnavailable)
            assert isinstance(deleted.error(), StoreUnavailable)
            journal.refuses = never
            assert turn(engine, "a", [8]) == oracle([*log, 8])
        else:
            assert late.result() == oracle([*log, 7])
            deleted.result()
            with pytest.raises(SessionNotFound):
                engine.session("a").info()
        engine.open("after")
        assert turn(engine, "after", [3, 4]) == oracle([3, 4])
        engine.assert_ledger()


def test_a_refused_keyed_turn_may_be_asked_again() -> None:
    with open_engine(engine_config(blocks=30)) as engine:
        journal = FailingJournal(engine)
        engine.open("a")
        journal.refuses = always
        with pytest.raises(StoreUnavailable):
            turn(engine, "a", tokens(13), idempotency_key="k")
        journal.refuses = never
        first = engine.session("a").turn(tokens=tokens(13), sampling=GREEDY, idempotency_key="k")
        again = engine.session("a").turn(tokens=tokens(13), sampling=GREEDY, idempotency_key="k")
        assert (first.replayed, again.replayed) == (False, True)
        assert list(first.tokens) == list(again.tokens) == oracle(tokens(13))
        assert counts(engine, "a") == (1, 21)
        journal.refuses = always
        with pytest.raises(StoreUnavailable):
            engine.generate(tokens=tokens(5), sampling=GREEDY, idempotency_key="g")
        engine.assert_ledger()
