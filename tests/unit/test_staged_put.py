"""What is stored of an edited file: all of it, once, and no more than the edit; however the engine is asked."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest

from fuse.staged_put import store_staged
from fuse.staging import Base, StagedFile, StagingFolder
from lakefs import errors
from lakefs.getting import Opened, close_object
from lakefs.limits import CHUNK_BYTES, SMALL_PAYLOAD_BYTES
from lakefs.names import Name
from lakefs.steps import Send, Start, Steps, send
from lakefs.wire import messages as m
from tests.contract.engines import KINDS, Kind
from tests.contract.test_lake import Driven, run, safetensors

T = TypeVar("T")
LIMIT = 1 << 30
NAME = Name("bkt", "folder/file")


@contextmanager
def small_chunks(chunk_bytes: int, small_payload_bytes: int) -> Iterator[None]:
    """Contents are cut into shorter chunks than users' are."""
    with (
        mock.patch("fuse.staged_put.CHUNK_BYTES", chunk_bytes),
        mock.patch("lakefs.chunking.CHUNK_BYTES", chunk_bytes),
        mock.patch("fuse.staged_put.SMALL_PAYLOAD_BYTES", small_payload_bytes),
    ):
        yield


# --- stored and read back ------------------------------------------------------------------------------

ASKED = ["embedded", "unix", "tcp"]


