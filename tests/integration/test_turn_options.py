"""Options, streams, cancelling and limits of turns, through all three clients."""

import threading
from collections.abc import Iterator

import pytest

from sessionkv import FinishReason, LimitsConfig, SamplingParams
from sessionkv.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PromptTooLong,
    TurnCancelled,
)
from sessionkv.text.builtin import END_OF_TEXT, IM_END
from tests.builders.checksum import tokens
from tests.builders.doors import KINDS, Door, Hold, Later, Script, open_door
from tests.builders.engine import GREEDY, StepGate, engine_config, greedy, oracle

ON_AND_ON = greedy(None, ignore_eos=False)
ENDING = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def door(kind: str, script: Script) -> Iterator[Door]:
    with open_door(kind, engine_config(blocks=512), runner={"script": script}) as door:
        yield door
        door.assert_ledger()


@pytest.fixture
def hold() -> Iterator[Hold]:
    hold = Hold()
    yield hold
    hold.release()


@pytest.fixture
def held(kind: str, hold: Hold) -> Iterator[Door]:
    config = engine_config(blocks=16_384)
    with open_door(kind, config, gate=hold.gate, runner={"script": hold.script}) as door:
        yield door
        hold.release()
        door.assert_ledger()


# How much ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "count"), [(1, 1), (4, 4), (None, 4), (5, None), (10_000, None)])
def test_what_fits_the_window(kind: str, asked: int | None, count: int | None) -> None:
    with open_door(kind, engine_config(max_model_len=64)) as door:
        for run in (door.client.open("a").turn, door.client.generate):
            if count is None:
                with pytest.raises(PromptTooLong) as caught:
                    run(tokens=tokens(60), sampling=greedy(asked))
                assert caught.value.details == {"n_prompt": 60, "max_tokens": asked, "n_ctx": 64}
            else:
                result = run(tokens=tokens(60), sampling=greedy(asked))
                assert list(result.tokens) == oracle(tokens(60), greedy(count))
                assert result.finish_reason is FinishReason.LENGTH
        with pytest.raises(PromptTooLong):
            door.client.generate(tokens=tokens(64), sampling=greedy(None))
        assert len(door.client.generate(tokens=tokens(63), sampling=greedy(None)).tokens) == 1
        door.assert_ledger()


