"""Remembers the sampled ids of recent replies by the conversation that led to them.

For clients that keep no session and send the whole conversation each time: what the reply was in
ids is then known here, if it was ours. Bounded in number and bytes; the least recently used go
first. A digest of tenant and conversation is the key, so no tenant finds another's replies. What
is found is a proposal: the caller compares its text with what was sent.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

_ENTRY_BYTES = 300  # key, array and map entry, measured with sys.getsizeof


class PromptDigest:
    """Key of a conversation's raw text, extended as the text is read. O(new text) a step."""

    __slots__ = ("_hash",)

    def __init__(self, tenant: str) -> None:
        """Start with the tenant, framed by its length."""
        name = tenant.encode()
        self._hash = hashlib.sha256(len(name).to_bytes(4, "little") + name)

    def extended(self, raw: str) -> bytes:
        """The key after ``raw`` more text; the text counts for later calls too."""
        self._hash.update(raw.encode())
        return self._hash.copy().digest()


class ReplyMemory:
    """Bounded memory of replies. One thread.

    Args:
        max_entries: Most replies.
        max_bytes: Most memory, bookkeeping included; a reply that is larger is not kept.
    """

    def __init__(self, *, max_entries: int = 4096, max_bytes: int = 64 * 1024**2) -> None:
        """Start empty."""
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def __len__(self) -> int:
        """Number of replies."""
        return len(self._entries)

    def put(self, tenant: str, prompt_raw: str, reply_ids: Sequence[int]) -> None:
        """Remember a reply as it stands in the log, by the raw text of its prompt."""
        key = PromptDigest(tenant).extended(prompt_raw)
        self._drop(key)
        ids = array("I", reply_ids)
        if _size(ids) > self._max_bytes:
            return
        self._entries[key] = ids
        self.num_bytes += _size(ids)
        while len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def take(self, tenant: str, raw: str, ends: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """For each prompt ``raw[:end]`` the reply that followed it, or an empty one; marks as used.

        Args:
            tenant: Whose.
            raw: Raw text of a conversation.
            ends: Ascending.
        """
        digest = PromptDigest(tenant)
        last = 0
        for end in ends:
            key = digest.extended(raw[last:end])
            last = end
            if key in self._entries:
                self._entries.move_to_end(key)
            yield tuple(self._entries.get(key, ()))

    def _drop(self, key: bytes) -> None:
        ids = self._entries.pop(key, None)
        if ids is not None:
            self.num_bytes -= _size(ids)


def _size(ids: array[int]) -> int:
    return _ENTRY_BYTES + len(ids) * ids.itemsize
