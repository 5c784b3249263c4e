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
from sessionkv.types.portable_tree import PortableTree, node_bytes

MAX_HELD_BYTES = 256 * 1024**2
"""Of all connections together: a tree of turns is imported as one, and as one transaction."""


class ImportDesk:
    """What each connection has sent so far. One thread."""

    def __init__(self, text: TextModel, *, max_bytes: int = MAX_HELD_BYTES) -> None:
        """Nothing is held."""
        self._text = text
        self._max_bytes = max_bytes
        self._held: dict[bytes, PortableTree] = {}

    def add(self, connection: bytes, request: Import) -> PortableTree:
        """Take in one request; everything that its connection sent since the last commit.

        What a committing or refused request belongs to is not held any longer.

        Raises:
            InvalidRequest: Naming what does not fit, cannot be read or is not of the vocabulary.
            Overloaded: Too much is held.
        """
        tree = self._held.pop(connection, None) or PortableTree()
        held = sum(other.num_bytes for other in self._held.values()) + tree.num_bytes
        if held + sum(map(node_bytes, request.nodes)) > self._max_bytes:
            raise Overloaded(
                f"sessions of more than {self._max_bytes} bytes of turns cannot be imported at "
                "once through a running engine",
                allowed_bytes=self._max_bytes,
            )
        for record in request.nodes:
            self._check(record)
            tree.add_node(record)
        for session in request.sessions:
            tree.add_session(session)
        if not request.commit:
            self._held[connection] = tree
        return tree

    def drop(self, connection: bytes) -> None:
        """Forget what a connection has sent."""
        self._held.pop(connection, None)

    def _check(self, record: NodeRecord) -> None:
        check_beside(record)
        if record.tokenizer_digest == self._text.facts.tokenizer_digest:
            self._text.check_tokens(unpack_tokens(record.token_ids), field="token_ids")
        check_blobs(record)
