"""Chunks below manifests, read from the members: the part of gc's walk through a lake that needs content.

Rules kept here:
- A manifest that cannot be read hides its children: the error ends the cycle before anything is freed, and names an
  object that refers to it.
- A manifest is read once in a cycle, as long as the cycle meets no more than MANIFESTS_SEEN_MAX of them; behind that
  the earliest are forgotten, and one that is met again is read again, which costs time and changes nothing.
- Memory: `_AT_ONCE` manifests with their entries; the ids of those that were seen; and of one blob the ids of
  manifests yet to be read, at most a manifest's entries for each level and each that is read at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import trio

from engine.lake_gc.lake_gc_bounds import MANIFESTS_SEEN_MAX
from engine.members.ports import Got, Stripes, Wanted
from engine.upkeep.roots import Owner
from lakefs.content.manifest import Manifest, parse
from lakefs.errors import ChunkDamaged, InvalidArgument, LakeError
from lakefs.ids import ChunkId, ChunkKind, id_text, kind_of

_AT_ONCE: Final = 8
"""Manifests read at once: 2.5 MiB, and 1.6 MiB of parsed entries of one of them."""
_PAUSES_S: Final = (1.0, 10.0)
"""Pauses before manifests are read again that could not be read now."""
VisitChunks = Callable[[list[ChunkId]], Awaitable[None]]
NameOf = Callable[[Owner], Awaitable[str]]
"""Returns the name of an owner, for a message."""


class ManifestWalk:
    """The manifests of one walk."""

    def __init__(self, stripes: Stripes) -> None:
        self._stripes = stripes
        self._seen: set[ChunkId] = set()
        self._seen_before: set[ChunkId] = set()
        self.read_count = 0

    def is_new(self, chunk: ChunkId) -> bool:
        """Note a manifest; True if it was not seen before, or was forgotten."""
        if chunk in self._seen or chunk in self._seen_before:
            return False
        if len(self._seen) >= MANIFESTS_SEEN_MAX // 2:
            self._seen, self._seen_before = set(), self._seen
        self._seen.add(chunk)
        return True

    async def below(self, tops: Sequence[tuple[ChunkId, Owner]], visit: VisitChunks, name_of: NameOf) -> None:
        """Visit the ids of all chunks below manifests: those of one manifest at a time, each once.

        `name_of` returns the name of their owners.  LakeErrors of `Stripes.read`, and ChunkDamaged for bytes that are
        no manifest: they name an owner.
        """
        pending = [*tops]
        while pending:
            reading, pending = pending[-_AT_ONCE:], pending[:-_AT_ONCE]
            pieces = await self._read([chunk for chunk, _ in reading])
            for (chunk, owner), piece in zip(reading, pieces, strict=True):
                children = await self._children(chunk, partial(name_of, owner), piece)
                if kind_of(children[0]) is ChunkKind.MANIFEST:
                    pending += [(child, owner) for child in children if self.is_new(child)]
                await visit(children)

    async def _read(self, chunks: Sequence[ChunkId]) -> list[Got | LakeError]:
        """Read manifests; what may be read a little later is tried again."""
        pieces: list[Got | LakeError] = []
        for pause_s in (*_PAUSES_S, None):
            try:
                pieces = await self._stripes.read([Wanted(chunk, 0) for chunk in chunks])
            except LakeError as error:
                pieces = [error] * len(chunks)
            if pause_s is None or not any(isinstance(piece, LakeError) and piece.retryable for piece in pieces):
                break
            await trio.sleep(pause_s)
        return pieces

    async def _children(
        self, chunk: ChunkId, name: Callable[[], Awaitable[str]], piece: Got | LakeError
    ) -> list[ChunkId]:
        """Return the chunks that a manifest lists, each once."""
        self.read_count += 1
        try:
            manifest = _parsed(chunk, piece)
        except LakeError as error:
            subject = await name()
            raise type(error)(
                f"nothing is freed: a manifest of {subject} cannot be read, so what it refers to is not known "
                f"({error.message})",
                subject=subject,
            ) from error
        return [*dict.fromkeys([entry.chunk for entry in manifest.entries])]


def _parsed(chunk: ChunkId, piece: Got | LakeError) -> Manifest:
    if isinstance(piece, LakeError):
        raise piece
    try:
        return parse(piece.payload)
    except InvalidArgument as error:
        raise ChunkDamaged(f"manifest {id_text(chunk)}: {error.message}", subject=id_text(chunk)) from error
