"""A thousand random turns over all kinds of tokenizers: log and KV are what was sampled."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import text as built
from tests.builders.drift import PROBE, Drifter, Planned
from tests.builders.engine import BLOCK_SIZE, engine_config, open_engine, oracle
from tests.builders.store import memory_store

TURNS = 200
SYSTEMS = {"mistral": [None]}


@pytest.fixture
def store() -> Iterator[Path]:
    with memory_store() as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["chatml", "chatml_words", "llama3", "mistral", "gemma"])
def test_two_hundred_random_turns_and_a_restart(name: str, store: Path, tmp_path: Path) -> None:
    text = built.ALL[name]()
    folder = tmp_path / "text"
    folder.mkdir()
    built.write_folder(name, folder)
    rng = random.Random(f"drift {name}")
    planned = Planned(text.vocab_size, rng)
    config = engine_config(store, blocks=4096, disk_bytes=200_000_000)
    runner = {"text_dir": folder, "script": planned}
    drifter = None
    while drifter is None or drifter.num_turns < TURNS:
        with open_engine(config, runner=runner) as engine:
            if drifter is None:
                drifter = Drifter(
                    engine, text, planned, rng,
                    oracle=lambda ids: oracle(ids, PROBE, vocab_size=text.vocab_size),
                    systems=SYSTEMS.get(name, [None, "Be brief.", "Say <|im_end|>é."]),
                    block_size=BLOCK_SIZE,
                )  # fmt: skip
            drifter.engine = engine
            for conversation in drifter.conversations:
                conversation.session = engine.session(conversation.session.name)
            half = drifter.num_turns + TURNS // 2
            while drifter.num_turns < half:
                drifter.step()
            engine.assert_ledger()
    ways = {"length", "end token", "stop string", "stop id", "cancelled", "dropped"}
    assert set(drifter.ends) == ways, drifter.ends
