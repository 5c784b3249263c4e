"""The seam between deciding and computing: what the engine asks of a runner.

A runner owns the device pool and knows nothing of sessions, hashes, tiers or sockets.
"""

from __future__ import annotations

from typing import Protocol

from sessionkv.engine.device_memory import DeviceMemory
from sessionkv.types import KVGeometry, StepOutput, StepPlan


class Runner(Protocol):
    """Carries out step plans over a pool of KV blocks. Used by one thread, the step loop's.

    Attributes:
        geometry: Shape of a block's KV; ``geometry.block_bytes`` is the extent size.
        num_blocks: Blocks of the device pool.
        vocab_size: Token ids are below it.
        max_model_len: Most positions of one sequence.
        fingerprint: Digest of everything of the model that changes KV bytes: weights, rope,
            numerics version.
        weights_bytes: Memory of the weights, for reports.
    """

    geometry: KVGeometry
    num_blocks: int
    vocab_size: int
    max_model_len: int
    fingerprint: str
    weights_bytes: int

    @property
    def pool_bytes(self) -> int:
        """Memory of the pool and whatever else holds KV, for reports."""
        ...

    def execute(self, plan: StepPlan) -> StepOutput:
        """Carry out one plan; returns when its results are in memory.

        Raises:
            Exception: Anything: the whole step failed and none of its KV may be matched. The
                runner must stay usable; sequences of the plan are ended by the caller.
        """
        ...

    @property
    def memory(self) -> DeviceMemory:
        """The extents of the pool (``geometry.block_bytes`` long), for the movers.

        Their own threads read and write a block while it is leased to a transfer and no plan
        touches it.
        """
        ...

    def close(self) -> None:
        """Free the pool and the model."""
        ...
