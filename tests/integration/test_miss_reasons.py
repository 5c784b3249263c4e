"""Each reason for which a turn may compute what its conversation had, at the exact position."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sessionkv import CacheReport, MissReason
from sessionkv.text.builtin import IM_END, IM_START, write_byte_text
from sessionkv.types import Tier
from tests.builders.checksum import tokens
from tests.builders.engine import (
    GREEDY,
    CheckedEngine,
    engine_config,
    greedy,
    open_engine,
    oracle,
    without_cache,
)
from tests.builders.text import THINK_DROPPING

DISK = 50_000_000
PROMPT = tokens(13)


def miss_of(report: CacheReport) -> tuple[MissReason, int | None, int | None]:
    return report.miss.reason, report.miss.token, report.miss.turn


def first_turn(engine: CheckedEngine, name: str = "a", **options: object) -> list[int]:
    """Open a session with one turn of 13 + 8 tokens; its log, whose last token has no KV."""
    result = engine.open(name, **options).turn(tokens=PROMPT, sampling=GREEDY)
    assert miss_of(result.cache) == (MissReason.FIRST_TURN, None, None)
    return PROMPT + list(result.tokens)


def next_turn(engine: CheckedEngine, log: list[int], name: str = "a") -> CacheReport:
    """Another turn, which is right whatever the cache had."""
    result = engine.session(name).turn(tokens=[7, 8], sampling=GREEDY)
    assert list(result.tokens) == oracle([*log, 7, 8])
    report = result.cache
    assert report.cached_tokens + report.computed_tokens == report.prompt_tokens == len(log) + 2
    missed = len(log) - 1 - report.cached_tokens
    assert report.miss_tokens == ({report.miss.reason.value: missed} if missed else {})
    return report


def push_out(engine: CheckedEngine, num_blocks: int) -> None:
    """Fill the device with something else."""
    engine.generate(tokens=tokens(4 * num_blocks - 1, start=500), sampling=greedy(2))


def test_none() -> None:
    with open_engine() as engine:
        log = first_turn(engine)
        assert miss_of(next_turn(engine, log)) == (MissReason.NONE, None, None)


def test_evicted() -> None:
    with open_engine(engine_config(blocks=8)) as engine:
        log = first_turn(engine)
        push_out(engine, 8)
        report = next_turn(engine, log)
        assert report.cached_tokens == 0
        assert miss_of(report) == (MissReason.EVICTED, 0, 1)


def test_evicted_from_the_middle_of_an_older_turn() -> None:
    with open_engine(engine_config(blocks=10)) as engine:
        log = first_turn(engine)
        push_out(engine, 6)  # 10 blocks: 4 are free, and 2 are taken from the end of the chain
        report = next_turn(engine, log)
        assert report.device_tokens == 16
        assert miss_of(report) == (MissReason.EVICTED, 16, 1)


def test_expired() -> None:
    with open_engine(engine_config(blocks=8)) as engine:
        log = first_turn(engine)
        engine.session("a").pin(tier="device", ttl_s=0.001)
        expire_pins(engine)
        push_out(engine, 8)
        assert miss_of(next_turn(engine, log)) == (MissReason.EXPIRED, 0, 1)


def expire_pins(engine: CheckedEngine) -> None:
    """Wait for the core's housekeeping to take the pin off."""
    for _ in range(1000):
        if engine.session("a").info().pin is None:
            return
        threading.Event().wait(0.01)
    raise AssertionError("the pin did not fall off")


def test_not_stored(tmp_path: Path) -> None:
    config = engine_config(tmp_path, disk_bytes=DISK, durability="off")
    with open_engine(config) as engine:
        log = first_turn(engine)
    with open_engine(config) as engine:
        report = next_turn(engine, log)
        assert report.cached_tokens == 0
        assert miss_of(report) == (MissReason.NOT_STORED, 0, 1)


def test_corrupt(tmp_path: Path) -> None:
    config = engine_config(tmp_path, disk_bytes=DISK)
    with open_engine(config) as engine:
        log = first_turn(engine)
        engine.flush()
        damaged = [r for r in engine.parts.kv.resident_keys()][2]
    flip_byte_of(tmp_path, damaged)
    with open_engine(config) as engine:
        report = next_turn(engine, log)
        assert (report.disk_tokens, report.computed_tokens) == (16, 7)  # what lies behind is used
        assert miss_of(report) == (MissReason.CORRUPT, 8, 1)
        assert engine.stats()["ledger"]["corrupt_blocks"] == 1
        log += [7, 8, *oracle([*log, 7, 8])]
        engine.assert_ledger()
    with open_engine(config) as engine:  # what was computed again has been stored again
        assert miss_of(next_turn(engine, log)) == (MissReason.NONE, None, None)


def flip_byte_of(store: Path, key: bytes) -> None:
    """Damage the payload of one block on disk."""
    for path in (store / "blocks").rglob("segment-*"):
        data = bytearray(path.read_bytes())
        at = data.find(key)
        if at >= 0:
            payload = data.index(PROMPT[8].to_bytes(4, "little"), at + 512)
            data[payload] ^= 0x40
            path.write_bytes(data)
            return
    raise AssertionError("the block is not on disk")


