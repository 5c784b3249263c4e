"""Host memory made quick for a device, in the background: huge pages, present, and registered.

Registering alone takes memory from the system page by page on one thread; pages that several
threads have made present before are registered several times faster (in the order of a second for
16 GiB). It goes piece by piece from the front, where a tier's first blocks are, so copies become
quick as the memory comes into use. Whoever launches work on the device waits while a piece is being
registered; so that it is not starved, half of the time goes by between the pieces. Memory that
cannot be registered is slower, no more.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Protocol

from sessionkv.engine.device_memory import address_of

_log = logging.getLogger(__name__)

PIECE_BYTES = 64 * 2**20
"""Registering holds up whoever else asks something of the device: so little at a time that a step
does not notice, so much that the number of pieces does not count."""
_TOUCHING_THREADS = min(8, os.cpu_count() or 1)
_TOUCH_BYTES = 8 * 2**20
# Linux 5.14; mmap has no name for it. Makes pages present without writing to them, so what they
# hold meanwhile stays. An older kernel refuses, and registering then takes as long as it takes.
_MADV_POPULATE_WRITE = 23
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)


class Registrar(Protocol):
    """Makes ranges of host memory known to a device. Any thread."""

    def register(self, address: int, num_bytes: int) -> None:
        """Make a range known.

        Raises:
            Exception: It cannot be.
        """
        ...

    def unregister(self, address: int) -> None:
        """End it, by where the range begins."""
        ...


class Pinner:
    """Pins what it is given, in order, on a thread of its own that starts with the first.

    Attributes:
        stopping: Set once the end was asked for: the piece under way is the last.
    """

    def __init__(self, registrar: Registrar) -> None:
        """Nothing is pinned."""
        self._registrar = registrar
        self._asked: Queue[tuple[memoryview, int] | None] = Queue()
        self.stopping = threading.Event()
        self._registered: list[int] = []
        self._kept: list[memoryview] = []
        self._thread: threading.Thread | None = None

    def pin(self, memory: memoryview, block_bytes: int) -> None:
        """Queue page-aligned memory; no block of ``block_bytes`` will be registered in parts."""
        if not memory.nbytes:
            return
        self._kept.append(memory)
        self._asked.put((memory, block_bytes))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pinning", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until what was queued is pinned, as far as it can be."""
        self._asked.join()

    def close(self) -> None:
        """End the thread, after the piece it is at, and unregister everything."""
        self.stopping.set()
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()
        try:
            for address in self._registered:
                self._registrar.unregister(address)
        except Exception as error:  # noqa: BLE001 a device that failed gives back nothing
            _log.warning("host memory stays pinned until the process ends: %s", error)
        self._registered.clear()
        self._kept.clear()

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None and not self.stopping.is_set():
            try:
                self._pin(*asked)
            except Exception as error:  # noqa: BLE001 whatever a device says
                # Where one piece could not be had the next ones could not either.
                _log.warning("host memory stays unpinned, copies of it are slower: %s", error)
            self._asked.task_done()

    def _pin(self, memory: memoryview, block_bytes: int) -> None:
        address = address_of(memory)
        _advise(address, memory.nbytes, _MADV_HUGEPAGE)
        with ThreadPoolExecutor(_TOUCHING_THREADS, "pinning") as touching:
            for start, size in pieces(memory.nbytes, block_bytes):
                if self.stopping.is_set():
                    return
                list(touching.map(_touch, *zip(*_parts(address + start, size), strict=True)))
                began_s = time.monotonic()
                self._registrar.register(address + start, size)
                self._registered.append(address + start)
                self.stopping.wait(time.monotonic() - began_s)


def pieces(num_bytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Start and size of the pieces of some memory, each of whole blocks and whole pages.

    About :data:`PIECE_BYTES` each; the last is what is left.
    """
    unit = math.lcm(block_bytes, mmap.PAGESIZE)
    size = max(unit, PIECE_BYTES // unit * unit)
    for start in range(0, num_bytes, size):
        yield start, min(size, num_bytes - start)


def _parts(address: int, num_bytes: int) -> list[tuple[int, int]]:
    starts = range(0, num_bytes, _TOUCH_BYTES)
    return [(address + start, min(_TOUCH_BYTES, num_bytes - start)) for start in starts]


def _touch(address: int, num_bytes: int) -> None:
    _advise(address, num_bytes, _MADV_POPULATE_WRITE)


def _advise(address: int, num_bytes: int, advice: int) -> None:
    """Advice that is not taken is no error here. Lets other threads run."""
    libc = ctypes.CDLL(None)
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice))
