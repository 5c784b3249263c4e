"""Whatever happens to a store's files: nothing wrong is served, and no signal ends the process."""

from __future__ import annotations

from tests.builders.harm import HARMS
from tests.builders.integrity import harm_engine, harm_journal, harm_store


def test_harmed_block_stores() -> None:
    outcome = harm_store(300, seed=1)
    assert outcome.trials.keys() == HARMS.keys()
    assert sum(outcome.trials.values()) == 300
    # Harm is noticed, and does not spoil what it did not touch.
    assert outcome.bad > 100
    assert outcome.served > 3000


def test_engines_over_harmed_blocks_answer_as_cold_ones() -> None:
    outcome = harm_engine(6, seed=2)
    assert outcome.served > 100
    assert outcome.bad > 0


def test_engines_over_harmed_journals_invent_nothing() -> None:
    outcome = harm_journal(6, seed=2)
    assert outcome.served > 10
    assert outcome.absent > 0
