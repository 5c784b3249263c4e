from __future__ import annotations

import pytest

from sessionkv.kernels.philox import philox4x32, random_bits

# Known answers that come with the authors' own code, Random123: zeros, ones and digits of pi.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == expected


def test_a_draw_is_the_upper_bits_of_the_first_two_words() -> None:
    assert random_bits(0, 0) == 0xE169C58D6627E8D5 >> 11
    assert random_bits(2**64 - 1, 2**64 - 1) < 2**53


def test_every_bit_of_seed_and_index_counts() -> None:
    draws = {random_bits(1 << bit, 0) for bit in range(64)}
    draws |= {random_bits(0, 1 << bit) for bit in range(64)}
    assert len(draws | {random_bits(0, 0)}) == 129
