"""Objects as memory: chunks mapped from the engine's segments, pinned there, checked once, read without a copy.

    open  ->  PinChunks  ->  mmap of each chunk's pages, in one range where they join  ->  check  ->  views

Rules kept here:
- Chunks are pinned before they are mapped and unpinned after they are unmapped: neither gc nor compaction touches
  mapped pages.
- Mappings are read-only.  They are unmapped only when no view of them exists.
- Bytes are checked once, when they are mapped, as the client's `Check` says: later changes of the disk are not noticed.
- Any reference to a view keeps its memory mapped: a tensor of torch.frombuffer does, though it locks no buffer.
- An I/O error under a mapping is SIGBUS, which ends the process: no part of the product reads through one.  After
  a lost connection the chunks are no longer pinned, and the bytes may become zeros (`MappedObject.is_pinned`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from lakefs.content.verify import Check, damaged, granule_crcs, matches_id, mismatch
from lakefs.errors import ChunkNotFound, EngineUnreachable, InvalidArgument, LakeError, StaleGrant
from lakefs.get.fetch import locate
from lakefs.get.objects import close_object, open_object
from lakefs.get.opened import Access, Opened, Piece
from lakefs.get.tensors import Library, MappedTensors
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.grants.grant_reads import bring_in, fetch_crcs
from lakefs.ids import ChunkId, SegmentId
from lakefs.limits import BATCH_MAX, CHECK_WINDOW, PAGE_BYTES, SMALL_PAYLOAD_BYTES
from lakefs.names import Name
from lakefs.steps.steps import Pipeline, Steps, Work, send
from lakefs.wire.media import IN_FILES
from lakefs.wire.messages import Grant, ObjectStat, PinChunks, Pinned, UnpinChunks

MAP_ATTEMPTS: Final = 3
"""Most attempts to map an object when the connection that pinned its chunks is lost before the mapping is made."""
_FAILED: Final = ctypes.c_void_p(-1).value

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000


@dataclass(frozen=True)
class _Extent:
    """A chunk's payload in a segment's file."""

    segment: SegmentId
    offset: int
    length: int

    @property
    def begins_page(self) -> bool:
        return self.offset % PAGE_BYTES == 0

    @property
    def ends_page(self) -> bool:
        return (self.offset + self.length) % PAGE_BYTES == 0


class MappedObject:
    """An object, or a range of it, as read-only memory, until the end of the block that `Lake.map` opened.

    numpy.frombuffer(mapped.view) and torch.frombuffer(mapped.view) copy nothing.  Arrays and tensors made so, and all
    references to the view, must be gone by the end of the block: else the block raises BufferError, and the memory
    stays mapped, and pinned till the connection ends.
    """

    def __init__(self, name: Name, stat: ObjectStat, chunks: Sequence[ChunkId]) -> None:
        self.name = name
        self.stat = stat
        self.chunks = list(chunks)
        """The pinned chunks."""
        self.epoch = 0
        """Number of the connection that pins them."""
        self.pieces: list[memoryview] = []
        """The bytes in order; one piece if they are contiguous."""
        self.is_pinned: Callable[[], bool] = lambda: True
        """Returns True if the connection that pins the bytes is still open; there may be none to pin."""
        self._memories: list[mmap.mmap] = []

    @property
    def view(self) -> memoryview:
        """All bytes as one view.  InvalidArgument if chunks are not whole pages: use `pieces`."""
        if len(self.pieces) != 1:
            raise InvalidArgument(
                f"{self.name} is not whole pages, so it is mapped in {len(self.pieces)} pieces: use those",
                subject=str(self.name),
            )
        return self.pieces[0]

    def tensors(self, library: Library = "numpy") -> MappedTensors:
        """Return the tensors of a safetensors file by their names: arrays of numpy, or tensors of torch ("torch").

        Each is made when it is asked for: a read-only view, or a copy where its bytes do not lie in one row at an
        address for its type.  InvalidArgument if this is no whole safetensors file.
        """
        return MappedTensors(str(self.name), self.pieces, library)

    def close(self) -> None:
        """Unmap.  BufferError when a view is still in use: the memory stays mapped, and `close` may be called again."""
        try:
            if self._memories and _references(self.pieces) > _references([memoryview(b"")]):
                raise BufferError  # torch would go on reading at the address of a released view
            for piece in self.pieces:
                piece.release()
            while self._memories:
                self._memories[-1].close()
                self._memories.pop()
        except BufferError:
            raise BufferError(
                f"{self.name} is mapped and in use: views and arrays of it must be gone at the end of the block"
            ) from None
        self.pieces = []

    def add(self, memory: mmap.mmap) -> memoryview:
        """Take over a mapping; return all of it as a read-only view."""
        self._memories.append(memory)
        return memoryview(memory).toreadonly()


def map_object(access: Access, name: Name, offset: int = 0, length: int | None = None) -> Steps[MappedObject]:
    """Map a range of an object, to its end if no length is given; checked as `access.check` says.

    KeyNotFound, IsAFolder, ChunkDamaged; InvalidArgument for a range before the object's start, or where the
    engine shares no segments.  EngineBusy when too much is pinned.
    """
    if not access.offers.segments:
        raise InvalidArgument(
            f"{name}: objects are mapped over the Unix socket of one engine only; read it instead", subject=str(name)
        )
    if offset < 0 or (length is not None and length < 0):
        raise InvalidArgument(f"{name}: there is no range {offset}+{length}", subject=str(name))
    segments_only = replace(access, media=0)
    opened = yield from open_object(segments_only, name, inline_bytes=0)
    try:
        end = opened.stat.size_bytes if length is None else min(offset + length, opened.stat.size_bytes)
        pieces = opened.overlapping(offset, end - offset)
        mapped = MappedObject(name, opened.stat, list(dict.fromkeys(piece.chunk for piece in pieces)))
        if not pieces:
            mapped.pieces = [memoryview(b"")]
            return mapped
        grants, mapped.epoch = yield from _pin(opened, mapped.chunks)
        mapped.is_pinned = partial(access.is_held, mapped.epoch)
        try:
            opened.grants.update(grants)
            yield from locate(segments_only, opened, mapped.chunks)
            yield from _map_checked(segments_only, mapped, pieces, grants, offset, end)
        except BaseException:
            yield from unpin(mapped)
            raise
        return mapped
    finally:
        yield from close_object(opened)


@contextmanager
def unmapped_at_end(mapped: MappedObject) -> Iterator[MappedObject]:
    """Context manager: unmap at the end of the block.  BufferError, after an error as a note, if a view is in use."""
    try:
        yield mapped
    except BaseException as error:
        try:
            mapped.close()
        except BufferError as held:  # most likely by the frames of the error
            error.add_note(str(held))
        raise
    mapped.close()


def unpin(mapped: MappedObject) -> Steps[None]:
    """Remove the pins; pins of a lost connection have ended already."""
    try:
        for start in range(0, len(mapped.chunks), BATCH_MAX):
            yield from send(UnpinChunks([bytes(chunk) for chunk in mapped.chunks[start : start + BATCH_MAX]]))
    except LakeError:
        return


def _pin(opened: Opened, chunks: Sequence[ChunkId]) -> Steps[tuple[dict[ChunkId, Grant], int]]:
    """Pin chunks; return grants of their places, and the epoch of the connection that pins all of them."""
    grants: dict[ChunkId, Grant] = {}
    epoch = 0
    try:
        for start in range(0, len(chunks), BATCH_MAX):
            batch = chunks[start : start + BATCH_MAX]
            reply = yield from send(PinChunks([bytes(chunk) for chunk in batch]))
            assert isinstance(reply.message, Pinned)
            is_anew = bool(grants) and reply.epoch != epoch
            if is_anew:
                grants.clear()  # their pins ended with the connection
            grants.update(zip(batch, reply.message.grants, strict=True))
            epoch = reply.epoch
            if is_anew:
                raise EngineUnreachable(
                    f"the connection was lost while {opened.name} was mapped", subject=str(opened.name)
                )
        for grant in grants.values():
            if grant.medium not in IN_FILES:
                raise ChunkNotFound(f"{opened.name}: a chunk of it is gone", subject=str(opened.name))
    except BaseException:
        held = [chunk for chunk, grant in grants.items() if grant.medium in IN_FILES]
        yield from unpin(MappedObject(opened.name, opened.stat, held))
        raise
    return grants, epoch


def _map_checked(
    access: Access, mapped: MappedObject, pieces: Sequence[Piece], grants: dict[ChunkId, Grant], offset: int, end: int
) -> Steps[None]:
    runs = _runs(pieces, grants)
    pipeline = Pipeline(CHECK_WINDOW)
    for run in runs:
        extents = [_extent(grants[piece.chunk]) for piece in run]
        lead = extents[0].offset % PAGE_BYTES
        whole = mapped.add(_mapping(access.descriptors, extents, str(mapped.name)))[lead:]
        base = run[0].offset
        for piece in run:
            payload = whole[piece.offset - base : piece.offset - base + piece.length]
            check = (access, str(mapped.name), piece.chunk, grants[piece.chunk], payload)
            yield from pipeline.submit(Work(_check, check), _done)
        last = run[-1].offset + run[-1].length
        mapped.pieces.append(whole[max(offset, base) - base : min(end, last) - base])
    yield from pipeline.drain()


def _done(result: object) -> None:
    return None


def _references(pieces: list[memoryview]) -> int:
    """Return the highest reference count of a piece, as this interpreter counts."""
    return max((sys.getrefcount(piece) for piece in pieces), default=0)


def _runs(pieces: Sequence[Piece], grants: dict[ChunkId, Grant]) -> list[list[Piece]]:
    """Return the pieces as few runs: in a run each but the first begins a page, and each but the last ends one.

    The last piece of a run may begin inside a page if it is short: it is then copied behind the rest.
    """
    runs: list[list[Piece]] = []
    is_open = False
    for piece in pieces:
        extent = _extent(grants[piece.chunk])
        if is_open and (extent.begins_page or extent.length < SMALL_PAYLOAD_BYTES):
            runs[-1].append(piece)
        else:
            runs.append([piece])
        is_open = extent.ends_page and (extent.begins_page or runs[-1] == [piece])
    return runs


def _extent(grant: Grant) -> _Extent:
    return _Extent(SegmentId(grant.segment), grant.offset, grant.stored_bytes)


def _mapping(descriptors: SegmentDescriptors, extents: Sequence[_Extent], name: str) -> mmap.mmap:
    """Map the pages of the extents, one after the other.  StaleGrant; InvalidArgument when there is no room."""
    leads = [extents[0].offset % PAGE_BYTES, *(0 for _ in extents[1:])]
    lengths = [
        -(-(lead + extent.length) // PAGE_BYTES) * PAGE_BYTES for lead, extent in zip(leads, extents, strict=True)
    ]
    # Reserve one range of addresses; closing it also unmaps the file pages that are mapped over it.
    memory = mmap.mmap(-1, sum(lengths), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    at = 0
    try:
        for extent, lead, length in zip(extents, leads, lengths, strict=True):
            with descriptors.use(extent.segment) as descriptor:
                if (extent.offset - lead) % PAGE_BYTES:
                    memory[at : at + extent.length] = os.pread(descriptor, extent.length, extent.offset)
                else:
                    _map_over(address + at, length, descriptor, extent.offset - lead)
            at += length
    except (OSError, IndexError) as error:
        memory.close()
        raise InvalidArgument(f"{name} cannot be mapped: {error}", subject=name) from error
    except BaseException:
        memory.close()
        raise
    return memory


def _map_over(address: int, length: int, descriptor: int, offset: int) -> None:
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _mmap(address, length, mmap.PROT_READ, flags, descriptor, offset) in (None, _FAILED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _check(access: Access, name: str, chunk: ChunkId, grant: Grant, payload: memoryview) -> None:
    """Check the mapped bytes of a chunk, after the kernel has read them in.  Blocks.  ChunkDamaged."""
    if access.check is Check.NONE:
        payload.release()
        return
    try:
        with access.descriptors.use(SegmentId(grant.segment)) as descriptor:
            bring_in(descriptor, grant.offset, grant.stored_bytes)
        crcs = fetch_crcs(access.descriptors, chunk, grant) if access.check is Check.CRC32C else b""
        if not (granule_crcs(payload) == crcs if crcs else matches_id(chunk, payload)):
            raise mismatch(chunk, access.check)
    except StaleGrant as error:
        raise damaged(chunk, name, error.message) from error
    finally:
        payload.release()
