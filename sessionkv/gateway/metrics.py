"""``/metrics``: what the engine counts, as Prometheus text.

Each scrape asks the engine once and keeps nothing. Every series has a name of its own,
``sessionkv_*``; what vLLM has too is there under vLLM's name as well (``vllm:*``, counted in tokens
where vLLM does), so that its dashboards go on working. An operator's key sees the whole engine and
each tenant, any other its own tenant's series alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from sessionkv.gateway.services import Services
from sessionkv.types import FinishReason, MissReason, Tier

Values = Mapping[str, Any]

_COUNTERS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "prompt_tokens": (("prompt_tokens",), "Tokens of prompts of committed turns"),
    "generation_tokens": (("generation_tokens",), "Tokens sampled"),
    "computed_prompt_tokens": (("computed_prompt_tokens",), "Prompt tokens computed, repeats too"),
    "recomputed_tokens": (("recomputed_tokens",), "Tokens computed again after preemptions"),
    "steps": (("steps",), "Steps of the model"),
    "preemptions": (("preemptions",), "Sequences that had to give up their blocks"),
    "book_errors": (("book_errors",), "Times that the cache's books did not balance"),
    "prefix_cache_queries_tokens": (("prefix_cache", "queries_tokens"), "Prompt tokens looked up"),
    "prefix_cache_hits_tokens": (("prefix_cache", "hits_tokens"), "Prompt tokens found"),
    "corrupt_blocks": (("ledger", "corrupt_blocks"), "Blocks whose bytes were damaged"),
    "lost_blocks": (("ledger", "lost_blocks"), "Blocks that left every tier"),
    "journal_compactions": (("store", "compactions"), "Times that the journal was compacted"),
}
_GAUGES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "requests_running": (("requests_running",), "Turns that hold blocks"),
    "requests_waiting": (("requests_waiting",), "Turns that wait"),
    "draining": (("draining",), "Whether the engine takes no more turns"),
    "sessions": (("sessions",), "Named sessions, on disk too"),
    "loaded_sessions": (("store", "loaded_sessions"), "Sessions in memory"),
    "retained_blocks": (("retention", "retained_blocks"), "Blocks that sessions in memory want"),
    "journal_bytes": (("store", "journal_bytes"), "Bytes of the journal on disk"),
    "damaged_records": (("store", "damaged_records"), "Records of the journal that are damaged"),
    "weights_bytes": (("weights_bytes",), "Bytes of the model's weights"),
}
_OF_TIERS: Mapping[str, tuple[str, bool, str]] = {
    "kv_used_bytes": ("used_bytes", False, "Bytes of blocks that hold something"),
    "kv_capacity_bytes": ("cap_bytes", False, "Bytes that the tier may hold"),
    "kv_usage_ratio": ("usage_rate", False, "Used part of the tier"),
    "kv_leased_blocks": ("leased_blocks", False, "Blocks that turns or copies hold"),
    "kv_wasted_bytes": ("wasted_bytes", False, "Used bytes that hold no token"),
    "kv_clean_blocks": ("clean_blocks", False, "Blocks that a lower tier has too"),
    "kv_dirty_blocks": ("dirty_blocks", False, "Blocks that no lower tier has"),
    "kv_evictions": ("evictions", True, "Blocks dropped to make room"),
    "kv_evictions_waited": ("evictions_waited", True, "Those of them that somebody waited for"),
}
_LATENCIES: Mapping[str, tuple[str, str | None, str]] = {
    "ttft": ("time_to_first_token", "time_to_first_token", "From arrival to the first token"),
    "inter_token": ("inter_token_latency", "inter_token_latency", "Between two tokens of a turn"),
    "e2e": ("e2e_request_latency", "e2e_request_latency", "From arrival to the commit"),
    "queue": ("request_queue_time", "request_queue_time", "From arrival to the first step"),
    "prefill": ("request_prefill_time", "request_prefill_time", "Of a turn's prompt"),
    "decode": ("request_decode_time", "request_decode_time", "From the first token to the last"),
    "fetch": ("request_fetch_time", None, "Of loading from lower tiers"),
    "step": ("step_time", None, "Of one step"),
}
_MOVES: Mapping[str, tuple[str, str]] = {
    "moved_bytes": ("moved_bytes", "Bytes moved between tiers"),
    "moved_blocks": ("blocks", "Blocks moved between tiers"),
    "failed_moves": ("failed_blocks", "Blocks that could not be moved"),
}


def router(services: Services) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["metrics"])

    @routes.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        stats = await (await services.client(request)).stats()
        return Response(
            exposition(stats, (await services.model()).id), media_type=CONTENT_TYPE_LATEST
        )

    return routes


def exposition(stats: Values, model: str) -> bytes:
    """The text of all series."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot([*_own(stats), *_vllm(stats, model)]))
    return generate_latest(registry)


