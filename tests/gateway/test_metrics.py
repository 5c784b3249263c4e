"""``/metrics``: the engine's figures under stable names; dashboards and alerts name only those."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.builders.engine import engine_config, socket_engine
from tests.builders.gateway import Gateway, gateway, http_engine
from tests.builders.tenants import KEYS, access

DOCS = Path(__file__).parents[2] / "docs"
BODY = {
    "model": "checksum",
    "messages": [{"role": "user", "content": "Hello there"}],
    "max_tokens": 4,
    "temperature": 0,
}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(served: Gateway, **headers: str) -> Samples:
    answer = served.http.get("/metrics", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def named(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


@pytest.fixture(scope="module")
def samples() -> Iterator[Samples]:
    """After one and the same request twice."""
    with http_engine(engine_config(blocks=256, host_blocks=64)) as engine:
        usages = [engine.post("/v1/chat/completions", BODY).json()["usage"] for _ in range(2)]
        found = scraped(engine)
        found["usage", ()] = usages[0]["prompt_tokens"]
        found["cached", ()] = usages[1]["prompt_tokens_details"]["cached_tokens"]
        yield found


def test_tokens_requests_and_hits_are_exact(samples: Samples) -> None:
    prompt, cached = samples["usage", ()], samples["cached", ()]
    assert cached > 0
    for prefix, labels in (
        ("sessionkv_", {}),
        ("vllm:", {"model_name": "checksum", "engine": "0"}),
    ):
        assert named(samples, f"{prefix}prompt_tokens_total", **labels) == 2 * prompt
        assert named(samples, f"{prefix}generation_tokens_total", **labels) == 8
    vllm = {"model_name": "checksum", "engine": "0"}
    assert named(samples, "vllm:prefix_cache_queries_total", **vllm) == 2 * prompt
    assert named(samples, "vllm:prefix_cache_hits_total", **vllm) == cached
    assert named(samples, "vllm:request_success_total", finished_reason="length", **vllm) == 2
    assert named(samples, "sessionkv_requests_finished_total", reason="length") == 2
    assert named(samples, "sessionkv_cached_tokens_total", tier="device") == cached
    assert named(samples, "sessionkv_requests_running") == 0


@pytest.mark.parametrize(
    "name", ["time_to_first_token", "e2e_request_latency", "request_queue_time"]
)
def test_histograms_have_real_buckets(samples: Samples, name: str) -> None:
    for prefix, labels in (
        ("sessionkv_", {}),
        ("vllm:", {"model_name": "checksum", "engine": "0"}),
    ):
        assert named(samples, f"{prefix}{name}_seconds_count", **labels) == 2
        buckets = {
            dict(key)["le"]: value
            for (found, key), value in samples.items()
            if found == f"{prefix}{name}_seconds_bucket"
        }
        assert len(buckets) > 20
        counts = [buckets[bound] for bound in sorted(buckets, key=float)]
        assert counts == sorted(counts)
        assert buckets["+Inf"] == 2
        total = named(samples, f"{prefix}{name}_seconds_sum", **labels)
        shortest = min(float(bound) for bound, count in buckets.items() if count == 2)
        assert 0 <= total <= 2 * shortest


def test_a_tenant_scrapes_its_own_and_an_operator_all(tmp_path: Path) -> None:
    config = engine_config(blocks=256)
    keys = access(alice={"device_bytes": 4096}).with_service("own")
    with (
        socket_engine(tmp_path, config, access=keys) as engine,
        gateway(engine.endpoint, key="own") as served,
    ):
        auth = {"Authorization": f"Bearer {KEYS['alice']}"}
        assert served.post("/v1/chat/completions", BODY, headers=auth).status_code == 200
        hers = scraped(served, **auth)
        his = scraped(served, **{"x-api-key": KEYS["bob"]})
        all_of_it = scraped(served, **{"x-api-key": KEYS["root"]})
    assert named(hers, "sessionkv_requests_finished_total", reason="length") == 1
    assert named(his, "sessionkv_requests_finished_total", reason="length") == 0
    assert named(his, "sessionkv_prompt_tokens_total") == 0
    for one in (hers, his):
        assert not any(name.startswith(("sessionkv_kv_", "sessionkv_tenant")) for name, _ in one)
    assert named(all_of_it, "sessionkv_tenant_prompt_tokens_total", tenant="alice") > 0
    assert named(all_of_it, "sessionkv_tenant_prompt_tokens_total", tenant="bob") == 0
    quota = named(all_of_it, "sessionkv_tenant_quota_bytes", tenant="alice", tier="device")
    assert 0 < quota <= 4096
    tenants = {dict(labels).get("tenant") for _, labels in all_of_it}
    assert tenants == {None, "alice", "bob", "root"}


def test_dashboard_and_alerts_name_series_that_exist(samples: Samples) -> None:
    there = {name for name, _ in samples} | {
        "sessionkv_tenant_quota_bytes",
        "sessionkv_tenant_retained_bytes",
        "sessionkv_tenant_generation_tokens_total",
    }
    board = json.loads((DOCS / "grafana.json").read_text())
    expressions = [
        target["expr"] for panel in board["panels"] for target in panel.get("targets", [])
    ]
    alerts = re.findall(r"^ +expr: (.+)$", (DOCS / "alerts.yml").read_text(), re.MULTILINE)
    assert len(expressions) > 10
    assert len(alerts) > 5
    for expression in (*expressions, *alerts):
        used = re.findall(r"\b(?:sessionkv_|vllm:)[a-z0-9_:]+", expression)
        assert used, expression
        assert set(used) <= there, expression
