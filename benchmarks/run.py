"""``python -m benchmarks.run [--only NAME ...]``: measure, print a table, keep the JSON.

Exit code 1 when a bound is not met. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from benchmarks.report import Options, Row, as_json, as_table, environment

NAMES = (
    "client_import", "sockets", "core", "text", "cache_match", "next_turn", "decode", "restart",
    "shared_prefix", "http",
)  # fmt: skip


def main() -> int:
    """Run the benchmarks that were asked for, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--model", default=Options().model)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    args = parser.parse_args()
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in args.only}
    if args.list:
        for name, module in modules.items():
            print(f"{name:16}{module.ABOUT}")
        return 0
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for the processes that are started
    options = Options(args.model, args.repeats, args.threads)
    results: dict[str, list[Row]] = {}
    print(" · ".join(f"{key}: {value}" for key, value in environment().items()))
    for name, module in modules.items():
        print(f"\n### {name}: {module.ABOUT}\n", flush=True)
        results[name] = module.measure(options)
        print(as_table(results[name]), flush=True)
    if args.json:
        args.json.write_text(as_json(results) + "\n")
    return 1 if any(row.met is False for rows in results.values() for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
