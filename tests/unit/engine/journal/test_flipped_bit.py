"""The journal's reader does not confuse a flipped bit and a torn write."""

from __future__ import annotations

import random

import pytest
from crc32c import crc32c

from engine.journal.bit_flip import byte_with_bit_off, has_unwritten_sector, is_in_empty_sector, with_one_bit_turned


@pytest.mark.parametrize("size", [1, 2, 44, 511, 4096])
def test_any_one_bit_is_found_and_two_are_not(size: int) -> None:
    generator = random.Random(size)
    content = generator.randbytes(size)
    crc = crc32c(content)
    for bit in {0, 7, 8 * size - 1, generator.randrange(8 * size)}:
        turned = bytearray(content)
        turned[bit // 8] ^= 1 << bit % 8
        assert byte_with_bit_off(turned, crc) == bit // 8
        other = (bit + 5) % (8 * size)
        turned[other // 8] ^= 1 << other % 8
        assert byte_with_bit_off(turned, crc) is None
    assert byte_with_bit_off(content, crc) is None


def test_every_bit_is_turned_once() -> None:
    turned = list(with_one_bit_turned(b"ab"))
    assert len(set(turned)) == 16
    assert all((int.from_bytes(each) ^ int.from_bytes(b"ab")).bit_count() == 1 for each in turned)


def test_a_sector_of_zeros_is_unwritten() -> None:
    assert has_unwritten_sector(b"x" * 512 + bytes(512) + b"x")
    assert not has_unwritten_sector(b"x" * 512 + bytes(511))
    assert not has_unwritten_sector(b"x" * 100 + bytes(512) + b"x" * 412)


def test_a_last_sector_that_may_not_have_been_written_is_told_from_one_that_was() -> None:
    content = b"x" * 512 + b"\0" * 3
    assert [is_in_empty_sector(content, at) for at in (0, 511, 512, 514)] == [False, False, True, True]
    assert not is_in_empty_sector(b"x" * 512 + b"\0\1", 512)
