"""What every part of the store's benchmark is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How much to measure, and where.

    Attributes:
        sizes_kib: Record sizes; keys of ``shapes.GEOMETRIES``.
        store_bytes: Payload of a store.
        restore_blocks: Blocks of the restore during which the interpreter lock is watched.
        index_blocks: Blocks in the index that is opened.
        folder: On the disk that is measured; None for the usual temporary folder.
    """

    repeats: int = 5
    sizes_kib: tuple[int, ...] = (720, 1792, 2304)
    store_bytes: int = 2 * 2**30
    restore_blocks: int = 2048
    index_blocks: int = 1_000_000
    folder: Path | None = None
