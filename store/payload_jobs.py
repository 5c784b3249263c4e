"""Moving payloads between memory and slots: the part of the block store's work that takes time.

A job is made and taken in by the block store; in between, :meth:`run` may be called on any thread,
once, and touches nothing but the job, the segment files and the bytes it was given. That is where
checksums are made and verified; reading and writing pass no bytes through Python objects: the disk
is read straight into the block, and both it and the checksum let other threads run meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from sessionkv.errors import StoreError
from sessionkv.store.gates import Gates
from sessionkv.store.record import HEADER_BYTES, RecordLayout, names_another
from sessionkv.store.segments import SegmentFiles
from sessionkv.types import BlockHash, BlockRecord, DiskBlock, MoveOutcome

_log = logging.getLogger(__name__)

RecordAndView = tuple[BlockRecord, memoryview]


@dataclass(frozen=True, slots=True)
class PayloadFiles:
    """What jobs work on."""

    layout: RecordLayout
    segments: SegmentFiles
    gates: Gates


@dataclass(slots=True)
class ReadJob:
    """Blocks to be read and verified.

    Attributes:
        outcomes: One for each block, once it ran; on any but OK the view holds nothing of use.
    """

    files: PayloadFiles
    blocks: Sequence[DiskBlock]
    views: Sequence[memoryview]
    outcomes: list[MoveOutcome] = field(default_factory=list)

    def run(self) -> None:
        """Read blocks straight into their views and verify them there. Raises nothing.

        Blocks in slots that follow each other are read together: disks and the system's reading
        ahead are several times faster with a few large reads than with many of a block.
        """
        self.outcomes = [MoveOutcome.IO_ERROR] * len(self.blocks)
        for indices in self._runs():
            headers = [bytearray(HEADER_BYTES) for _ in indices]
            if self._fill(indices, headers):
                for index, header in zip(indices, headers, strict=True):
                    self.outcomes[index] = self._verified(index, header)
            elif len(indices) > 1:
                for index in indices:  # to tell the bad ones from the others
                    if self._fill((index,), headers):
                        self.outcomes[index] = self._verified(index, headers[0])

    def _runs(self) -> list[list[int]]:
        """Blocks to read together, as indices."""
        runs: list[list[int]] = []
        for index, block in enumerate(self.blocks):
            try:
                self.files.gates.pass_through("before_read")
            except OSError as error:
                _log.warning("reading block %s failed: %s", block.record.key.hex(), error)
                continue
            last = self.blocks[runs[-1][-1]].slot if runs else None
            if last is not None and self.files.segments.adjoin(last, block.slot):
                runs[-1].append(index)
            else:
                runs.append([index])
        return runs

    def _fill(self, indices: Sequence[int], headers: Sequence[bytearray]) -> bool:
        """Read the slots of a run into headers and views; False where that did not work."""
        padding = bytearray(self.files.layout.padding_bytes)
        buffers: list[bytearray | memoryview] = []
        for index, header in zip(indices, headers, strict=False):
            buffers += (
                (header, self.views[index], padding) if padding else (header, self.views[index])
            )
        first = self.blocks[indices[0]]
        try:
            if self.files.segments.read(first.slot, buffers):
                return True
        except OSError as error:
            _log.warning("reading block %s failed: %s", first.record.key.hex(), error)
            return False
        if len(indices) == 1:
            self.outcomes[indices[0]] = MoveOutcome.MISSING
        return False

    def _verified(self, index: int, header: bytearray) -> MoveOutcome:
        block = self.blocks[index]
        expected = self.files.layout.header(block.record, self.views[index])
        if header[: len(expected)] == expected:
            return MoveOutcome.OK
        is_other = names_another(header, block.record.key)
        return MoveOutcome.MISSING if is_other else MoveOutcome.CORRUPT


@dataclass(slots=True)
class WriteJob:
    """Blocks to be stored.

    Attributes:
        blocks: All that were asked for.
        known: Keys of those that are on disk already.
        slots: Where new ones go; those left out found no room.
        refused: Nothing is written now, and why is known.
        error: What stopped it; nothing of it is to be named in the index then.
    """

    files: PayloadFiles
    blocks: Sequence[RecordAndView]
    known: set[BlockHash] = field(default_factory=set)
    slots: dict[BlockHash, int] = field(default_factory=dict)
    refused: bool = False
    error: Exception | None = None

    def run(self) -> None:
        """Write headers and payloads; durable on return. Raises nothing."""
        if self.error is not None or not self.slots:
            return
        self.error = StoreError("the blocks were not written")  # whatever ends this but success
        try:
            self._write()
        except OSError as error:
            self.error = error
        else:
            self.error = None

    def named(self) -> list[tuple[BlockRecord, int]]:
        """Records with the slots that hold them now."""
        records = {record.key: record for record, _ in self.blocks}
        return [(records[key], slot) for key, slot in self.slots.items()]

    def outcomes(self) -> list[MoveOutcome]:
        """One for each block, once all of it is done."""
        there = self.known | self.slots.keys()
        return [
            MoveOutcome.OK if record.key in there else MoveOutcome.NO_ROOM
            for record, _ in self.blocks
        ]

    def _write(self) -> None:
        files, views = self.files, {record.key: (record, view) for record, view in self.blocks}
        for key, slot in self.slots.items():
            record, view = views[key]
            header = files.layout.header(record, view).ljust(HEADER_BYTES, b"\0")
            files.segments.write(slot, (header, view))
        files.gates.pass_through("disk_put_half")
        files.segments.sync()
