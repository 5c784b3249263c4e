"""A device whose steps and copies run as late as its rules allow.

What a step does is queued by :meth:`DeferredDevice.launch` and runs when a fence behind it is
waited for; a copy reads and writes when it is waited for, or, where steps are held behind it, just
before the first of these, and its end is told not before the next. So whoever relies on more than
the rules promise sees old bytes, or bytes that are gone.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from sessionkv.engine.device_memory import Copy, Copying, address_of
from tests.builders.store import Gates

UNFINISHED = 0xDD
"""What the targets of copies are full of, from where steps are held behind these until they are
made."""
_MOST_HELD_S = 0.02
"""Copies end by themselves, whether steps come behind them or not."""


class DeferredDevice:
    """Blocks that only copies reach.

    Attributes:
        log: Starts and ends of copies, as ``("start" | "end", "in" | "out", block ids)``.
        bad_blocks: Those whose copies do not arrive.
        failing: Numbers of the copies, by direction from 0, that raise: ``("start" | "wait", "in" |
            "out", number)``.
        gates: ``wait_in`` and ``wait_out`` hold whoever waits for copies.
        promises: Whether copies tell what will become of them where steps are held behind them; a
            step that is held runs with them made, and no sooner.
        overlaps: Copies that were to write what one has not ended reading or writing that steps are
            held behind: as ``("in" | "out", device block)``. None may be.
    """

    view = None
    promises = False

    def __init__(
        self, num_blocks: int, block_bytes: int, *shut: str, memory: memoryview | None = None
    ) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self._memory = memory or memoryview(bytearray(b"\xee" * (num_blocks * block_bytes)))
        self.log: list[tuple[str, str, tuple[int, ...]]] = []
        self.bad_blocks: set[int] = set()
        self.failing: set[tuple[str, str, int]] = set()
        self.gates = Gates(*shut)
        self.pinned: list[tuple[int, int]] = []
        self._started = {"in": 0, "out": 0}
        self._steps: list[Callable[[], None]] = []
        self._num_run = 0
        self._lock = threading.Lock()
        self._loop: int | None = None
        self._held: set[_Deferred] = set()
        self.overlaps: list[tuple[str, int]] = []

    def extent(self, block_id: int) -> memoryview:
        """The block's bytes as they are at this moment."""
        return self._memory[block_id * self.block_bytes :][: self.block_bytes]

    def launch(self, step: Callable[[], None]) -> None:
        """Queue what a step does."""
        self._steps.append(step)

    def run_steps(self, until: int | None = None) -> None:
        """Run the steps that were launched, up to the first ``until`` of all."""
        until = len(self._steps) if until is None else until
        for held in tuple(self._held):
            if held.is_made:
                held.may_be_told.set()
        with self._lock:
            for step in self._steps[self._num_run : until]:
                step()
            self._num_run = max(self._num_run, until)

    def pin(self, memory: memoryview, block_bytes: int) -> None:
        self.pinned.append((memory.nbytes, block_bytes))

    def fence(self) -> object:
        self._loop = self._loop or threading.get_ident()
        assert threading.get_ident() == self._loop, "only the step loop knows what it launched"
        return _Fence(self, len(self._steps))

    def copy_out(self, copies: Sequence[Copy], after: object) -> Copying:
        return self._start("out", copies, after)

    def copy_in(self, copies: Sequence[Copy], after: object) -> Copying:
        return self._start("in", copies, after)

    def _start(self, way: str, copies: Sequence[Copy], after: object) -> Copying:
        assert isinstance(after, _Fence)
        assert after.device is self
        number = self._started[way]
        self._started[way] += 1
        if ("start", way, number) in self.failing:
            raise RuntimeError("told to fail")
        self.log.append(("start", way, tuple(block for block, _ in copies)))
        deferred = _Deferred(self, way, number, list(copies), after)
        taken = {place for held in tuple(self._held) for place in held.places}
        written = zip(copies, deferred.targets, strict=True)
        self.overlaps += [(way, block) for (block, _), target in written if target in taken]
        return deferred


class _Fence:
    def __init__(self, device: DeferredDevice, num_steps: int) -> None:
        self.device, self.num_steps = device, num_steps


class _Deferred:
    def __init__(
        self, device: DeferredDevice, way: str, number: int, copies: list[Copy], after: _Fence
    ) -> None:
        self.device, self.way, self.number = device, way, number
        self.copies, self.after = copies, after
        self.is_waited_for = False
        self.arrived = [block not in device.bad_blocks for block, _ in copies]
        extents, memories = [block for block, _ in copies], [address_of(m) for _, m in copies]
        self.targets: list[object] = [("block", block) for block in extents]
        sources: list[object] = [("memory", address) for address in memories]
        if way == "out":
            self.targets, sources = sources, self.targets
        self.places = {*self.targets, *sources}
        self.is_made = False
        self.may_be_told = threading.Event()
        self._making = threading.Lock()

    def hold_steps(self) -> list[bool] | None:
        device = self.device
        assert device._loop == threading.get_ident(), "only the step loop holds its steps"
        if not device.promises:
            return None
        device.run_steps(self.after.num_steps)
        with self._making:
            if not self.is_made:
                for block, _ in itertools.compress(self.copies, self.arrived):
                    device.extent(block)[:] = bytes([UNFINISHED]) * device.block_bytes
                device._held.add(self)
                device.launch(self._make)
        return self.arrived

    def wait(self) -> list[bool]:
        assert not self.is_waited_for
        self.is_waited_for = True
        device = self.device
        device.gates.pass_through(f"wait_{self.way}")
        if ("wait", self.way, self.number) in device.failing:
            raise RuntimeError("told to fail")
        device.run_steps(self.after.num_steps)
        if self in device._held:
            self.may_be_told.wait(_MOST_HELD_S)
        self._make()
        device._held.discard(self)
        device.log.append(("end", self.way, tuple(block for block, _ in self.copies)))
        return self.arrived

    def _make(self) -> None:
        """Make the copies, once."""
        with self._making:
            if self.is_made:
                return
            for block, memory in itertools.compress(self.copies, self.arrived):
                extent = self.device.extent(block)
                if self.way == "in":
                    extent[:] = memory
                else:
                    memory[:] = extent
            self.is_made = True
