import math

import pytest

from sessionkv.types.words import number


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (2, "2"), (2**31 - 1, "2,147,483,647"), (-1e6, "-1,000,000"), (0.01, "0.01"), (1.0, "1"),
        (2.0**60, "1.15292e+18"), (math.inf, "inf"),
    ],
)  # fmt: skip
def test_numbers_are_shown_so_that_they_can_be_read(value: float, shown: str) -> None:
    assert number(value) == shown
