"""Core reads what clients say between two steps: a long one holds up no front and loses nothing."""

from __future__ import annotations

import time
from pathlib import Path

from sessionkv import LimitsConfig
from tests.builders.engine import StepGate, engine_config, greedy, oracle
from tests.builders.fake_engine import short_endpoint
from tests.builders.linked_engine import linked_engine
from tests.builders.wire_client import WireClient

ONE = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}


def test_clients_are_answered_while_core_is_in_a_step_and_the_link_is_full() -> None:
    gate = StepGate()
    prompt = [number % 200 for number in range(20_000)]
    config = engine_config(
        blocks=8192,
        max_model_len=30_000,
        step_tokens=20_000,
        limits=LimitsConfig(missed_heartbeats=1000),
    )
    with short_endpoint() as endpoint:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        with (
            linked_engine(folder, config, gate) as (engine, link),
            WireClient(engine.endpoint) as first,
            WireClient(engine.endpoint) as other,
        ):
            first.send("generate", 1, tokens=[1, 2], sampling=ONE)
            gate.reached()
            first.send("generate", 2, tokens=prompt, sampling=ONE)
            first.send("generate", 3, tokens=[3], sampling=ONE)
            while not link.is_behind:  # core reads nothing, and the kernel is full
                time.sleep(0.001)
            for number in range(10):
                assert other.call("ping", number)["t"] == "result"
            assert first.call("ping", 4)["t"] == "result"
            assert link.is_behind
            other.send("generate", 11, tokens=[4], sampling=ONE)
            gate.open()
            answers = {}
            while len(answers) < 3:
                reply = first.receive()
                answers[reply["id"]] = reply["tokens"]
            assert answers == {
                1: oracle([1, 2], greedy(1)),
                2: oracle(prompt, greedy(1)),
                3: oracle([3], greedy(1)),
            }
            assert other.until(11)[-1]["tokens"] == oracle([4], greedy(1))
            assert not link.is_behind
