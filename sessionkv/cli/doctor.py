"""``sessionkv doctor``: this machine, the model on it, the store and the socket; what is wrong.

Looks only. The model's files are looked at as ``serve --offline`` would: nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict

from sessionkv.cli import output
from sessionkv.cli.doctor_checks import (
    Finding,
    check_engine,
    check_gpu,
    check_libraries,
    check_machine,
    check_model,
    check_store,
    usable_gpus,
)
from sessionkv.cli.settings import config_from


def run(args: argparse.Namespace) -> int:
    """Print what was found; 1 when something is wrong."""
    config = config_from(args)
    gpus = usable_gpus(config)
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        check_machine,
        check_libraries,
        lambda: check_gpu(config, gpus),
        lambda: check_model(config, gpus),
        lambda: check_store(config),
        lambda: check_engine(args.endpoint),
    )
    findings = [finding for check in checks for finding in check()]
    problems = [finding for finding in findings if finding.advice]
    if args.json:
        output.print_json([asdict(finding) for finding in findings])
        return 1 if problems else 0
    console = output.stdout()
    console.print(output.table(("", ""), ((f.topic, f.text) for f in findings)))
    console.print()
    for finding in problems:
        console.print(f"{finding.topic}: {finding.text}", style="bold", markup=False)
        console.print(f"  {finding.advice}", markup=False)
    if not problems:
        console.print("nothing is wrong")
    return 1 if problems else 0
