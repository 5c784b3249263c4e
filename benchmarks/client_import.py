"""How long `import sessionkv` takes, and what a client process weighs."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.report import ROOT, Options, Row, median_row

ABOUT = "import time and memory of a client process"
_IMPORT = """
import time
start = time.perf_counter()
import sessionkv
print((time.perf_counter() - start) * 1000)
"""
_CLIENT = """
import time
start = time.perf_counter()
from sessionkv import Client, AsyncClient, SamplingParams, launch
print((time.perf_counter() - start) * 1000)
"""
_MEMORY = """
from sessionkv import Client, launch
with launch("checksum") as engine:
    session = engine.client().open("s")
    for _ in range(20):
        session.turn("hello", sampling=__import__("sessionkv").SamplingParams(max_tokens=8))
    status = open("/proc/self/status").read()
print(int(status.split("VmRSS:")[1].split()[0]) / 1024)
"""


def _printed(code: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def measure(options: Options) -> list[Row]:
    """Each sample is a new process; the first one warms the file cache and does not count."""
    rows = []
    for name, code, unit, bound in (
        ("import sessionkv", _IMPORT, "ms", 100.0),
        ("import client, launch and sampling", _CLIENT, "ms", 100.0),
        ("RSS of a client after 20 turns", _MEMORY, "MiB", 60.0),
    ):
        _printed(code)
        samples = [_printed(code) for _ in range(options.repeats)]
        rows.append(median_row(name, samples, unit, bound=("<=", bound)))
    return rows