@contextmanager
def other_weights(config: object, fingerprint: str) -> Iterator[CheckedEngine]:
    with open_engine(config, runner={"fingerprint": fingerprint}) as engine:
        yield engine


def test_identity_changed(tmp_path: Path) -> None:
    config = engine_config(tmp_path, disk_bytes=DISK)
    with other_weights(config, "one") as engine:
        reply = engine.open("a").turn(tokens=PROMPT, sampling=GREEDY)
        log = PROMPT + list(reply.tokens)
    with other_weights(config, "two") as engine:
        result = engine.session("a").turn(tokens=[7], sampling=GREEDY)
        assert list(result.tokens) == oracle([*log, 7], fingerprint="two")
        assert result.cache.cached_tokens == 0
        assert miss_of(result.cache) == (MissReason.IDENTITY_CHANGED, 0, 1)
        log += [7, *result.tokens]
        # From here on its blocks are of the new weights, those of the old history too.
        result = engine.session("a").turn(tokens=[8], sampling=GREEDY)
        assert miss_of(result.cache) == (MissReason.NONE, None, None)
        log += [8, *result.tokens]
    with other_weights(config, "two") as engine:
        result = engine.session("a").turn(tokens=[9], sampling=GREEDY)
        assert result.cache.disk_tokens == len(log) - 1
        assert miss_of(result.cache) == (MissReason.NONE, None, None)


def test_history_edited() -> None:
    with open_engine(engine_config(blocks=200)) as engine:
        session = engine.open("a", history="follow")
        history = [{"role": "user", "content": "one two three"}]
        reply = session.turn(messages=history, sampling=greedy(6))
        again = [
            {"role": "user", "content": "one TWO three"},
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": "go on"},
        ]
        result = session.turn(messages=again, sampling=greedy(6))
        # The byte tokenizer: "<|im_start|>user\none " is 10 tokens.
        assert result.cache.device_tokens == 10
        assert miss_of(result.cache) == (MissReason.HISTORY_EDITED, 10, 1)
        assert result.cache.miss.expected.startswith("two three")
        assert result.cache.miss.found.startswith("TWO three")


def test_what_was_evicted_before_an_edit_is_told_first() -> None:
    with open_engine(engine_config(blocks=24)) as engine:
        session = engine.open("a", history="follow")
        reply = session.turn(messages=[{"role": "user", "content": "one two"}], sampling=greedy(6))
        push_out(engine, 24)
        again = [
            {"role": "user", "content": "one TWO"},
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": "go on"},
        ]
        result = session.turn(messages=again, sampling=greedy(6))
        assert result.cache.cached_tokens == 0
        assert miss_of(result.cache)[:2] == (MissReason.EVICTED, 0)


def test_template_rewrote(tmp_path: Path) -> None:
    write_byte_text(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(THINK_DROPPING)
    reply = [*b"<think>x</think>hi", IM_END]

    def script(token_ids: Sequence[int]) -> int:
        """The reply's next token: what follows the last opening is what it has so far."""
        opening = len(token_ids) - 1 - list(reversed(token_ids)).index(IM_START)
        return reply[len(token_ids) - opening - len(b"?assistant\n")]

    runner = {"text_dir": tmp_path, "script": script}
    with open_engine(engine_config(blocks=200), runner=runner) as engine:
        session = engine.open("a", history="follow")
        history = [{"role": "user", "content": "one"}]
        sampling = greedy(40, ignore_eos=False)
        first = session.turn(messages=history, sampling=sampling)
        assert first.text == "<think>x</think>hi"
        history += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "go"}]
        result = session.turn(messages=history, sampling=sampling)
        kept = first.usage.prompt_tokens
        # The "h" of the reply now stands where its thought began.
        assert result.cache.device_tokens == kept
        assert miss_of(result.cache) == (MissReason.TEMPLATE_REWROTE, kept, 1)
        assert result.cache.miss.expected == "<think>x</think>"
        assert result.cache.miss.found.startswith("hi<|im_end|>")


def test_recompute_was_sooner() -> None:
    config = engine_config(blocks=8, host_blocks=32)
    with open_engine(config) as engine:
        log = first_turn(engine)
        push_out(engine, 8)
        rates = engine.parts.planner.rates
        type(rates).observe_prefill(rates, 1000, 1e-6)
        rates.observe_load(Tier.HOST, 1, 64, 10.0)
        report = next_turn(engine, log)
        assert report.cached_tokens == 0
        assert miss_of(report) == (MissReason.RECOMPUTE_WAS_SOONER, 0, 1)


def test_cache_off() -> None:
    with open_engine(without_cache(engine_config())) as engine:
        log = first_turn(engine)
        report = next_turn(engine, log)
        assert report.cached_tokens == 0
        assert miss_of(report) == (MissReason.CACHE_OFF, 0, 1)


def test_bypassed() -> None:
    with open_engine() as engine:
        log = first_turn(engine)
        result = engine.generate(tokens=log, sampling=GREEDY, cache=False)
        assert list(result.tokens) == oracle(log)
        assert result.cache.cached_tokens == 0
        assert miss_of(result.cache) == (MissReason.BYPASSED, 0, None)
        # It left nothing behind, and took nothing away.
        assert next_turn(engine, log).device_tokens == 20
