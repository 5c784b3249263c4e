"""With ``TRITON_DEBUG=1`` kernels check what lies on the device before they form an address.

The interpreter does not read the variable; its own switch is turned here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.builders.indexed import INDEXED

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 100


@pytest.mark.parametrize("name", INDEXED)
def test_a_wrong_index_is_told_before_it_is_used(name: str, interpreted_index_checks: None) -> None:
    indexed = INDEXED[name]
    for index in indexed.good:
        indexed.launch(index, CPU)
    for index in indexed.bad:
        with pytest.raises(Exception, match=f"AssertionError.*{indexed.message}"):
            indexed.launch(index, CPU)


@pytest.mark.gpu
def test_a_wrong_index_is_told_natively() -> None:
    """Each in a process of its own, as a failed check leaves the device unusable to it."""
    environment = {**os.environ, "TRITON_DEBUG": "1"}
    children = {
        name: subprocess.Popen(
            [sys.executable, "-m", "tests.builders.indexed", name],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in INDEXED
    }
    told = {name: child.communicate(timeout=TIMEOUT_S)[0] for name, child in children.items()}
    for name, child in children.items():
        assert "all is well so far" in told[name], (name, told[name])
        assert child.returncode, name
        assert re.search(f"Assertion `({INDEXED[name].message})", told[name]), (name, told[name])
