"""Usage and cache reports as the plain maps that ``done`` and session infos carry.

Unknown fields are ignored and absent ones are zero, so that reports may grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from sessionkv.types import CacheReport, MissReason, MissReport, Usage

_CACHE_FIELDS = tuple(item.name for item in fields(CacheReport) if item.name != "miss")
_REQUIRED = ("prompt_tokens", "device_tokens", "host_tokens", "disk_tokens", "computed_tokens")
_MISS_REASONS = {reason.value: reason for reason in MissReason}
_MISS_FIELDS = tuple(item.name for item in fields(MissReport) if item.name != "reason")


def usage_to_map(usage: Usage) -> dict[str, Any]:
    """For the wire."""
    return asdict(usage)


def usage_from_map(values: Mapping[str, Any]) -> Usage:
    """From the wire."""
    return Usage(
        prompt_tokens=values.get("prompt_tokens", 0),
        completion_tokens=values.get("completion_tokens", 0),
    )


def cache_to_map(report: CacheReport) -> dict[str, Any]:
    """For the wire; the miss reason by its name."""
    values = {name: getattr(report, name) for name in _CACHE_FIELDS}
    values["miss_tokens"] = dict(report.miss_tokens)
    values["miss"] = {
        "reason": report.miss.reason.value,
        **{name: getattr(report.miss, name) for name in _MISS_FIELDS},
    }
    return values


def cache_from_map(values: Mapping[str, Any]) -> CacheReport:
    """From the wire; a miss reason that this version does not know reads as ``not_matched``."""
    known: dict[str, Any] = dict.fromkeys(_REQUIRED, 0)
    known.update({name: values[name] for name in _CACHE_FIELDS if name in values})
    return CacheReport(**known, miss=_miss_from_map(values.get("miss") or {}))


def _miss_from_map(values: Mapping[str, Any]) -> MissReport:
    reason = values.get("reason", MissReason.NONE.value)
    return MissReport(
        _MISS_REASONS.get(reason, MissReason.NOT_MATCHED),
        **{name: values[name] for name in _MISS_FIELDS if name in values},
    )
