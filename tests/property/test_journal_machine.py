"""The journal against a dictionary: what the tree makes of random operations, restarts, copies."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sessionkv.cache.turns import Change, Opening
from sessionkv.config import LimitsConfig
from sessionkv.errors import SessionKVError
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.store.questions import Due, FindDue, FindKey, FindSession, ListSessions, SessionPage
from tests.builders.tree import ROOT, TENANT, Sessions, key_record

LONG = "n" * 400
NAMES = st.sampled_from(["a", "b", "trip", "trip-2", LONG, LONG + "x", LONG + "y" * 2000])


class JournalMachine(RuleBasedStateMachine):
    """Model: the builders' dictionary, which is told the same operations."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sessionkv-journal-"))
        self.directory = StoreDirectory.open(self.folder / "store")
        self.journal = Journal(self.directory, map_bytes=64 * 1024, compact_bytes=0)
        self.s = Sessions(LimitsConfig(sessions=5, idempotency_keys=2), max_unnamed=2)
        self.now = 1.0
        self.num_keys = 0
        self.open("a")

    def commit(self, make) -> None:
        self.now += 1.0
        try:
            change: Change = make()
        except SessionKVError:
            return
        self.s.commit(change)
        self.journal.commit([change.ops])

    def pick(self, data: st.DataObject) -> str | None:
        names = sorted(name for _, name in self.s.journal.heads)
        return data.draw(st.sampled_from(names)) if names else None

    def open(self, name: str) -> None:
        self.commit(lambda: _uncommitted_open(self.s, name, self.now))

    @rule(name=NAMES)
    def open_one(self, name: str) -> None:
        self.open(name)

    @rule(data=st.data(), size=st.integers(1, 9), with_key=st.booleans(), key=st.integers(0, 4))
    def turn(self, data: st.DataObject, size: int, with_key: bool, key: int) -> None:
        name = self.pick(data)
        more = {"key": key_record(f"k{key}", self.now + 1.0)} if with_key else {}
        if name is not None:
            self.commit(lambda: self.s.begin_turn(name, [size] * size, now=self.now, **more))

    @rule(data=st.data(), name=NAMES, unnamed=st.booleans())
    def fork(self, data: st.DataObject, name: str, unnamed: bool) -> None:
        source, target = self.pick(data), None if unnamed else name
        if source is not None:
            self.commit(lambda: self.s.tree.fork(TENANT, source, target, now=self.now))

    @rule(data=st.data(), name=NAMES)
    def rename(self, data: st.DataObject, name: str) -> None:
        source = self.pick(data)
        if source is not None:
            self.commit(lambda: self.s.tree.rename(TENANT, source, name, now=self.now))

    @rule(data=st.data(), what=st.sampled_from(["delete", "rewind", "pin", "unpin"]))
    def change(self, data: st.DataObject, what: str) -> None:
        name = self.pick(data)
        tree = self.s.tree
        if name is not None:
            self.commit(
                {
                    "delete": lambda: tree.delete(TENANT, name),
                    "rewind": lambda: tree.rewind(TENANT, name, 1, now=self.now),
                    "pin": lambda: tree.pin(TENANT, name, tier="disk", now=self.now),
                    "unpin": lambda: tree.unpin(TENANT, name, now=self.now),
                }[what]
            )

    @rule()
    def reopen(self) -> None:
        self.journal.close()
        self.journal = Journal(self.directory, map_bytes=64 * 1024, compact_bytes=0)

    @rule()
    def begin_copy(self) -> None:
        self.journal.compact_if_worth()

    @rule()
    def end_copy(self) -> None:
        if self.journal.catch_up():
            self.journal.swap()

    @invariant()
    def answers_are_those_of_the_model(self) -> None:
        model, journal = self.s.journal, self.journal
        summary = model.summary()
        found = journal.summary()
        assert found.tenants == summary.tenants
        assert found.next_node_id == summary.next_node_id
        assert sorted(found.pinned) == sorted(summary.pinned)
        for head_id in (*model.heads, (TENANT, "nobody")):
            assert journal.answer(FindSession(*head_id)) == model.find(head_id)
        for prefix in ("", "trip", LONG, "~"):
            self.check_list(prefix)
        for number in range(5):
            key = f"k{number}"
            assert journal.answer(FindKey(TENANT, key)) == model.keys.get((TENANT, key))
        due = journal.answer(FindDue(self.now - 5.0, 2, 0.0, 2, 99))
        assert due == Due(tuple(model.due_unnamed(self.now - 5.0, 2)), keys=False)
        assert journal.figures().num_nodes == len(model.nodes)

    def check_list(self, prefix: str) -> None:
        heads = sorted(self.s.journal.heads.values(), key=lambda head: head.name)
        wanted = [
            head
            for head in heads
            if head.name.startswith(prefix) and head.name.startswith("~") == (prefix == "~")
        ]
        rows, after = [], None
        while True:
            page = self.journal.answer(ListSessions(TENANT, prefix, after, 2))
            assert isinstance(page, SessionPage)
            rows += page.rows
            after = page.after
            if after is None:
                break
        assert [row.head for row in rows] == wanted
        tree = self.s.tree
        for row in rows:
            node_id = row.head.node_id
            assert (row.num_turns, row.num_tokens, row.kind) == (
                tree.num_turns(node_id), tree.num_tokens(node_id), tree.record(node_id).kind,
            )  # fmt: skip

    def teardown(self) -> None:
        self.journal.close()
        self.directory.close()
        shutil.rmtree(self.folder)


def _uncommitted_open(s: Sessions, name: str, now: float) -> Change:
    return s.tree.open(TENANT, name, root=ROOT, opening=Opening(), now=now)


TestJournal = JournalMachine.TestCase
TestJournal.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
