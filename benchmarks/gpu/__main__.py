"""``python -m benchmarks.gpu``: the engine on a device, end to end, through its socket.

In stages, each with a JSON file in the results folder. A second run goes on where the first one
ended. Exit code 1 when something failed or a bound is not met. Draws what was measured, beside the
results, where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.machine import describe
from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.results import Results
from benchmarks.gpu.setting import Setting, in_child
from benchmarks.gpu.stages import STAGES, run_stage
from benchmarks.report import as_json, as_table, environment

FAST = Path("/dev/shm")
ROOM_BYTES = 20 * 2**30
"""For all models."""


def main() -> int:
    """Run the stages that were asked for, print the tables and write the JSON."""
    args = _arguments()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sessionkv-stores-", dir=args.disk) as disk:
        setting = Setting(
            model=args.model,
            work=args.work,
            disk=Path(disk),
            device=args.device,
            step_tokens=args.step_tokens,
            deadline_s=began + args.budget_s,
        )
        if args.list:
            return _list(setting)
        about = environment() | ({} if args.model == "tiny" else in_child(describe))
        about |= {"commit": args.commit} if args.commit else {}
        print(" · ".join(f"{key}: {value}" for key, value in about.items()), flush=True)
        results = Results(
            args.results / args.model,
            setting,
            only=args.only,
            again=args.again,
            commit=about["commit"],
        )
        for name, stage in STAGES.items():
            run_stage(name, stage, setting, results)
    rows = results.rows()
    for name in STAGES:
        if name in rows:
            print(f"\n## {name}: {STAGES[name].about}\n\n{as_table(rows[name])}")
    if args.json:
        whole = json.loads(as_json({**rows})) | {"environment": about}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    for name, words in results.failed.items():
        print(f"FAILED {name}: {words[:300]}")
    if results.left:
        print(f"no time for: {', '.join(results.left)}")
    print(f"{time.monotonic() - began:.0f} s in all")
    if rows and find_spec("matplotlib"):
        plots = import_module("benchmarks.gpu.plots")
        folder = args.results / args.model
        print(*plots.draw(folder, folder / "plots"), sep="\n")
    missed = any(row.met is False for part in rows.values() for row in part)
    return 1 if missed or results.failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="stages or cases")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--model", choices=SHAPES, default="8b")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--results", type=Path, default=Path("build/gpu"), metavar="DIR")
    parser.add_argument("--again", action="store_true", help="also what was measured before")
    parser.add_argument("--budget-s", type=float, default=float("inf"), metavar="N")
    parser.add_argument("--commit", metavar="TEXT", help="where there is no git to ask")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--step-tokens", type=int, metavar="N", help="scheduler.step_tokens")
    parser.add_argument("--work", type=Path, default=_work(), metavar="DIR", help="for models")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="for stores")
    args = parser.parse_args()
    setting = Setting(args.model, args.work, args.work)
    known = {name for stage in STAGES.values() for name in stage.cases(setting)} | set(STAGES)
    if unknown := set(args.only) - known:
        parser.error(f"no stage or case is called {', '.join(sorted(unknown))}; see --list")
    return args


def _work() -> Path:
    """Memory, where there is room for the models or an earlier run has put them; else the disk."""
    name = f"sessionkv-models-{os.getuid()}"
    if (FAST / name).is_dir():
        return FAST / name
    is_large = FAST.is_dir() and shutil.disk_usage(FAST).free >= ROOM_BYTES
    return (FAST if is_large else Path(tempfile.gettempdir())) / name


def _list(setting: Setting) -> int:
    for name, stage in STAGES.items():
        print(f"{name:12}{stage.about}")
        print(f"{'':12}{' '.join(stage.cases(setting))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
