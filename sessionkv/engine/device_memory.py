"""How movers reach the extents of a runner's pool: as host memory, or by copies.

A pool in host memory gives views, and the disk reads and writes them itself. A pool of another
device is copied to and from host memory, beside the steps that compute.

Why such copies and the steps never disturb each other. The cache leases both ends of a move from
before it is submitted until its answer has been taken in, and core submits, takes in and launches
steps on one thread. So, of the steps launched *before* the submit, the fence taken then waits for
all: what a spill reads has been written, and what a fetch overwrites is read no more. Of the steps
launched *between* submit and answer, none touches a leased block. And a step launched *after* the
answer comes after the copy, since a mover answers only when the copy has ended. All this holds with
two steps in flight: a sequence that ends while a step computes it keeps its leases until that step
has been collected.

One kind of step does touch a leased block before the answer: one that reads what a fetch brings,
for which core had all steps to come held behind the copy (:meth:`Copying.hold_steps`). They run on
one stream, and every fence taken since lies on it, so whatever reads the block comes after the copy
as well: the step itself, a later one of whoever finds the block, and a copy of it to elsewhere. The
leases end with the answer as ever.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

_log = logging.getLogger(__name__)

Copy = tuple[int, memoryview]
"""A block of the device, and the host memory of its length at the other end."""


class Copying(Protocol):
    """Copies that were started together."""

    def wait(self) -> list[bool]:
        """Wait for their end; whether each arrived, in order. Lets other threads run; once.

        Raises:
            Exception: None of them can be relied on.
        """
        ...

    def hold_steps(self) -> list[bool] | None:
        """Have all steps to come, and fences, come behind the copies; what :meth:`wait` will say.

        None where that cannot be said before, and then nothing is held. Should the wait say
        otherwise or raise, the device has failed and no step that was held ends well. The step
        loop's thread only; never waits.
        """
        ...


class DeviceMemory(Protocol):
    """The device's end of moves. The caller has the blocks leased."""

    @property
    def view(self) -> Callable[[int], memoryview] | None:
        """Gives an extent's writable bytes, for the life of the runner; None but in host memory."""
        ...

    def pin(self, memory: memoryview, block_bytes: int) -> None:
        """Make page-aligned host memory quick to copy to and from, in the background.

        It can be used at once. Asked once for each memory; those asked for first come first.

        Args:
            memory: Of whole blocks; kept until the runner is closed.
            block_bytes: Length of the copies to come, which begin at multiples of it.
        """
        ...

    def fence(self) -> object:
        """A point after all that was launched so far. The step loop's thread only; never waits."""
        ...

    def copy_out(self, copies: Sequence[Copy], after: object) -> Copying:
        """Start copies from the device, behind a fence. One thread; the other way another may.

        Raises:
            Exception: None was started.
        """
        ...

    def copy_in(self, copies: Sequence[Copy], after: object) -> Copying:
        """Start copies to the device; as :meth:`copy_out`."""
        ...


@dataclass(frozen=True, slots=True)
class Copied:
    """Copies that had ended when they were asked for."""

    arrived: list[bool]

    def wait(self) -> list[bool]:
        """See :class:`Copying`."""
        return self.arrived

    def hold_steps(self) -> list[bool]:
        """See :class:`Copying`."""
        return self.arrived


class HostPool:
    """A pool in host memory, and no fences.

    What a move reads was written by steps that have been collected, and what it overwrites no step
    in flight touches.
    """

    def __init__(self, view: Callable[[int], memoryview]) -> None:
        """Over a runner's views of blocks."""
        self.view = view

    def pin(self, memory: memoryview, block_bytes: int) -> None:
        """All host memory is alike here."""

    def fence(self) -> object:
        """See :class:`DeviceMemory`."""
        return None

    def copy_out(self, copies: Sequence[Copy], after: object) -> Copying:
        """Copy block by block; what fails leaves the others alone."""
        del after
        return Copied([self._copy(*copy, is_in=False) for copy in copies])

    def copy_in(self, copies: Sequence[Copy], after: object) -> Copying:
        """Copy block by block; what fails leaves the others alone."""
        del after
        return Copied([self._copy(*copy, is_in=True) for copy in copies])

    def _copy(self, block_id: int, memory: memoryview, *, is_in: bool) -> bool:
        try:
            extent = self.view(block_id)
            copy_bytes(*((extent, memory) if is_in else (memory, extent)))
        except Exception:  # noqa: BLE001 a runner's view; the other blocks are to be copied
            _log.exception("copying device block %d failed", block_id)
            return False
        return True


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy equal lengths of contiguous, writable memory; lets other threads run meanwhile.

    Raises:
        ValueError: The lengths differ.
    """
    if target.nbytes != source.nbytes:
        raise ValueError(f"{source.nbytes} bytes do not fit {target.nbytes}")
    # A foreign function call releases the interpreter lock, slice assignment does not.
    ctypes.memmove(address_of(target), address_of(source), source.nbytes)


def address_of(memory: memoryview) -> int:
    """Where writable memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def reserve(num_bytes: int) -> memoryview:
    """Zeroed, page-aligned memory of this process that is taken only as it is written."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return memoryview(mmap.mmap(-1, max(1, num_bytes), flags=private))
