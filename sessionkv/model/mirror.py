"""Contiguous copies of the KV of running sequences, so that a step reads no block twice.

The pool of blocks is the truth; a mirror only follows it. It is filled from the blocks once when
its sequence joins the batch, gets every token right after the pool got it, and is given back when
the sequence leaves. Nothing is ever spilled from a mirror. Their memory is bounded: a sequence that
gets none reads its blocks instead, which is slower and equally right. Memory given back is kept for
the next mirror, whose filling then waits for no fresh pages; its content means nothing any more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sessionkv.errors import SessionKVError

_ROUND_TOKENS = 128


class Mirror:
    """KV of one sequence; ``data`` is ``[num_layers, 2, kv_heads, capacity, head_dim]`` fp32.

    Attributes:
        num_tokens: Positions, from 0, that are valid in every layer.
    """

    __slots__ = ("data", "num_tokens")

    def __init__(self, data: Tensor) -> None:
        """Take ownership of the memory."""
        self.data = data
        self.num_tokens = 0

    @property
    def capacity(self) -> int:
        """Positions there is room for."""
        return self.data.shape[3]


class MirrorPool:
    """Gives out mirrors within a budget of bytes. Used by the step loop's thread only."""

    def __init__(
        self, *, num_layers: int, kv_heads: int, head_dim: int, max_tokens: int, budget_bytes: int
    ) -> None:
        """Start empty; nothing is allocated before a mirror is asked for.

        Args:
            num_layers: Layers of the model.
            kv_heads: Key heads of a layer.
            head_dim: Dimensions of a head.
            max_tokens: No sequence is longer.
            budget_bytes: Most memory of all mirrors together.
        """
        self._max_tokens = max_tokens
        self._shape = (num_layers, 2, kv_heads, head_dim)
        self._budget_bytes = budget_bytes
        self._held_bytes = 0
        self._spares: list[Tensor] = []

    @property
    def used_bytes(self) -> int:
        """Memory of all mirrors now."""
        return self._held_bytes - sum(spare.nbytes for spare in self._spares)

    @property
    def held_bytes(self) -> int:
        """Memory of all mirrors, and of what is kept for the next ones."""
        return self._held_bytes

    def create(self, num_tokens: int) -> Mirror | None:
        """A mirror with room for at least that many tokens; None when the budget is spent."""
        data = self._allocate(num_tokens)
        return None if data is None else Mirror(data)

    def grow(self, mirror: Mirror, num_tokens: int) -> bool:
        """Make room for ``num_tokens``, at least doubling; False when the budget is spent.

        Cost: a copy of what is valid, amortised over the tokens appended since the last growth.
        """
        if num_tokens <= mirror.capacity:
            return True
        data = self._allocate(max(num_tokens, min(2 * mirror.capacity, self._max_tokens)))
        if data is None:
            data = self._allocate(num_tokens)
        if data is None:
            return False
        valid = mirror.num_tokens
        data[:, :, :, :valid] = mirror.data[:, :, :, :valid]
        self._spares.append(mirror.data)
        mirror.data = data
        return True

    def release(self, mirror: Mirror) -> None:
        """Take a mirror back; its memory waits for the next one.

        Raises:
            SessionKVError: It was released before.
        """
        if mirror.capacity == 0:
            raise SessionKVError("a mirror was released twice")
        self._spares.append(mirror.data)
        mirror.data = mirror.data.new_empty((*self._shape[:3], 0, self._shape[3]))
        mirror.num_tokens = 0

    def _allocate(self, num_tokens: int) -> Tensor | None:
        """Spare memory that is not much too large, else new memory within the budget."""
        layers, two, heads, head_dim = self._shape
        capacity = -(-num_tokens // _ROUND_TOKENS) * _ROUND_TOKENS
        fitting = [s for s in self._spares if capacity <= s.shape[3] <= 2 * capacity]
        if fitting:
            best = min(fitting, key=lambda spare: spare.shape[3])
            self._spares = [spare for spare in self._spares if spare is not best]
            return best
        nbytes = layers * two * heads * capacity * head_dim * 4
        while self._spares and self._held_bytes + nbytes > self._budget_bytes:
            self._held_bytes -= self._spares.pop(0).nbytes
        if self._held_bytes + nbytes > self._budget_bytes:
            return None
        self._held_bytes += nbytes
        return torch.empty((layers, two, heads, capacity, head_dim))
