"""Makes the bytes of a chunk, or of a range of it, from the shards that came, and checks them.

The rule is: never other bytes.
- A whole chunk is checked by the BLAKE3 of all its bytes, whichever shards they were made from.  When that fails, the
  shards do not belong together: each choice of enough of them is tried (`decode`).
- A range that came from its own data shard is checked by the CRC32C of its granules: as the member's answer has them,
  and as the chunk's vector has them, if it is known here.
- A range that was decoded has no CRC of its own: a decoded granule is a function of several shards, and one of them
  may be wrong though its checksum is right.  It is compared with the chunk's vector.  Where that is not known, a
  range is not decoded: its reader takes the whole chunk, and knows the vector from then on.

Blocks; any thread may call, for reads that are held.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from engine.stripes.chunk_read import ChunkRead
from engine.stripes.decode import Read, solve
from lakefs.content.verify import granule_crcs, matches_id
from lakefs.ids import Buffer


class Made(NamedTuple):
    """Checked bytes, and the CRC32Cs of their granules."""

    payload: memoryview
    crcs: bytes


def made(read: ChunkRead, vector: bytes) -> Made | None:
    """Return the bytes of a read that is ready, or None if they fail their check.

    `vector`: the CRCs of the range's granules; empty: not known.  A range must not be decoded without them.
    """
    memory = read.memory
    _assemble(read, memory, read.got)
    if read.is_whole:
        return Made(memory, granule_crcs(memory)) if matches_id(read.chunk, memory) else None
    is_direct = read.has_wanted
    assert is_direct or vector, "a range is decoded only where its checksums are known"
    crcs = granule_crcs(memory)
    if is_direct and crcs != read.crcs[read.wanted[0]]:
        return None
    return Made(memory, crcs) if crcs == (vector or crcs) else None


def made_from_any(read: ChunkRead) -> Made | None:
    """Return a whole chunk, made from any choice of its shards that makes it; None if none does."""
    solved = solve(read.code, read.chunk, [Read(shard, read.length, part) for shard, part in read.got.items()])
    if solved is None:
        return None
    memory = memoryview(b"".join([solved.shard(shard) for shard in read.wanted]))
    return Made(memory, granule_crcs(memory))


def _assemble(read: ChunkRead, memory: memoryview, present: Mapping[int, Buffer]) -> None:
    """Put the wanted shards into `memory`: those that are present, and those that are decoded from them."""
    lacking: dict[int, memoryview] = {}
    for shard in read.wanted:
        begin = read.code.extent(read.length, shard)[0] if read.is_whole else 0
        target = memory[begin : begin + read.part_bytes(shard)]
        part = present.get(shard)
        if part is None:
            lacking[shard] = target
        elif not isinstance(part, memoryview) or part.obj is not memory.obj:
            target[:] = part
    if lacking:
        chosen = {shard: present[shard] for shard in sorted(present)[: read.needed]}
        read.code.rebuild(read.length, chosen, lacking, read.begin, read.end)
