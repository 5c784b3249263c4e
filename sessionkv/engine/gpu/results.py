"""What a step leaves on the device, and how it gets to the host.

Memory at fixed addresses, so that graphs of any size write into it. One copy brings what every step
has, others what it has besides; waiting for them is the only wait of a step. The next step may be
launched before that: its results follow on the device, and go to other memory of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sessionkv.engine.gpu.buffers import copy_words
from sessionkv.types.sampling import MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class FetchedResults:
    """A step's results on the host.

    Attributes:
        unusable: ``[rows]`` uint8: whether a row of hidden states is.
        token_ids: By row of logits: what was sampled.
        bad: By row of logits: whether it is unusable.
        logprob_ids, logprobs: By row that asked for log-probabilities, ``1 + MAX_LOGPROBS`` of
            them: of the token and the likeliest, as far as they were asked for.
        computed_s: Seconds between the step's begin and its end on the device; None on the CPU.
    """

    unusable: Tensor
    token_ids: list[int]
    bad: list[int]
    logprob_ids: list[list[int]]
    logprobs: list[list[float]]
    computed_s: float | None


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
        max_rows: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate for steps of at most so many sequences, and rows with their padding."""
        self.logits = torch.zeros((max_running, vocab_size), dtype=dtype, device=device)
        ends = 8 * max_running, 9 * max_running, 9 * max_running + max_rows
        whole_words = -(-ends[-1] // 4) * 4
        self._device = torch.zeros(whole_words, dtype=torch.uint8, device=device)
        self.token_ids, self._bad, self._unusable = _parts(self._device, ends)
        self._logprobs = [
            torch.zeros((max_running, 1 + MAX_LOGPROBS), dtype=dtype, device=device)
            for dtype in (torch.int64, torch.float32)
        ]
        self._hosts = [_HostResults(self._device, self._logprobs, ends) for _ in range(2)]

    def begin(self) -> None:
        """A step begins here: what is launched from now on until :meth:`send` is its own."""
        self._hosts[-1].begin()

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
        for kept, found in zip(self._logprobs, (ids, values), strict=True):
            kept[first : first + found.shape[0], : found.shape[1]] = found

    def send(
        self, num_rows: int, *, num_samples: int, num_asked: int = 0
    ) -> Callable[[], FetchedResults]:
        """Start copying what the steps launched so far leave; never waits.

        Args:
            num_rows: Rows of hidden states, with the padding between them.
            num_samples: Rows of logits.
            num_asked: Rows of log-probabilities.

        Returns:
            Waits for the copy; to be called before the next but one is started.
        """
        self._hosts.reverse()
        host = self._hosts[0]
        host.copy(self._device, self._logprobs, num_asked)
        return partial(host.fetch, num_rows, num_samples, num_asked)


class _HostResults:
    """Memory of the host for the results of one step in flight."""

    def __init__(self, device: Tensor, logprobs: Sequence[Tensor], ends: Sequence[int]) -> None:
        self._memory, *self._logprobs = (
            torch.zeros_like(part, device="cpu", pin_memory=device.is_cuda)
            for part in (device, *logprobs)
        )
        self._parts = _parts(self._memory, ends)
        self._span: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.is_cuda:
            self._span = _timed_event(), _timed_event()

    def begin(self) -> None:
        if self._span is not None:
            self._span[0].record()

    def copy(self, device: Tensor, logprobs: Sequence[Tensor], num_asked: int) -> None:
        copy_words(self._memory, device)
        if num_asked:
            for host, kept in zip(self._logprobs, logprobs, strict=True):
                copy_words(host[:num_asked], kept[:num_asked])
        if self._span is not None:
            self._span[1].record()

    def fetch(self, num_rows: int, num_samples: int, num_asked: int) -> FetchedResults:
        computed_s: float | None = None
        if self._span is not None:
            began, done = self._span
            done.synchronize()
            computed_s = began.elapsed_time(done) / 1000
        ids, bad, unusable = self._parts
        logprob_ids, logprobs = (host[:num_asked].tolist() for host in self._logprobs)
        return FetchedResults(
            unusable[:num_rows],
            ids[:num_samples].tolist(),
            bad[:num_samples].tolist(),
            logprob_ids,
            logprobs,
            computed_s,
        )


def _timed_event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def _parts(memory: Tensor, ends: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, bad rows of logits and unusable rows of hidden states in one buffer of bytes."""
    return memory[: ends[0]].view(torch.int64), memory[ends[0] : ends[1]], memory[ends[1] : ends[2]]
