"""Hashes payloads in memory: ids, checksums of granules, and the vector behind each long payload.

Rules kept here:
- A payload is filled, hashed, and its vector added in one call, while its bytes are in the processor's cache.
- The bytes that are hashed are in memory of this process; once filled, nothing else can change them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from crc32c import crc32c

from engine.chunks.payload import Hashed, Payload
from engine.format.checksums import seal_payload, vector_of
from engine.host.tasks import run_all
from lakefs.content.verify import vector_bytes
from lakefs.ids import ChunkKind, chunk_id_of, data_chunk_id
from lakefs.limits import WRITE_RUN_BYTES, WRITE_RUNS_AT_ONCE
from lakefs.ports import Offload


async def hash_payloads(payloads: Sequence[Payload], offload: Offload) -> list[Hashed]:
    """Return payloads with ids and checksums, in order, without writing them anywhere.

    Short ones that lie in memory are hashed at once, others in threads, about 1 MiB with each call.  Errors of fills.
    """
    hashed: list[Hashed | None] = [None] * len(payloads)
    at_once = [index for index, payload in enumerate(payloads) if payload.area is None and payload.fill is None]
    runs = deque(_runs(payloads))
    for index, item in zip(at_once, hash_all([payloads[index] for index in at_once]), strict=True):
        hashed[index] = item

    async def work(_: int) -> None:
        while runs:
            run = runs.popleft()
            try:
                found = await offload.run(hash_all, [payloads[index] for index in run])
            except BaseException:
                runs.clear()  # the request has failed
                raise
            for index, item in zip(run, found, strict=True):
                hashed[index] = item

    await run_all(work, range(min(WRITE_RUNS_AT_ONCE, len(runs))))
    done = [item for item in hashed if item is not None]
    assert len(done) == len(payloads), "each payload is hashed"
    return done


def granule_crcs_of(item: Hashed) -> bytes:
    """Return the CRC32C of each granule of a hashed payload, 4 bytes each; of the empty one none."""
    payload = item.payload
    if not payload.length:
        return b""
    vector = vector_bytes(payload.length)
    if payload.area is None or not vector:
        return item.crc.to_bytes(4, "little")
    return bytes(payload.area[payload.length : payload.length + vector])


def bytes_of(payload: Payload) -> memoryview:
    """Return the memory of a payload's bytes."""
    memory = payload.small if payload.area is None else payload.area[: payload.length]
    assert memory is not None, "a payload has memory"
    return memory


def hash_all(payloads: Sequence[Payload]) -> list[Hashed]:
    """Return payloads with ids and checksums, in order; fills those that are to be filled.  Blocks."""
    return [
        Hashed(payload, data_chunk_id(payload.small), crc32c(payload.small))
        if payload.small is not None and payload.fill is None and payload.kind is ChunkKind.DATA
        else _hash(payload)
        for payload in payloads
    ]


def _hash(payload: Payload) -> Hashed:
    """Fill and hash a payload, add vector and padding: in one call, while the bytes are in the CPU's cache."""
    memory = bytes_of(payload)
    vector = None if payload.fill is None else payload.fill(memory, 0)
    chunk = chunk_id_of(payload.kind, memory)
    if payload.area is None:
        return Hashed(payload, chunk, crc32c(memory))
    return Hashed(payload, chunk, seal_payload(payload.area, payload.length, vector or vector_of(memory)))


def _runs(payloads: Sequence[Payload]) -> list[list[int]]:
    """Return indexes of the payloads that threads hash, in runs of about WRITE_RUN_BYTES."""
    runs: list[list[int]] = []
    room = 0
    for index, payload in enumerate(payloads):
        if payload.area is None and payload.fill is None:
            continue
        if not runs or payload.length > room:
            runs.append([])
            room = WRITE_RUN_BYTES
        runs[-1].append(index)
        room -= payload.length
    return runs
