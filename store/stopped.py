"""What is in the store of a stopped engine, looked at without changing it.

The directory is locked meanwhile, so that no engine starts on it. Damage is found and told, never
stepped on: an LMDB file is checked before it is mapped, and nothing is moved aside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sessionkv.errors import StoreUnavailable
from sessionkv.store.block_index import BlockIndex
from sessionkv.store.block_store import LAYOUT_VERSION
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.environment import check_environment, opening
from sessionkv.store.index_entry import Entry
from sessionkv.store.record import HEADER_BYTES, RecordLayout, geometry_in
from sessionkv.store.segments import SegmentFiles
from sessionkv.types import BlockHash, BlockRecord, KVGeometry, pack_tokens, unpack_tokens

_IDENTITY_BYTES = 32


def open_stopped(path: Path | str) -> StoreDirectory:
    """Lock a store that is there; close it when done.

    Raises:
        StoreInUse: An engine has it; with its pid.
        StoreUnavailable: There is no store, or it cannot be used.
    """
    target = Path(path).expanduser()
    if not (target / "format").is_file():
        raise StoreUnavailable(f"there is no store in {target}", directory=str(target))
    return StoreDirectory.open(target)


def identity_folders(directory: StoreDirectory) -> list[tuple[bytes, Path]]:
    """KV identities with blocks in the store, and their folders."""
    found = []
    for path in sorted(directory.blocks_path.iterdir()):
        if (identity := _identity(path.name)) is not None and path.is_dir():
            found.append((identity, path))
    return found


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A record that an engine would not serve."""

    key: bytes
    slot: int
    what: str


class StoredBlocks:
    """The blocks of one identity, read-only. A context manager; one thread.

    Attributes:
        identity: Which.
        path: Its folder.
        damage: Why its index cannot be read, None where it can.
        geometry: Shape of its blocks; None where there is no sound record to tell.
    """

    def __init__(self, directory: StoreDirectory, identity: bytes, *, whole: bool = False) -> None:
        """Open what is there; with ``whole`` all of the index's structure is checked first.

        Raises:
            StoreUnavailable: The disk refuses.
        """
        self.identity = identity
        self.path = directory.blocks_path / identity.hex()
        self.geometry: KVGeometry | None = None
        self._index: BlockIndex | None = None
        self._segments: SegmentFiles | None = None
        self.damage = check_environment(self.path / "index", whole=whole)
        if self.damage is None:
            with opening(self.path):
                self.damage = self._open()

    def _open(self) -> str | None:
        index = self._index = BlockIndex(self.path / "index", block_size=0)
        layout = index.layout()
        if any(layout.get(name, 0) < 1 for name in ("slot_bytes", "block_size", "payload_bytes")):
            return "its layout cannot be read"
        if layout.get("version") != LAYOUT_VERSION:
            return f"its layout is of version {layout.get('version')}: an engine would empty it"
        if index.end_slot() is None:
            return "the number of its slots is damaged: an engine would empty it"
        index.close()
        self._index = BlockIndex(self.path / "index", layout["block_size"])
        self._segments = SegmentFiles(self.path, layout["slot_bytes"])
        self.geometry = self._find_geometry()
        return None

    @property
    def index(self) -> BlockIndex:
        """The index.

        Raises:
            StoreUnavailable: It is damaged.
        """
        if self._index is None or self.damage is not None:
            raise StoreUnavailable(f"the index in {self.path} is damaged: {self.damage}")
        return self._index

    def entries(self) -> Iterator[Entry]:
        """What the index names, by key."""
        with self.index.reading() as txn:
            yield from self.index.entries(txn)

    @property
    def block_size(self) -> int:
        """Tokens of a full block.

        Raises:
            StoreUnavailable: The index is damaged.
        """
        return self.index.layout()["block_size"]

    def __contains__(self, key: object) -> bool:
        """Whether the index names a block of this key."""
        with self.index.reading() as txn:
            return isinstance(key, bytes) and self.index.get(txn, key) is not None

    def read(self, record: BlockRecord) -> memoryview | None:
        """The payload of a block, verified; None where the store does not have it, sound."""
        if self._segments is None or self.geometry is None:
            return None
        tokens = pack_tokens(record.token_ids)
        with self.index.reading() as txn:
            slot = self.index.slot_of(txn, record.key, record.parent, tokens)
        if slot is None:
            return None
        entry = Entry(record.key, record.parent, tokens, slot)
        payload = memoryview(bytearray(self.geometry.block_bytes))
        wrong = _wrong_with(entry, self.identity, self.geometry, self._segments, payload)
        return payload if wrong is None else None

    def num_blocks(self) -> int:
        """Blocks in the index, damaged entries too."""
        with self.index.reading() as txn:
            return self.index.count(txn)

    def bad_blocks(self) -> Iterator[BadBlock | None]:
        """Read every record: None for a sound one, in the order of their keys."""
        segments, geometry = self._segments, self.geometry
        payload = memoryview(bytearray(geometry.block_bytes if geometry else 0))
        seen: dict[int, bytes] = {}
        for entry in self.entries():
            if entry.slot in seen:
                what = f"its slot is named by {seen[entry.slot].hex()[:16]} too"
                yield BadBlock(entry.key, entry.slot, what)
                continue
            seen[entry.slot] = entry.key
            if segments is None or geometry is None:
                yield BadBlock(entry.key, entry.slot, "no record of the folder can be read")
                continue
            wrong = _wrong_with(entry, self.identity, geometry, segments, payload)
            yield None if wrong is None else BadBlock(entry.key, entry.slot, wrong)

    def close(self) -> None:
        """Close the files."""
        if self._segments is not None:
            self._segments.close()
        if self._index is not None:
            self._index.close()

    def __enter__(self) -> StoredBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find_geometry(self) -> KVGeometry | None:
        """The shape that the first sound record names; one that damage made up is never sound."""
        if self._segments is None:
            return None
        header = bytearray(HEADER_BYTES)
        payload_bytes = self.index.layout()["payload_bytes"]
        for entry in self.entries():
            try:
                found = None
                if self._segments.read(entry.slot, (header,)):
                    found = geometry_in(header, self.identity)
            except OSError:
                continue
            if found is None or found.block_bytes != payload_bytes:
                continue
            payload = memoryview(bytearray(found.block_bytes))
            if _wrong_with(entry, self.identity, found, self._segments, payload) is None:
                return found
        return None


def _wrong_with(
    entry: Entry,
    identity: bytes,
    geometry: KVGeometry,
    segments: SegmentFiles,
    payload: memoryview,
) -> str | None:
    """What is wrong with the record that an entry names; None if nothing: it is in ``payload``."""
    header = bytearray(HEADER_BYTES)
    try:
        if not segments.read(entry.slot, (header, payload)):
            return "the segment file ends before it"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    tokens = tuple(unpack_tokens(entry.tokens))
    record = BlockRecord(BlockHash(entry.key), BlockHash(entry.parent), tokens)
    expected = RecordLayout(identity, geometry).header(record, payload)
    if header[: len(expected)] == expected:
        return None
    if not any(header):
        return "its slot is empty"
    if header[64:96] != entry.key:
        return "its slot holds another block"
    return "its bytes are not what was stored"


def _identity(name: str) -> bytes | None:
    try:
        found = bytes.fromhex(name)
    except ValueError:
        return None
    return found if len(found) == _IDENTITY_BYTES and found.hex() == name else None
