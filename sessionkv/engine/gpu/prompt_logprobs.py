"""Log-probabilities of prompts' tokens, which few ask for: of every row of a step, not of the last.

Such a step computes all rows of the last layer, and their logits a few rows at a time: all of them
would be gigabytes. Nobody else's step is any different for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sessionkv.kernels.logprobs import log_probabilities
from sessionkv.model.gpu_decoder import GpuDecoder
from sessionkv.types import SequenceStart, SequenceStep
from sessionkv.types.plan import PromptLogprobs

ROWS_AT_ONCE = 16
"""As in sampling: about 40 bytes for each logit of such rows."""


class PromptScorer:
    """The step loop's thread only."""

    def __init__(self, decoder: GpuDecoder, device: torch.device) -> None:
        """Nobody has asked yet."""
        self._decoder, self._device = decoder, device
        self._starts: dict[int, SequenceStart] = {}

    def start(self, start: SequenceStart) -> None:
        """Note a sequence, if it asks for any."""
        if start.prompt_logprobs is not None:
            self._starts[start.seq_id] = start

    def end(self, seq_id: int) -> None:
        """Forget a sequence; most are not known."""
        self._starts.pop(seq_id, None)

    def predicted(self, steps: Iterable[SequenceStep]) -> dict[int, Sequence[int]]:
        """The tokens that the first rows of steps predict, by seq_id, where they are wanted."""
        if not self._starts:
            return {}
        found = {
            step.seq_id: self._starts[step.seq_id].predicted(step)
            for step in steps
            if step.seq_id in self._starts
        }
        return {seq_id: token_ids for seq_id, token_ids in found.items() if token_ids}

    def launch(
        self, hidden: Tensor, predicted: Mapping[int, Sequence[int]], first_rows: Mapping[int, int]
    ) -> Callable[[], dict[int, list[PromptLogprobs]]]:
        """Start computing them.

        Args:
            hidden: ``[rows, hidden]``, normalised; all rows of a step.
            predicted: From :meth:`predicted`.
            first_rows: Where each sequence's rows begin.

        Returns:
            Waits for them.
        """
        parts = {
            seq_id: [
                self._score(seq_id, hidden[row + at :], token_ids[at : at + ROWS_AT_ONCE])
                for at in range(0, len(token_ids), ROWS_AT_ONCE)
            ]
            for seq_id, token_ids in predicted.items()
            for row in (first_rows[seq_id],)
        }
        return lambda: {seq_id: _entries(some) for seq_id, some in parts.items()}

    def _score(
        self, seq_id: int, hidden: Tensor, token_ids: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        count = min(self._starts[seq_id].prompt_logprobs or 0, self._decoder.spec.vocab_size)
        rows = hidden[: len(token_ids)]
        out = rows.new_empty((len(token_ids), self._decoder.spec.vocab_size))
        logits = self._decoder.logits(rows, out=out)
        chosen = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        return log_probabilities(logits, chosen, count)


def _entries(parts: Iterable[tuple[Tensor, Tensor]]) -> list[PromptLogprobs]:
    found: list[PromptLogprobs] = []
    for ids, values in parts:
        found += map(list, map(zip, ids.tolist(), values.tolist()))
    return found
