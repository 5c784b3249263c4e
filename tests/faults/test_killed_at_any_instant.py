"""SIGKILL at any instant: what was acknowledged is there, repeats are replays, nothing grows."""

from __future__ import annotations

from pathlib import Path

from tests.builders.kills import kill_engines


def test_fifty_kills(tmp_path: Path) -> None:
    tally = kill_engines(tmp_path, 50, seed=1, workers=2, load_s=0.08)
    assert tally.kills == 50
    # Each kind of check has really been made.
    assert tally.total("acknowledged") > 100
    assert tally.total("sessions_checked") > 50
    assert tally.total("replayed_acknowledged") > 50
    assert tally.total("repeated_unanswered") > 10
    assert tally.total("committed_unanswered") > 0
    assert {"load", "start", "rest"} <= set(tally.instants)
    assert sum(instant.startswith("gate ") for instant in tally.instants) > 4
