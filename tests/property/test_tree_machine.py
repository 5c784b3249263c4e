"""The tree against a model that knows only lists, with ever other sessions in memory.

After every step all of the journal is loaded into another tree, which has to be as the model is;
the tree itself has to be as that one in all that it has in memory.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sessionkv.cache.retention_view import PINNED, RETAINED
from sessionkv.cache.tree import Opening
from sessionkv.config import LimitsConfig
from sessionkv.errors import Overloaded, PinRefused, RewindBeyondRoot, SessionExists
from sessionkv.types import DeleteHead, Tier
from tests.builders.tree import (
    BLOCK_BYTES,
    ROOT,
    TENANT,
    Sessions,
    attach_all,
    full_hashes,
    is_tail,
    key_record,
    snapshot,
    tail_key,
)

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
# Few different tokens, so that sessions often share content without sharing turns.
DELTAS = st.integers(1, 11).flatmap(
    lambda size: st.sampled_from([[0] * size, [0] * (size - 1) + [1], [1] * size])
)
TTL_S = 50.0
MONTH_S = 30 * 86400.0


def some_session(machine: TreeMachine) -> bool:
    return bool(machine.turns)


class TreeMachine(RuleBasedStateMachine):
    """Model: a session is its list of turns, each a (node id, tokens) pair, and its pin."""

    @initialize()
    def start(self) -> None:
        limits = LimitsConfig(sessions=4, idempotency_keys=3, idempotency_ttl_s=TTL_S)
        self.s = Sessions(limits, max_unnamed=2)
        self.now = 1.0
        self.turns: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
        self.pins: dict[str, tuple[Tier, float | None, int]] = {}
        self.used: dict[str, float] = {}
        self.keys: dict[str, float] = {}
        self.num_keys = 0
        for name in ("a", "b"):
            self.turns[name] = [(self.s.open(name, now=self.now).node_id, ())]
            self.used[name] = self.now

    # Helpers

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def pick(self, data: st.DataObject) -> str:
        name = data.draw(st.sampled_from(sorted(self.turns)), label="session")
        self.s.look_up(name)
        return name

    def done(self, data: st.DataObject, make) -> object:
        """Make the change, now and then failing to commit it once before."""
        if data.draw(st.booleans(), label="commit fails first"):
            before, next_id = snapshot(self.s.tree), self.s.tree._ids.next_ids
            self.s.tree.revert(make())
            assert snapshot(self.s.tree) == before
            # The id is lost, which no journal ever saw; keep the two comparable.
            self.s.tree._ids._next = next_id
        owners_before = set(self.s.tree.retention._owners)
        change = make()
        gone = owners_before - set(self.s.tree.retention._owners)
        if not any(isinstance(op, DeleteHead) for op in change.ops):
            gone = {key for key in gone if is_tail(key)}
        assert sorted(change.freed_keys) == sorted(gone)
        self.s.commit(change)
        # After a restart a head may have come to a turn whose tail nobody has told yet.
        attach_all(self.s.tree)
        return change

    def forget(self, name: str) -> None:
        del self.turns[name], self.used[name]
        self.pins.pop(name, None)

    def named(self) -> list[str]:
        return [name for name in self.turns if not name.startswith("~")]

    # Rules

    @rule(name=NAMES, data=st.data())
    def open(self, name: str, data: st.DataObject) -> None:
        now = self.tick()
        self.s.look_up(name)
        if name not in self.turns and len(self.named()) == 4:
            with pytest.raises(Overloaded):
                self.s.open(name, now=now)
            return
        change = self.done(
            data, lambda: self.s.tree.open(TENANT, name, root=ROOT, opening=Opening(), now=now)
        )
        if name in self.turns:
            assert change.ops == ()
        else:
            self.turns[name] = [(change.node_id, ())]
            self.used[name] = now

    @precondition(some_session)
    @rule(delta=DELTAS, data=st.data(), with_key=st.booleans(), edited=st.booleans())
    def turn(self, delta: list[int], data: st.DataObject, with_key: bool, edited: bool) -> None:
        name = self.pick(data)
        now = self.tick()
        turns = self.turns[name]
        depth = data.draw(st.integers(1, len(turns))) if edited else len(turns)
        more = {"parent_id": turns[depth - 1][0]} if edited else {}
        if with_key:
            self.num_keys += 1
            more["key"] = key_record(f"k{self.num_keys}", now)
        change = self.done(data, lambda: self.s.begin_turn(name, delta, now=now, **more))
        self.turns[name] = [*turns[:depth], (change.node_id, tuple(delta))]
        self.used[name] = now
        if with_key:
            self.keys[f"k{self.num_keys}"] = now
            self.keys = dict(list(self.keys.items())[-3:])

    @precondition(some_session)
    @rule(name=NAMES, data=st.data(), unnamed=st.booleans())
    def fork(self, name: str, data: st.DataObject, unnamed: bool) -> None:
        source = self.pick(data)
        now = self.tick()
        depth = data.draw(st.integers(1, len(self.turns[source])))
        node_id = self.turns[source][depth - 1][0]
        target = None if unnamed else name
        self.s.look_up(name)

        def make():
            return self.s.tree.fork(TENANT, source, target, now=now, node_id=node_id)

        if target in self.turns:
            with pytest.raises(SessionExists):
                make()
            return
        num_unnamed = len(self.turns) - len(self.named())
        if len(self.named()) == 4 if target else num_unnamed == 4:  # twice as many as stay
            with pytest.raises(Overloaded):
                make()
            return
        change = self.done(data, make)
        assert change.head.name == target or change.head.name.startswith("~")
        self.turns[change.head.name] = self.turns[source][:depth]
        self.used[change.head.name] = now

    @precondition(some_session)
    @rule(name=NAMES, data=st.data())
    def rename(self, name: str, data: st.DataObject) -> None:
        source = self.pick(data)
        now = self.tick()
        self.s.look_up(name)

        def make():
            return self.s.tree.rename(TENANT, source, name, now=now)

        if name in self.turns:
            with pytest.raises(SessionExists):
                make()
            return
        if len(self.named()) - (source in self.named()) == 4:
            with pytest.raises(Overloaded):
                make()
            return
        self.done(data, make)
        self.turns[name] = self.turns.pop(source)
        self.used[name] = now
        del self.used[source]
        if source in self.pins:
            self.pins[name] = self.pins.pop(source)

    @precondition(some_session)
    @rule(data=st.data(), turns=st.integers(1, 4))
    def rewind(self, data: st.DataObject, turns: int) -> None:
        name = self.pick(data)
        now = self.tick()
        if turns >= len(self.turns[name]):
            with pytest.raises(RewindBeyondRoot):
                self.s.tree.rewind(TENANT, name, turns, now=now)
            return
        self.done(data, lambda: self.s.tree.rewind(TENANT, name, turns, now=now))
        self.turns[name] = self.turns[name][:-turns]
        self.used[name] = now

    @precondition(some_session)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        name = self.pick(data)
        self.done(data, lambda: self.s.tree.delete(TENANT, name))
        self.forget(name)

    @precondition(some_session)
    @rule(
        data=st.data(),
        tier=st.sampled_from(Tier),
        ttl_s=st.sampled_from([None, 3.0, 20.0]),
        priority=st.sampled_from([0, 50, 100]),
    )
    def pin(self, data: st.DataObject, tier: Tier, ttl_s: float | None, priority: int) -> None:
        name = self.pick(data)
        now = self.tick()
        for other in self.turns:  # so that all pins are known to the last tail
            self.s.look_up(other)

        def make():
            return self.s.tree.pin(
                TENANT, name, tier=tier.value, now=now, ttl_s=ttl_s, priority=priority
            )

        wanted = self.pinned()[tier].keys() | set(self.owned_by(name))
        if len(wanted) * BLOCK_BYTES > self.s.caps[tier] * 0.8:
            with pytest.raises(PinRefused) as error:
                make()
            assert error.value.details["needed_bytes"] == len(wanted) * BLOCK_BYTES
            return
        self.done(data, make)
        self.pins[name] = (tier, None if ttl_s is None else now + ttl_s, priority)
        self.used[name] = now

    @precondition(some_session)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = self.pick(data)
        now = self.tick()
        self.done(data, lambda: self.s.tree.unpin(TENANT, name, now=now))
        self.pins.pop(name, None)
        self.used[name] = now

    @rule(data=st.data(), waited_s=st.sampled_from([1.0, 5.0, 60.0, MONTH_S]))
    def expire(self, data: st.DataObject, waited_s: float) -> None:
        self.now += waited_s
        due = self.s.journal.due_unnamed(self.now - MONTH_S, 2)
        for _, name in due:
            self.s.look_up(name)
        wanted = any(
            end is not None and end <= self.now for _, end, _ in self.pins.values()
        ) or bool(due)
        if wanted:
            self.done(data, lambda: self.s.tree.expire(self.now, due))
        else:
            assert self.s.tree.expire(self.now, due) is None
        self.s.commit(self.s.tree.forget_keys(self.now))
        for name, (_, end, _) in list(self.pins.items()):
            if end is not None and end <= self.now:
                del self.pins[name]
        for _, name in due:
            self.forget(name)
        self.keys = {key: at for key, at in self.keys.items() if at + TTL_S > self.now}

    @rule()
    def restart(self) -> None:
        self.s.tree = self.s.fresh_tree()
        for name in self.pins:
            self.s.look_up(name)

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        loose = [head_id for head_id in self.s.tree.coldest()]
        assert {name for _, name in loose} == self.loaded() - set(self.pins)
        for head_id in data.draw(st.permutations(loose)) if loose else ():
            if data.draw(st.booleans()):
                released = set(self.s.tree.released_keys(head_id))
                before = set(self.s.tree.retention._owners)
                self.s.tree.let_go(head_id)
                assert before - set(self.s.tree.retention._owners) == released

    @precondition(some_session)
    @rule(data=st.data())
    def changes_under_way_keep_what_they_touch(self, data: st.DataObject) -> None:
        """A change is taken back after everything else that may has left memory."""
        name = self.pick(data)
        now = self.tick()
        tree = self.s.tree
        counts = snapshot(tree)["counts"]
        change = data.draw(
            st.sampled_from(
                [
                    lambda: tree.delete(TENANT, name),
                    lambda: self.s.begin_turn(name, [1, 1], now=now),
                    lambda: tree.touch(TENANT, name, now=now),
                ]
            )
        )()
        for head_id in list(tree.coldest()):
            tree.let_go(head_id)
        tree.revert(change)
        assert snapshot(tree)["counts"] == counts
        assert self.loaded() == {name, *self.pins}
        if change.node_id is not None:
            tree._ids._next[0] -= 1

    # Model answers

    def node_keys(self, name: str, depth: int) -> list[bytes]:
        turns = self.turns[name]
        before = [t for _, tokens in turns[: depth - 1] for t in tokens]
        log = before + list(turns[depth - 1][1])
        keys = full_hashes(log)[len(full_hashes(before)) :]
        node_id = turns[depth - 1][0]
        on_it = any(other[-1][0] == node_id for other in self.turns.values())
        tail = tail_key(log) if depth > 1 else None
        return [*keys, tail] if on_it and tail is not None else keys

    def owned_by(self, name: str) -> list[bytes]:
        return [
            key
            for depth in range(1, len(self.turns[name]) + 1)
            for key in self.node_keys(name, depth)
        ]

    def pinned(self) -> dict[Tier, dict[bytes, int]]:
        """Highest priority of each pinned key, by tier."""
        found: dict[Tier, dict[bytes, int]] = {tier: {} for tier in Tier}
        for name, (tier, _, priority) in self.pins.items():
            for key in self.owned_by(name):
                found[tier][key] = max(found[tier].get(key, 0), priority)
        return found

    def loaded(self) -> set[str]:
        return {name for _, name in self.s.tree._state.heads}

    # Invariants

    @invariant()
    def everything_agrees(self) -> None:
        self.whole = self.s.whole_tree()
        self.the_journal_is_as_the_model(self.whole)
        self.ranks_are_what_heads_and_pins_reach()
        self.bytes_of_sessions_sum_to_all_that_is_retained()
        self.what_is_in_memory_is_as_in_the_journal()

    def the_journal_is_as_the_model(self, tree) -> None:
        assert tree.num_sessions == self.s.tree.num_sessions == len(self.named())
        assert tree.num_unnamed == self.s.tree.num_unnamed == len(self.turns) - len(self.named())
        live = {node_id for turns in self.turns.values() for node_id, _ in turns}
        assert tree.num_nodes == len(live)
        for name in self.turns:
            self.check_log(tree, name)
        known = {key for key, at in self.keys.items() if at + TTL_S > self.now}
        assert known <= {key for _, key in self.s.journal.keys}
        assert len(self.s.journal.keys) <= 3

    def check_log(self, tree, name: str) -> None:
        turns = self.turns[name]
        head = tree.head(TENANT, name)
        log = [token for _, tokens in turns for token in tokens]
        assert head.node_id == turns[-1][0]
        assert tree.num_turns(head.node_id) == len(turns) - 1
        assert tree.tokens_of(head.node_id) == log
        assert tree.hashes_of(head.node_id) == full_hashes(log)
        assert tree.num_tokens(head.node_id) == len(log)

    def ranks_are_what_heads_and_pins_reach(self) -> None:
        retention = self.whole.retention
        owned = {key for name in self.turns for key in self.owned_by(name)}
        pinned = self.pinned()
        assert set(retention._owners) == owned
        for tier in Tier:
            assert retention.pinned_bytes(tier) == len(pinned[tier]) * BLOCK_BYTES
            for key in owned:
                rank = PINNED + pinned[tier][key] if key in pinned[tier] else RETAINED
                assert retention.rank(key, tier) == rank

    def bytes_of_sessions_sum_to_all_that_is_retained(self) -> None:
        tree = self.whole
        exclusive = 0
        shared: set[bytes] = set()
        for name in self.turns:
            keys = tree.session_keys(TENANT, name)
            assert [*keys.exclusive, *keys.shared] != [] or not self.owned_by(name)
            assert sorted(keys.exclusive + keys.shared) == sorted(self.owned_by(name))
            exclusive += len(keys.exclusive)
            shared.update(keys.shared)
            others = {k for other in self.turns if other != name for k in self.owned_by(other)}
            assert set(keys.exclusive) == set(self.owned_by(name)) - others
        assert exclusive + len(shared) == tree.retention.num_keys

    def what_is_in_memory_is_as_in_the_journal(self) -> None:
        tree, whole = self.s.tree, self.whole
        assert set(self.pins) <= self.loaded() <= set(self.turns)
        assert tree._ids.next_ids == self.s.journal.next_ids
        here, there = snapshot(tree), snapshot(whole)
        for name in self.loaded():
            self.check_log(tree, name)
            keys = {*tree.session_keys(TENANT, name).exclusive}
            assert keys >= {*whole.session_keys(TENANT, name).exclusive}
        paths = {node_id for name in self.loaded() for node_id, _ in self.turns[name]}
        assert set(here["nodes"]) == paths
        assert tree.num_bytes == sum(node.num_bytes for node in tree._state.nodes.values())
        for node_id, (record, parent, counts, pins, _) in here["nodes"].items():
            assert (record, parent, counts, pins) == there["nodes"][node_id][:4]
        assert here["heads"].items() <= there["heads"].items()
        # Tails of sessions that are not in memory may be known or not.
        owned = {key for name in self.loaded() for key in self.owned_by(name)}
        ends = {turns[-1][0] for name, turns in self.turns.items() if name in self.loaded()}
        tails = {tree._state.nodes[node_id].tail for node_id in ends}
        known = {key for key in owned if not is_tail(key)} | (tails - {None})
        assert known <= set(tree.retention._owners)
        assert all(is_tail(key) for key in set(tree.retention._owners) - known)
        for tier in Tier:
            pins, all_pins = here["pins"][tier], there["pins"][tier]
            assert pins.items() <= all_pins.items()
            assert not {key for key in all_pins.keys() - pins.keys() if key in known}
        assert not [node for node in tree._state.nodes.values() if not node.held]


TestTree = TreeMachine.TestCase
TestTree.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