@pytest.fixture(params=ASKED)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Ways in which a mount asks, and a few in which it does not."""
    return KINDS[request.param]


class Edited:
    """A file as a mount has it open, and what it should hold."""

    def __init__(self, lake: Driven, folder: Path) -> None:
        self.lake = lake
        self.staging = StagingFolder(folder / "staging", LIMIT)
        self.content = bytearray()
        self.opened: Opened | None = None
        self.file: StagedFile = self.staging.new(str(NAME), None)

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
        self.content += bytes(max(0, offset - len(self.content)))
        self.content[offset : offset + len(data)] = data

    def truncate(self, size: int) -> None:
        self.file.truncate(size)
        self.content = self.content[:size] + bytes(max(0, size - len(self.content)))

    def storing(self, **options: Any) -> Steps[m.ObjectStat]:
        attributes = m.ObjectAttributes(mode=0o600, mtime_ns=17)
        keep_node = self.opened.stat.node if self.opened else 0
        wanted: dict[str, Any] = {
            "keep_node": keep_node,
            "condition": m.NO_CONDITION,
            "durable": True,
            **options,
        }
        return store_staged(self.lake.steps, self.file, self.opened, NAME, attributes, **wanted)

    async def store(self) -> m.ObjectStat:
        """Store, compare with what others read, and go on over the new content."""
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
        """Payload that the last `store` had the engine store."""
        return sum(sum(data_lengths(request)) for request in self.lake.asked)

    async def close(self) -> None:
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
        await lake.run(lake.steps.create_bucket(NAME.bucket))
        try:
            await body(edited)
        finally:
            await edited.close()

    run(kind, with_lake)


TEST_CHUNK = 80_000


@pytest.mark.parametrize("seed", range(8))
def test_random_edits_are_read_back_by_others(kind: Kind, seed: int) -> None:
    rng = random.Random(seed)

    async def body(edited: Edited) -> None:
        if seed % 4:
            await edited.base_on(rng.randbytes(rng.randrange(6 * TEST_CHUNK)))
        for _ in range(12):
            for _ in range(rng.randrange(4)):
                size = len(edited.content)
                match rng.randrange(8):
                    case 0:
                        edited.truncate(rng.randrange(size + 1))
                    case 1:
                        edited.truncate(size + rng.randrange(2 * TEST_CHUNK))
                    case 2:
                        edited.write(size, rng.randbytes(rng.randrange(1, 3 * TEST_CHUNK)))
                    case 3:
                        edited.write(size + rng.randrange(TEST_CHUNK), rng.randbytes(10))
                    case 4 if size:
                        offset = rng.randrange(size)
                        edited.file.fill(offset, bytes(edited.content[offset : offset + 1000]))
                    case _:
                        edited.write(rng.randrange(size + 1), rng.randbytes(int(2 ** rng.uniform(0, 18))))
            await edited.store()

    with small_chunks(TEST_CHUNK, SMALL_PAYLOAD_BYTES):
        edit(kind, body)


def test_an_edit_stores_the_chunks_that_it_touches(kind: Kind) -> None:
    rng = random.Random(1)
    content = rng.randbytes(5 * CHUNK_BYTES + 100_000)

    async def body(edited: Edited) -> None:
        await edited.base_on(content)
        edited.write(CHUNK_BYTES + 5, b"edited")
        stat = await edited.store()
        assert edited.sent_bytes == CHUNK_BYTES
        assert stat.chunk_count == 6
        edited.write(2 * CHUNK_BYTES, rng.randbytes(CHUNK_BYTES))
        await edited.store()
        assert edited.sent_bytes == CHUNK_BYTES
        by_descriptor = edited.lake.count(m.StoreFromSource)
        assert by_descriptor == (1 if edited.lake.steps.carries_descriptors else 0)
        edited.write(len(edited.content), b"appended")
        await edited.store()
        assert edited.sent_bytes == 8
        edited.truncate(3 * CHUNK_BYTES)
        stat = await edited.store()
        assert edited.sent_bytes == 0
        assert stat.chunk_count == 3
        edited.truncate(2 * CHUNK_BYTES + 1)
        edited.truncate(2 * CHUNK_BYTES + 1000)
        stat = await edited.store()
        assert edited.sent_bytes == 1000
        whole = await edited.lake.run(edited.lake.steps.put("bkt/whole", bytes(edited.content)))
        assert whole.stat.blob == stat.blob, "cut as a whole file is"

    edit(kind, body)


def test_filled_bytes_are_no_edit(kind: Kind) -> None:
    content = random.Random(2).randbytes(3 * CHUNK_BYTES)

    async def body(edited: Edited) -> None:
        await edited.base_on(content)
        edited.file.fill(CHUNK_BYTES, content[CHUNK_BYTES : 2 * CHUNK_BYTES])
        edited.write(0, b"x")
        await edited.store()
        assert edited.sent_bytes == CHUNK_BYTES

    edit(kind, body)


@pytest.mark.parametrize("size", [10, 100_000, 2 * CHUNK_BYTES + 5])
def test_content_that_did_not_change_keeps_its_blob(kind: Kind, size: int) -> None:
    async def body(edited: Edited) -> None:
        edited.write(0, safetensors({"a": 20 << 10, "b": size}, random.Random(3)))
        first = await edited.store()
        second = await edited.store()
        assert (second.blob, second.etag, second.node) == (first.blob, first.etag, first.node)
        assert edited.sent_bytes == 0

    edit(kind, body)


def test_a_new_file_is_stored_as_a_put_stores_it(kind: Kind) -> None:
    rng = random.Random(4)
    contents = [
        b"",
        b"small",
        rng.randbytes(SMALL_PAYLOAD_BYTES + 1),
        rng.randbytes(2 * CHUNK_BYTES + 1),
        safetensors({"a": 2 << 20, "b": 1 << 20, "c": 100, "d": 5 << 20}, rng),
    ]

    async def body(edited: Edited) -> None:
        for content in contents:
            for over in (False, True):  # an older content, and all of it truncated
                edited.truncate(0)
                if not over:
                    await edited.close_base()
                    edited.file.discard()
                    edited.file = edited.staging.new(str(NAME), None)
                for offset in range(0, len(content), 1 << 20):
                    edited.write(offset, content[offset : offset + (1 << 20)])
                stat = await edited.store()
                put = await edited.lake.run(edited.lake.steps.put("bkt/put", content))
                assert (stat.blob, stat.etag) == (put.stat.blob, put.stat.etag)

    edit(kind, body)


def test_small_content_is_one_request(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        edited.write(0, b"first")
        edited.write(SMALL_PAYLOAD_BYTES - 2, b"!")
        await edited.store()
        edited.write(5, b"more")  # the rest of it came inline when it was opened
        for _ in range(2):
            edited.lake.asked.clear()
            await edited.lake.run(edited.storing())
            assert [type(asked) for asked in edited.lake.asked] == [m.PutObjects]
        assert await edited.lake.run(edited.lake.steps.get(str(NAME))) == edited.content

    edit(kind, body)


def test_a_long_hole_costs_one_chunk_of_zeros(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        edited.write(5, b"begin")
        edited.file.truncate(1000 * CHUNK_BYTES)
        edited.file.write(1000 * CHUNK_BYTES, b"end")
        edited.lake.asked.clear()
        stat = await edited.lake.run(edited.storing())
        assert (stat.size_bytes, stat.chunk_count) == (1000 * CHUNK_BYTES + 3, 1001)
        assert edited.sent_bytes == 2 * CHUNK_BYTES + 3
        opened = await edited.lake.run(edited.lake.steps.open(str(NAME)))
        read = edited.lake.steps.read
        assert await edited.lake.run(read(opened, 0, 12)) == bytes(5) + b"begin" + bytes(2)
        assert await edited.lake.run(read(opened, 500 * CHUNK_BYTES - 5, 10)) == bytes(10)
        assert await edited.lake.run(read(opened, 1000 * CHUNK_BYTES - 2, 10)) == bytes(2) + b"end"
        await edited.lake.run(close_object(opened))

    edit(kind, body)


def test_a_name_keeps_its_node_when_that_is_asked_for(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        for content in (b"small", random.Random(5).randbytes(CHUNK_BYTES + 10)):
            edited.write(0, content)
            first = await edited.store()
            edited.write(0, b"edited")
            second = await edited.store()
            assert second.node == first.node
            edited.write(0, b"again!")
            with pytest.raises(errors.PreconditionFailed):
                await edited.lake.run(edited.storing(keep_node=first.node + 1000))
            with pytest.raises(errors.PreconditionFailed):
                await edited.lake.run(edited.storing(condition=m.Condition(absent=True)))
            await edited.store()

    edit(kind, body)


def test_an_answer_before_it_is_durable_can_be_asked_for(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        for content in (b"small", random.Random(6).randbytes(CHUNK_BYTES + 10)):
            edited.write(0, content)
            for durable in (False, True):
                edited.lake.asked.clear()
                await edited.lake.run(edited.storing(durable=durable))
                told = [a.durable for a in edited.lake.asked if isinstance(a, m.PutObjects | m.Commit)]
                assert told == [durable]
            assert await edited.lake.run(edited.lake.steps.get(str(NAME))) == edited.content

    edit(kind, body)


# --- when things go wrong ------------------------------------------------------------------------------


def before_each(
    request_type: type[m.Request], times: int, steps: Steps[T], act: Callable[[Any], Steps[Any] | None]
) -> Steps[T]:
    """The same steps; before so many requests of a type `act(request)` is done, and the steps that it gives."""
    answer: Any = None
    error: BaseException | None = None
    while True:
        try:
            step = steps.throw(error) if error is not None else steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        answer, error = None, None
        request = step.effect.request if isinstance(step, Start) and isinstance(step.effect, Send) else None
        if isinstance(request, request_type) and times:
            times -= 1
            further = act(request)
            if further is not None:
                yield from further
        try:
            answer = yield step
        except errors.LakeError as raised:
            error = raised


def ending_session(request: Any) -> Steps[Any]:
    return send(m.SessionEnd(request.session))


def test_a_store_that_lost_its_session_begins_again(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        await edited.base_on(random.Random(7).randbytes(3 * CHUNK_BYTES))
        edited.write(5, b"edited")
        edited.write(2 * CHUNK_BYTES, bytes(CHUNK_BYTES))
        with pytest.raises(errors.SessionLost):
            await edited.lake.run(before_each(m.Commit, 3, edited.storing(), ending_session))
        await edited.lake.run(before_each(m.Commit, 2, edited.storing(), ending_session))
        assert await edited.lake.run(edited.lake.steps.get(str(NAME))) == edited.content
        await edited.store()

    edit(kind, body)


def test_a_source_of_a_lost_connection_is_opened_again(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        edited.write(0, random.Random(8).randbytes(3 * CHUNK_BYTES))

        def forgetting(request: m.StoreFromSource) -> Steps[Any]:
            return send(m.SourceClose(request.source))

        await edited.lake.run(before_each(m.StoreFromSource, 2, edited.storing(), forgetting))
        await edited.store()

    edit(kind, body)


def test_content_that_changes_while_it_is_stored_is_not_torn(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        await edited.base_on(bytes(2 * CHUNK_BYTES))
        edited.write(0, b"1")
        numbers = iter(range(2, 10))

        def meddling(request: m.Request) -> None:
            edited.write(0, b"%d" % next(numbers))

        with pytest.raises(errors.SourceChanged):
            await edited.lake.run(before_each(m.StoreChunks, 100, edited.storing(), meddling))
        assert await edited.lake.run(edited.lake.steps.get(str(NAME))) == bytes(2 * CHUNK_BYTES)
        await edited.lake.run(before_each(m.StoreChunks, 1, edited.storing(), meddling))
        assert await edited.lake.run(edited.lake.steps.get(str(NAME))) == edited.content

    edit(kind, body)


def test_a_staging_folder_that_the_engine_does_not_read_from_is_sent(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        edited.write(0, random.Random(9).randbytes(2 * CHUNK_BYTES + 5))
        with mock.patch("engine.sources._file_system", return_value=0):
            await edited.store()
        assert edited.lake.count(m.StoreFromSource) == 0
        assert edited.sent_bytes == 2 * CHUNK_BYTES + 5

    edit(kind, body)


def test_a_staging_file_that_somebody_shortened_is_not_stored(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        await edited.base_on(b"before")
        for size in (1000, 2 * CHUNK_BYTES):
            edited.write(0, random.Random(size).randbytes(size))
            os.ftruncate(edited.file.descriptor, size // 3)
            with pytest.raises((errors.LocalFileError, errors.SourceChanged)):
                await edited.lake.run(edited.storing())
            assert await edited.lake.run(edited.lake.steps.get(str(NAME))) == b"before"

    edit(kind, body)
