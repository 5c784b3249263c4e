import io
from collections.abc import Sequence

import pytest

from sessionkv.errors import ExportDamaged
from sessionkv.store.export_file import (
    ExportCounts,
    ExportedBlock,
    ExportItem,
    ExportReader,
    ExportWriter,
    KVSection,
)
from sessionkv.types.portable import PortableSession
from tests.builders.store import IDENTITY, chain, geometry, node, payload

SHAPE = geometry(64)
BLOCKS = [
    ExportedBlock(record, memoryview(payload(record, 64))) for record in chain([1, 2, 3, 4, 5])
]
ITEMS: list[ExportItem] = [
    node(3),
    node(4, 3),
    node(9, 3, incoming_blob=b"x" * 300),
    PortableSession("trip", 4, "keep", 1.5, 2.5),
    PortableSession("träume/2", 9, "follow", 1.5, 2.5),
    node(1),
    PortableSession("empty", 1, "keep", 0.0, 0.0),
    KVSection(IDENTITY, SHAPE),
    *BLOCKS,
]


def written(items: Sequence[ExportItem]) -> bytes:
    file = io.BytesIO()
    writer = ExportWriter(file)
    for item in items:
        writer.add(item)
    writer.finish()
    return file.getvalue()


def read(content: bytes) -> list[ExportItem]:
    return list(ExportReader(io.BytesIO(content)))


def refused(content: bytes) -> ExportDamaged:
    with pytest.raises(ExportDamaged) as caught:
        read(content)
    return caught.value


def test_what_was_written_comes_back() -> None:
    reader = ExportReader(io.BytesIO(written(ITEMS)))
    assert list(reader) == ITEMS
    assert reader.counts == ExportCounts(nodes=4, sessions=3, blocks=2)


def test_an_empty_export_is_a_whole_file() -> None:
    assert read(written([])) == []


def test_the_same_items_make_the_same_bytes() -> None:
    assert written(ITEMS) == written(ITEMS)
    assert written([])[:16].hex() == "534b5645585052540100000000000000"
    assert written([])[16:24] == b"END \x18\0\0\0"


def test_every_flipped_bit_is_refused_at_or_before_its_record() -> None:
    content = written(ITEMS)
    for at in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[at] ^= 1 << bit
            assert 0 <= refused(bytes(flipped)).details["offset"] <= at


def test_every_truncation_is_refused() -> None:
    content = written(ITEMS)
    for length in range(len(content)):
        assert refused(content[:length]).details["offset"] <= length


def test_more_after_the_end_is_refused() -> None:
    content = written(ITEMS)
    assert refused(content + b"\0").details["offset"] == len(content)


def test_records_that_were_swapped_dropped_or_doubled_are_refused() -> None:
    whole, without = written(ITEMS), written([*ITEMS[:-1]])
    last = written(ITEMS)[len(without) - 40 : -40]  # the last block's record
    assert refused(whole.replace(last, b"")).details["offset"] == len(without) - 40
    assert refused(whole.replace(last, last + last)).details["offset"] == len(whole) - 40


@pytest.mark.parametrize(
    "items",
    [
        [node(2, 1)],
        [node(1), node(1)],
        [node(1), PortableSession("a", 1, "keep", 0.0, 0.0), node(1)],
        [node(1)],
        [node(1), node(2, 1), PortableSession("a", 1, "keep", 0.0, 0.0)],
        [PortableSession("a", 1, "keep", 0.0, 0.0)],
        [node(1), node(2, 1, kind="raw"), node(3, 2, kind="chat")],
        [BLOCKS[0]],
        [KVSection(IDENTITY, geometry(128)), BLOCKS[0]],
        [KVSection(IDENTITY, SHAPE), node(1)],
        [KVSection(b"short", SHAPE)],
    ],
)
def test_what_does_not_fit_is_refused(items: Sequence[ExportItem]) -> None:
    assert refused(written(items)).details["offset"] >= 16


def test_other_files_and_newer_formats_are_named_as_such() -> None:
    assert "not a file of exported sessions" in refused(b"").message
    assert "not a file of exported sessions" in refused(b"PK\x03\x04" * 100).message
    newer = bytearray(written([]))
    newer[8] = 2
    assert "format 2" in refused(bytes(newer)).message
