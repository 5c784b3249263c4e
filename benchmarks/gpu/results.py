"""What was measured, a file for each stage: written after each case, so that a run can go on later.

A case that is in its stage's file is not measured again unless asked. What a case raises is
printed, and the others go on.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import Setting
from benchmarks.report import Row, as_table


class Results:
    """All stages of one model in one folder.

    Attributes:
        failed: Cases that raised, by name, in words.
        left: Cases that there was no time for.
    """

    def __init__(
        self,
        folder: Path,
        setting: Setting,
        *,
        only: Collection[str] = (),
        again: bool = False,
        commit: str = "unknown",
    ) -> None:
        """Read what is there.

        Args:
            folder: Made where it is missing.
            setting: Its ``known`` rows are filled from what is there, and from what is measured.
            only: Names of cases to measure; none is all.
            again: Measure them also where they are there already.
            commit: Kept with each case.
        """
        self.folder, self._setting = folder, setting
        self._only, self._again, self._commit = set(only), again, commit
        self.failed: dict[str, str] = {}
        self.left: list[str] = []
        self.stages: dict[str, dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.json")):
            self.stages[path.stem] = json.loads(path.read_text(encoding="utf-8"))
            for case in self.stages[path.stem].values():
                setting.known.update({row.name: row for row in rows_of(case)})

    def pending(self, stage: str, names: Collection[str]) -> list[str]:
        """Those of a stage's cases that are to be measured."""
        if self._setting.time_is_up:
            self.left += [name for name in names if self._is_wanted(stage, name)]
            return []
        return [name for name in names if self._is_wanted(stage, name)]

    def measure(self, stage: str, name: str, action: Callable[[], list[Row]]) -> None:
        """Measure one case, print its rows and keep them."""
        if self._setting.time_is_up:
            print(f"\n### {stage}: {name}: no time left", flush=True)
            self.left.append(name)
            return
        print(f"\n### {stage}: {name}", flush=True)
        began = time.monotonic()
        with self.guarded(name):
            rows = action()
            self._keep(stage, name, rows, time.monotonic() - began)

    @contextmanager
    def guarded(self, name: str) -> Any:
        """What is raised inside is printed and counted under a name."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - one failure must not cost the other figures
            traceback.print_exc()
            self.failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name} failed: {self.failed[name][:500]}", flush=True)

    def rows(self) -> dict[str, list[Row]]:
        """All rows of each stage."""
        return {
            stage: [row for case in cases.values() for row in rows_of(case)]
            for stage, cases in self.stages.items()
        }

    def _is_wanted(self, stage: str, name: str) -> bool:
        if self._only and not {stage, name} & self._only:
            return False
        return self._again or name not in self.stages.get(stage, {})

    def _keep(self, stage: str, name: str, rows: list[Row], seconds: float) -> None:
        self._setting.known.update({row.name: row for row in rows})
        cases = self.stages.setdefault(stage, {})
        cases[name] = {
            "commit": self._commit,
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "seconds": round(seconds, 2),
            "rows": [asdict(row) for row in rows],
        }
        draft = self.folder / f".{stage}.draft"
        draft.write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")
        draft.replace(self.folder / f"{stage}.json")
        print(f"{as_table(rows)}\n\n({seconds:.1f} s)", flush=True)


def rows_of(case: dict[str, Any]) -> list[Row]:
    """Rows of one case as they were before they were JSON."""
    rows = []
    for row in case["rows"]:
        bound = None if row["bound"] is None else tuple(row["bound"])
        rows.append(Row(**row | {"bound": bound, "samples": tuple(row["samples"])}))
    return rows
