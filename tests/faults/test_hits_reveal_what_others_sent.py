"""Nothing that a tenant is told depends on what another one has sent.

Each probe is answered twice: by an engine where the victim has used what is probed for, and by one
where it has not. Every answer must be the same in both. The positive control is the victim itself,
whose own probes are told apart at once.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sessionkv import Client, SessionKVError
from sessionkv.ipc import messages as wire
from tests.builders.checksum import tokens
from tests.builders.engine import engine_config, greedy
from tests.builders.tenants import access, tenants

PROBES = 10_000
ROUND = 50
"""Probes sent at once: a connection has a bound on what waits for it."""
SECRETS = [tokens(16, start=90 * i) for i in range(8)]
ONE = greedy(1)
_TIMES = ("_ms", "_per_s", "_s")


def probe(number: int) -> tuple[type[wire.Request], dict[str, Any]]:
    """What a curious tenant asks, number after number."""
    guess = SECRETS[number % len(SECRETS)]
    name = f"victim-{number % 5}"
    kinds = [
        (wire.Generate, {"tokens": guess[: 4 + number % 13], "sampling": ONE, "cache": True}),
        (wire.List, {"prefix": name[: number % 9]}),
        (wire.Stats, {}),
        (wire.Info, {"session": name}),
        (wire.Fork, {"session": name, "name": "x"}),
        (wire.Turn, {"session": name, "tokens": guess, "sampling": ONE}),
        (wire.Export, {"session": name}),
        (wire.Pin, {"session": name, "tier": "device"}),
        (wire.Close, {"session": name, "keep": False}),
        (
            wire.Generate,
            {"tokens": guess, "sampling": ONE, "idempotency_key": f"key-{number % 7}"},
        ),
    ]
    return kinds[number % len(kinds)]


def asked(client: Client, numbers: Iterator[int], count: int) -> list[str]:
    """Answers to the next probes, without times. Nothing is computed beside something else."""
    pending, found = [], []
    for kind, fields in map(probe, itertools.islice(numbers, count)):
        if kind is wire.Generate:
            found += [told(one) for one in pending]
            found.append(told(client._core.submit(kind, fields)))
            pending = []
        else:
            pending.append(client._core.submit(kind, fields))
    found += [told(one) for one in pending]
    return [json.dumps(_timeless(answer), sort_keys=True) for answer in found]


def told(pending: Any) -> dict[str, Any]:
    event, _ = pending.get(30)
    if isinstance(event, SessionKVError):
        return event.to_wire()
    if isinstance(event, wire.Failure):
        return event.to_error().to_wire()
    if isinstance(event, wire.Result):
        return {"value": event.value}
    return {"tokens": list(event.tokens), "cache": event.cache, "replayed": event.replayed}


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        timeless = {k: v for k, v in value.items() if not k.endswith(_TIMES) and k != "buckets"}
        return {k: _timeless(v) for k, v in timeless.items()}
    return value


def answers(folder: Path, *, victim_is_there: bool) -> list[str]:
    folder.mkdir()
    numbers, found = itertools.count(), []
    with tenants(folder, engine_config(blocks=512), access=access()) as (_, victim, curious):
        if victim_is_there:
            for i in range(5):
                victim.open(f"victim-{i}").turn(tokens=SECRETS[i], sampling=greedy(4))
            for i, secret in enumerate(SECRETS):
                victim.generate(tokens=secret, sampling=ONE, idempotency_key=f"key-{i}")
        while len(found) < PROBES:
            found += asked(curious, numbers, ROUND)
    return found


@pytest.mark.slow
def test_ten_thousand_probes_tell_nothing(tmp_path: Path) -> None:
    with_victim = answers(tmp_path / "with", victim_is_there=True)
    without = answers(tmp_path / "without", victim_is_there=False)
    assert len(with_victim) == PROBES
    assert with_victim == without


def test_the_same_probes_tell_a_tenant_of_itself(tmp_path: Path) -> None:
    """The positive control: hits, lists, figures and names are there to be seen by their owner."""
    with tenants(tmp_path, engine_config(blocks=512), access=access()) as (_, owner, other):
        cold = asked(owner, itertools.count(), 30)
        owner.open("victim-0").turn(tokens=SECRETS[0], sampling=ONE)
        warm = asked(owner, itertools.count(), 30)
        assert sum(a != b for a, b in zip(cold, warm, strict=True)) > 5
        prompt = [7, *tokens(31, start=900)]
        hits = [
            client.generate(tokens=prompt, sampling=ONE).cache.cached_tokens
            for client in (owner, other, owner, other)
        ]
        assert hits == [0, 0, 31, 31]
