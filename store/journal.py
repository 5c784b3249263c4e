"""The journal: turns, heads and idempotency keys, durable before anybody is told.

One LMDB environment; ``journal_tables`` says what is in it, ``docs/store-format.md`` byte by byte.

Invariants: a commit is on disk when it returns, whole or not at all; node ids are never given
twice, also across restarts; a record that does not match its checksum is never served; nothing but
:meth:`Journal.load` and the upgrade of an old journal reads more than it was asked for. Must not
know what turns mean: the tree in ``cache`` decides what is written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress

import lmdb

from sessionkv.errors import StoreError, StoreUnavailable
from sessionkv.store import journal_reads as reads
from sessionkv.store.directory import StoreDirectory, disk_bytes, sync_folder
from sessionkv.store.environment import (
    begin_read,
    open_environment,
    open_sound,
    opening,
    write,
)
from sessionkv.store.file_guard import FileGuard
from sessionkv.store.full_disk import not_written
from sessionkv.store.journal_copy import JournalCopy, remove_copy
from sessionkv.store.journal_counts import counts_agree, recount
from sessionkv.store.journal_reads import JournalFigures
from sessionkv.store.journal_records import name_key
from sessionkv.store.journal_tables import NUM_DATABASES, Damage, Tables
from sessionkv.store.journal_upgrade import VERSION, upgrade
from sessionkv.store.questions import (
    FindDue,
    FindKey,
    FindSession,
    ListSessions,
    Question,
    Reply,
    SessionPage,
)
from sessionkv.store.set_aside import SetAside, set_aside
from sessionkv.types import (
    HeadRecord,
    JournalOp,
    JournalState,
    JournalSummary,
    KeyRecord,
    NodeRecord,
)

__all__ = ["Journal", "name_key"]

_log = logging.getLogger(__name__)

COMPACT_BYTES = 32 * 1024**2
"""Free pages below this are left to be used again."""
_COPY_FOLDER = "copy"
_CLOSE_S = 10.0


class Journal:
    """The journal of a locked store directory. Used by one thread at a time; owns its environment.

    Attributes:
        quarantined: Where a damaged journal was moved to at open, None when there was none.
        recounted: Tenants whose counts were damaged at open, and were made anew.
    """

    def __init__(
        self,
        directory: StoreDirectory,
        *,
        map_bytes: int = 2**30,
        max_readers: int = 126,
        compact_bytes: int = COMPACT_BYTES,
    ) -> None:
        """Open the journal, empty when there is none; one of an older format is upgraded.

        Args:
            directory: Locked.
            map_bytes: First size of the map: address space, not disk; grown on demand.
            max_readers: Reader slots.
            compact_bytes: Least bytes of free pages that are worth a compaction.

        Raises:
            StoreUnavailable: It cannot be opened, or is of a newer format.
        """
        directory.check_process()
        self._directory = directory
        self._options = {
            "max_dbs": NUM_DATABASES,
            "map_bytes": map_bytes,
            "max_readers": max_readers,
        }
        self._compact_bytes = compact_bytes
        self._copy: JournalCopy | None = None
        self._compactions = 0
        self._is_open = True
        self._damage = Damage()
        self._env, self.quarantined = open_environment(directory.journal_path, **self._options)
        with opening(directory.journal_path):
            remove_copy(directory.journal_path / _COPY_FOLDER)
            self._tables = Tables(self._env, self._damage)
            self._guard = FileGuard(directory.journal_path)
            self._bring_up()
            self.recounted = self._correct_counts()
            self._guard.note()
            self._figures = JournalFigures()
            self._figures = self.figures()

    # Questions -------------------------------------------------------------------------------

    @property
    def damaged_records(self) -> int:
        """Records found unreadable since it was opened."""
        return self._damage.count

    def summary(self) -> JournalSummary:
        """What an engine must know before it starts. O(pinned heads)."""
        self._directory.check_process()
        with begin_read(self._env) as txn:
            return reads.summary(txn, self._tables)

    def figures(self) -> JournalFigures:
        """Counts as they are now; the last ones, where somebody cut the file short. O(1)."""
        self._ensure_open()
        with suppress(lmdb.CorruptedError), self._reading() as txn:
            self._figures = reads.figures(
                txn, self._tables, self.damaged_records, self._compactions
            )
        return self._figures

    def answer(self, question: Question) -> Reply:
        """Answer one question; costs as ``journal_reads`` says.

        Raises:
            StoreUnavailable: The journal cannot be read.
        """
        self._directory.check_process()
        self._ensure_open()
        try:
            with self._reading() as txn:
                return self._answer(txn, question)
        except lmdb.Error as error:
            raise StoreUnavailable(f"the journal cannot be read: {error}") from error

    def load(self) -> JournalState:
        """Read everything; O(journal). What is damaged is left out, counted and logged.

        A node whose parent is missing and a head whose node is missing are left out too.

        Raises:
            StoreError: Used in a fork or after :meth:`close`.
        """
        self._directory.check_process()
        tables = self._tables
        with begin_read(self._env) as txn:
            nodes = reads.read_all(txn, tables.nodes, NodeRecord, self._damage)
            heads = reads.read_all(txn, tables.heads, HeadRecord, self._damage)
            keys = reads.read_all(txn, tables.keys, KeyRecord, self._damage)
            next_node_id = tables.next_node_id(txn)
        known: set[int] = set()
        whole = []
        for node in nodes:
            if node.parent_id is None or node.parent_id in known:
                known.add(node.node_id)
                whole.append(node)
        reachable = [head for head in heads if head.node_id in known]
        lost = len(nodes) - len(whole), len(heads) - len(reachable)
        if self.damaged_records or any(lost):
            _log.warning(
                "the journal %s has %d damaged records; %d turns and %d sessions that need them "
                "were left out",
                self._directory.journal_path,
                self.damaged_records,
                *lost,
            )
        return JournalState(tuple(whole), tuple(reachable), tuple(keys), next_node_id)

    def used_bytes(self) -> int:
        """Bytes of disk the journal takes. Any thread."""
        return disk_bytes(self._directory.journal_path)

    def set_aside(self) -> tuple[SetAside, ...]:
        """Damaged journals that were moved aside, at this open or earlier. Any thread."""
        return set_aside(self._directory.journal_path)

    # Changes ---------------------------------------------------------------------------------

    def commit(self, batches: Iterable[Sequence[JournalOp]]) -> None:
        """Write all batches in one transaction; on disk when this returns.

        Raises:
            StoreError: An operation cannot be stored, or use in a fork; nothing was written.
            StoreUnavailable: The disk is full or failed, or the file was removed; nothing was
                written.
        """
        self._directory.check_process()
        self._ensure_open()
        self._check_still_there()
        kept = [tuple(batch) for batch in batches]

        try:
            write(
                self._env,
                lambda txn: self._tables.apply_all(txn, kept),
                end_reading=self._end_copying,
            )
        except lmdb.Error as error:
            raise not_written("the journal", self._directory.journal_path, error) from error
        except (ValueError, TypeError, OverflowError) as error:
            raise StoreError(f"a record cannot be stored: {error}") from error
        self._guard.note()
        if self._copy is not None:
            self._copy.note(kept)

    def close(self) -> None:
        """Close the environment; harmless when done already. Waits for a copy under way."""
        copy, self._copy = self._copy, None
        if copy is not None:
            if not copy.end(_CLOSE_S):
                return  # a disk that hangs; closing would take the file from under the copy
            remove_copy(copy.folder)
        with suppress(lmdb.Error):
            self._guard.check()  # closing touches the map of the lock file
        self._env.close()

    # Compaction ------------------------------------------------------------------------------

    @property
    def is_compacting(self) -> bool:
        """Whether a copy is being made, or waits to be taken over."""
        return self._copy is not None

    @property
    def is_copied(self) -> bool:
        """Whether :meth:`catch_up` may be called."""
        return self._copy is not None and self._copy.is_done

    def wasted_bytes(self) -> int:
        """Bytes of pages that hold nothing. O(1)."""
        info = self._env.info()
        with begin_read(self._env) as txn:
            stats = [self._env.stat(), *(txn.stat(database) for database in self._tables.all)]
        used = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        pages = int(info["last_pgno"]) + 1
        return max(0, pages - used) * int(stats[0]["psize"])

    def compact_if_worth(self) -> None:
        """Start a copy when more than half of the file holds nothing. Returns at once."""
        if self._copy is not None or not self._is_open or not self._guard.is_there():
            return
        wasted = self.wasted_bytes()
        size = (int(self._env.info()["last_pgno"]) + 1) * int(self._env.stat()["psize"])
        if wasted < self._compact_bytes or wasted * 2 < size:
            return
        try:
            self._copy = JournalCopy(self._env, self._directory.journal_path / _COPY_FOLDER)
        except (lmdb.Error, OSError) as error:
            self._give_up(error)

    def catch_up(self) -> bool:
        """Write to the finished copy what was committed since; whether it may be taken over."""
        copy = self._copy
        if copy is None:
            return False
        copy.end()
        if copy.error is not None or copy.lags:
            self._give_up(copy.error or "too much was written meanwhile")
            return False
        try:
            env = open_sound(copy.folder, **self._options)
            try:
                tables = Tables(env, self._damage)
                write(env, lambda txn: tables.apply_all(txn, copy.changes))
            finally:
                env.close()
        except (lmdb.Error, OSError, StoreError) as error:
            self._give_up(error)
            return False
        return True

    def swap(self) -> None:
        """Put the copy that has caught up in the journal's place; nothing may be committed between.

        Raises:
            StoreUnavailable: The journal cannot be opened again; the next commit tries once more.
        """
        copy, self._copy = self._copy, None
        if copy is None:
            return
        self._env.close()
        self._is_open = False
        failure = None
        try:
            copy.data.rename(self._directory.journal_path / "data.mdb")
            self._compactions += 1
        except OSError as error:
            failure = error
        self._ensure_open()
        remove_copy(copy.folder)
        if failure is not None:
            self._give_up(failure)

    def _end_copying(self) -> None:
        """Wait until a copy under way has read what it reads; it goes on as before then."""
        if self._copy is not None:
            self._copy.end()

    def _give_up(self, reason: object) -> None:
        """The journal stays as it is; the next try is made when twice as much is wasted."""
        _log.warning("the journal could not be compacted: %s", reason)
        if self._copy is not None:
            self._copy.end()
            self._copy = None
        self._compact_bytes = 2 * max(self._compact_bytes, self.wasted_bytes())
        remove_copy(self._directory.journal_path / _COPY_FOLDER)

    # Private ---------------------------------------------------------------------------------

    def _bring_up(self) -> None:
        """One of an older format is upgraded, one of a newer format is left alone."""
        with begin_read(self._env) as txn:
            version = self._tables.version(txn)
        if version > VERSION:
            self._env.close()
            path = self._directory.journal_path
            raise StoreUnavailable(
                f"the journal {path} has version {version}; this one reads versions up to "
                f"{VERSION}: upgrade sessionkv or choose another directory",
                version=version,
            )
        if version < VERSION:
            write(self._env, lambda txn: upgrade(txn, self._tables))

    def _correct_counts(self) -> int:
        """Count anew what tenants have, where the rows that say it are damaged; how many were."""
        with begin_read(self._env) as txn:
            if counts_agree(txn, self._tables):
                return 0
        return write(self._env, lambda txn: recount(txn, self._tables, self._damage))

    def _answer(self, txn: lmdb.Transaction, question: Question) -> Reply:
        tables = self._tables
        match question:
            case FindSession(tenant, name):
                return reads.find_session(txn, tables, tenant, name)
            case ListSessions(tenant, prefix, after, limit):
                rows, more = reads.list_sessions(
                    txn, tables, tenant, prefix=prefix, after=after, limit=limit
                )
                return SessionPage(rows, more)
            case FindKey(tenant, key):
                return reads.find_key(txn, tables, tenant, key)
            case FindDue():
                return reads.find_due(txn, tables, question)

    def _ensure_open(self) -> None:
        """After a copy took the journal's place: open it and make its name durable, once."""
        if self._is_open:
            return
        path = self._directory.journal_path
        with opening(path):
            sync_folder(path)
            self._env = open_sound(path, **self._options)
            self._guard = FileGuard(path)
            self._tables = Tables(self._env, self._damage)
        self._is_open = True

    def _check_still_there(self) -> None:
        """What is written to a file without a name is gone at the next start."""
        path = self._directory.journal_path
        what = "is gone: it was removed or replaced"
        try:
            self._guard.check()
            if self._guard.is_there():
                return
        except lmdb.CorruptedError:
            what = "was cut short"
        raise StoreUnavailable(
            f"the journal {path} {what} by another program while the engine ran: start it "
            "again, and restore the store from a backup where sessions are missing then",
            directory=str(path),
        )

    def _reading(self) -> lmdb.Transaction:
        """A read transaction; the file is as it was left.

        Raises:
            lmdb.Error: It cannot be read, or somebody cut the file short.
        """
        self._guard.check()
        return begin_read(self._env)
