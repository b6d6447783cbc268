"""GF(256) with the polynomial 0x11d, and the parity of a chunk, in plain Python; nothing here is the product's code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

_POLYNOMIAL: Final = 0x11D
Matrix = list[list[int]]


def multiplied(one: int, other: int) -> int:
    """Return the product of two elements: bit by bit, reduced as it grows."""
    product = 0
    while other:
        if other & 1:
            product ^= one
        one <<= 1
        if one & 0x100:
            one ^= _POLYNOMIAL
        other >>= 1
    return product


@cache
def inverted(element: int) -> int:
    """Return the element that gives 1 with this one."""
    (found,) = (other for other in range(1, 256) if multiplied(element, other) == 1)
    return found


@cache
def _times(factor: int) -> bytes:
    return bytes(multiplied(factor, element) for element in range(256))


def scaled(content: bytes, factor: int) -> bytes:
    """Return each byte times a factor."""
    return content.translate(_times(factor))


def added(parts: Sequence[bytes]) -> bytes:
    """Return the sum of byte strings; a short one counts as if zeros followed."""
    total = 0
    for part in parts:
        total ^= int.from_bytes(part, "little")
    return total.to_bytes(max(map(len, parts)), "little")


def coefficient(data: int, row: int, column: int) -> int:
    """Return the coefficient of a data shard in a parity shard: Cauchy, each row scaled so that it begins with 1."""
    x = data + row
    return multiplied(x, inverted(x ^ column))


def parity_of(shards: Sequence[bytes], data: int, parity: int) -> list[bytes]:
    """Return the parity shards of those data shards that exist."""
    return [
        added([scaled(shard, coefficient(data, row, column)) for column, shard in enumerate(shards)])
        for row in range(parity)
    ]


def is_invertible(matrix: Matrix) -> bool:
    """Return True if the rows are independent: elimination by Gauss."""
    rows = [list(row) for row in matrix]
    for column in range(len(rows)):
        pivot = next((i for i in range(column, len(rows)) if rows[i][column]), None)
        if pivot is None:
            return False
        rows[column], rows[pivot] = rows[pivot], rows[column]
        factor = inverted(rows[column][column])
        rows[column] = [multiplied(factor, value) for value in rows[column]]
        for i in range(column + 1, len(rows)):
            factor = rows[i][column]
            rows[i] = [value ^ multiplied(factor, lead) for value, lead in zip(rows[i], rows[column], strict=True)]
    return True
