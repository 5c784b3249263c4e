"""Progress bars for what takes long while an engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from sessionkv.cli import output


class _Amount(ProgressColumn):
    """``12.0 MiB of 98.7 MiB`` for bytes, counts for the rest."""

    def render(self, task: Task) -> Text:
        """The column's text."""
        if task.fields["unit"] == "bytes":
            done, total = output.size(task.completed), output.size(task.total)
        else:
            done, total = f"{task.completed:,.0f}", f"{task.total:,.0f}" if task.total else "-"
        return Text(done if task.total is None else f"{done} of {total}", style="dim")


class StartProgress:
    """Progress bars on standard error, one for each stage of starting; nothing off a terminal.

    ``update`` may be called from any thread, with ``{"stage", "done", "total", "unit"}``.
    """

    def __init__(self) -> None:
        console = output.stderr()
        self._stages: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            _Amount(),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> StartProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, event: Mapping[str, Any]) -> None:
        """Take in one event."""
        stage = str(event["stage"])
        if stage not in self._stages:
            self._stages[stage] = self._progress.add_task(
                stage, total=None, unit=event.get("unit", "")
            )
        self._progress.update(
            self._stages[stage], completed=event.get("done", 0), total=event.get("total")
        )

    def close(self) -> None:
        """Leave the bars as they are and give the terminal back. Idempotent."""
        self._progress.stop()
