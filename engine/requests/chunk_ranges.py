"""Ranges of chunks and shards as ReadChunks asks for them: planned, and with memory to read them into."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import ExitStack
from itertools import accumulate
from typing import Final

from engine.format.layouts import ChunkRecord
from engine.requests.answer_memory import AnswerMemory
from engine.segments.batch_reader import Range
from engine.sessions.references import Client
from lakefs.content.verify import granules_around
from lakefs.errors import ChunkNotFound, InvalidArgument, LakeError, RequestTooLarge
from lakefs.ids import WHOLE_CHUNK, ChunkId, ShardNumber, shard_text
from lakefs.limits import BODY_BYTES_MAX
from lakefs.wire import messages as m

LENT_FROM_BYTES: Final = 128 << 10
"""Content of less has memory of its own: at most 8 MiB for all requests of a connection."""


def absent(chunk: ChunkId, shard: ShardNumber = WHOLE_CHUNK) -> ChunkNotFound:
    """Return the error for a chunk or shard without a record."""
    text = shard_text(chunk, shard)
    return ChunkNotFound(f"chunk {text} is not in the store", subject=text)


def room_of(wanted: Range) -> int:
    """Return the bytes that are read for a range of a chunk with a vector; 0 for other chunks."""
    record, offset, length = wanted
    begin, end = granules_around(offset, length, record.stored_bytes)
    return end - begin if record.vector_bytes else 0


def planned_ranges(
    chunks: Seq[ChunkId], records: Seq[ChunkRecord | None], request: m.ReadChunks
) -> list[Range | LakeError]:
    """Return the range to read of each chunk, while they fit one body; or the error."""
    planned: list[Range | LakeError] = []
    room = BODY_BYTES_MAX
    for chunk, record, offset, length in zip(chunks, records, request.offsets, request.lengths, strict=True):
        if record is None:
            planned.append(absent(chunk))
            continue
        end = record.stored_bytes if length == 0 else offset + length
        if not 0 <= offset < end <= record.stored_bytes:
            outside = f"range {offset}+{length} is outside a chunk of {record.stored_bytes} bytes"
            planned.append(InvalidArgument(outside))
            continue
        begin, stop = granules_around(offset, end - offset, record.stored_bytes)
        widened = stop - begin
        if widened > room:
            planned.append(RequestTooLarge(f"the ranges of one request add up to more than {BODY_BYTES_MAX} bytes"))
            continue
        room -= widened
        planned.append((record, offset, end - offset))
    return planned


async def memory_for(
    memory: AnswerMemory, client: Client, rooms: Seq[int], releases: ExitStack
) -> list[memoryview | None]:
    """Return memory of each length, as parts of one; None for length 0, and where all together are short.

    `releases` gives it back.
    """
    total = sum(rooms)
    if total < LENT_FROM_BYTES:
        return [None] * len(rooms)
    buffer = await memory.take(client, total)
    releases.callback(buffer.release)
    ends = accumulate(rooms)
    return [buffer.view[end - room : end] if room else None for room, end in zip(rooms, ends, strict=True)]
