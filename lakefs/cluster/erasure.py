"""`ErasureCode`: cuts a chunk into k data shards, makes m parity shards, and makes lost shards anew from any k.

One rule for every length L of a chunk, and the length alone decides:

    s = ceil(L / k), rounded up to a granule, and L at most         bytes of a shard
    j = ceil(L / s)                                                 data shards that exist
    shard i of the data is the chunk's bytes [i s, (i + 1) s)       the last one may be shorter
    shards k to k + m - 1 are the parity: s bytes each

Rules kept here:
- Data shards are plain ranges of the chunk that begin at granules, and are not padded.  So granules, their CRCs and
  ranges of the chunk are those of its shards, and a whole chunk is read without decoding.
- For parity, bytes that a short shard lacks count as zeros.
- The code is maximum distance separable: any j shards make all the others.
- A lone data shard's parity is its copy, so a chunk of up to a granule lies m + 1 times by the same rule.
- Byte n of a shard depends on byte n of others alone, so the same range of j shards makes that range of the others.
- The bytes of parity are a format: they never change.  Arithmetic is that of GF(256) with the polynomial 0x11d, in
  which + is XOR.  The row of parity p has x / (x + i) for data shard i, with x = k + p: a Cauchy matrix, each row
  scaled so that the first column is 1.
- Pure: no I/O, nothing is checked against a hash, and nothing is allocated for shards; the caller passes their memory.

Any thread may call.  The interpreter's lock is released for more than 64 KiB.  The memory of a call must not be used
until it has ended; after an error, what was to be written holds any bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from lakefs.errors import InvalidArgument, StoreUnusable
from lakefs.host.writable_memory import WritableBuffer
from lakefs.ids import Buffer
from lakefs.limits import CHUNK_BYTES, GRANULE_BYTES

if TYPE_CHECKING:
    from lakefs.cluster._erasure import Code
else:
    try:
        from lakefs.cluster._erasure import Code
    except ImportError:  # there was no compiler, or no libisal
        Code = None

PROTECTIONS: Final = ((4, 2), (1, 0), (1, 1), (2, 1), (8, 2))
"""Data and parity shards of the codes that a lake may have."""
TABLES_MAX: Final = 512
"""Tables that a code keeps; enough for all of 8+2, so none is made twice.  From j of the j + 2 shards one of the others
is made, or both: 3 x the sum of C(j + 2, 2) for j = 2 to 8, 483.  Each has at most 512 bytes."""


class ErasureCode:
    """One of `PROTECTIONS`.  Shards are numbered: 0 to `data` - 1 the data, then the parity.

    Lengths are those of chunks, 1 to CHUNK_BYTES; an empty chunk is stored nowhere.  InvalidArgument for others.
    """

    def __init__(self, data: int, parity: int) -> None:
        """InvalidArgument for other codes; StoreUnusable if the native module was not built or lacks its library."""
        if (data, parity) not in PROTECTIONS:
            known = ", ".join(f"{k}+{m}" for k, m in PROTECTIONS)
            raise InvalidArgument(f"protection is {data}+{parity}; it is one of {known}")
        if Code is None:
            raise StoreUnusable(
                "the native module lakefs.cluster._erasure is not built, or its library is gone; install libisal, a C "
                "compiler and Python's headers (libisal-dev, gcc, python3-dev), then install the package again",
                subject="lakefs.cluster._erasure",
            )
        self.data = data
        self.parity = parity
        self._code = Code(data, parity, GRANULE_BYTES, CHUNK_BYTES, TABLES_MAX)

    def shard_bytes(self, length: int) -> int:
        """Return the bytes of each shard of a chunk, but for the last data shard."""
        return self._code.shard_bytes(length)

    def data_shards(self, length: int) -> int:
        """Return the number of data shards that exist."""
        return -(-length // self.shard_bytes(length))

    def shards(self, length: int) -> Sequence[int]:
        """Return the numbers of all shards that exist, ascending."""
        return *range(self.data_shards(length)), *range(self.data, self.data + self.parity)

    def sizes(self, length: int) -> dict[int, int]:
        """Return the bytes of all shards that exist, by their numbers."""
        size = self.shard_bytes(length)
        last = -(-length // size) - 1
        sizes = dict.fromkeys((*range(last + 1), *range(self.data, self.data + self.parity)), size)
        sizes[last] = length - last * size
        return sizes

    def extent(self, length: int, shard: int) -> tuple[int, int]:
        """Return offset and length of a data shard in its chunk."""
        if not 0 <= shard < self.data_shards(length):
            raise InvalidArgument(f"a chunk of {length} bytes has no data shard {shard}")
        offset = shard * self.shard_bytes(length)
        return offset, min(self.shard_bytes(length), length - offset)

    def part_bytes(self, length: int, shard: int, begin: int = 0, end: int | None = None) -> int:
        """Return the number of bytes that a shard has of its range [begin, end); of the whole shard, if none is given.

        A range may reach over the end of the last data shard, which then has less of it than others, or nothing.
        """
        begin, end = self._range(length, begin, end)
        whole = (
            self.shard_bytes(length) if self.data <= shard < self.data + self.parity else self.extent(length, shard)[1]
        )
        return max(0, min(whole, end) - begin)

    def pieces(self, length: int, offset: int, size: int) -> list[tuple[int, int, int]]:
        """Return where bytes [offset, offset + size) of the chunk lie: (data shard, begin, end) of each, in order."""
        if not 0 <= offset <= offset + size <= length:
            raise InvalidArgument(f"bytes {offset} to {offset + size} of a chunk of {length}")
        step = self.shard_bytes(length)
        touched = range(offset // step, -(-(offset + size) // step) if size else 0)
        return [(i, max(offset - i * step, 0), min(offset + size - i * step, step)) for i in touched]

    def needed(self, length: int, begin: int = 0) -> int:
        """Return the number of shards that make any other from byte `begin` on.

        Behind the end of a short last shard it is one less, and that shard is not one of them: it has nothing there.
        """
        begin, _ = self._range(length, begin, None)
        count = self.data_shards(length)
        return count if begin < self.extent(length, count - 1)[1] else count - 1

    def stored_bytes(self, length: int) -> int:
        """Return the bytes of all shards together."""
        return length + self.parity * self.shard_bytes(length)

    def encode(self, chunk: Buffer, parity: Sequence[WritableBuffer]) -> None:
        """Write the parity shards of a chunk into memory of `shard_bytes` each, in order.

        For a lone data shard they are copies: a caller that can use the chunk's own memory instead need not call.
        BufferError for memory that is read-only or not contiguous.
        """
        self._code.encode(chunk, parity)

    def rebuild(
        self,
        length: int,
        present: Mapping[int, Buffer],
        wanted: Mapping[int, WritableBuffer],
        begin: int = 0,
        end: int | None = None,
    ) -> None:
        """Write the bytes [begin, end) of the wanted shards, data or parity, from that range of others.

        `present` has at least `needed` shards; what is beyond that is not read.  Memory of each is as long as its
        `part_bytes`.  BufferError for memory that is read-only or not contiguous.
        """
        self._code.rebuild(length, present, wanted, begin, end)

    def _range(self, length: int, begin: int, end: int | None) -> tuple[int, int]:
        """Return a range of shards, checked."""
        whole = self.shard_bytes(length)
        end = whole if end is None else end
        if not 0 <= begin < end <= whole:
            raise InvalidArgument(f"bytes {begin} to {end} of shards that have {whole}")
        return begin, end
