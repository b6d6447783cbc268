"""Damaged shards as members report them: their partitions are noted as dirty, so that the walker makes them anew.

That is done for every damaged shard, whether a name refers to its chunk or not: a put in progress may be about to bind
one, and was answered before the damage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from engine.coordinator.lake_state import LakeState
from lakefs.cluster.table import Table
from lakefs.ids import ChunkId, ChunkKind

_KINDS: Final = {"c": ChunkKind.DATA, "m": ChunkKind.MANIFEST}


async def note_damaged(state: LakeState, table: Table, named: Iterable[str]) -> None:
    """Note the partitions of damaged shards, as reports name them; whole chunks among them are passed over."""
    chunks = [chunk for text in named if (chunk := _chunk_of_shard(text)) is not None]
    if chunks:
        await state.note_dirty({table.partition_of(chunk) for chunk in chunks}, table.ring_epoch)


def _chunk_of_shard(text: str) -> ChunkId | None:
    """Return the chunk of a shard, as reports name it; None for a whole chunk."""
    chunk, slash, _ = text.partition("/")
    kind, _, digest = chunk.partition(":")
    return ChunkId(bytes((_KINDS[kind],)) + bytes.fromhex(digest)) if slash else None