class _Snapshot(Collector):
    """Metrics that were made for one scrape."""

    def __init__(self, found: Sequence[Metric]) -> None:
        self._found = found

    def collect(self) -> Sequence[Metric]:
        return self._found


def _own(stats: Values) -> Iterator[Metric]:
    for name, (path, text) in _COUNTERS.items():
        if (value := _at(stats, path)) is not None:
            yield CounterMetricFamily(f"sessionkv_{name}", text, value=value)
    for name, (path, text) in _GAUGES.items():
        if (value := _at(stats, path)) is not None:
            yield GaugeMetricFamily(f"sessionkv_{name}", text, value=value)
    reasons = [reason.value for reason in FinishReason]
    misses = [reason.value for reason in MissReason]
    yield _counts(stats, "requests_finished", "Committed turns", ("reason", reasons))
    yield _counts(
        stats, "requests_failed", "Turns that were not committed", ("code", ["turn_failed"])
    )
    yield _counts(stats, "miss_tokens", "History tokens computed again", ("reason", misses))
    yield _counts(stats, "miss_turns", "Turns by their first miss", ("reason", misses))
    for name, (key, _, text) in _LATENCIES.items():
        latency = stats.get("latency", {}).get(name)
        if latency is not None:
            yield _histogram(f"sessionkv_{key}_seconds", text, latency)
    yield from _tiers(stats)
    yield from _moves(stats)
    yield from _tenants(stats.get("tenants", {}))


def _vllm(stats: Values, model: str) -> Iterator[Metric]:
    """Under vLLM's names and labels, what it has too."""
    labels = {"model_name": model, "engine": "0"}

    def one(kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, path: str) -> Metric:
        family = kind(f"vllm:{name}", f"As vLLM's {name}", labels=[*labels])
        family.add_metric([*labels.values()], _at(stats, path.split("/")) or 0)
        return family

    yield one(GaugeMetricFamily, "num_requests_running", "requests_running")
    yield one(GaugeMetricFamily, "num_requests_waiting", "requests_waiting")
    if "kv" in stats:
        yield one(GaugeMetricFamily, "kv_cache_usage_perc", "kv/device/usage_rate")
        yield one(CounterMetricFamily, "num_preemptions", "preemptions")
    yield one(CounterMetricFamily, "prefix_cache_queries", "prefix_cache/queries_tokens")
    yield one(CounterMetricFamily, "prefix_cache_hits", "prefix_cache/hits_tokens")
    yield one(CounterMetricFamily, "prompt_tokens", "prompt_tokens")
    yield one(CounterMetricFamily, "generation_tokens", "generation_tokens")
    success = CounterMetricFamily(
        "vllm:request_success", "As vLLM's request_success", labels=[*labels, "finished_reason"]
    )
    finished = stats.get("requests_finished", {})
    for reason in FinishReason:
        name = "abort" if reason is FinishReason.CANCELLED else reason.value
        success.add_metric([*labels.values(), name], finished.get(reason.value, 0))
    yield success
    for key, (_, name, _) in _LATENCIES.items():
        latency = stats.get("latency", {}).get(key)
        if name is not None and latency is not None:
            yield _histogram(f"vllm:{name}_seconds", f"As vLLM's {name}", latency, labels)


def _at(stats: Values, path: Sequence[str]) -> float | None:
    value: Any = stats
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return float(value)


def _counts(stats: Values, name: str, text: str, by: tuple[str, Sequence[str]]) -> Metric:
    """Counters by label; those that are known are there from the start, as 0."""
    label, known = by
    family = CounterMetricFamily(f"sessionkv_{name}", text, labels=[label])
    found = dict.fromkeys(known, 0) | dict(stats.get(name, {}))
    for key, value in found.items():
        family.add_metric([key], value)
    return family


