"""What a step leaves on the device, and how it gets to the host.

Memory at fixed addresses, so that graphs of any size write into it. One copy brings what every step
has, others what it has besides; waiting for them is the only wait of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sessionkv.types.sampling import MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class FetchedResults:
    """A step's results on the host.

    Attributes:
        unusable: ``[tokens]`` uint8: whether a row of hidden states is.
        token_ids: By row of logits: what was sampled.
        bad: By row of logits: whether it is unusable.
        logprob_ids, logprobs: By row that asked for log-probabilities, ``1 + MAX_LOGPROBS`` of
            them: of the token and the likeliest, as far as they were asked for.
    """

    unusable: Tensor
    token_ids: list[int]
    bad: list[int]
    logprob_ids: list[list[int]]
    logprobs: list[list[float]]


class StepResults:
    """The step loop's thread only.

    Attributes:
        logits: ``[max_running, vocab_size]``; the rows that sampled last.
        token_ids: ``[max_running]`` int64: what they sampled.
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
        self._device, self._host = _both(ends[-1], torch.uint8, device)
        (self.token_ids, self._bad, self._unusable), self._host_parts = (
            (memory[: ends[0]].view(torch.int64), memory[ends[0] : ends[1]], memory[ends[1] :])
            for memory in (self._device, self._host)
        )
        count = 1 + MAX_LOGPROBS
        self._logprobs = [
            tuple(memory.view(max_running, count) for memory in _both(max_running * count, *kind))
            for kind in ((torch.int64, device), (torch.float32, device))
        ]
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
        self.token_ids[: token_ids.shape[0]] = token_ids
        self._bad[: bad.shape[0]] = bad

    def put_logprobs(self, first: int, ids: Tensor, values: Tensor) -> None:
        """Keep log-probabilities, ``[rows, at most 1 + MAX_LOGPROBS]``, from row ``first`` on."""
        for (kept, _), found in zip(self._logprobs, (ids, values), strict=True):
            kept[first : first + found.shape[0], : found.shape[1]] = found

    def fetch(self, num_tokens: int, *, num_samples: int, num_asked: int = 0) -> FetchedResults:
        """Wait for the step.

        Args:
            num_tokens: Rows of hidden states.
            num_samples: Rows of logits.
            num_asked: Rows of log-probabilities.
        """
        self._host.copy_(self._device, non_blocking=True)
        if num_asked:
            for kept, host in self._logprobs:
                host[:num_asked].copy_(kept[:num_asked], non_blocking=True)
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        ids, bad, unusable = self._host_parts
        return FetchedResults(
            unusable[:num_tokens],
            ids[:num_samples].tolist(),
            bad[:num_samples].tolist(),
            *(host[:num_asked].tolist() for _, host in self._logprobs),
        )


def _both(count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory on the device, and as much on the host for copies of it."""
    on_device = torch.zeros(count, dtype=dtype, device=device)
    return on_device, torch.zeros(count, dtype=dtype, pin_memory=device.type == "cuda")
