"""The floor under a turn is measured between two processes, of which one may die."""

from __future__ import annotations

import sys

import pytest

from benchmarks import echo


def test_times_of_another_process_that_answers() -> None:
    assert len(echo.echo_times_us(3, request_bytes=100, answer_bytes=10)) == 3


def test_one_that_has_died_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo, "PATIENCE_S", 0.05)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(TimeoutError, match="has not answered"):
        echo.echo_times_us(1, request_bytes=1, answer_bytes=1)
