import io
import re

import pytest
from rich.console import Console

from sessionkv.cli import output
from sessionkv.cli.progress import StartProgress


def test_each_stage_of_a_start_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(output, "stderr", lambda: console)
    with StartProgress() as progress:
        progress.update({"stage": "load", "done": 1, "total": 1, "unit": "steps"})
        for done in (0, 30, 69):
            progress.update({"stage": "graphs", "done": done, "total": 69, "unit": "steps"})
    plain = re.sub(r"\x1b\[[?\d;]*\w", "", shown.getvalue())
    last = [line for line in plain.splitlines() if line.strip()][-2:]
    assert [line.split()[0] for line in last] == ["load", "graphs"]
    assert "69 of 69" in last[1]


def test_nothing_is_shown_off_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(output, "stderr", lambda: Console(file=shown))
    with StartProgress() as progress:
        progress.update({"stage": "graphs", "done": 1, "total": 2, "unit": "steps"})
    assert shown.getvalue().strip() == ""
