"""What a stream that asks hears of its prompt, and that it is what the cache report says."""

from pathlib import Path
from typing import Any

from sessionkv import CacheReport, Engine
from sessionkv.client import PromptProgress, StreamEvent
from sessionkv.ipc import messages as wire
from tests.builders.checksum import tokens
from tests.builders.engine import (
    GREEDY,
    CheckedEngine,
    StepGate,
    engine_config,
    greedy,
    open_engine,
)

DISK = 50_000_000


def heard(stream: Any) -> tuple[list[StreamEvent], PromptProgress]:
    """All events, and the note that came before all others."""
    events = list(stream)
    first = events[0].progress
    assert first is not None
    after = [event for event in events if event.tokens]
    assert after, "something was sampled"
    assert all(event.progress is None for event in events[events.index(after[0]) :])
    return events, first


def figures(source: PromptProgress | CacheReport) -> tuple[int, int, int, int]:
    return source.prompt_tokens, source.device_tokens, source.host_tokens, source.disk_tokens


def next_turn(engine: Engine) -> tuple[int, int, int, int]:
    """Figures of a session's next turn, the same in its first event and in its report."""
    stream = engine.session("a").stream(tokens=[7, 8], sampling=greedy(2), progress=True)
    _, first = heard(stream)
    assert stream.result is not None
    assert figures(first) == figures(stream.result.cache)
    assert first.cached_tokens == stream.result.cache.cached_tokens
    return figures(first)


def begin(engine: Engine) -> None:
    engine.open("a").turn(tokens=tokens(13), sampling=GREEDY)  # 20 positions with KV


def push_out(engine: CheckedEngine) -> None:
    engine.generate(tokens=[201] * 40, sampling=greedy(1))


def test_a_cold_prompt_has_nothing_cached() -> None:
    with open_engine() as engine:
        _, first = heard(engine.stream_generate(tokens=tokens(13), sampling=GREEDY, progress=True))
        assert first == PromptProgress(13, 0, 0, 0, 0)


def test_on_the_device() -> None:
    with open_engine() as engine:
        begin(engine)
        assert next_turn(engine) == (23, 20, 0, 0)


def test_in_host_memory(tmp_path: Path) -> None:
    with open_engine(engine_config(tmp_path, blocks=10, host_blocks=20)) as engine:
        begin(engine)
        push_out(engine)
        assert next_turn(engine) == (23, 0, 20, 0)


def test_on_disk_after_a_restart(tmp_path: Path) -> None:
    config = engine_config(tmp_path, disk_bytes=DISK)
    with open_engine(config) as engine:
        begin(engine)
        engine.flush()
    with open_engine(config) as engine:
        assert next_turn(engine) == (23, 0, 0, 20)


def test_who_does_not_ask_hears_nothing() -> None:
    with open_engine() as engine:
        assert all(
            event.progress is None
            for event in engine.stream_generate(tokens=tokens(13), sampling=GREEDY)
        )
        result = engine.generate(tokens=tokens(13), sampling=GREEDY, progress=True)
        assert len(result.tokens) == 8


def test_an_answer_that_is_replayed_begins_with_its_own_figures() -> None:
    with open_engine() as engine:
        begin(engine)
        asked: dict[str, Any] = {"tokens": [7], "sampling": greedy(2), "idempotency_key": "k"}
        result = engine.session("a").turn(**asked)
        _, first = heard(engine.session("a").stream(**asked, progress=True))
        assert figures(first) == figures(result.cache)
        assert first.done_tokens == first.prompt_tokens


def test_a_retry_that_attaches_hears_what_was_said_before_it_came() -> None:
    gate = StepGate(lambda plan: any(step.sample for step in plan.steps))
    with open_engine(engine_config(step_tokens=8), gate=gate) as engine:
        asked: dict[str, Any] = {
            "tokens": tokens(30), "sampling": greedy(2), "idempotency_key": "k", "progress": True,
        }  # fmt: skip
        first = engine.stream_generate(**asked)
        gate.reached()
        second = engine.stream_generate(**asked)
        answered = engine._core.submit(wire.Import, {})  # by the front, which has it attached then
        assert answered.get(30) is not None
        gate.open()
        assert heard(first)[1] == PromptProgress(30, 0, 0, 0, 0)
        assert heard(second)[1] == PromptProgress(30, 0, 0, 0, 0)
