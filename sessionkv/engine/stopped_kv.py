"""KV of sessions out of and into the store of a stopped engine.

Blocks are found by the chain hash of a session's log, as an engine finds them, and verified before
they leave and when they come. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from sessionkv.cache.chain import TokenChain, full_key, partial_key
from sessionkv.cache.retention_view import RETAINED
from sessionkv.engine.stopped_sessions import StoppedSessions
from sessionkv.errors import StoreUnavailable
from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.export_file import ExportedBlock, KVSection
from sessionkv.store.stopped import StoredBlocks, identity_folders
from sessionkv.types import BlockHash, BlockRecord, HeadRecord, MoveOutcome

_NO_CAP = 2**62
"""Nothing that is there is to go; the next engine trims to its own cap."""
_BATCH_BLOCKS = 16


def export_kv(
    directory: StoreDirectory,
    sessions: StoppedSessions,
    names: Sequence[str],
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> Iterator[KVSection | ExportedBlock]:
    """For each KV identity in the store, the blocks that the sessions' logs lead to, each once.

    Raises:
        StoreUnavailable: A block store cannot be opened.
    """
    num_sent = 0
    for identity, _ in identity_folders(directory):
        with StoredBlocks(directory, identity) as stored:
            if stored.geometry is None:
                continue
            yield KVSection(identity, stored.geometry)
            seen: set[bytes] = set()
            for name in names:
                for record in _records(sessions, sessions.head(name), stored):
                    if record.key in seen or (payload := stored.read(record)) is None:
                        continue
                    seen.add(record.key)
                    yield ExportedBlock(record, payload)
                    num_sent += 1
                    progress(num_sent)


def retained_keys(
    sessions: StoppedSessions, heads: Iterable[HeadRecord], stored: StoredBlocks
) -> set[bytes]:
    """Keys of the blocks that hold the sessions' logs under an identity. O(tokens)."""
    return {record.key for head in heads for record in _records(sessions, head, stored)}


def _records(
    sessions: StoppedSessions, head: HeadRecord, stored: StoredBlocks
) -> Iterator[BlockRecord]:
    """Blocks of a session's log, the unfilled one that its last turn left included.

    A block that is there without any tenant was public when it was written.
    """
    chain = TokenChain(
        BlockHash(stored.identity),
        stored.block_size,
        tenant=head.tenant,
        public=stored,
        token_ids=sessions.tokens_of(head),
    )
    for block in range(len(chain.hashes)):
        yield chain.block_record(block)
    num_written = len(chain) - sessions.path(head)[-1].num_unwritten_tokens
    tail = chain.tail_record(max(num_written, 0))
    if tail is not None:
        yield tail


class KVImport:
    """Takes exported blocks into a store; a context manager.

    Blocks of an identity that the store does not have are left out where it has others: its engine
    runs another model. A store without any takes all.

    Attributes:
        taken: Blocks stored, or there before.
        left_out: Blocks of other identities.
        refused: Blocks that are not what their key says, or that the disk had no room for.
    """

    def __init__(self, directory: StoreDirectory) -> None:
        """Look at what the store has."""
        self._directory = directory
        self._known = {identity for identity, _ in identity_folders(directory)}
        self._is_new = not self._known
        self._section: KVSection | None = None
        self._blocks: BlockStore | None = None
        self._waiting: list[tuple[BlockRecord, memoryview]] = []
        self.taken = self.left_out = self.refused = 0

    def begin(self, section: KVSection) -> None:
        """The blocks that follow are of this section.

        Raises:
            StoreUnavailable: The block store cannot be opened, or has blocks of another shape.
        """
        self._end()
        self._section = section
        if not self._is_new and section.identity not in self._known:
            return
        if section.identity in self._known:
            with StoredBlocks(self._directory, section.identity) as stored:
                if stored.geometry not in (None, section.geometry):
                    raise StoreUnavailable(
                        f"the blocks in {stored.path} have another shape than those of the file"
                    )
        self._blocks = BlockStore(
            self._directory,
            section.identity,
            section.geometry,
            cap_bytes=_NO_CAP,
            rank_of=lambda key: RETAINED,  # all of it is sessions'
        )

    def add(self, block: ExportedBlock) -> None:
        """Take in one block; it is stored when :meth:`close` has returned."""
        if self._blocks is None or self._section is None:
            self.left_out += 1
            return
        record = block.record
        is_full = record.fill == self._section.geometry.block_size
        key = (full_key if is_full else partial_key)(record.parent, record.token_ids)
        if key != record.key:
            self.refused += 1
            return
        self._waiting.append((record, block.payload))
        if len(self._waiting) >= _BATCH_BLOCKS:
            self._write()

    def close(self) -> None:
        """Store what is left and close the files."""
        self._end()

    def __enter__(self) -> KVImport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self) -> None:
        if self._blocks is None:
            return
        outcomes = self._blocks.write_many(self._waiting)
        stored = sum(outcome is MoveOutcome.OK for outcome in outcomes)
        self.taken += stored
        self.refused += len(outcomes) - stored
        self._waiting.clear()

    def _end(self) -> None:
        try:
            self._write()
        finally:
            if self._blocks is not None:
                self._blocks.close()
                self._blocks = None
