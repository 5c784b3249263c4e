"""From a request's parameters to the engine's, under the names that the client used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sessionkv.errors import InvalidRequest
from sessionkv.gateway.openai.schema import Sampling
from sessionkv.types import SamplingParams
from sessionkv.types.grammars import Grammar

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
)
PRIORITY = {"flex": -10, "priority": 10}
"""Of the engine's -100 to 100, by service tier."""


def sampling_of(
    body: Sampling,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    grammar: Grammar | None = None,
    fit_window: bool = False,
) -> list[SamplingParams]:
    """One for each answer that is asked for.

    Args:
        body: The request.
        max_tokens: Most tokens; the two APIs name it differently.
        logprobs: How many likeliest tokens to tell of; None is off.
        grammar: What each answer has to be.
        fit_window: An answer for which the window has less room ends there; else it is refused.

    Raises:
        InvalidRequest: Naming the parameter.
    """
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    given |= {"max_tokens": max_tokens, "logprobs": logprobs, "logit_bias": _bias(body.logit_bias)}
    given |= {"grammar": grammar, "fit_window": fit_window}
    if body.stop:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    first = SamplingParams(**{name: value for name, value in given.items() if value is not None})
    if first.seed is None:
        return [first] * (body.n or 1)
    return [replace(first, seed=(first.seed + i) % 2**64) for i in range(body.n or 1)]


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    try:
        return {int(token_id): bias for token_id, bias in given.items()}
    except ValueError:
        raise InvalidRequest("logit_bias", given, "a map of token ids to numbers") from None


def priority_of(body: Sampling) -> int:
    """The engine's priority of a service tier."""
    return PRIORITY.get(body.service_tier or "", 0)


def tier_of(body: Sampling) -> str:
    """The service tier that a request was given."""
    return body.service_tier if body.service_tier in PRIORITY else "default"
