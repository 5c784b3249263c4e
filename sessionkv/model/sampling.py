"""Choosing the next token from one row of logits.

Pure arithmetic on one row and that request's own state. The random number of output i is a
function of seed and i alone, so neither batch mates nor a preemption can change a draw, and a
request that is resumed continues exactly. Greedy ties go to the lowest id.

Order: logit bias, penalties, ``min_tokens`` or a mask of tokens, temperature, top-k, top-p, min-p,
draw.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import Tensor

from sessionkv.kernels.philox import RANDOM_BITS, random_bits
from sessionkv.types import SampledToken, SamplingParams, TokenLogprob

_FIRST_LOOK = 256  # of a large vocabulary, the nucleus is nearly always among so many


class SamplerState:
    """What sampling has to remember of one request.

    Attributes:
        params: Validated parameters; ``seed`` is set unless the temperature is 0.
        num_outputs: Tokens sampled so far, those before a resumption included.
    """

    __slots__ = ("_bias", "_counts", "_seen", "_stop_ids", "num_outputs", "params")

    def __init__(
        self,
        params: SamplingParams,
        *,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        stop_token_ids: Set[int],
        vocab_size: int,
    ) -> None:
        """Take in what is known at the start, prompt and earlier output alike.

        Cost: O(tokens) where there are penalties, else O(1).
        """
        self.params = params
        self.num_outputs = len(token_ids) - num_prompt_tokens
        self._bias = _as_bias(params, vocab_size)
        self._seen = self._counts = self._stop_ids = None
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[torch.tensor(token_ids, dtype=torch.int64)] = True
        if params.presence_penalty or params.frequency_penalty:
            outputs = torch.tensor(token_ids[num_prompt_tokens:], dtype=torch.int64)
            self._counts = torch.bincount(outputs, minlength=vocab_size).to(torch.float32)
        if params.min_tokens and not params.ignore_eos:
            stops = sorted(i for i in stop_token_ids if i < vocab_size)
            self._stop_ids = torch.tensor(stops, dtype=torch.int64)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is simply the row's largest logit."""
        changed = (self._bias, self._seen, self._counts)
        return (
            self.params.temperature == 0
            and self.params.logprobs is None
            and all(part is None for part in changed)
            and not self._stops_are_masked
        )

    @property
    def _stops_are_masked(self) -> bool:
        return self._stop_ids is not None and self.num_outputs < self.params.min_tokens

    def append(self, token_id: int) -> None:
        """Remember a sampled token."""
        self.num_outputs += 1
        if self._seen is not None:
            self._seen[token_id] = True
        if self._counts is not None:
            self._counts[token_id] += 1

    def process(self, logits: Tensor, mask: bytes | None = None) -> Tensor:
        """Bias, penalties and ``min_tokens`` applied to a copy of ``logits`` (``[vocab_size]``).

        Where there is a ``mask`` (see :class:`~sessionkv.types.StepPlan`) it alone says which
        tokens are left.
        """
        row = logits.clone()
        params = self.params
        if self._bias is not None:
            ids, values = self._bias
            row[ids] += values
        if self._seen is not None:
            penalty = params.repetition_penalty
            row = torch.where(self._seen, torch.where(row > 0, row / penalty, row * penalty), row)
        if self._counts is not None:
            row -= params.frequency_penalty * self._counts
            row -= params.presence_penalty * (self._counts > 0)
        if mask is not None:
            row[~unpack_mask(mask, row.shape[0])] = float("-inf")
        elif self._stops_are_masked:
            row[self._stop_ids] = float("-inf")
        return row


def unpack_mask(mask: bytes, vocab_size: int) -> Tensor:
    """``[vocab_size]`` bool of packed bits: token ``i`` is bit ``i % 8`` of byte ``i // 8``."""
    packed = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten()[:vocab_size].bool()


