"""``python -m benchmarks.store [--only PART ...] [--json FILE]``: measure, print tables, keep JSON.

Exit code 1 when a bound is not met. Run it on an otherwise idle machine; it takes up to 6 GiB of
disk, given back at the end.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Row, as_json, as_table, environment
from benchmarks.store import checksum, index, journal, layout, planner, restore
from benchmarks.store.options import StoreOptions
from benchmarks.store.shapes import GEOMETRIES

PARTS: dict[str, tuple[str, Callable[[StoreOptions], list[Row]]]] = {
    "layout": (layout.ABOUT, layout.measure),
    "values": ("values inside LMDB against segment files, by turns", layout.measure_values),
    "checksum": (checksum.ABOUT, checksum.measure),
    "restore": (restore.ABOUT, restore.measure),
    "index": (index.ABOUT, index.measure),
    "journal": (journal.ABOUT, journal.measure),
    "planner": (planner.ABOUT, planner.measure),
}


def main() -> int:
    """Run the parts that were asked for, one after the other."""
    default = StoreOptions()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--sizes", nargs="+", type=int, choices=GEOMETRIES, metavar="KIB")
    parser.add_argument("--repeats", type=int, default=default.repeats)
    parser.add_argument("--store-mib", type=int, default=default.store_bytes // 2**20)
    parser.add_argument("--restore-blocks", type=int, default=default.restore_blocks)
    parser.add_argument("--index-blocks", type=int, default=default.index_blocks)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    args = parser.parse_args()
    options = StoreOptions(
        repeats=args.repeats,
        sizes_kib=tuple(args.sizes or default.sizes_kib),
        store_bytes=args.store_mib * 2**20,
        restore_blocks=args.restore_blocks,
        index_blocks=args.index_blocks,
        folder=args.dir,
    )
    results: dict[str, list[Row]] = {}
    print(" · ".join(f"{key}: {value}" for key, value in environment().items()))
    for name in args.only:
        about, measure = PARTS[name]
        print(f"\n### {name}: {about}\n", flush=True)
        results[name] = measure(options)
        print(as_table(results[name]), flush=True)
    if args.json:
        args.json.write_text(as_json(dict(results)) + "\n")
    return 1 if any(row.met is False for rows in results.values() for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
