"""The sessions in the store of a stopped engine: listed, exported, imported, deleted.

Works on a locked store directory and the journal's own records; nothing runs and no model is
needed. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from sessionkv.cache.tree_checks import check_name
from sessionkv.cache.tree_state import is_unnamed
from sessionkv.config import LimitsConfig
from sessionkv.errors import InvalidRequest, SessionExists, SessionNotFound, StoreUnavailable
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.environment import check_environment
from sessionkv.store.journal import Journal
from sessionkv.text.stored import check_blobs
from sessionkv.types import (
    DeleteHead,
    DeleteKey,
    DeleteNode,
    HeadRecord,
    JournalOp,
    NodeRecord,
    PutHead,
    PutNode,
    unpack_tokens,
)
from sessionkv.types.node_ids import NodeIds
from sessionkv.types.portable import LOCAL_TENANT, PortableSession
from sessionkv.types.portable_tree import PortableTree


def journal_damage(directory: StoreDirectory) -> str | None:
    """Why the journal cannot be read; None where it can, or where there is none yet."""
    path = directory.journal_path
    return check_environment(path) if (path / "data.mdb").exists() else None


@contextmanager
def open_sessions(directory: StoreDirectory) -> Iterator[StoppedSessions]:
    """The journal's sessions, those of the local tenant by name.

    Raises:
        StoreUnavailable: It is damaged; an engine would set it aside, and this leaves it alone.
    """
    damage = journal_damage(directory)
    if damage is not None:
        path = directory.journal_path
        raise StoreUnavailable(
            f"the journal {path} is damaged ({damage}), so its sessions cannot be read. Restore "
            "the store from a backup, or start an engine on it, which sets the journal aside and "
            "begins with an empty one",
            directory=str(path),
            damage=damage,
        )
    journal = Journal(directory)
    try:
        yield StoppedSessions(journal, LOCAL_TENANT)
    finally:
        journal.close()


class StoppedSessions:
    """One tenant's sessions in a journal that no engine has open.

    Attributes:
        heads: Sessions by name, those without a name of their own left out.
        unnamed: Those without one: their names begin with ``~``.
        all_heads: Every head there is, of whatever tenant.
        num_turns: Turns of all of them.
        num_keys: Idempotency keys.
    """

    def __init__(self, journal: Journal, tenant: str) -> None:
        """Read the journal. O(journal)."""
        state = journal.load()
        self._journal = journal
        self._tenant = tenant
        self._nodes = {node.node_id: node for node in state.nodes}
        self._keys = state.keys
        self.all_heads = state.heads
        self.num_turns = sum(node.parent_id is not None for node in state.nodes)
        self.num_keys = len(state.keys)
        known = journal.summary()
        next_ids = known.next_node_id, *known.other_next_ids
        self._ids = NodeIds(next_ids, first_number=known.first_number)
        own = sorted(
            (head for head in state.heads if head.tenant == tenant), key=lambda head: head.name
        )
        self.heads = {head.name: head for head in own if not is_unnamed(head.name)}
        self.unnamed = {head.name: head for head in own if is_unnamed(head.name)}

    def head(self, name: str) -> HeadRecord:
        """A session, with a name of its own or without.

        Raises:
            SessionNotFound: There is no session of that name.
        """
        head = self.heads.get(name) or self.unnamed.get(name)
        if head is None:
            raise SessionNotFound(f"there is no session named {name!r}", session=name)
        return head

    def path(self, head: HeadRecord) -> list[NodeRecord]:
        """Turns of a session, root first."""
        found: list[NodeRecord] = []
        node_id: int | None = head.node_id
        while node_id is not None:
            found.append(self._nodes[node_id])
            node_id = found[-1].parent_id
        return found[::-1]

    def tokens_of(self, head: HeadRecord) -> list[int]:
        """The log of a session."""
        return unpack_tokens(b"".join(node.token_ids for node in self.path(head)))

    def export(
        self, names: Sequence[str], *, progress: Callable[[int], None] = lambda done: None
    ) -> Iterator[NodeRecord | PortableSession]:
        """The sessions' turns and the sessions, tree by tree; what branches share comes once.

        Raises:
            SessionNotFound: There is no session of a name.
        """
        trees: dict[int, list[HeadRecord]] = {}
        for name in names:
            head = self.head(name)
            trees.setdefault(self.path(head)[0].node_id, []).append(head)
        done = 0
        for heads in trees.values():
            sent: set[int] = set()
            for head in heads:
                new = [node for node in self.path(head) if node.node_id not in sent]
                sent.update(node.node_id for node in new)
                yield from new
                yield PortableSession.of(head)
                done += 1
                progress(done)

    def add(self, tree: PortableTree, limits: LimitsConfig) -> None:
        """Add turns and sessions from elsewhere, in one transaction.

        Raises:
            SessionExists: A name is taken; nothing was added.
            InvalidRequest: A name is not allowed, a turn is reached by no session, or what it
                holds cannot be read; nothing was added.
            StoreUnavailable: The journal cannot be written; nothing was added.
        """
        for session in tree.sessions:
            check_name("name", session.name, limits.session_name_bytes)
            if is_unnamed(session.name):
                raise InvalidRequest("name", session.name, "a name that does not begin with ~")
            if session.name in self.heads:
                raise SessionExists(f"there is a session named {session.name!r}")
        for record in tree.nodes:
            check_blobs(record)
        first = self._ids.reserve(self._tenant, len(tree.nodes))
        nodes, heads = tree.placed(self._tenant, first)
        self._journal.commit([[*map(PutNode, nodes), *map(PutHead, heads)]])
        self._nodes |= {node.node_id: node for node in nodes}
        self.heads |= {head.name: head for head in heads}

    def delete(self, heads: Iterable[HeadRecord]) -> None:
        """Delete heads, and the turns that no other one reaches, in one transaction.

        Where no head is left, idempotency keys go too. Of no use afterwards.

        Raises:
            StoreUnavailable: The journal cannot be written; nothing was deleted.
        """
        leaving = {(head.tenant, head.name) for head in heads}
        staying = [head for head in self.all_heads if (head.tenant, head.name) not in leaving]
        reached: set[int] = set()
        for head in staying:
            node_id: int | None = head.node_id
            while node_id is not None and node_id not in reached:
                reached.add(node_id)
                node_id = self._nodes[node_id].parent_id
        ops: list[JournalOp] = [DeleteHead(*head_id) for head_id in leaving]
        # Children have higher ids than their parents, and go first.
        ops += map(DeleteNode, sorted(self._nodes.keys() - reached, reverse=True))
        if not staying:
            ops += [DeleteKey(key.tenant, key.key) for key in self._keys]
        self._journal.commit([ops])
