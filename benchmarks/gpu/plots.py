"""Pictures of what was measured: ``python -m benchmarks.gpu.plots [RESULTS] [--to FOLDER]``.

Reads the JSON files of a results folder, of one model, and draws each bound against its figure and
the first tokens as they were sampled. Needs no device.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.gpu.results import rows_of
from benchmarks.report import Row

LEAST_SAMPLES = 5
"""A row of fewer is no distribution."""
MET, MISSED = "#2a7f62", "#c0392b"


@dataclass(frozen=True, slots=True)
class Margin:
    """A row with a bound, as a bar.

    Attributes:
        label: Name, figure and bound.
        ratio: How far it is on the right side: 1 is the bound itself, 2 twice as good.
    """

    label: str
    ratio: float


def load(folder: Path) -> list[Row]:
    """All rows of a results folder, in the order of its files.

    Raises:
        FileNotFoundError: There are none.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise FileNotFoundError(f"no results in {folder}: run benchmarks/gpu/run.sh first")
    stages = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return [row for stage in stages for case in stage.values() for row in rows_of(case)]


def margins(rows: Sequence[Row]) -> list[Margin]:
    """The rows with bounds, the worst first."""
    found = []
    for row in rows:
        if row.bound is None or not row.value or not row.bound[1]:
            continue
        sign, limit = row.bound
        ratio = limit / row.value if sign == "<=" else row.value / limit
        label = f"{row.name}\n{row.value:,.4g} {row.unit}, bound {sign} {limit:,.4g}"
        found.append(Margin(label, ratio))
    return sorted(found, key=lambda margin: margin.ratio)


def draw_margins(found: Sequence[Margin]) -> Figure:
    """One bar for each bound, from the bound to the figure."""
    figure = Figure(figsize=(10, 1.5 + 0.42 * len(found)), layout="constrained")
    axes = figure.subplots()
    places = range(len(found))
    axes.barh(
        places,
        [margin.ratio - 1.0 for margin in found],
        left=1.0,
        color=[MET if margin.ratio >= 1.0 else MISSED for margin in found],
    )
    axes.set_yticks(places, [margin.label for margin in found], fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("times better than the bound")
    axes.xaxis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(mpl.ticker.StrMethodFormatter("{x:g}"))
    return figure


def draw_first_tokens(rows: Sequence[Row]) -> Figure:
    """All samples of each time in milliseconds, where there are enough, and the row's figure."""
    timed = [row for row in rows if row.unit == "ms" and len(row.samples) >= LEAST_SAMPLES]
    figure = Figure(figsize=(10, 1.5 + 0.3 * len(timed)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(reversed(timed)):
        axes.plot(row.samples, [place] * len(row.samples), "|", color="#34495e", alpha=0.5)
        axes.plot([row.value], [place], "o", color=MET if row.met is not False else MISSED)
    axes.set_yticks(range(len(timed)), [row.name for row in reversed(timed)], fontsize=7)
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds: samples, and the figure made of them")
    return figure


def draw(results: Path, folder: Path) -> list[Path]:
    """Draw all of a results folder into another; the pictures.

    Raises:
        FileNotFoundError: There is nothing to draw.
    """
    rows = load(results)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"bounds": draw_margins(margins(rows)), "times": draw_first_tokens(rows)}
    paths = []
    for name, figure in pictures.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def main() -> None:
    """Draw and say where."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="?", type=Path, default=Path("build/gpu/8b"))
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="default: beside the results")
    args = parser.parse_args()
    try:
        paths = draw(args.results, args.to or args.results / "plots")
    except FileNotFoundError as error:
        parser.error(str(error))
    print(*paths, sep="\n")


if __name__ == "__main__":
    main()
