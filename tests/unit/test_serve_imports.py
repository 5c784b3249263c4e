from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import {module}
print([name for name in {names} if name in sys.modules])
"""
AT_ONCE = ("numpy", "torch")
NOT_THE_FRONTS = (*AT_ONCE, "lmdb", "transformers", "triton", "xxhash", "rich", "asyncio")


@pytest.mark.parametrize(
    ("module", "names"),
    [("sessionkv.actor.serve", AT_ONCE), ("sessionkv.actor.front_main", NOT_THE_FRONTS)],
)
def test_what_a_process_loads_at_its_start(module: str, names: tuple[str, ...]) -> None:
    """``run_serve`` says how threads wait and how many OpenBLAS starts, before they look.

    The front's process is for sockets and text: it takes no memory for anything else.
    """
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module, names=names)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.strip() == "[]"