@pytest.mark.parametrize("asked", [0, -1, 1.5, True])
def test_max_tokens_that_are_none(asked: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        greedy(asked)  # type: ignore[arg-type]
    assert caught.value.details["field"] == "sampling.max_tokens"


def test_a_device_smaller_than_the_window_is_the_window(kind: str) -> None:
    with open_door(kind, engine_config(blocks=8)) as door:
        with pytest.raises(PromptTooLong) as caught:
            door.client.generate(tokens=tokens(26), sampling=greedy(8))
        assert caught.value.details == {"n_prompt": 26, "max_tokens": 8, "n_ctx": 33}
        result = door.client.generate(tokens=tokens(25), sampling=greedy(8))
        assert list(result.tokens) == oracle(tokens(25))
        door.assert_ledger()


# Sampling and stopping --------------------------------------------------------------------------


def test_one_seed_one_answer(door: Door) -> None:
    def run(seed: int | None) -> tuple[int, ...]:
        sampling = SamplingParams(seed=seed, max_tokens=16, ignore_eos=True)
        return door.client.generate(tokens=tokens(7), sampling=sampling).tokens

    assert run(11) == run(11) != run(12)
    assert run(None) != run(None)
    assert list(run(11)) == oracle(
        tokens(7), SamplingParams(seed=11, max_tokens=16, ignore_eos=True)
    )


@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_are_of_each_token_first(door: Door, count: int) -> None:
    sampling = greedy(8, logprobs=count)
    stream = door.client.stream_generate(tokens=tokens(7), sampling=sampling)
    events = list(stream)
    result = stream.result
    assert [len(entries) for entries in result.logprobs] == [count + 1] * 8
    assert [entries[0].token_id for entries in result.logprobs] == list(result.tokens)
    streamed = [entry for event in events for entry in event.logprobs or ()]
    assert streamed == list(result.logprobs)
    assert door.client.generate(tokens=tokens(7), sampling=GREEDY).logprobs is None


def test_a_stop_string_cuts_the_text_and_the_log(door: Door, script: Script) -> None:
    script.add(b"one, two, three", b"x")
    session = door.client.open("a")
    sampling = greedy(15, stop=("two", "never"), logprobs=0)
    result = session.turn("count", sampling=sampling)
    assert (result.text, result.stop) == ("one, ", "two")
    assert result.finish_reason is FinishReason.STOP
    assert bytes(result.tokens) == b"one, "
    assert len(result.logprobs) == len(result.tokens)
    assert bytes(door.log("a")[-5:]) == b"one, "
    again = session.turn("more", sampling=greedy(1))
    assert again.text == "x"
    assert bytes(i for i in door.log("a") if i < 256).count(b"one, \nuser\nmore") == 1


def test_the_clients_own_stop_ids_end_a_turn_and_are_named(door: Door, script: Script) -> None:
    script.add(b"ab\x07cd", b"ab\x07cd")
    sampling = greedy(5, stop_token_ids=(7,))
    chat = door.client.open("a").turn("x", sampling=sampling)
    assert (chat.text, bytes(chat.tokens), chat.stop) == ("ab", b"ab", 7)
    raw = door.client.generate(tokens=[1], sampling=sampling)
    assert (raw.text, bytes(raw.tokens), raw.stop) == ("ab", b"ab\x07", 7)
    for bad in ((259,), (3, 10**6)):
        with pytest.raises(InvalidRequest) as caught:
            door.client.generate(tokens=[1], sampling=greedy(5, stop_token_ids=bad))
        assert caught.value.details["field"] == f"sampling.stop_token_ids[{len(bad) - 1}]"
    with pytest.raises(InvalidRequest):
        door.client.generate(tokens=[1], sampling=greedy(5, logit_bias={259: 1.0}))


@pytest.mark.parametrize("end", [IM_END, END_OF_TEXT])
def test_either_end_token_ends_the_turn_and_is_not_text(
    door: Door, script: Script, end: int
) -> None:
    script.add([*b"ok", end, *b"more"])
    result = door.client.open("a").turn("x", sampling=ENDING)
    assert (result.text, result.stop) == ("ok", None)
    assert result.finish_reason is FinishReason.STOP
    assert list(result.tokens) == [*b"ok", IM_END]
    assert result.usage.completion_tokens == 3
    assert door.log("a")[-3:] == [*b"ok", IM_END]


def test_ends_that_are_ignored_and_stops_that_come_too_early(door: Door, script: Script) -> None:
    script.add([*b"ab", IM_END, *b"cd"], [*b"aXbcdefXg"], [*b"aSTb"])
    session = door.client.open("a")
    ignoring = session.turn("x", sampling=greedy(5))
    assert (ignoring.text, ignoring.finish_reason) == ("abcd", FinishReason.LENGTH)
    assert list(ignoring.tokens) == [*b"ab", IM_END, *b"cd"]
    early = session.turn("x", sampling=greedy(9, stop=("X",), min_tokens=6))
    assert (early.text, early.stop) == ("aXbcdef", "X")
    held_back = session.turn("x", sampling=greedy(3, stop=("STOP",)))
    assert (held_back.text, held_back.finish_reason) == ("aST", FinishReason.LENGTH)


# Streams ----------------------------------------------------------------------------------------


def test_events_follow_each_other_and_make_the_whole(door: Door, script: Script) -> None:
    reply = "naïve \u3042 and \U0001f600 end STOP".encode()
    script.add(reply)
    session = door.client.open("a")
    stream = session.stream("x", sampling=greedy(len(reply), stop=("STOP",)))
    events = list(stream)
    result = stream.result
    assert result.text == "naïve \u3042 and \U0001f600 end "
    assert "".join(event.text for event in events) == result.text
    assert "\ufffd" not in result.text
    position = 0
    for event in events[:-1]:
        assert event.offset == position
        position += len(event.tokens)
    assert bytes(t for e in events for t in e.tokens)[: len(result.tokens)] == bytes(result.tokens)
    assert events[-1].result is result
    assert [e.result for e in events[:-1]] == [None] * (len(events) - 1)


def test_leaving_a_stream_early_cancels_its_turn(held: Door, hold: Hold) -> None:
    session = held.client.open("a")
    stream = session.stream("x", sampling=ON_AND_ON)
    assert next(stream).text == "\0"
    stream.close()
    with session.stream("y", sampling=ON_AND_ON) as second:
        next(second)
    info = session.info()  # what was left has ended before anything else is asked
    assert (info.turns, info.running) == (0, False)
    assert list(stream) == []
    assert stream.result is None
    hold.release()


def test_many_at_once_wait_for_a_turn_that_was_left(held: Door, hold: Hold) -> None:
    session = held.client.open("a")
    for _ in range(2):
        stream = session.stream("x", sampling=ON_AND_ON)
        next(stream)
        stream.close()
        infos = [Later(session.info) for _ in range(4)]
        assert [(i.result().running, i.result().turns) for i in infos] == [(False, 0)] * 4
    hold.release()


def test_a_stream_of_a_failed_turn_raises(door: Door) -> None:
    stream = door.client.open("a").stream(tokens=[259])
    with pytest.raises(InvalidRequest):
        list(stream)


# Cancelling -------------------------------------------------------------------------------------


def test_cancel_keeps_what_was_delivered(held: Door, hold: Hold) -> None:
    session = held.client.open("a")
    stream = session.stream(tokens=tokens(5), sampling=ON_AND_ON)
    events = [next(stream) for _ in range(6)]
    result = stream.cancel(keep=True)
    assert result.finish_reason is FinishReason.CANCELLED
    assert set(result.tokens) == {0}
    assert len(result.tokens) >= sum(len(event.tokens) for event in events)
    assert result.text == "\0" * len(result.tokens)
    assert held.log("a") == [*tokens(5), *result.tokens]
    assert session.info().node == result.node
    hold.release()
    log = held.log("a")
    more = session.turn(tokens=[1], sampling=GREEDY)
    assert list(more.tokens) == oracle([*log, 1])
    # The last token sampled has no KV yet.
    assert more.cache.cached_tokens >= (len(log) - 1) // 4 * 4


@pytest.mark.parametrize("chars", [1, 7, 40])
def test_cancel_keeps_as_many_characters_as_it_is_told(
    door: Door, script: Script, chars: int
) -> None:
    said = "Grüße von der See. " * 90
    script.add(said.encode())
    session = door.client.open("a")
    stream = session.stream("Hi", sampling=ON_AND_ON)
    text = ""
    while len(text) < chars:
        text += next(stream).text
    result = stream.cancel(keep=True, chars=chars)
    assert (result.text, result.finish_reason) == (said[:chars], FinishReason.CANCELLED)
    assert bytes(result.tokens) == said[:chars].encode()
    assert result.usage.completion_tokens == len(result.tokens)
    assert door.log("a")[-len(result.tokens) :] == list(result.tokens)


def test_cancel_drops_everything_by_default(held: Door, hold: Hold) -> None:
    session = held.client.open("a")
    stream = session.stream(tokens=tokens(5), sampling=ON_AND_ON)
    next(stream)
    assert stream.cancel() is None
    assert stream.cancel(keep=True) is None
    info = session.info()
    assert (info.turns, info.running) == (0, False)
    hold.release()
    assert list(session.turn(tokens=[1], sampling=GREEDY).tokens) == oracle([1])


@pytest.mark.parametrize("keep", [True, False])
def test_cancel_in_line_and_after_the_end(held: Door, hold: Hold, keep: bool) -> None:
    session = held.client.open("a")
    running = Later(lambda: session.turn("x", sampling=ON_AND_ON))
    hold.wait_going()
    stream = session.stream("y", sampling=GREEDY, when_busy="queue")
    first = Later(lambda: next(stream, None))  # an asyncio stream starts when it is awaited
    held.wait_queued("a", 1)
    assert Later(lambda: stream.cancel(keep=keep)).result() is None
    assert first.result() is None or isinstance(first.error(), TurnCancelled)
    assert session.info().queued == 0
    hold.release()
    running.result()
    ended = session.stream("z", sampling=greedy(2))
    whole = list(ended)[-1].result
    assert ended.cancel(keep=keep) == whole
    assert session.info().turns == 2


@pytest.mark.parametrize("keep", [True, False])
def test_cancel_in_the_middle_of_a_prompt(kind: str, keep: bool) -> None:
    gate = StepGate(lambda plan: plan.steps[0].start == 8)
    with open_door(kind, engine_config(step_tokens=8), gate=gate) as door:
        session = door.client.open("a")
        stream = session.stream(tokens=tokens(30), sampling=GREEDY)
        reading = Later(lambda: next(stream, None))
        gate.reached()
        leaving = Later(lambda: stream.cancel(keep=keep))
        while not cancel_arrived(door):
            pass
        gate.open()
        assert leaving.result() is None
        assert reading.result() is None
        assert session.info().turns == 0
        result = session.turn(tokens=tokens(30), sampling=GREEDY)
        assert list(result.tokens) == oracle(tokens(30))
        assert 16 <= result.cache.device_tokens < 30
        door.assert_ledger()


def cancel_arrived(door: Door) -> bool:
    """Core, held in a step, has the cancel in its mail."""
    assert door.engine.building.built is not None
    return len(door.engine.building.built.inbox._items) > 0


class Shutter:
    """Gates of the store that can be shut and opened again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open = threading.Event()
        self._open.set()
        self._reached = threading.Event()

    def pass_through(self, name: str) -> None:
        if name == self._name and not self._open.is_set():
            self._reached.set()
            if not self._open.wait(30):
                raise TimeoutError(name)

    def shut(self) -> None:
        self._open.clear()

    def reached(self) -> None:
        assert self._reached.wait(30)

    def open(self) -> None:
        self._open.set()


@pytest.mark.parametrize("keep", [True, False])
def test_cancel_while_the_turn_is_being_journalled_is_too_late(kind: str, keep: bool) -> None:
    gates = Shutter("before_commit")
    with open_door(kind, engine_config(), gates=gates) as door:
        session = door.client.open("a")
        gates.shut()
        stream = session.stream(tokens=tokens(5), sampling=GREEDY)
        reading = Later(lambda: list(stream))
        gates.reached()
        cancelling = Later(lambda: stream.cancel(keep=keep))
        assert door.client.stats()["ledger"]
        gates.open()
        reading.result()  # either of them may have taken the last event
        assert cancelling.result() == stream.result is not None
        assert door.log("a") == [*tokens(5), *oracle(tokens(5))]
        door.assert_ledger()


# Deadlines and priorities -----------------------------------------------------------------------


def test_a_deadline_ends_the_turn_and_leaves_the_session(held: Door, hold: Hold) -> None:
    session = held.client.open("a")
    with pytest.raises(DeadlineExceeded) as caught:
        session.turn("x", sampling=ON_AND_ON, deadline_s=0.05)
    assert caught.value.details["deadline_s"] == 0.05
    running = Later(lambda: session.turn("x", sampling=ON_AND_ON))
    while not session.info().running:
        pass
    with pytest.raises(DeadlineExceeded):
        session.turn("y", when_busy="queue", deadline_s=0.05)
    assert session.info().running
    hold.release()
    running.result()
    assert session.info().turns == 1
    assert session.turn("z", sampling=GREEDY, deadline_s=3600).tokens


def test_priorities_and_deadlines_have_limits(door: Door) -> None:
    for priority in (-100, 0, 100):
        assert door.client.generate(tokens=[1], sampling=greedy(1), priority=priority).tokens
    for fields in ({"priority": 101}, {"deadline_s": 0}, {"deadline_s": float("nan")},
                   {"idempotency_key": ""}, {"idempotency_key": "x" * 257}):  # fmt: skip
        with pytest.raises(InvalidRequest):
            door.client.generate(tokens=[1], **fields)


def test_a_turn_of_too_many_messages(kind: str) -> None:
    config = engine_config(limits=LimitsConfig(messages=3), blocks=128)
    with open_door(kind, config) as door:
        session = door.client.open("a")
        many = [{"role": "user", "content": "x"}] * 4
        with pytest.raises(InvalidRequest, match="at most 3"):
            session.turn(messages=many)
        assert session.turn(messages=many[:3], sampling=greedy(1)).tokens
