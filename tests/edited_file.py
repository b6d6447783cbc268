"""A file that is edited as through a mount, with what it should hold: the rig of tests that store it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from fuse.staging.commit import store_staged
from fuse.staging.folder import Base, StagedFile, StagingFolder
from fuse.staging.write_behind import WriteBehind
from lakefs.get.objects import close_object
from lakefs.get.opened import Opened
from lakefs.limits import BLOB_BYTES_MAX
from lakefs.names import Name
from lakefs.steps.steps import Steps
from lakefs.wire import messages as m
from tests.contract.engines import Kind
from tests.contract.test_lake import Driven, run

LIMIT = 1 << 30
NAME = Name("bkt", "folder/file")


@contextmanager
def small_chunks(chunk_bytes: int, small_payload_bytes: int) -> Iterator[None]:
    """Cut contents into shorter chunks than those of users."""
    with (
        mock.patch("fuse.staging.commit.CHUNK_BYTES", chunk_bytes),
        mock.patch("lakefs.content.chunking.CHUNK_BYTES", chunk_bytes),
        mock.patch("lakefs.put.objects.CHUNK_BYTES", chunk_bytes),
        mock.patch("fuse.staging.write_behind.CHUNK_BYTES", chunk_bytes),
        mock.patch("fuse.staging.write_behind.BEGIN_BYTES", 2 * chunk_bytes),
        mock.patch("fuse.staging.commit.SMALL_PAYLOAD_BYTES", small_payload_bytes),
    ):
        yield


class Edited:
    """A file as a mount has it open, and what it should hold."""

    def __init__(self, lake: Driven, folder: Path) -> None:
        self.lake = lake
        self.staging = StagingFolder(folder / "staging", LIMIT)
        self.content = bytearray()
        self.opened: Opened | None = None
        self.file: StagedFile = self.staging.new(str(NAME), None)
        self.behind: WriteBehind | None = None

    def stage_in(self, folder: Path) -> None:
        """Stage in another folder; nothing was written yet."""
        self.file.discard()
        self.staging.close()
        self.staging = StagingFolder(folder / "staging", LIMIT)
        self.file = self.staging.new(str(NAME), None)

    async def base_on(self, content: bytes) -> None:
        """Begin with stored content."""
        await self.lake.run(self.lake.steps.put(str(NAME), content))
        self.content = bytearray(content)
        await self.reopen()

    async def reopen(self) -> None:
        await self.close_base()
        self.opened = await self.lake.run(self.lake.steps.open(str(NAME)))
        self.file.discard()
        self.file = self.staging.new(str(NAME), Base(self.opened.stat.size_bytes))

    async def close_base(self) -> None:
        if self.opened is not None:
            await self.lake.run(close_object(self.opened))
            self.opened = None

    def write(self, offset: int, data: bytes) -> None:
        self.file.write(offset, data)
        if self.behind is not None:
            self.behind.changed(offset, offset + len(data))
        self.content += bytes(max(0, offset - len(self.content)))
        self.content[offset : offset + len(data)] = data

    def truncate(self, size: int) -> None:
        self.file.truncate(size)
        if self.behind is not None:
            self.behind.changed(size, BLOB_BYTES_MAX)
        self.content = self.content[:size] + bytes(max(0, size - len(self.content)))

    def storing(self, **options: Any) -> Steps[m.ObjectStat]:
        attributes = m.ObjectAttributes(mode=0o600, mtime_ns=17)
        keep_node = self.opened.stat.node if self.opened else 0
        wanted: dict[str, Any] = {
            "keep_node": keep_node,
            "condition": m.NO_CONDITION,
            "durable": True,
            "behind": self.behind,
            **options,
        }
        stored = yield from store_staged(self.lake.steps, self.file, self.opened, NAME, attributes, **wanted)
        return stored.stat

    async def store(self) -> m.ObjectStat:
        """Store, compare with what others read, and continue on top of the new content."""
        self.lake.asked.clear()
        stat = await self.lake.run(self.storing())
        assert (stat.size_bytes, stat.mode, stat.mtime_ns) == (len(self.content), 0o600, 17)
        assert await self.lake.run(self.lake.steps.get(str(NAME))) == self.content
        await self.close_base()
        self.opened = await self.lake.run(self.lake.steps.open(str(NAME)))
        assert self.opened.stat.blob == stat.blob
        assert self.file.mark_stored(Base(stat.size_bytes))
        assert self.staging.used_bytes == 0
        return stat

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that the engine stored for the last `store`."""
        return sum(sum(data_lengths(request)) for request in self.lake.asked)

    def store_behind(self) -> None:
        """Begin to store what is written while more is written."""
        self.behind = WriteBehind(self.lake.steps, self.file)

    async def end_behind(self) -> None:
        if self.behind is not None:
            await self.lake.run(self.behind.end())
            self.behind = None

    async def close(self) -> None:
        await self.end_behind()
        await self.close_base()
        self.file.discard()
        self.staging.close()


def data_lengths(request: m.Request) -> list[int]:
    if isinstance(request, m.StoreChunks):
        return [length for kind, length in zip(request.kinds, request.lengths, strict=True) if kind == 1]
    return request.lengths if isinstance(request, m.StoreFromSource | m.PutObjects) else []


def edit(kind: Kind, body: Callable[[Edited], Awaitable[None]]) -> None:
    """Run `body` with a file; afterwards nothing is held or open."""

    async def with_lake(lake: Driven) -> None:
        edited = Edited(lake, lake.engine.folder)
        try:
            await body(edited)
        finally:
            await edited.close()

    run(kind, with_lake)
