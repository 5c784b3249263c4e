from __future__ import annotations

import mmap
import threading
from math import lcm

import pytest

from sessionkv.engine.device_memory import address_of, reserve
from sessionkv.engine.pinning import PIECE_BYTES, Pinner, pieces
from tests.builders.store import Gates

MIB = 2**20


class Registrar:
    """Notes what it is asked; refuses from the ``refuse_from``-th on."""

    def __init__(self, *shut: str, refuse_from: int = 1000) -> None:
        self.gates = Gates(*shut)
        self.registered: dict[int, int] = {}
        self.unregistered: list[int] = []
        self._refuse_from = refuse_from

    def register(self, address: int, num_bytes: int) -> None:
        self.gates.pass_through("register")
        if len(self.registered) >= self._refuse_from:
            raise RuntimeError("no more")
        self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        self.unregistered.append(address)


@pytest.mark.parametrize(
    ("num_bytes", "block_bytes"),
    [(1000 * 2_359_296, 2_359_296), (64 * MIB, MIB), (7 * 4096, 4096), (1000 * 1000, 1000)],
)
def test_pieces_cover_memory_in_order_by_whole_blocks_and_pages(
    num_bytes: int, block_bytes: int
) -> None:
    end = 0
    for start, size in pieces(num_bytes, block_bytes):
        assert start == end
        assert start % block_bytes == start % mmap.PAGESIZE == 0
        assert 0 < size <= max(PIECE_BYTES, lcm(block_bytes, mmap.PAGESIZE))
        end = start + size
    assert end == num_bytes


def test_memory_is_registered_from_the_front_and_keeps_what_it_holds() -> None:
    registrar = Registrar()
    pinner = Pinner(registrar)
    first, second = reserve(2 * PIECE_BYTES + 2 * MIB), reserve(3 * MIB)
    first[5 * MIB :][:4] = b"kept"
    pinner.pin(first, 2 * MIB)
    pinner.pin(reserve(0)[:0], MIB)
    pinner.pin(second, MIB)
    pinner.wait()
    start = address_of(first)
    assert list(registrar.registered.items()) == [
        (start, PIECE_BYTES), (start + PIECE_BYTES, PIECE_BYTES),
        (start + 2 * PIECE_BYTES, 2 * MIB), (address_of(second), 3 * MIB),
    ]  # fmt: skip
    assert bytes(first[5 * MIB :][:5]) == b"kept\0"
    assert registrar.unregistered == []
    pinner.close()
    assert registrar.unregistered == list(registrar.registered)


def test_memory_that_cannot_be_registered_is_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registrar = Registrar(refuse_from=1)
    pinner = Pinner(registrar)
    memory = reserve(3 * PIECE_BYTES)
    pinner.pin(memory, PIECE_BYTES)
    pinner.wait()
    (line,) = caplog.messages
    assert line == "host memory stays unpinned, copies of it are slower: no more"
    pinner.close()
    assert registrar.unregistered == [address_of(memory)]


def test_closing_ends_with_the_piece_under_way() -> None:
    registrar = Registrar("register")
    pinner = Pinner(registrar)
    memory = reserve(4 * PIECE_BYTES)
    pinner.pin(memory, PIECE_BYTES)
    pinner.pin(reserve(PIECE_BYTES), PIECE_BYTES)
    assert registrar.gates.reached["register"].wait(30)
    closing = threading.Thread(target=pinner.close)
    closing.start()
    assert pinner.stopping.wait(30)
    assert registrar.unregistered == []
    registrar.gates.open("register")
    closing.join(30)
    assert list(registrar.registered) == registrar.unregistered == [address_of(memory)]


def test_memory_that_cannot_be_given_back_is_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Registrar):
        def unregister(self, address: int) -> None:
            raise RuntimeError("the device is gone")

    pinner = Pinner(Broken())
    pinner.pin(reserve(PIECE_BYTES), MIB)
    pinner.wait()
    pinner.close()
    (line,) = caplog.messages
    assert line == "host memory stays pinned until the process ends: the device is gone"


def test_closing_what_was_never_used() -> None:
    Pinner(Registrar()).close()
