"""Ranges of many objects with few requests and few hand-overs to threads, each checked.

Names are opened a batch at a time.  Chunks that lie in a range whole are fetched as ever (`lakefs.get.fetch`).  Parts
of chunks are read by a few threads' calls, many with each, or requested side by side where the client holds no
descriptors.  A part that fails its check is read anew by itself.

The bytes of one object are those of one version of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from lakefs.content.verify import Check, granules_around
from lakefs.errors import LakeError, StaleGrant
from lakefs.get.cached import fill_part
from lakefs.get.fetch import fetch_part, fetch_wanted, locate_all, part_request, take_part
from lakefs.get.objects import GET_MANY_BATCH, close_leases, open_objects
from lakefs.get.opened import Access, Opened, Piece
from lakefs.get.places import BufferSink, Wanted
from lakefs.grants.grant_reads import fetch_range
from lakefs.host.new_bytes import NewBytes
from lakefs.limits import CLIENT_THREADS, FETCH_WINDOW, KIB
from lakefs.names import Name
from lakefs.steps.steps import Pipeline, Send, Steps, Work
from lakefs.wire.engine_port import Reply
from lakefs.wire.media import BY_REQUEST

PARTS_PER_CALL_MIN: Final = 8
"""Parts of chunks that one call to a thread reads at least, if there are so many: a hand-over costs as much as two."""


SHORT_PART_BYTES: Final = 256 * KIB
"""Longest part that is read from the page cache without a hand-over to a thread."""


class Range(NamedTuple):
    """Bytes of an object, from `start` to `end` as those of a slice: negative from the end, None for the end."""

    name: Name
    start: int | None
    end: int | None


class _Part(NamedTuple):
    """A part of one chunk, and the memory that it belongs to."""

    opened: Opened
    piece: Piece
    offset: int
    target: memoryview


def get_ranges(access: Access, ranges: Sequence[Range]) -> Steps[list[bytes | LakeError]]:
    """Return the bytes of each range, in order; the error in the place of one whose object cannot be opened.

    ChunkDamaged, ChunkNotFound and errors of the connection are raised.  Memory: that of the answer.
    """
    # A lease may end with a connection; bytes that are checked prove themselves then.
    checked = replace(access, check=Check.CRC32C) if access.check is Check.NONE else access
    answers: list[bytes | LakeError] = []
    for start in range(0, len(ranges), GET_MANY_BATCH):
        answers += yield from _get_batch(checked, ranges[start : start + GET_MANY_BATCH])
    return answers


def _get_batch(access: Access, ranges: Sequence[Range]) -> Steps[list[bytes | LakeError]]:
    names = list(dict.fromkeys(wanted.name for wanted in ranges))
    found = dict(zip(names, (yield from open_objects(access, names)), strict=True))
    try:
        answers: list[NewBytes | LakeError] = []
        whole: list[Wanted] = []
        parts: list[_Part] = []
        for wanted in ranges:
            opened = found[wanted.name]
            if isinstance(opened, LakeError):
                answers.append(opened)
                continue
            begin, end, _ = slice(wanted.start, wanted.end).indices(opened.stat.size_bytes)
            target = NewBytes(max(0, end - begin))
            answers.append(target)
            _cut(opened, begin, target.view, whole, parts)
        if whole:
            yield from fetch_wanted(access, whole)
        if parts:
            yield from _fetch_parts(access, parts)
        whole.clear()
        parts.clear()  # views of the answers, which are taken now
        return [answer if isinstance(answer, LakeError) else answer.take() for answer in answers]
    finally:
        yield from close_leases([opened.lease for opened in found.values() if isinstance(opened, Opened)])


def _cut(opened: Opened, begin: int, view: memoryview, whole: list[Wanted], parts: list[_Part]) -> None:
    """Add the chunks, and the parts of chunks, that fill `view` from the object's byte `begin` on."""
    end = begin + len(view)
    for piece in opened.overlapping(begin, len(view)):
        first, last = max(begin, piece.offset), min(end, piece.offset + piece.length)
        if last - first == piece.length:
            whole.append(Wanted(opened, piece, BufferSink(view, begin)))
        else:
            parts.append(_Part(opened, piece, first - piece.offset, view[first - begin : last - begin]))


def _fetch_parts(access: Access, parts: Sequence[_Part]) -> Steps[None]:
    yield from locate_all(access, [(part.opened, part.piece.chunk) for part in parts])
    distant: list[_Part] = []
    for part in parts:
        inline = part.opened.inline.get(part.piece.chunk)
        if inline is None:
            distant.append(part)
        else:
            part.target[:] = memoryview(inline)[part.offset : part.offset + len(part.target)]
    pipeline = Pipeline(FETCH_WINDOW)
    streamed = distant
    if access.can_use_descriptors:
        streamed = [part for part in distant if part.opened.grants[part.piece.chunk].medium in BY_REQUEST]
        local = [part for part in distant if part.opened.grants[part.piece.chunk].medium not in BY_REQUEST]
        local = _not_cached(access, local)
        size = max(PARTS_PER_CALL_MIN, -(-len(local) // CLIENT_THREADS))
        for start in range(0, len(local), size):
            yield from _submit_local(access, local[start : start + size], pipeline)
    for part in streamed:
        yield from _submit_streamed(part, pipeline)
    yield from pipeline.drain()


def _not_cached(access: Access, parts: Sequence[_Part]) -> list[_Part]:
    """Read what is cached in this thread, `at_once_bytes` at most; return the parts that are left.

    Two threads that read short parts wait for the interpreter's lock most of their time.
    """
    left: list[_Part] = []
    room = access.at_once_bytes
    for part in parts:
        opened, piece, offset, target = part
        begin, end = granules_around(offset, len(target), piece.length)
        if end - begin > min(room, SHORT_PART_BYTES):
            left.append(part)
            continue
        room -= end - begin
        if not fill_part(access.descriptors, access.check, opened, piece, offset, target):
            left.append(part)
    return left


def _submit_local(access: Access, group: Sequence[_Part], pipeline: Pipeline) -> Steps[None]:
    def done(stale: list[_Part]) -> Steps[None]:
        for part in stale:
            length = len(part.target)
            part.target[:] = yield from fetch_part(access, part.opened, part.piece, part.offset, length)

    yield from pipeline.submit(Work(_read_group, (access, group)), done)


def _read_group(access: Access, group: Sequence[_Part]) -> list[_Part]:
    """Read and check parts; return those that did not match.  Blocks."""
    stale: list[_Part] = []
    for part in group:
        chunk = part.piece.chunk
        try:
            part.target[:] = fetch_range(
                access.descriptors, chunk, part.opened.grants[chunk], part.offset, len(part.target)
            )
        except StaleGrant:
            stale.append(part)
    return stale


def _submit_streamed(part: _Part, pipeline: Pipeline) -> Steps[None]:
    def received(reply: Reply) -> None:
        part.target[:] = take_part(part.opened, part.piece, part.offset, len(part.target), reply)

    yield from pipeline.submit(Send(part_request(part.piece, part.offset, len(part.target))), received)
