"""Kernels that begin before the one before them has ended (programmatic dependent launch).

Between two kernels that follow each other a GPU does nothing for a moment, and its memory for
longer: the last programs of the one run out, the first of the other have not asked for anything
yet. From compute capability 9.0 on a kernel may be launched so that its programs start as soon as
all of those before it have, and room is left. They do then what does not depend on what came
before, and wait. That is for steps of one row, which are made of such kernels: each one that is
launched as usual behind one of these was measured to begin half a microsecond later than behind
its like.

Invariants of a kernel that is launched so:

- Every program waits, also one that has nothing to do, before it reads what another kernel of the
  step writes, and before it writes anything. A kernel that is waited for has then waited for those
  before it itself, so whoever waits comes behind all of them.
- What it reads before is older than the step: weights, tables of constants, the step's inputs. A
  kernel that is launched as usual comes behind those and before the first of this kind.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

_FIRST_CAPABILITY = (9, 0)


def starts_early(rows: Tensor) -> bool:
    """Whether a kernel over these rows is to be launched so: ``launch_pdl``, and ``EARLY`` inside.

    Under the interpreter, on the CPU, one kernel follows the other.
    """
    return rows.shape[0] == 1 and rows.is_cuda and _is_able(rows.device)


@functools.cache  # asking takes as long as a launch
def _is_able(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


@triton.jit
def let_next_start(EARLY: tl.constexpr) -> None:
    """The next kernel's programs may start when all of this one's have come here, or have ended."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(EARLY: tl.constexpr) -> None:
    """Wait until all kernels before this one have ended and what they wrote can be read."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
