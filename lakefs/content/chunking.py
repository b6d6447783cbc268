"""Decides where content is cut into chunks.

`docs/format.md`, section Manifest, is normative.  Fixed cuts are every 4 MiB.  A sound safetensors file is cut at its
tensors instead, so that a tensor that did not change gives the same chunks in the next checkpoint.

Rules kept here:
- A plan depends on the first bytes and the length alone: the same file always gets the same blob id.
- Lengths are 1 byte to 4 MiB and sum to the content's length; they are generated, never listed.
- A tensor of 1 MiB or more is cut every 4 MiB from its own start, whatever precedes or follows it.
- Smaller tensors are packed greedily, so the cuts of a run (the smaller ones between two larger) depend on the
  lengths of earlier tensors of the same run, and on nothing else: a changed value moves no cut, a changed shape moves
  cuts up to the run's end, and the next larger tensor stops it.

Number of chunks: a run of n bytes gives at most n / 3 MiB + 1 (two tensors under 1 MiB that do not fit together leave
less than 1 MiB free), a larger tensor of n bytes at most n / 1 MiB; so any file gives at most 2 n / 1 MiB + 1, and
the chunks of the header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from lakefs.content.manifest import CutKind
from lakefs.content.safetensors import (
    LENGTH_BYTES,
    SMALLEST_FILE_BYTES,
    SafetensorsHeader,
    file_bytes,
    header_bytes,
    parse_header,
)
from lakefs.errors import SourceChanged
from lakefs.ids import Buffer
from lakefs.limits import BLOB_BYTES_MAX, CHUNK_BYTES, MIB

LARGE_TENSOR_BYTES: Final = 1 * MIB
"""A tensor of this length or more starts a chunk.  Part of the format."""


@dataclass(frozen=True)
class CutPlan:
    """Cuts of one content of `size_bytes`; `header` is None for fixed cuts."""

    size_bytes: int
    header: SafetensorsHeader | None = None

    @property
    def cut_kind(self) -> CutKind:
        """The cut kind that the manifest records."""
        return CutKind.FIXED if self.header is None else CutKind.SAFETENSORS

    def lengths(self) -> Iterator[int]:
        """Yield the lengths of the chunks in order; each call starts again."""
        return fixed_cuts(self.size_bytes) if self.header is None else _tensor_cuts(self.header)


def fixed_cuts(size_bytes: int) -> Iterator[int]:
    """Yield the lengths of the chunks of `size_bytes` cut every 4 MiB; none for no bytes."""
    assert size_bytes >= 0, "a length is not negative"
    left = size_bytes
    while left > CHUNK_BYTES:
        yield CHUNK_BYTES
        left -= CHUNK_BYTES
    if left:
        yield left


def plan(prefix: Buffer, size_bytes: int) -> CutPlan:
    """Return the cuts of a content of `size_bytes` that begins with `prefix`.

    `prefix` holds at least what `safetensors.header_bytes` asks for: the first 8 bytes, and the whole header if those
    are plausible.  Parsing a header of many MiB takes seconds at worst: call it through `Offload` then.
    """
    return CutPlan(size_bytes, parse_header(prefix, size_bytes))


def plan_file(read_at: Callable[[int, int], bytes], size_bytes: int) -> CutPlan:
    """Return the cuts of a file of `size_bytes`, read with `read_at(offset_bytes, length)`: twice at most.

    The first read is of 9 bytes, the second of a plausible header.  Blocks as `read_at` does, and for the parse.
    SourceChanged if the file is now shorter than `size_bytes`.
    """
    if size_bytes < SMALLEST_FILE_BYTES:
        return CutPlan(size_bytes)
    prefix = _read_exactly(read_at, 0, LENGTH_BYTES + 1)
    needed = header_bytes(prefix, size_bytes)
    if needed is None:
        return CutPlan(size_bytes)
    # The bytes of the first read are kept: a file that changes between the reads must not change the length
    # prefix.
    return plan(prefix + _read_exactly(read_at, len(prefix), needed - len(prefix)), size_bytes)


def plan_growing(read_at: Callable[[int, int], bytes], size_bytes: int) -> CutPlan | None:
    """Return the cuts of a file that is still being written, and has `size_bytes` so far, judged by its beginning.

    The cuts of a safetensors file are those of its header, and hold if the file gets the length that the header
    declares; all others are fixed, up to the longest blob.  None while a plausible header is incomplete.  Blocks like
    `plan_file`.
    """
    fixed = CutPlan(BLOB_BYTES_MAX)
    if size_bytes < SMALLEST_FILE_BYTES:
        return None
    prefix = _read_exactly(read_at, 0, LENGTH_BYTES + 1)
    needed = header_bytes(prefix, BLOB_BYTES_MAX)
    if needed is None:
        return fixed
    if size_bytes < needed:
        return None
    prefix += _read_exactly(read_at, len(prefix), needed - len(prefix))
    declared_bytes = file_bytes(prefix)
    return fixed if declared_bytes is None else plan(prefix, declared_bytes)


def iter_extents(lengths: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of pieces that follow each other from 0."""
    offset_bytes = 0
    for length in lengths:
        yield offset_bytes, length
        offset_bytes += length


def _tensor_cuts(header: SafetensorsHeader) -> Iterator[int]:
    """Yield the lengths of the chunks of a safetensors file."""
    yield from fixed_cuts(header.header_bytes)
    packed_bytes = 0
    for length in header.tensor_lengths:
        large = length >= LARGE_TENSOR_BYTES
        if packed_bytes and (large or packed_bytes + length > CHUNK_BYTES):
            yield packed_bytes
            packed_bytes = 0
        if large:
            yield from fixed_cuts(length)
        else:
            packed_bytes += length
    if packed_bytes:
        yield packed_bytes


def _read_exactly(read_at: Callable[[int, int], bytes], offset_bytes: int, length: int) -> bytes:
    """Return `length` bytes from `offset_bytes`; SourceChanged if the source is now shorter."""
    piece = read_at(offset_bytes, length)
    if len(piece) != length:
        raise SourceChanged(
            f"the source ended at byte {offset_bytes + len(piece)} of {offset_bytes + length} while it was read; "
            "store it again when nothing writes to it"
        )
    return piece