def _histogram(
    name: str, text: str, latency: Values, labels: Mapping[str, str] | None = None
) -> Metric:
    labels = labels or {}
    family = HistogramMetricFamily(name, text, labels=[*labels])
    buckets = [(repr(float(bound)), float(count)) for bound, count in latency["buckets"]]
    family.add_metric(
        [*labels.values()], [*buckets, ("+Inf", float(latency["count"]))], latency["sum_s"]
    )
    return family


def _family(name: str, text: str, labels: Sequence[str], *, counts: bool) -> Any:
    kind = CounterMetricFamily if counts else GaugeMetricFamily
    return kind(f"sessionkv_{name}", text, labels=labels)


def _tiers(stats: Values) -> Iterator[Metric]:
    if "kv" not in stats:
        return
    for name, (key, counts, text) in _OF_TIERS.items():
        family = _family(name, text, ["tier"], counts=counts)
        for tier in Tier:
            family.add_metric([tier.value], stats["kv"][tier.value][key])
        yield family
    cached = _family("cached_tokens", "Prompt tokens found", ["tier"], counts=True)
    wanted = _family(
        "larger_cache_wanted_blocks",
        "Blocks looked for that had left the tier lately: a larger one would have had them",
        ["tier"],
        counts=True,
    )
    pinned = _family("pinned_bytes", "Bytes that pins promise", ["tier"], counts=False)
    for tier in Tier:
        cached.add_metric([tier.value], stats["prefix_cache"][f"{tier.value}_tokens"])
        wanted.add_metric([tier.value], stats["larger_cache"][tier.value]["wanted_blocks"])
        pinned.add_metric([tier.value], stats["retention"]["pinned_bytes"][tier.value])
    yield from (cached, wanted, pinned)
    store = stats["store"]
    off = _family("disk_off", "The disk tier was asked for and is off", [], counts=False)
    off.add_metric([], float(bool(store["disk_off"])))
    late = _family("unanswered_tiers", "Kinds of transfers that get no answer", [], counts=False)
    late.add_metric([], len(store["unanswered"]))
    aside = _family("set_aside_journals", "Damaged journals that were set aside", [], counts=False)
    aside.add_metric([], len(store["set_aside_journals"]))
    yield from (off, late, aside)


def _moves(stats: Values) -> Iterator[Metric]:
    if "transfers" not in stats:
        return
    pairs = [(a.value, b.value) for a in Tier for b in Tier if a is not b]
    for name, (key, text) in _MOVES.items():
        family = _family(name, text, ["source", "target"], counts=True)
        for source, target in pairs:
            moves = stats["transfers"].get(f"{source}_to_{target}", {})
            family.add_metric([source, target], moves.get(key, 0))
        yield family


def _tenants(tenants: Mapping[str, Values]) -> Iterator[Metric]:
    if not tenants:
        return
    running = _family("tenant_requests_running", "Turns that hold blocks", ["tenant"], counts=False)
    waiting = _family("tenant_requests_waiting", "Turns that wait", ["tenant"], counts=False)
    prompts = _family("tenant_prompt_tokens", "Tokens of prompts", ["tenant"], counts=True)
    sampled = _family("tenant_generation_tokens", "Tokens sampled", ["tenant"], counts=True)
    hits = _family(
        "tenant_prefix_cache_hits_tokens", "Prompt tokens found", ["tenant"], counts=True
    )
    bytes_of = {
        key: _family(f"tenant_{key}", text, ["tenant", "tier"], counts=False)
        for key, text in {
            "quota_bytes": "KV that the tenant may keep before others",
            "retained_bytes": "KV of its sessions within the quota",
            "past_bytes": "KV of its sessions past the quota, which leaves first",
        }.items()
    }
    for tenant, values in tenants.items():
        running.add_metric([tenant], values["requests_running"])
        waiting.add_metric([tenant], values["requests_waiting"])
        prompts.add_metric([tenant], values["prompt_tokens"])
        sampled.add_metric([tenant], values["generation_tokens"])
        hits.add_metric([tenant], values["prefix_cache"]["hits_tokens"])
        for tier, quota in values["quota"].items():
            for key, family in bytes_of.items():
                family.add_metric([tenant, tier], quota[key])
    yield from (running, waiting, prompts, sampled, hits, *bytes_of.values())