def sample(logits: Tensor, state: SamplerState, mask: bytes | None = None) -> SampledToken:
    """Choose the next token; the caller appends it to the state.

    Args:
        logits: ``[vocab_size]`` fp32, its largest value finite; not changed.
        state: The request's own.
        mask: The only tokens that may be chosen, where not all may.
    """
    params = state.params
    row = state.process(logits, mask)
    if params.temperature == 0:
        token_id = int(row.max(0).indices)
    else:
        token_id = draw(row, params, uniform(params.seed or 0, state.num_outputs))
    if params.logprobs is None:
        return SampledToken(token_id)
    return SampledToken(token_id, log_probabilities(logits, token_id, params.logprobs))


def uniform(seed: int, index: int) -> float:
    """A number from 0 (inclusive) to 1 (exclusive) with 53 random bits, a pure function."""
    return random_bits(seed, index) * 2.0**-RANDOM_BITS


def draw(logits: Tensor, params: SamplingParams, number: float) -> int:
    """Draw from the filtered distribution by inverting its cumulative sum, by id, in float64.

    Args:
        logits: ``[vocab_size]``, processed.
        params: Temperature above 0, top-k, top-p and min-p.
        number: Uniform in [0, 1).
    """
    scaled = logits.double() / params.temperature
    if params.top_k or params.top_p < 1.0:
        likeliest, falling = _likeliest(scaled, params)
        ids, order = likeliest.sort()
        weights = falling[order]
    else:
        ids, weights = None, torch.exp(scaled - scaled.max())
    if params.min_p:
        weights = torch.where(weights >= params.min_p, weights, 0.0)  # the largest weight is 1
    cumulative = weights.cumsum(0)
    at = int(torch.searchsorted(cumulative, number * cumulative[-1], right=True))
    if at == len(weights):  # the product was rounded up to the sum
        at = int(weights.nonzero()[-1])
    return at if ids is None else int(ids[at])


def log_probabilities(logits: Tensor, token_id: int, count: int) -> tuple[TokenLogprob, ...]:
    """Of the token, then of the ``count`` likeliest, best first; from raw logits."""
    values = torch.log_softmax(logits.double(), 0)
    chosen = [token_id, *_top_ids(logits, count).tolist()] if count else [token_id]
    return tuple(TokenLogprob(i, float(values[i])) for i in chosen)


def _likeliest(scaled: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Ids and weights that top-k, then top-p leave, by falling weight (the largest is 1)."""
    vocab_size = scaled.shape[0]
    top = scaled.max()
    if params.top_k:
        ids = _top_ids(scaled, min(params.top_k, vocab_size))
        weights = torch.exp(scaled[ids] - top)
        wanted = params.top_p * weights.sum()
    else:
        wanted = params.top_p * torch.exp(scaled - top).sum()
        ids = _top_ids(scaled, min(_FIRST_LOOK, vocab_size))
        weights = torch.exp(scaled[ids] - top)
        if weights.sum() < wanted:
            ids = _top_ids(scaled, vocab_size)
            weights = torch.exp(scaled[ids] - top)
    if params.top_p < 1.0:
        before = weights.cumsum(0) - weights
        kept = max(1, int((before < wanted).sum()))
        ids, weights = ids[:kept], weights[:kept]
    return ids, weights


def _top_ids(values: Tensor, count: int) -> Tensor:
    """Ids of the ``count`` largest values, falling; equal values by rising id."""
    if count < values.shape[0]:
        ids = (values >= values.topk(count).values[-1]).nonzero().squeeze(1)
    else:
        ids = torch.arange(values.shape[0])
    return ids[values[ids].sort(descending=True, stable=True).indices[:count]]


def _as_bias(params: SamplingParams, vocab_size: int) -> tuple[Tensor, Tensor] | None:
    known = {i: bias for i, bias in params.logit_bias.items() if i < vocab_size}
    if not known:
        return None
    return torch.tensor(list(known), dtype=torch.int64), torch.tensor(list(known.values()))
