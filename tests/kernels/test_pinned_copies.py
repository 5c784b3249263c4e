from __future__ import annotations

import pytest
import torch

from sessionkv.kernels.pinned_copies import copy_pinned


def host(count: int, device: torch.device) -> torch.Tensor:
    """Pinned where there is a device to reach it; every word another one."""
    words = torch.arange(1, count + 1, dtype=torch.int32)
    return words.pin_memory() if device.type == "cuda" else words


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 2500])
def test_words_go_to_the_device_and_back(device: torch.device, count: int) -> None:
    there = torch.zeros(count + 4, dtype=torch.int32, device=device)
    source, back = host(count, device), host(count + 4, device)
    copy_pinned(there[:count], source)
    copy_pinned(back, there)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert back.tolist() == [*range(1, count + 1), 0, 0, 0, 0]


def test_any_dtype_and_shape_is_copied_as_it_is(device: torch.device) -> None:
    source = torch.randn(3, 8).to(torch.float16)
    source = source.pin_memory() if device.type == "cuda" else source
    there = torch.zeros(48, dtype=torch.uint8, device=device)
    copy_pinned(there, source)
    assert torch.equal(there.cpu().view(torch.float16).view(3, 8), source)


def test_what_does_not_fit_is_refused() -> None:
    words = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="16 bytes cannot be copied to 12"):
        copy_pinned(words[:3], words)
    with pytest.raises(ValueError, match="in words"):
        copy_pinned(torch.zeros(3, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="source has strides"):
        copy_pinned(words[:2], words[::2])
    with pytest.raises(
        ValueError, match=r"target is at 0x[0-9a-f]+4; it must be aligned to 16 bytes"
    ):
        copy_pinned(words[1:], words[:3])
    with pytest.raises(ValueError, match="source is at 0x"):
        copy_pinned(words[:2], words[2:])
