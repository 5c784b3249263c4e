from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import sessionkv.actor.serve
print([name for name in ("numpy", "torch") if name in sys.modules])
"""


def test_what_looks_at_the_environment_once_is_loaded_after_it_was_set() -> None:
    """``run_serve`` says how threads wait and how many OpenBLAS starts."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "[]"
