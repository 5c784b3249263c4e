"""Turns that clients send to be imported: read as text, and held until all of them are there.

Core never reads a blob and must be able to hand each one back to the front later, so whatever is
inside is read once here. Held by connection, in bounded memory.
"""

from __future__ import annotations

from sessionkv.actor.readable import check_beside
from sessionkv.errors import Overloaded
from sessionkv.ipc.messages import Import
from sessionkv.text.model import TextModel
from sessionkv.text.stored import check_blobs
from sessionkv.types import NodeRecord, unpack_tokens
from sessionkv.types.holdings import Holdings
from sessionkv.types.portable_tree import PortableTree, node_bytes

MAX_HELD_BYTES = 256 * 1024**2
"""Shared by tenants: a tree of turns is imported as one, and as one transaction."""


class ImportDesk:
    """What each connection has sent so far. One thread."""

    def __init__(self, text: TextModel, *, max_bytes: int = MAX_HELD_BYTES) -> None:
        """Nothing is held."""
        self._text = text
        self._max_bytes = max_bytes
        self._held: dict[bytes, tuple[str, PortableTree]] = {}

    def add(self, connection: bytes, tenant: str, request: Import) -> PortableTree:
        """Take in one request; everything that its connection sent since the last commit.

        What a committing or refused request belongs to is not held any longer.

        Raises:
            InvalidRequest: Naming what does not fit, cannot be read or is not of the vocabulary.
            Overloaded: Too much is held, and the tenant has its share of it.
        """
        _, tree = self._held.pop(connection, (tenant, PortableTree()))
        held = Holdings()
        for other, theirs in self._held.values():
            held.add(other, theirs.num_bytes)
        more = tree.num_bytes + sum(map(node_bytes, request.nodes))
        if not held.has_room(tenant, self._max_bytes, more):
            allowed = held.share(tenant, self._max_bytes)
            raise Overloaded(
                f"sessions of more than {allowed} bytes of turns cannot be imported at once "
                "through a running engine now",
                allowed_bytes=allowed,
            )
        for record in request.nodes:
            self._check(record)
            tree.add_node(record)
        for session in request.sessions:
            tree.add_session(session)
        if not request.commit:
            self._held[connection] = (tenant, tree)
        return tree

    def drop(self, connection: bytes) -> None:
        """Forget what a connection has sent."""
        self._held.pop(connection, None)

    def _check(self, record: NodeRecord) -> None:
        check_beside(record)
        if record.tokenizer_digest == self._text.facts.tokenizer_digest:
            self._text.check_tokens(unpack_tokens(record.token_ids), field="token_ids")
        check_blobs(record)
