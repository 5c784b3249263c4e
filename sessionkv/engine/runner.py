"""The seam between deciding and computing: what the engine asks of a runner.

A runner owns the device pool and knows nothing of sessions, hashes, tiers or sockets.

A step is launched and, later, collected. A runner that computes elsewhere than on the thread that
calls it begins at the launch, so that the next step can be planned and launched meanwhile: the
device then goes from one to the other without waiting for anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sessionkv.engine.device_memory import DeviceMemory
from sessionkv.types import KVGeometry, StepOutput, StepPlan


class LaunchedStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepOutput:
        """Wait until its results are in memory. Once; the step loop's thread.

        Raises:
            Exception: Anything: the whole step failed and none of its KV may be matched. The
                runner must stay usable; sequences of the plan are ended by the caller.
        """
        ...


class LaterResult:
    """A :class:`LaunchedStep` whose result is had by a call.

    That computes the step where the runner computes on the calling thread, or waits for it.
    """

    def __init__(self, get: Callable[[], StepOutput]) -> None:
        """With the call."""
        self._get = get

    def result(self) -> StepOutput:
        """See :class:`LaunchedStep`."""
        return self._get()


class Runner(Protocol):
    """Carries out step plans over a pool of KV blocks. Used by one thread, the step loop's.

    Steps are launched in the order of their ids and collected in the same order; at most two are
    launched and not collected. The second of them was made ahead (``StepPlan.is_ahead``): it only
    continues sequences of the first, with the tokens that this one samples.

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

    @property
    def plans_ahead(self) -> bool:
        """Whether to plan the next step before the last is collected; no where nothing is won."""
        ...

    def prepare_thread(self) -> None:
        """Make what a thread has for itself, so that no step does; once, on the step loop's."""
        ...

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begin with one plan.

        A sequence of a plan made ahead may have failed in the step before: its result is then of
        no use, and nobody looks at it.

        Raises:
            Exception: As :meth:`LaunchedStep.result`.
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
