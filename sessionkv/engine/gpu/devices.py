"""Which device computes, and what there is of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sessionkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that torch can use.

    Attributes:
        free_bytes: Of its memory, what no process holds.
    """

    name: str
    free_bytes: int
    total_bytes: int


def find_gpus() -> list[Gpu]:
    """Those that torch can use, in its order. Makes a context on each, which takes a moment."""
    gpus = []
    for index in range(count_gpus()):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), free, total))
    return gpus


def count_gpus() -> int:
    """How many GPUs torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pick_device(asked: str, num_gpus: int) -> torch.device:
    """The device to compute on.

    Args:
        asked: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        num_gpus: How many torch can use.

    Raises:
        ConfigError: A GPU was asked for that is not there.
    """
    if asked == "cpu" or (asked == "auto" and not num_gpus):
        return torch.device("cpu")
    device = torch.device("cuda", 0) if asked in ("auto", "cuda") else torch.device(asked)
    if device.index >= num_gpus:
        built = "" if torch.version.cuda else ", as it is built without CUDA"
        raise ConfigError(
            "device", asked, f"a GPU that torch can use (it sees {num_gpus}{built}), auto or cpu"
        )
    return device
