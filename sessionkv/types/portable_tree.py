"""Turns and sessions that move together into a store: checked as they come, numbered at the end.

Invariants: parents come before children; a session's turns are of one kind; every turn is reached
by a session. Numbers are those of the place the turns come from until :meth:`PortableTree.placed`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sessionkv.errors import InvalidRequest
from sessionkv.types.portable import PortableSession
from sessionkv.types.records import HeadRecord, NodeRecord


class TreeShape:
    """Whether turns and sessions fit together, by numbers and kinds alone."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self._kinds: dict[int, str] = {}
        self._ends: set[int] = set()

    def add_node(self, record: NodeRecord) -> None:
        """Take in a turn.

        Raises:
            InvalidRequest: It is there already, its parent is not, or its kind does not follow.
        """
        node_id, parent_id = record.node_id, record.parent_id
        if node_id in self._kinds:
            raise InvalidRequest("node_id", node_id, "a number that was not given before")
        if parent_id is not None:
            above = self._kinds.get(parent_id)
            if above is None:
                raise InvalidRequest("parent_id", parent_id, "a turn that came before")
            if above not in ("root", record.kind):
                raise InvalidRequest("kind", record.kind, f"{above}, as the turn before")
            self._ends.discard(parent_id)
        self._kinds[node_id] = record.kind
        self._ends.add(node_id)

    def add_session(self, session: PortableSession) -> None:
        """Take in a session.

        Raises:
            InvalidRequest: Its last turn has not come.
        """
        if session.node_id not in self._kinds:
            raise InvalidRequest("node_id", session.node_id, "a turn that came before")
        self._ends.discard(session.node_id)

    def check_whole(self) -> None:
        """See that nothing more has to come.

        Raises:
            InvalidRequest: No session leads to one of the turns.
        """
        if self._ends:
            raise InvalidRequest("node_id", min(self._ends), "a turn that a session leads to")


class PortableTree:
    """Turns and sessions to be imported as one.

    Attributes:
        nodes: Turns, parents first.
        sessions: Sessions on them.
        num_bytes: About what ``nodes`` hold.
    """

    def __init__(self) -> None:
        """Empty."""
        self.nodes: list[NodeRecord] = []
        self.sessions: list[PortableSession] = []
        self.num_bytes = 0
        self._shape = TreeShape()
        self._names: set[str] = set()

    @classmethod
    def of(cls, nodes: Iterable[NodeRecord], sessions: Iterable[PortableSession]) -> PortableTree:
        """One of these turns, parents first, and these sessions on them.

        Raises:
            InvalidRequest: They do not fit together.
        """
        tree = cls()
        for record in nodes:
            tree.add_node(record)
        for session in sessions:
            tree.add_session(session)
        return tree

    def add_node(self, record: NodeRecord) -> None:
        """Take in a turn.

        Raises:
            InvalidRequest: It does not fit the turns before.
        """
        self._shape.add_node(record)
        self.nodes.append(record)
        self.num_bytes += node_bytes(record)

    def add_session(self, session: PortableSession) -> None:
        """Take in a session.

        Raises:
            InvalidRequest: Its last turn has not come, or its name has.
        """
        if session.name in self._names:
            raise InvalidRequest("name", session.name, "a name that was not given before")
        self._shape.add_session(session)
        self._names.add(session.name)
        self.sessions.append(session)

    def placed(self, tenant: str, first_id: int) -> tuple[list[NodeRecord], list[HeadRecord]]:
        """The same turns with numbers from ``first_id`` on, and heads on them.

        Raises:
            InvalidRequest: No session leads to one of the turns.
        """
        self._shape.check_whole()
        new_ids = {old.node_id: first_id + i for i, old in enumerate(self.nodes)}
        nodes = [
            replace(
                old,
                node_id=new_ids[old.node_id],
                parent_id=None if old.parent_id is None else new_ids[old.parent_id],
            )
            for old in self.nodes
        ]
        return nodes, [item.to_head(tenant, new_ids[item.node_id]) for item in self.sessions]


def node_bytes(record: NodeRecord) -> int:
    """About what a turn takes in memory, in a frame and in a file."""
    blobs = (record.token_ids, record.incoming_blob, record.reply_blob, record.sampling_blob)
    return 512 + sum(map(len, blobs))
