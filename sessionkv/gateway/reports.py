"""The engine's reports as every API carries them: under ``sessionkv``, beside its own usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sessionkv.client import TurnResult
from sessionkv.types import CacheReport


def cache_map(report: CacheReport) -> dict[str, Any]:
    """A cache report in plain values, with the sum of what was cached."""
    values = asdict(report)
    values["cached_tokens"] = report.cached_tokens
    values["miss"]["reason"] = report.miss.reason.value
    values["miss_tokens"] = dict(report.miss_tokens)
    return values


def extension(
    results: Sequence[TurnResult], rewrites: Sequence[Mapping[str, str]] = ()
) -> dict[str, Any]:
    """The field ``sessionkv`` of an answer: the cache report, of each answer where there are more.

    Args:
        results: The answers, in order; at least one.
        rewrites: What the model was not given as the client sent it.
    """
    value: dict[str, Any] = {"cache": cache_map(results[0].cache)}
    if results[0].node is not None:
        value["node"] = results[0].node
    if rewrites:
        value["rewrites"] = list(rewrites)
    if len(results) > 1:
        value["choices"] = [cache_map(result.cache) for result in results]
    return value
