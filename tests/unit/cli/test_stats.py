from typing import Any

import pytest

from sessionkv.cli import stats


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("used_bytes", 1536, "1.5 KiB"),
        ("hit_rate", 0.5, "50.0%"),
        ("mean_ms", 12.345, "12.35 ms"),
        ("busy_s", 3, "3 s"),
        ("prefill_tokens_per_s", 151.99, "151.99"),
        ("steps", 1000, "1,000"),
        ("enabled", True, "True"),
        ("reason", "", "-"),
        ("reason", None, "-"),
        ("advice", [], "-"),
        ("advice", ["a", "b"], "a; b"),
    ],
)
def test_units_follow_the_name(name: str, value: Any, shown: str) -> None:
    assert stats._shown(name, value) == shown


def test_groups_are_plain_values_first_and_none_is_empty() -> None:
    values = {"kv": {"host": {"used_bytes": 0}}, "steps": 2, "requests_failed": {}}
    assert stats._groups(values) == [
        ("engine", {"steps": "2"}),
        ("kv", {"host.used_bytes": "0 B"}),
    ]
