"""The default model in fp32: wherever a history was meanwhile, the next turn is as without a cache.

The same ids, and each one's log-probability within 1e-3 of the cold run's. Since the ids are the
same, every probability is one given the same text before it. The cold run is a generation from the
same ids that bypasses the cache, alone in its batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from sessionkv import CacheConfig, Client, Engine, EngineConfig, MissReason, SamplingParams, launch
from sessionkv.client.results import TurnResult
from sessionkv.config import user_cache_dir
from sessionkv.engine.build import BuiltEngine, build_engine
from sessionkv.model.prepare import prepare_model

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK = 16
BLOCKS = 10
BLOCK_BYTES = 30 * 2 * 3 * 64 * BLOCK * 4
NATS = 1e-3
FIRST = (
    "The lighthouse stood at the end of a long stone pier. Every evening the keeper climbed its "
    "hundred and twelve steps, lit the lamp and wrote a line in the book. On the third of March"
)
OTHER = (
    "To make bread you need flour, water, salt and yeast. Mix them, and let the dough rest for an "
    "hour in a warm place. Then fold it twice, shape it into a round loaf, and"
)
NEXT = "\nThe next morning,"


def sampling(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def encode(smollm2: str) -> Callable[[str], list[int]]:
    folder = prepare_model(smollm2, cache_dir=user_cache_dir(), offline=True).text_dir
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def config(model: str, store: Path, *, host_blocks: int = 0, disk: bool = False) -> EngineConfig:
    return EngineConfig(
        model=model,
        store=store,
        offline=True,
        max_model_len=BLOCKS * BLOCK,
        cache=CacheConfig(
            block_size=BLOCK,
            device_blocks=BLOCKS,
            host_bytes=host_blocks * BLOCK_BYTES,
            disk_bytes=10**9 if disk else 0,
        ),
    )


def build(config: EngineConfig, **arguments: Any) -> BuiltEngine:
    """What is found is loaded: how fast this machine computes is not what is tested."""
    built = build_engine(config, **arguments)
    built.parts.planner.rates.observe_prefill = lambda *args, **fields: None  # type: ignore[method-assign]
    return built


@dataclass
class Talk:
    """A session with one turn, and what it costs to go on."""

    client: Client
    name: str
    log: list[int]
    delta: list[int]

    def next(self, count: int = 12, name: str | None = None) -> TurnResult:
        session = self.client.session(name or self.name)
        return session.turn(tokens=self.delta, sampling=sampling(count))

    def assert_as_cold(self, result: TurnResult, **tiers: int) -> None:
        """The same ids and probabilities as without a cache, and this much from each tier."""
        assert_as_cold(self.client, [*self.log, *self.delta], result)
        report = result.cache
        found = (report.device_tokens, report.host_tokens, report.disk_tokens)
        assert found == tuple(tiers.get(tier, 0) for tier in ("device", "host", "disk"))
        assert sum(found) >= len(self.log) - 1
        assert report.computed_tokens == len(self.log) + len(self.delta) - sum(found)
        assert report.miss.reason is MissReason.NONE


def assert_as_cold(client: Client, prompt: list[int], result: TurnResult) -> None:
    count = len(result.tokens)
    cold = client.generate(tokens=prompt, sampling=sampling(count), cache=False)
    assert cold.cache.cached_tokens == 0
    assert result.tokens == cold.tokens
    assert result.logprobs is not None
    assert cold.logprobs is not None
    for position, (warm, alone) in enumerate(zip(result.logprobs, cold.logprobs, strict=True)):
        assert warm[0].token_id == alone[0].token_id
        assert abs(warm[0].logprob - alone[0].logprob) <= NATS, position


def begin(client: Client, encode: Callable[[str], list[int]], name: str, text: str = FIRST) -> Talk:
    prompt = encode(text)
    first = client.open(name).turn(tokens=prompt, sampling=sampling(8))
    assert_as_cold(client, prompt, first)
    return Talk(client, name, prompt + list(first.tokens), encode(NEXT))


def push_out(client: Client) -> None:
    """Fill the device with something else."""
    ids = [(7 * i + 3) % 9000 + 50 for i in range(BLOCKS * BLOCK - 1)]
    client.generate(tokens=ids, sampling=sampling(1))


@pytest.fixture(scope="module")
def engine(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """With a host tier that holds three times what the device does."""
    store = tmp_path_factory.mktemp("host")
    with Engine(config(smollm2, store, host_blocks=3 * BLOCKS), build=build) as engine:
        yield engine


def test_on_the_device_forked_and_rewound(engine: Engine, encode: Any) -> None:
    talk = begin(engine, encode, "device")
    engine.session("device").fork("copy")
    result = talk.next()
    talk.assert_as_cold(result, device=len(talk.log) - 1)
    # The copy is asked the same, so all but the last prompt token is there.
    copied = talk.next(name="copy")
    assert copied.cache.computed_tokens == 1
    assert_as_cold(engine, [*talk.log, *talk.delta], copied)
    engine.session("device").rewind()
    talk.delta = encode("\nBut nobody")
    again = talk.next()
    assert again.cache.device_tokens == len(talk.log) + 1  # the new line is what both share
    assert_as_cold(engine, [*talk.log, *talk.delta], again)


def test_in_host_memory(engine: Engine, encode: Any) -> None:
    talk = begin(engine, encode, "host", OTHER)
    push_out(engine)
    talk.assert_as_cold(talk.next(), host=len(talk.log) - 1)


def test_preempted(engine: Engine, encode: Any) -> None:
    talks = [begin(engine, encode, f"pressed {i}", text) for i, text in enumerate((FIRST, OTHER))]
    before = engine.stats()["preemptions"]
    results: dict[int, TurnResult] = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: talks[i].next(50)}))
        for i in range(len(talks))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.stats()["preemptions"] > before
    for i, talk in enumerate(talks):
        assert_as_cold(engine, [*talk.log, *talk.delta], results[i])


def test_on_disk_and_restarted(smollm2: str, tmp_path: Path, encode: Any) -> None:
    where = config(smollm2, tmp_path, disk=True)
    with Engine(where, build=build) as engine:
        talk = begin(engine, encode, "a")
        push_out(engine)
        talk.assert_as_cold(talk.next(), disk=len(talk.log) - 1)
        engine.session("a").rewind()
    with Engine(where, build=build) as engine:
        talk.client = engine
        talk.delta = encode(NEXT)[:1] + encode(" the")
        # The turn that was taken back had begun with the same token.
        talk.assert_as_cold(talk.next(), disk=len(talk.log) + 1)


def test_killed_and_restarted(smollm2: str, tmp_path: Path, encode: Any) -> None:
    where = config(smollm2, tmp_path, disk=True)
    with launch(config=where) as process:
        talk = begin(process.client(), encode, "a", OTHER)
        talk.client.flush()
        process.kill()
    with launch(config=where) as process:
        talk.client = process.client()
        talk.assert_as_cold(talk.next(), disk=len(talk.log) - 1)
