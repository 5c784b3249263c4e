"""Kernels run natively where there is a CUDA device, elsewhere under Triton's interpreter.

A test that takes ``device`` runs on both: on the CPU through the interpreter and, marked ``gpu``,
on the device. Triton reads the variable when it is first imported, so it is set before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

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


@pytest.fixture
def interpreted_index_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels check their indices, as natively with ``TRITON_DEBUG=1``; skips on a device."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the device here, not interpreted")
    _turn_on_index_checks(monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def index_checks_as_asked() -> Iterator[None]:
    """Let the interpreter obey ``TRITON_DEBUG``, which it does not of its own."""
    from triton import knobs

    with pytest.MonkeyPatch.context() as monkeypatch:
        if knobs.runtime.debug and knobs.runtime.interpret:
            _turn_on_index_checks(monkeypatch)
        yield


def _turn_on_index_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    options = interpreter.InterpreterOptions(debug=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
