"""Core reads what clients say between two steps: a long one holds up no front and loses nothing."""

from __future__ import annotations

import time
from pathlib import Path

from sessionkv import EngineConfig, LimitsConfig
from tests.builders.engine import StepGate, engine_config, greedy, oracle
from tests.builders.fake_engine import short_endpoint
from tests.builders.linked_engine import linked_engine
from tests.builders.wire_client import WireClient

ONE = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}


def long_steps_config() -> EngineConfig:
    return engine_config(
        blocks=8192,
        max_model_len=30_000,
        step_tokens=20_000,
        limits=LimitsConfig(missed_heartbeats=1000),
    )


def test_clients_are_answered_while_core_is_in_a_step_and_the_link_is_full() -> None:
    gate = StepGate()
    prompt = [number % 200 for number in range(20_000)]
    config = long_steps_config()
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


def test_what_core_leaves_unread_is_bounded_and_what_was_taken_in_is_not_lost() -> None:
    gate, limit = StepGate(), 50_000
    prompts = {number: [number, *range(200), *[9] * 9800] for number in range(10, 30)}
    with short_endpoint() as endpoint:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        with (
            linked_engine(folder, long_steps_config(), gate, max_unsent_bytes=limit) as served,
            WireClient(served[0].endpoint) as asker,
            WireClient(served[0].endpoint) as other,
        ):
            unsent = served[1]._frames
            asker.send("generate", 1, tokens=[1, 2], sampling=ONE)
            gate.reached()
            for number, prompt in prompts.items():
                asker.send("generate", number, tokens=prompt, sampling=ONE)
            refused = {}
            while max(prompts) not in refused:  # until the last one has been looked at
                reply = asker.receive()
                assert (reply["code"], reply["retryable"]) == ("overloaded", True)
                assert reply["details"]["allowed_bytes"] == limit
                refused[reply["id"]] = reply
            taken = sorted(prompts.keys() - refused.keys())
            assert list(refused) == list(range(len(taken) + 10, 30))  # all since the first one
            # One prompt more than the limit, and what was taken in before the link knew.
            before = unsent.num_unsent_bytes
            assert limit < before < limit + 65_536 + 11_000
            assert other.call("ping", 1)["t"] == "result"
            assert other.call("list", 2)["code"] == "overloaded"
            for number in range(100, 150):
                assert asker.call("cancel", number, request=taken[-1])["value"] == {"found": True}
            assert before < unsent.num_unsent_bytes < before + 100  # core is told of it once
            gate.open()
            ended = {}
            while len(ended) < len(taken) + 1:
                reply = asker.receive()
                ended[reply["id"]] = reply
            assert ended.pop(taken[-1])["code"] == "turn_cancelled"
            assert ended.pop(1)["tokens"] == oracle([1, 2], greedy(1))
            for number, reply in ended.items():
                assert reply["tokens"] == oracle(prompts[number], greedy(1))
            assert not unsent.num_unsent_bytes
            again = asker.call("generate", 29, tokens=prompts[29], sampling=ONE)
            assert again["tokens"] == oracle(prompts[29], greedy(1))
            assert other.call("list", 3)["t"] == "result"
