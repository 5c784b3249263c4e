"""Which device computes."""

from __future__ import annotations

import torch

from sessionkv.errors import ConfigError


def pick_device(asked: str) -> torch.device:
    """The device to compute on.

    Raises:
        ConfigError: A GPU was asked for that torch cannot use.
    """
    count = torch.cuda.device_count() if asked != "cpu" and torch.cuda.is_available() else 0
    if asked == "cpu" or (asked == "auto" and not count):
        return torch.device("cpu")
    device = torch.device("cuda", 0) if asked in ("auto", "cuda") else torch.device(asked)
    if device.index >= count:
        raise ConfigError("device", asked, f"a GPU that torch can use; it sees {count}")
    return device
