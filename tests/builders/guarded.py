"""Memory with guards round it, so that a kernel that leaves what it was given shows.

Every tensor lies in an allocation of its own between two guards, filled with a pattern that is NaN
in every float type and a number far outside any table in every integer type. What is read of a
guard poisons the result; what is written to one is found by :meth:`Guarded.check`. Under Triton's
interpreter every single address is looked at as well, also of a read without influence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GUARD_BYTES = 1 << 16
"""More than any kernel's tile reads at once. A multiple of 512, the alignment of torch's own
memory on a GPU: so the same variants of a kernel are chosen as in the engine."""
PATTERN = 0x7FE5
"""16 bits: a quiet NaN of its own in bf16 and fp16, twice in fp32; above 2**30 in integers."""
T = TypeVar("T")
_FRESH = (torch.empty, torch.empty_like, Tensor.new_empty)


@dataclass(frozen=True)
class _Extent:
    """One tensor: its whole allocation as words of 16 bits, and the bytes of it that it has."""

    words: Tensor
    start: int
    end: int
    shape: tuple[int, ...]
    before: Tensor | None
    """What it held, where nothing may be written."""

    def outside(self) -> list[int]:
        """Bytes that were written, counted from the tensor's first, but not its own."""
        memory = self.words.view(torch.uint8).cpu()
        pattern = torch.full_like(self.words, PATTERN, device="cpu").view(torch.uint8)
        changed = memory != pattern
        changed[self.start : self.end] = False
        return [int(at) - self.start for at in changed.nonzero().view(-1)]

    def content(self) -> Tensor:
        return self.words.view(torch.uint8)[self.start : self.end]


class Guarded(TorchFunctionMode):
    """Places tensors; as a context, also those that the code inside asks torch for.

    Args:
        device: Of all of them.
    """

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        self._device = torch.device(device)
        self._extents: list[_Extent] = []
        self._addresses = np.empty((0, 2), np.uint64)

    def given(self, tensor: Tensor, *, shift: int = 0) -> Tensor:
        """A copy that may only be read; ``shift`` elements behind an aligned address."""
        return self._place(tensor, shift=shift, is_given=True)

    def written(self, tensor: Tensor, *, shift: int = 0) -> Tensor:
        """A copy that may be written."""
        return self._place(tensor, shift=shift, is_given=False)

    def fresh(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory that nobody has written yet: of the pattern."""
        return self.written(_filled(shape, dtype))

    def check(self) -> None:
        """Fail if a guard or a tensor that was only given has changed."""
        for extent in self._extents:
            places = extent.outside()
            assert not places, f"bytes {places[:9]} of a tensor {list(extent.shape)} were written"
            if extent.before is not None:
                assert torch.equal(extent.content(), extent.before), (
                    f"a tensor {list(extent.shape)} that was only to be read was written"
                )

    def run(self, launch: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call a launch, whose own memory has guards too; look at every address, then check."""
        with self, watched_addresses(lambda: self._addresses):
            result = launch(*args, **options)
        self.check()
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FRESH and result.numel():
            return self.fresh(*result.shape, dtype=result.dtype)
        return result

    def _place(self, tensor: Tensor, *, shift: int, is_given: bool) -> Tensor:
        assert tensor.is_contiguous()
        start = GUARD_BYTES + shift * tensor.itemsize
        end = start + tensor.nbytes
        words = _filled(((end + GUARD_BYTES) // 2 + 1,), torch.int16).to(self._device)
        content = words.view(torch.uint8)[start:end]
        content.copy_(tensor.detach().view(-1).view(torch.uint8))
        before = content.clone() if is_given else None
        self._extents.append(_Extent(words, start, end, tuple(tensor.shape), before))
        own = np.array([[words.data_ptr() + start, words.data_ptr() + end]], np.uint64)
        known = np.concatenate([self._addresses, own])
        self._addresses = known[known[:, 0].argsort()]
        return content.view(tensor.dtype).view(tensor.shape)


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    empty = torch.empty(shape, dtype=dtype)
    words = torch.full((empty.nbytes // 2 + 1,), PATTERN, dtype=torch.int16)
    return words.view(torch.uint8)[: empty.nbytes].view(dtype).view(shape)


@contextmanager
def watched_addresses(extents: Callable[[], npt.NDArray[np.uint64]]) -> Iterator[None]:
    """Under the interpreter, raise IndexError before an address outside all extents is used.

    The interpreter wraps it in its own error. Natively this does nothing.

    Args:
        extents: First address and the one after the last of each, ascending, ``[n, 2]``; asked at
            every access, as memory is allocated between launches.
    """
    from triton import knobs
    from triton.runtime.interpreter import InterpreterBuilder

    if not knobs.runtime.interpret:
        yield
        return
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def look(pointers: Any, mask: Any) -> None:
        known = extents()
        used = np.asarray(pointers.data)[np.asarray(mask.data)]
        size = pointers.get_element_ty().primitive_bitwidth // 8 or 1
        which = np.searchsorted(known[:, 0], used, side="right").astype(np.int64) - 1
        inside = (which >= 0) & (used + np.uint64(size) <= known[which, 1])
        if not inside.all():
            raise IndexError(f"{int((~inside).sum())} of {used.size} addresses are outside")

    def watched_load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        look(pointers, mask)
        return load(builder, pointers, mask, *rest)

    def watched_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        look(pointers, mask)
        return store(builder, pointers, value, mask, *rest)

    InterpreterBuilder.create_masked_load = watched_load
    InterpreterBuilder.create_masked_store = watched_store
    try:
        yield
    finally:
        InterpreterBuilder.create_masked_load = load
        InterpreterBuilder.create_masked_store = store
