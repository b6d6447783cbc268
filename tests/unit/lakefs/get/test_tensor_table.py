"""The table of a safetensors file: the orders in which loaders take tensors; empty for any other file."""

from __future__ import annotations

import json
import re
import struct

import pytest
from hypothesis import given, strategies as st

from lakefs.content.safetensors import header_bytes, parse_header
from lakefs.get.tensor_table import natural_key, tensor_table

LENGTH = 100


def head(members: dict[str, tuple[int, int]]) -> bytes:
    """Return a header of 8-bit tensors."""
    text = json.dumps(
        {
            name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
            for name, (begin, end) in members.items()
        }
    ).encode()
    return struct.pack("<Q", len(text)) + text


def at(*places: int) -> list[tuple[int, int]]:
    """Return tensors of one length at such places of a file."""
    return [(LENGTH * place, LENGTH * (place + 1)) for place in places]


def test_orders_are_those_of_names_of_names_with_numbers_and_of_the_header() -> None:
    prefix = head(dict(zip(["layer.10", "layer.2", "layer.1"], at(1, 0, 2), strict=True)))
    table = tensor_table(prefix, len(prefix) + 3 * LENGTH)
    assert table is not None
    assert list(table.begins) == [len(prefix) + LENGTH * place for place in range(3)]
    # In the file: 2, 10, 1.  By name: 1, 10, 2.  By number: 1, 2, 10.  In the header: 10, 2, 1.
    assert [list(order.sequence) for order in table.orders] == [[2, 1, 0], [2, 0, 1], [1, 0, 2]]


def test_a_file_in_the_order_of_its_names_has_no_other_order() -> None:
    prefix = head(dict(zip("abc", at(0, 1, 2), strict=True)))
    table = tensor_table(prefix, len(prefix) + 3 * LENGTH)
    assert table is not None
    assert not table.orders


def test_empty_tensors_and_metadata_are_left_out() -> None:
    prefix = head({"b": (0, LENGTH), "none": (LENGTH, LENGTH), "a": (LENGTH, 2 * LENGTH)})
    text = b'{"__metadata__":{"x":"y"},' + prefix[9:]
    prefix = struct.pack("<Q", len(text)) + text
    table = tensor_table(prefix, len(prefix) + 2 * LENGTH)
    assert table is not None
    assert [list(order.sequence) for order in table.orders] == [[1, 0]]


@pytest.mark.parametrize(
    "prefix",
    [
        bytes(64),
        struct.pack("<Q", 20) + b"{" * 20,
        struct.pack("<Q", 1 << 60) + b"{}",
        head({"a": (0, LENGTH), "b": (0, LENGTH)}),
        head({"a": (0, LENGTH)})[:-1] + b" ",
    ],
)
def test_what_is_no_sound_file_has_no_table(prefix: bytes) -> None:
    assert tensor_table(prefix, len(prefix) + 2 * LENGTH) is None


@given(st.lists(st.text("a.01239_").map(str.encode), unique=True))
def test_names_are_sorted_with_their_numbers_as_numbers(names: list[bytes]) -> None:
    def key(name: bytes) -> list[tuple[int, bytes]]:
        parts = re.split(rb"([0-9]+)", name)
        return [(int(part), b"") if index % 2 else (0, part) for index, part in enumerate(parts)]

    assert [key(name) for name in sorted(names, key=natural_key)] == [key(name) for name in sorted(names, key=key)]


@given(st.integers(0, 400), st.integers(0, 255))
def test_there_is_a_table_of_every_sound_header_and_of_no_other(place: int, byte: int) -> None:
    prefix = bytearray(head(dict(zip(["b", "a", "c"], at(2, 0, 1), strict=True))))
    prefix[place % len(prefix)] = byte
    size = len(prefix) + 3 * LENGTH
    needed = header_bytes(prefix, size)
    if needed is None or needed <= len(prefix):
        table = tensor_table(prefix, size)
        assert (table is None) == (parse_header(prefix, size) is None)
        assert table is None or sum(table.ends) - sum(table.begins) == 3 * LENGTH
