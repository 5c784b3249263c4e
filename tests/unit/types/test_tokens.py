from __future__ import annotations

import pytest

from sessionkv.types import pack_tokens, unpack_tokens


def test_ids_are_four_bytes_each_lowest_first():
    assert pack_tokens([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"
    assert pack_tokens([]) == b""


def test_what_was_packed_comes_back():
    assert unpack_tokens(pack_tokens([0, 7, 2**32 - 1])) == [0, 7, 2**32 - 1]


@pytest.mark.parametrize("wrong", [-1, 2**32, 1.0, "1"])
def test_what_is_no_id_is_refused(wrong):
    with pytest.raises((OverflowError, TypeError)):
        pack_tokens([1, wrong])


def test_half_an_id_is_refused():
    with pytest.raises(ValueError, match="multiple of item size"):
        unpack_tokens(b"\x01\0\0")
