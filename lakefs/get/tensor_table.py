"""The table of a safetensors file, for readers that take tensor by tensor; `lakefs.get.range_orders` follows them.

Loaders take tensors in the order of the file, in the order of the header, by name in byte order (the order in which the
format's own library returns keys: layers 1, 10, 11, 2), or by name with numbers as numbers (layers 1, 2, 10, 11).
"""

from __future__ import annotations

import re
from typing import Final

from lakefs.content.safetensors import parse_table
from lakefs.get.range_orders import RangeTable
from lakefs.ids import Buffer

_NUMBERS: Final = re.compile(rb"([0-9]++)")


def tensor_table(prefix: Buffer, file_bytes: int) -> RangeTable | None:
    """Return the table of a file's tensors that are not empty; None when it is no sound safetensors file.

    `prefix` as for `lakefs.content.safetensors.parse_header`.  Takes some 10 us a tensor.
    """
    found = parse_table(prefix, file_bytes)
    if found is None:
        return None
    tensors = [
        (begin, end - begin, name)
        for begin, end, name in zip(found.begins, found.ends, found.names, strict=True)
        if end > begin
    ]
    in_file = sorted(range(len(tensors)), key=lambda index: tensors[index][0])
    numbers = {index: number for number, index in enumerate(in_file)}
    names = [tensors[index][2] for index in in_file]
    by_name = sorted(range(len(names)), key=names.__getitem__)
    by_number = sorted(range(len(names)), key=lambda number: natural_key(names[number]))
    in_header = [numbers[index] for index in range(len(tensors))]
    extents = [tensors[index][:2] for index in in_file]
    return RangeTable(extents, (by_name, by_number, in_header))


def natural_key(name: bytes) -> list[tuple[int, bytes]]:
    """Return a sort key of a name that compares the numbers in it as numbers, of any length."""
    key: list[tuple[int, bytes]] = []
    for position, part in enumerate(_NUMBERS.split(name)):
        digits = part.lstrip(b"0") if position % 2 else part
        key.append((len(digits) if position % 2 else 0, digits))
    return key
