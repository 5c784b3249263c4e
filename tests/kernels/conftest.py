"""Kernels run natively where there is a CUDA device, elsewhere under Triton's interpreter.

A test that takes ``device`` runs on both: on the CPU through the interpreter and, marked ``gpu``,
on the device. Triton reads the variable when it is first imported, so it is set before.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where to run. Without a CUDA device the tests marked ``gpu`` are skipped."""
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled for the device here, not interpreted")
    return torch.device("cpu") if request.param == "cpu" else torch.device("cuda", 0)
