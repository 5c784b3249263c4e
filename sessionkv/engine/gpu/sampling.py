"""Sampling that depends on more than logits and common parameters, without leaving the device.

Bias, penalties, end tokens that may not come yet, masks of grammars, log-probabilities. A step
samples all of its rows alike first, as if nobody had asked for any of this, and in its graph where
it has one. Then the rows of those who did are taken out of the logits, changed and sampled again by
themselves. So the others' arithmetic and tokens are what they would be without them, and nothing
but tokens and log-probabilities goes to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sessionkv.engine.gpu.buffers import StepBuffers
from sessionkv.engine.gpu.results import StepResults
from sessionkv.kernels.logit_changes import (
    add_at,
    count_tokens,
    mask_tokens,
    penalise,
    start_history,
)
from sessionkv.kernels.logprobs import log_probabilities
from sessionkv.kernels.sampling import SamplingRows, sample_tokens
from sessionkv.types import SamplingParams, SequenceStart

ROWS_AT_ONCE = 16
"""Bounds the scratch memory: log-probabilities take about 40 bytes for each logit of such rows."""


class _Extras:
    """What one sequence asks for, and has sampled so far."""

    __slots__ = ("history_row", "num_masked", "params", "stop_ids")

    def __init__(self, start: SequenceStart, history_row: int | None) -> None:
        self.params = start.sampling
        self.history_row = history_row
        num_outputs = len(start.token_ids) - start.num_prompt_tokens
        self.stop_ids: list[int] = []
        self.num_masked = 0  # outputs to come that must not be one of the stop ids
        # Where there is a grammar its masks say so.
        if not self.params.ignore_eos and self.params.grammar is None:
            self.stop_ids = sorted(start.stop_token_ids)
            self.num_masked = max(0, self.params.min_tokens - num_outputs)

    @property
    def are_none(self) -> bool:
        """Whether it samples like most."""
        params = self.params
        changes = params.logit_bias or self.num_masked or self.history_row is not None
        return not changes and params.logprobs is None and params.grammar is None


class _Key(NamedTuple):
    """What is done to one row stays the same while this does."""

    row: int
    extras: _Extras
    masks_stops: bool
    mask_row: int


@dataclass(frozen=True, slots=True)
class _Entries:
    """Single logits and what is added to them; see :func:`~..logit_changes.add_at`."""

    rows: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class _Penalties:
    """By row; see :func:`~..logit_changes.penalise`."""

    history_rows: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """Some of a step's rows with what happens to them, on the device.

    Attributes:
        rows: ``[n]`` int64: which of the step's rows of logits.
        bias, penalties, masked: What changes them, in this order; None where no row has any.
        mask_rows: ``[n]`` int32: which of the step's masks is theirs, -1 for none; None where no
            row has one.
        asked: Which of the step's rows want log-probabilities, int64; None where none does.
        num_asked: How many these are.
        num_likeliest: The most that one of them wants beside the sampled token.
    """

    rows: Tensor
    bias: _Entries | None
    penalties: _Penalties | None
    masked: _Entries | None
    mask_rows: Tensor | None
    asked: Tensor | None
    num_asked: int
    num_likeliest: int

    @property
    def changes_logits(self) -> bool:
        """Whether its rows are to be sampled again."""
        changes = (self.bias, self.penalties, self.masked, self.mask_rows)
        return any(change is not None for change in changes)


@dataclass(frozen=True, slots=True)
class ExtraRows:
    """What :meth:`ExtraSampling.prepare` found for one step.

    Attributes:
        parts: For :meth:`ExtraSampling.sample`.
        sequences: Those with any extras.
        num_likeliest: Of the rows that want log-probabilities, in the order in which these come,
            how many they want beside the sampled token's.
    """

    parts: Sequence[_Part]
    sequences: Sequence[_Extras]
    num_likeliest: dict[int, int]


class ExtraSampling:
    """Samples for sequences that ask for more than most do. The step loop's thread only."""

    def __init__(self, max_running: int, *, vocab_size: int, device: torch.device) -> None:
        """Allocate a history for each sequence that may run."""
        self._vocab_size, self._device = vocab_size, device
        self._histories = torch.zeros((max_running, vocab_size), dtype=torch.int32, device=device)
        self._free = list(range(max_running - 1, -1, -1))
        self._sequences: dict[int, _Extras] = {}
        self._parts: dict[tuple[_Key, ...], _Part] = {}
        self._num_words = -(-vocab_size // 32)
        self._masks = StepBuffers({"masks": ("int32", (max_running, self._num_words))}, device)

    def start(self, start: SequenceStart) -> None:
        """Note what a sequence asks for, which for most is nothing.

        Cost: where it has penalties, its tokens are copied to the device.
        """
        history_row = self._free.pop() if _has_penalties(start.sampling) else None
        extras = _Extras(start, history_row)
        if extras.are_none:
            return
        self._sequences[start.seq_id] = extras
        if history_row is not None:
            end = start.num_prompt_tokens
            prompt, outputs = start.token_ids[:end], start.token_ids[end:]
            start_history(self._histories, history_row, prompt=prompt, outputs=outputs)

    def end(self, seq_id: int) -> None:
        """Forget a sequence; most are not known."""
        extras = self._sequences.pop(seq_id, None)
        if extras is not None and extras.history_row is not None:
            self._free.append(extras.history_row)

    def prepare(
        self, seq_ids: Sequence[int], masks: Mapping[int, bytes] | None = None
    ) -> ExtraRows | None:
        """Find the rows with extras, before the step is launched: uploads wait for nothing then.

        Args:
            seq_ids: The sequences that sample, in the order of the step's rows of logits.
            masks: Of the step's plan. They are uploaded with every step.

        Returns:
            None where there are none. What is uploaded is kept for as long as it stays the same.
        """
        if not self._sequences:
            return None
        found = [
            (row, extras)
            for row, seq_id in enumerate(seq_ids)
            if (extras := self._sequences.get(seq_id)) is not None
        ]
        places = self._upload_masks([masks.get(seq_ids[row]) for row, _ in found]) if masks else {}
        parts = {}
        for first in range(0, len(found), ROWS_AT_ONCE):
            some = found[first : first + ROWS_AT_ONCE]
            mask_rows = [places.get(first + at, -1) for at in range(len(some))]
            key = tuple(
                _Key(row, extras, extras.num_masked > 0, mask_row)
                for (row, extras), mask_row in zip(some, mask_rows, strict=True)
            )
            parts[key] = self._parts.get(key) or self._upload(some, mask_rows)
        self._parts = parts
        wanted = {row: n for row, e in found if (n := e.params.logprobs) is not None}
        return ExtraRows([*parts.values()], [extras for _, extras in found], wanted)

    def sample(
        self, extra: ExtraRows, logits: Tensor, *, sampling: SamplingRows, results: StepResults
    ) -> None:
        """Sample the rows with extras again; launches only.

        Args:
            extra: What was prepared.
            logits: ``[rows, vocab_size]``, raw; not changed.
            sampling: The rows' common parameters.
            results: Holds all rows' tokens; gets theirs, and log-probabilities.
        """
        num_asked = 0
        for part in extra.parts:
            if part.changes_logits:
                self._resample(part, logits, sampling, results)
            if part.asked is not None:
                ids, values = log_probabilities(
                    logits[part.asked], results.token_ids[part.asked], part.num_likeliest
                )
                results.put_logprobs(num_asked, ids, values)
                num_asked += part.num_asked
        for extras in extra.sequences:
            extras.num_masked -= extras.num_masked > 0

    def _resample(
        self, part: _Part, logits: Tensor, sampling: SamplingRows, results: StepResults
    ) -> None:
        rows, penalties = part.rows, part.penalties
        changed = logits[rows].float()  # a copy
        _add(changed, part.bias)
        if penalties is not None:
            penalise(
                changed,
                self._histories,
                history_rows=penalties.history_rows,
                repetition=penalties.repetition,
                presence=penalties.presence,
                frequency=penalties.frequency,
            )
        _add(changed, part.masked)
        if part.mask_rows is not None:
            mask_tokens(changed, self._masks.device["masks"], mask_rows=part.mask_rows)
        theirs = SamplingRows(*(getattr(sampling, item.name)[rows] for item in fields(sampling)))
        # Whether a row is usable was said of its raw logits: all ids may be masked on purpose.
        token_ids, _ = sample_tokens(changed, theirs)
        results.token_ids[rows] = token_ids
        if penalties is not None:
            count_tokens(self._histories, history_rows=penalties.history_rows, token_ids=token_ids)

    # -- what is uploaded when the batch changes --------------------------------------------------

    def _upload_masks(self, masks: Sequence[bytes | None]) -> dict[int, int]:
        """Of rows with extras, in their order; where those that have one find it."""
        self._masks.turn()
        host, places = self._masks.host["masks"], dict[int, int]()
        for at, mask in enumerate(masks):
            if mask is not None:
                host[len(places)] = np.frombuffer(mask, np.int32)
                places[at] = len(places)
        self._masks.upload_start("masks", len(places) * self._num_words)
        return places

    def _upload(self, some: Sequence[tuple[int, _Extras]], mask_rows: Sequence[int]) -> _Part:
        """Lists of what is done to these rows; those of a part count from 0."""
        bias = [
            (row, token_id, value)
            for row, (_, extras) in enumerate(some)
            for token_id, value in extras.params.logit_bias.items()
        ]
        masked = [
            (row, token_id, float("-inf"))
            for row, (_, extras) in enumerate(some)
            if extras.num_masked
            for token_id in extras.stop_ids
        ]
        asked = {row: n for row, e in some if (n := e.params.logprobs) is not None}
        return _Part(
            rows=self._tensor([row for row, _ in some], torch.int64),
            bias=self._entries(bias),
            penalties=self._penalties([extras for _, extras in some]),
            masked=self._entries(masked),
            mask_rows=self._tensor(mask_rows, torch.int32) if max(mask_rows) >= 0 else None,
            asked=self._tensor(asked, torch.int64) if asked else None,
            num_asked=len(asked),
            num_likeliest=min(max(asked.values(), default=0), self._vocab_size),
        )

    def _entries(self, entries: Iterable[tuple[int, int, float]]) -> _Entries | None:
        known = [entry for entry in entries if entry[1] < self._vocab_size]
        if not known:
            return None
        rows, token_ids, values = zip(*known, strict=True)
        return _Entries(
            self._tensor(rows, torch.int32),
            self._tensor(token_ids, torch.int64),
            self._tensor(values, torch.float32),
        )

    def _penalties(self, some: Sequence[_Extras]) -> _Penalties | None:
        if all(extras.history_row is None for extras in some):
            return None
        params = [extras.params for extras in some]
        history_rows = [-1 if e.history_row is None else e.history_row for e in some]
        return _Penalties(
            self._tensor(history_rows, torch.int32),
            self._tensor([p.repetition_penalty for p in params], torch.float32),
            self._tensor([p.presence_penalty for p in params], torch.float32),
            self._tensor([p.frequency_penalty for p in params], torch.float32),
        )

    def _tensor(self, values: Iterable[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=self._device)


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _add(logits: Tensor, entries: _Entries | None) -> None:
    if entries is not None:
        add_at(logits, rows=entries.rows, token_ids=entries.token_ids, values=entries.values)
