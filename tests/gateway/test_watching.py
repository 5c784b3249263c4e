"""What watching a session, and drawing the tree, cost the engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from sessionkv.client import Places, SessionInfo, SessionPage
from sessionkv.errors import Overloaded, SessionKVError, SessionNotFound
from sessionkv.gateway.session_paths import AT_ONCE, SessionPaths
from sessionkv.gateway.watching import PAUSES, SessionWatch

INFO = SessionInfo("a", "n-2", 1, 9, "chat", "keep", 1.0, 2.0)
HERE = Places(4, 64, 3, {"device": 3}, (("device", 3),))
BELOW = Places(4, 64, 3, {"host": 3}, (("host", 3),))
QUIET: dict[str, Any] = {"kv": {"device": {"evictions": 0}}}
PRESSED: dict[str, Any] = {"kv": {"device": {"evictions": 3}}}


@dataclass
class FakeEngine:
    """A client, its sessions and a clock in one."""

    info: SessionInfo | None = INFO
    places_now: Places = HERE
    looked: int = 0
    took_s: float = 0.01
    error: SessionKVError | None = None
    now_s: float = 0.0

    async def session_page(self, prefix: str, *, limit: int) -> SessionPage:
        assert limit == 1
        found = () if self.info is None else (self.info,)
        return SessionPage(tuple(i for i in found if i.name.startswith(prefix)), None)

    def session(self, name: str) -> FakeEngine:
        assert name == "a"
        return self

    async def places(self) -> Places:
        self.looked += 1
        self.now_s += self.took_s
        if self.error is not None:
            raise self.error
        return self.places_now

    def clock(self) -> float:
        return self.now_s


def look(watch: SessionWatch, stats: dict[str, Any]) -> Any:
    return asyncio.run(watch.look(stats))


def watching(engine: FakeEngine) -> SessionWatch:
    return SessionWatch(engine, "a", clock=engine.clock)  # type: ignore[arg-type]


def test_blocks_are_looked_up_only_when_something_changed() -> None:
    engine = FakeEngine()
    watch = watching(engine)
    assert look(watch, QUIET)["places"]["counts"] == {"device": 3}
    for _ in range(5):
        engine.now_s += 60
        assert look(watch, QUIET) is None
    assert engine.looked == 1
    engine.places_now = BELOW
    assert look(watch, PRESSED)["places"]["counts"] == {"host": 3}
    engine.info = replace(INFO, node="n-3", running=True)  # a turn has ended: at once
    assert look(watch, PRESSED)["session"]["node"] == "n-3"
    assert engine.looked == 3
    engine.now_s += 60
    look(watch, QUIET)
    assert engine.looked == 3  # another runs: its blocks are not the session's yet
    engine.info = replace(INFO, node="n-3")
    look(watch, QUIET)
    assert engine.looked == 4


def test_a_store_that_cannot_tell_leaves_what_was_seen_last() -> None:
    engine = FakeEngine()
    watch = watching(engine)
    look(watch, QUIET)
    engine.error = Overloaded("too many")
    engine.now_s += 60
    assert look(watch, PRESSED) is None
    engine.error, engine.places_now = None, BELOW
    engine.now_s += 60
    assert look(watch, PRESSED)["places"]["counts"] == {"host": 3}


def test_slow_looks_are_seldom() -> None:
    engine = FakeEngine(took_s=0.5)
    watch = watching(engine)
    look(watch, QUIET)
    engine.places_now = BELOW
    engine.now_s += PAUSES * 0.5 - 0.1
    assert look(watch, PRESSED) is None
    engine.now_s += 0.2
    assert look(watch, PRESSED)["places"]["counts"] == {"host": 3}
    assert engine.looked == 2


def test_who_is_not_told_of_the_books_is_told_of_its_blocks_all_the_same() -> None:
    engine = FakeEngine()
    watch = watching(engine)
    look(watch, {"tenant": "alice"})
    engine.places_now = BELOW
    engine.now_s += 60
    assert look(watch, {"tenant": "alice"})["places"]["counts"] == {"host": 3}


def test_another_session_of_that_beginning_is_not_it() -> None:
    engine = FakeEngine(info=replace(INFO, name="ab"))
    gone = {"name": "a", "session": None, "places": None}
    assert look(watching(engine), QUIET) == gone
    engine.info = INFO
    watch = watching(engine)
    assert look(watch, QUIET)["session"]["name"] == "a"
    engine.info = None
    assert look(watch, QUIET) == gone
    assert look(watch, QUIET) is None


class FakePaths:
    """Sessions that say their path once they are let."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.under_way = self.most = 0

    def session(self, name: str) -> FakePath:
        return FakePath(self, name)


@dataclass
class FakePath:
    engine: FakePaths
    name: str

    async def path(self) -> tuple[str, ...]:
        engine = self.engine
        engine.asked.append(self.name)
        engine.under_way += 1
        engine.most = max(engine.most, engine.under_way)
        await asyncio.sleep(0)
        engine.under_way -= 1
        if self.name == "gone":
            raise SessionNotFound("gone")
        return ("n-1", f"n-{self.name}")


def test_paths_are_asked_for_once_and_few_at_a_time() -> None:
    engine = FakePaths()

    async def ask() -> list[tuple[str, ...]]:
        paths = SessionPaths(most=100)
        infos = [replace(INFO, name=f"{i}", node=f"n-{i}") for i in range(30)]
        infos.append(replace(INFO, name="gone", node="n-99"))
        found: list[tuple[str, ...]] = []
        for _ in range(2):
            found += await asyncio.gather(*(paths.of(engine, info) for info in infos))  # type: ignore[arg-type]
        return found

    found = asyncio.run(ask())
    assert found[:31] == found[31:] == [*(("n-1", f"n-{i}") for i in range(30)), ()]
    assert engine.most == AT_ONCE
    assert len(engine.asked) == 32  # the one that was gone may be back


def test_what_is_remembered_of_paths_is_bounded() -> None:
    engine = FakePaths()

    async def ask() -> None:
        paths = SessionPaths(most=6)
        for i in (1, 2, 3, 4, 4, 1):
            await paths.of(engine, replace(INFO, name=f"{i}", node=f"n-{i}"))  # type: ignore[arg-type]

    asyncio.run(ask())
    assert engine.asked == ["1", "2", "3", "4", "1"]
