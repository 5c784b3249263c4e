from __future__ import annotations

import pytest

from sessionkv.client.assemble import StreamAssembler, answer, failure
from sessionkv.client.results import PromptProgress, StreamEvent
from sessionkv.errors import (
    EngineClosed,
    ProtocolViolation,
    SessionKVError,
    TurnFailed,
)
from sessionkv.ipc import messages as m
from sessionkv.types import TokenLogprob
from tests.builders.fake_engine import deltas, done


def run(*replies: m.Reply) -> list[StreamEvent]:
    assembler = StreamAssembler()
    found = [assembler.feed(reply) for reply in replies]
    return [event for event in found if event is not None]


def text_of(events: list[StreamEvent]) -> str:
    """What an application that follows the rule has on its screen."""
    text = ""
    for event in events:
        text = event.text if event.restarted else text + event.text
    return text


def tokens_of(events: list[StreamEvent]) -> list[int]:
    tokens: list[int] = []
    for event in events:
        tokens = list(event.tokens) if event.restarted else tokens + list(event.tokens)
    return tokens


def test_events_make_up_the_result():
    events = run(*deltas(1, "abc"), done(1, "abcd"))
    assert [(e.text, e.offset) for e in events] == [("a", 0), ("b", 1), ("c", 2), ("d", 3)]
    assert events[-1].result.text == "abcd"
    assert [e.result for e in events[:-1]] == [None] * 3


def test_how_far_the_prompt_is_comes_as_an_event_of_its_own():
    note = m.Progress(1, attempt=1, prompt_tokens=9, device_tokens=4, host_tokens=2, done_tokens=5)
    events = run(note, *deltas(1, "ab"), done(1, "ab"))
    assert events[0] == StreamEvent(progress=PromptProgress(9, 4, 2, 0, 5))
    assert events[0].progress.cached_tokens == 6
    assert [event.progress for event in events[1:]] == [None] * 3
    assert text_of(events) == "ab"


def test_how_far_the_prompt_of_another_attempt_is_starts_anew():
    again = m.Progress(1, attempt=2, prompt_tokens=9)
    events = run(*deltas(1, "abc"), again, m.Delta(1, attempt=2, tokens=[120], text="x"))
    assert (events[3].restarted, events[3].offset) == (True, 0)
    assert (events[4].restarted, events[4].offset, text_of(events)) == (False, 0, "x")


def test_text_may_lag_behind_the_tokens():
    events = run(
        m.Delta(1, offset=0, tokens=[1], text=""),
        m.Delta(1, offset=1, tokens=[2], text="é"),
        done(1, "é!", tokens=[1, 2, 3]),
    )
    assert [(e.text, e.tokens) for e in events] == [("", (1,)), ("é", (2,)), ("!", (3,))]


def test_a_stream_picked_up_again_shows_nothing_twice():
    again = m.Delta(1, offset=0, tokens=[97, 98, 99, 100], text="abcd")
    events = run(*deltas(1, "abc"), again, *deltas(1, "e", start=4), done(1, "abcde"))
    assert [(e.text, e.offset) for e in events] == [
        ("a", 0), ("b", 1), ("c", 2), ("d", 3), ("e", 4), ("", 5),
    ]  # fmt: skip


def test_a_stream_picked_up_again_delta_by_delta_shows_nothing_twice():
    events = run(*deltas(1, "abc"), *deltas(1, "abcd"), *deltas(1, "abcdef"), done(1, "abcdef"))
    assert text_of(events) == "abcdef"
    assert tokens_of(events) == [ord(c) for c in "abcdef"]
    assert not any(e.restarted for e in events)


def test_a_restart_is_an_event_and_offsets_begin_anew():
    events = run(*deltas(1, "abc"), m.Restarted(1), *deltas(1, "xy", attempt=2),
                 done(1, "xyz", attempt=2))  # fmt: skip
    assert [e.restarted for e in events] == [False] * 3 + [True] + [False] * 3
    assert [e.offset for e in events[4:]] == [0, 1, 2]
    assert text_of(events) == "xyz"


def test_another_attempt_without_notice_is_a_restart_too():
    events = run(*deltas(1, "abc"), *deltas(1, "xy", attempt=2), done(1, "xy", attempt=2))
    assert text_of(events) == "xy"
    assert tokens_of(events) == [ord(c) for c in "xy"]


def test_a_replayed_answer_of_another_attempt_replaces_what_was_shown():
    events = run(*deltas(1, "abc"), done(1, "wxyz", attempt=2, replayed=True))
    assert text_of(events) == "wxyz"
    assert events[-1].result.replayed


def test_a_replayed_answer_of_this_attempt_completes_what_was_shown():
    events = run(*deltas(1, "abc"), done(1, "abcd", replayed=True))
    assert [e.text for e in events] == ["a", "b", "c", "d"]


def test_logprobs_go_with_their_tokens():
    probs = [[[97, -1.0], [98, -2.0]], [[98, -0.5]]]
    events = run(
        m.Delta(1, tokens=[97], text="a", logprobs=probs[:1]),
        done(1, "ab", logprobs=probs),
    )
    assert events[0].logprobs == ((TokenLogprob(97, -1.0), TokenLogprob(98, -2.0)),)
    assert events[1].logprobs == ((TokenLogprob(98, -0.5),),)


def test_a_failure_is_raised_as_its_own_class():
    assembler = StreamAssembler()
    with pytest.raises(TurnFailed, match="broke"):
        assembler.feed(m.Failure(1, code="turn_failed", message="broke", details={"a": 1}))
    assert assembler.over
    assert assembler.result is None


def test_hostile_details_do_not_break_the_error():
    error = failure(
        m.Failure(1, code="overloaded", details={"self": 1, "message": 2, 3: 4, "a": 5})
    )
    assert error.details == {"self": 1, "message": 2, "a": 5}
    assert error.retryable


def test_an_unknown_code_is_the_base_error():
    assert type(failure(m.Failure(1, code="sunspots", message="x"))) is SessionKVError


def test_answers():
    assert answer(m.Result(1, 5)) == 5
    with pytest.raises(EngineClosed):
        answer(EngineClosed("x"))
    with pytest.raises(ProtocolViolation):
        answer(done(1))
