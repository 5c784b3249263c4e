"""What a step leaves on the device, and how it gets to the host.

Memory at fixed addresses, so that graphs of any size write into it. One copy brings everything the
host needs; waiting for it is the only wait of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor


class StepResults:
    """The step loop's thread only.

    Attributes:
        logits: ``[max_running, vocab_size]``; the rows that sampled last.
    """

    def __init__(
        self,
        max_running: int,
        *,
        max_step_tokens: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate for steps of at most so many sequences and tokens."""
        self.logits = torch.zeros((max_running, vocab_size), dtype=dtype, device=device)
        ends = 8 * max_running, 9 * max_running, 9 * max_running + max_step_tokens
        self._device = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        self._host = torch.zeros(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        (self._ids, self._bad, self._unusable), (ids, bad, unusable) = (
            (memory[: ends[0]].view(torch.int64), memory[ends[0] : ends[1]], memory[ends[1] :])
            for memory in (self._device, self._host)
        )
        self._host_parts = ids, bad, unusable
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def put_unusable(self, hidden: Tensor) -> None:
        """Note which rows of hidden states hold something that is not a finite number."""
        # One bad number in a row makes its sum bad.
        finite = hidden.sum(1, dtype=torch.float32).isfinite()
        torch.logical_not(finite, out=self._unusable[: hidden.shape[0]].view(torch.bool))

    def put_sampled(self, token_ids: Tensor, bad: Tensor) -> None:
        """Keep what rows sampled, int64, and whether their logits were unusable, bool."""
        self._ids[: token_ids.shape[0]] = token_ids
        self._bad[: bad.shape[0]] = bad

    def fetch(self, num_tokens: int, num_samples: int) -> tuple[Tensor, list[int], list[int]]:
        """Wait for the step: unusable rows ``[num_tokens]``, tokens, unusable samples."""
        self._host.copy_(self._device, non_blocking=True)
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        ids, bad, unusable = self._host_parts
        return unusable[:num_tokens], ids[:num_samples].tolist(), bad[:num_samples].tolist()
