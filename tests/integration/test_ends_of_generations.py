"""A generation of which nothing is journalled ends with its last token, others when durable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sessionkv import Client, LimitsConfig, SamplingParams
from sessionkv.engine.messages import StepTokens, StopAt, TurnCommitted, TurnFinished, Verdict
from sessionkv.errors import TurnFailed
from tests.builders.engine import GREEDY, SocketEngine, engine_config, greedy, oracle, socket_engine
from tests.builders.fake_engine import short_endpoint

LIMITS = LimitsConfig(missed_heartbeats=1000, verdict_timeout_s=60.0)


@contextlib.contextmanager
def served() -> Iterator[tuple[SocketEngine, Client]]:
    with short_endpoint() as endpoint:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        config = engine_config(blocks=1024, limits=LIMITS)
        with socket_engine(folder, config) as engine, Client(engine.endpoint) as client:
            yield engine, client


class Overheard:
    """What front and core say to each other, batch by batch."""

    def __init__(self, engine: SocketEngine) -> None:
        self.batches: list[list[Any]] = []
        link: Any = engine.loop._link
        for name in ("put", "send"):
            setattr(link, name, self._listening(getattr(link, name)))

    def _listening(self, say: Any) -> Any:
        def listened(messages: list[Any]) -> None:
            self.batches.append(list(messages))
            say(messages)

        return listened

    def kinds(self) -> list[list[type]]:
        return [[type(message) for message in batch] for batch in self.batches]


def test_it_ends_in_the_batch_of_its_last_token_and_is_not_judged() -> None:
    with served() as (engine, client):
        said = Overheard(engine)
        done = client.generate(tokens=[1, 2], sampling=greedy(3))
        assert list(done.tokens) == oracle([1, 2], greedy(3))
        # Released before it was told, so nothing of it is held when the client knows.
        assert engine.parts.kv.ledger().idle
        assert said.kinds()[-1] == [StepTokens, TurnFinished, TurnCommitted]
        assert not any(Verdict in kinds for kinds in said.kinds())
        assert engine.parts.metrics._finished == {"length": 1}


@pytest.mark.parametrize("keyed", [True, False])
def test_what_is_kept_is_judged_and_committed_before_it_ends(keyed: bool) -> None:
    with served() as (engine, client):
        session = client.open("a")
        said = Overheard(engine)
        if keyed:
            client.generate(tokens=[1, 2], sampling=greedy(3), idempotency_key="k")
        else:
            session.turn(tokens=[1, 2], sampling=greedy(3))
        assert said.kinds()[-3:] == [[StepTokens, TurnFinished], [Verdict], [TurnCommitted]]


def test_a_stop_string_that_comes_while_it_ends_cuts_it_all_the_same() -> None:
    """The stop lies in the last token, and before it: core has ended by its limit both times."""
    with served() as (engine, client):
        free = client.generate(tokens=[1, 2], sampling=greedy(9))
        for place in (len(free.text) - 1, len(free.text) // 2):
            sampling = SamplingParams(
                temperature=0.0, max_tokens=9, ignore_eos=True, stop=(free.text[place],)
            )
            cut = client.generate(tokens=[1, 2], sampling=sampling)
            assert cut.text == free.text[: free.text.index(free.text[place])]
            assert (cut.finish_reason.value, cut.stop) == ("stop", free.text[place])
            assert engine.parts.kv.ledger().idle


@pytest.mark.parametrize("is_kept", [True, False])
def test_usage_ends_with_the_stop_string_however_late_core_hears_of_it(is_kept: bool) -> None:
    with served() as (engine, client):
        free = client.generate(tokens=[1, 2], sampling=greedy(9))
        sampling = greedy(9, stop=(free.text[4],))
        session = client.open("a")
        link: Any = engine.loop._link
        said, send = [], link.send

        def too_late(messages: list[Any]) -> None:
            said.extend(messages)
            send([message for message in messages if not isinstance(message, StopAt)])

        link.send = too_late
        ask = session.turn if is_kept else client.generate
        cut = ask(tokens=[1, 2], sampling=sampling)
        (stop_at,) = (message for message in said if isinstance(message, StopAt))
        assert stop_at.num_output_tokens < 9
        assert cut.usage.completion_tokens == stop_at.num_output_tokens


@pytest.mark.parametrize("part", ["judge", "push"])
def test_text_that_cannot_be_made_ends_it_with_an_error_whichever_way_core_ended_it(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front's cancel comes to core while the turn runs, or when it is long gone."""

    def wrong(*args: Any) -> Any:
        raise ZeroDivisionError

    with served() as (engine, client):
        with monkeypatch.context() as patch:
            if part == "judge":
                patch.setattr(engine.loop._front._writer, "judge", wrong)
            else:
                patch.setattr("sessionkv.actor.front_turn.FrontTurn.push", wrong)
            for count in (1, 2, 50):
                with pytest.raises(TurnFailed, match="ZeroDivisionError"):
                    client.generate(tokens=[1, 2], sampling=greedy(count))
        assert list(client.generate(tokens=[1, 2], sampling=GREEDY).tokens) == oracle([1, 2])
        assert engine.loop._front._turns == {}
        assert engine.parts.kv.ledger().idle
