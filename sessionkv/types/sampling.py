"""How the next token is chosen and when a turn stops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sessionkv.errors import InvalidRequest
from sessionkv.types.grammars import Grammar, check_grammar
from sessionkv.types.utf8 import utf8_bytes
from sessionkv.types.words import number

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 2**18
"""Of a whole prompt: some 4 MB on the wire, 7 in the journal, 30 in memory."""
MAX_LOGIT_BIAS = 1024
_U64 = 2**64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one turn; validated when made.

    Attributes:
        temperature: 0 is greedy (ties go to the lowest id).
        top_k: Keep the k likeliest tokens; 0 is off.
        top_p: Keep the smallest set of likeliest tokens with at least this probability.
        min_p: Drop tokens below this fraction of the likeliest one's probability.
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen in
            prompt or output.
        presence_penalty: Subtracted once from logits of tokens seen in the output.
        frequency_penalty: Subtracted once per occurrence in the output.
        seed: Same seed and same logits give the same tokens; None draws one.
        logit_bias: token id -> added to its logit.
        stop: Strings that end the turn; they are not part of the text.
        stop_token_ids: Ids that end the turn, besides the model's own.
        max_tokens: Most tokens to sample; None is what fits the window.
        fit_window: ``max_tokens`` is a ceiling: where less than that fits, the turn has what fits,
            and is not refused.
        min_tokens: Stops (ids and strings) count only from this many tokens on.
        ignore_eos: The model's own end tokens do not end the turn.
        logprobs: None is off; n gives the sampled token's and the n best log-probabilities.
        grammar: What the reply has to be (:mod:`sessionkv.types.grammars`). Before everything else
            it decides which tokens may come; end tokens come where the reply may end, also before
            ``min_tokens`` where nothing else may come.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: Grammar | None = None
    fit_window: bool = False

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: Naming the field, its value and what is allowed.
        """
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple):
                raise InvalidRequest(f"sampling.{name}", value, "a list")
            object.__setattr__(self, name, tuple(value))
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _integer("seed", self.seed, 0, _U64 - 1, optional=True)
        _integer("max_tokens", self.max_tokens, 1, 2**31 - 1, optional=True)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        for name in ("ignore_eos", "fit_window"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"sampling.{name}", getattr(self, name), "true or false")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                "sampling.min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})"
            )
        self._check_stops()
        self._check_logit_bias()
        if self.grammar is not None:
            object.__setattr__(self, "grammar", check_grammar(self.grammar))
            if self.ignore_eos:
                raise InvalidRequest("sampling.ignore_eos", True, "false where there is a grammar")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("sampling.stop", len(self.stop), f"at most {MAX_STOP_STRINGS}")
        for i, text in enumerate(self.stop):
            name = f"sampling.stop[{i}]"
            if not isinstance(text, str) or not text:
                raise InvalidRequest(name, text, "a string that is not empty")
            size = utf8_bytes(name, text)
            if size > MAX_STOP_STRING_BYTES:
                raise InvalidRequest(name, f"{size} bytes", f"at most {MAX_STOP_STRING_BYTES}")
        for i, token_id in enumerate(self.stop_token_ids):
            _integer(f"stop_token_ids[{i}]", token_id, 0, 2**31 - 1)

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest("sampling.logit_bias", self.logit_bias, "a map of id to number")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                "sampling.logit_bias", len(self.logit_bias), f"at most {MAX_LOGIT_BIAS} entries"
            )
        for token_id, bias in self.logit_bias.items():
            _integer("logit_bias key", token_id, 0, 2**31 - 1)
            _number(f"logit_bias[{token_id}]", bias, -1e6, 1e6)


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    is_number = False
    if isinstance(value, int | float) and not isinstance(value, bool):
        if low <= value <= high and not (above and value == low):  # false for what is not finite
            return
        is_number = isinstance(value, int) or math.isfinite(value)
    allowed = f"{'above' if above else 'from'} {number(low)} to {number(high)}"
    raise InvalidRequest(f"sampling.{name}", value, allowed if is_number else f"a number {allowed}")


def _integer(name: str, value: object, low: int, high: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"sampling.{name}", value, f"an integer from {low} to {high}")
