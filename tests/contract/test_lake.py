"""Lakes on every driver and connection: puts, gets, names, errors and cancellation."""

from __future__ import annotations

import io
import json
import os
import random
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

from engine.segments.files import SEGMENTS_FOLDER
from lakefs.client.blocking.driver import BlockingDriver
from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.client.trio.driver import TrioDriver
from lakefs.client.trio.lake import OpenedObject, TrioLake
from lakefs.errors import (
    ChunkDamaged,
    InvalidArgument,
    InvalidName,
    KeyNotFound,
    LakeError,
    LocalFileError,
    PreconditionFailed,
    SessionLost,
    SourceChanged,
)
from lakefs.get.opened import Opened
from lakefs.host.offload import InlineOffload, ThreadOffload
from lakefs.lake.lake_steps import LakeSteps
from lakefs.limits import CHUNK_BYTES
from lakefs.ports import Offload
from lakefs.steps.steps import Send, Start, Step, Steps, send
from lakefs.wire import messages as m
from tests.contract.collecting import collected_by
from tests.contract.engines import KINDS, Engine, InThreads, Kind, every
from tests.descriptors import open_descriptors
from tests.seen_steps import seen

T = TypeVar("T")


def content_of(size: int) -> bytes:
    """Return bytes that do not repeat."""
    return random.Random(size).randbytes(size)


MANY = content_of(2 * CHUNK_BYTES + 70_000)


@dataclass
class Driven:
    """A lake of either kind: operations are run, and the requests that they make are kept in `asked`."""

    lake: Lake | TrioLake
    engine: Engine
    asked: list[m.Request] = field(default_factory=list)

    @property
    def driver(self) -> BlockingDriver | TrioDriver:
        if isinstance(self.lake, Lake):
            return driver_of(self.lake)
        return driver_of(self.lake)

    @property
    def steps(self) -> LakeSteps:
        return self.driver.steps

    async def run(self, steps: Steps[T]) -> T:
        recorded, driver = _recorded(steps, self.asked), self.driver
        if isinstance(driver, TrioDriver):
            return await driver.run(recorded)
        return await trio.to_thread.run_sync(driver.run, recorded)

    def count(self, request: type[m.Request]) -> int:
        return sum(isinstance(asked, request) for asked in self.asked)


class Told:
    """A progress callback that adds up the numbers that it gets."""

    def __init__(self) -> None:
        self.done = self.there = 0

    def __call__(self, done: int, there: int) -> None:
        self.done += done
        self.there += there


def _recorded(steps: Steps[T], asked: list[m.Request]) -> Steps[T]:
    """Take the same steps, and note what they send."""

    def see(step: Step, _: object) -> None:
        if isinstance(step, Start) and isinstance(step.effect, Send):
            asked.append(step.effect.request)

    return seen(steps, see)


Body = Callable[[Driven], Awaitable[None]]
TRIO_KINDS = [name for name, kind in KINDS.items() if kind.can_watch]


@pytest.fixture(params=every(TRIO_KINDS))
def trio_kind(request: pytest.FixtureRequest) -> Kind:
    """Kinds that a trio lake drives."""
    return KINDS[request.param]


def run(kind: Kind, body: Body) -> None:
    """Run `body` with a lake; afterwards nothing is held, open or in flight."""

    async def main(engine: Engine) -> None:
        await engine.client.call(m.BucketCreate("bkt"))
        network = "tcp" in kind.name or "network" in kind.name
        if isinstance(engine.client, InThreads):
            blocking = Lake(engine.client.engine)
            try:
                await body(Driven(blocking, engine))
            finally:
                await trio.to_thread.run_sync(blocking.close)
        else:
            async with _offload(kind) as offload:
                lake = TrioLake(engine.client, offload, network=network)
                await body(Driven(lake, engine))
                await lake.aclose()
        if engine.store is not None:
            held = engine.store.references.statistics()
            assert held["leases"] == 0
            assert held["sessions"] == 0

    kind.run(main)


class _Inline:
    async def __aenter__(self) -> Offload:
        return InlineOffload()

    async def __aexit__(self, *_: object) -> None:
        return None


def _offload(kind: Kind) -> _Inline | ThreadOffload:
    return _Inline() if kind.simulated else ThreadOffload(2, "lake-test")


# --- putting and getting -------------------------------------------------------------------------------

SIZES = [0, 1, 65_535, 65_536, CHUNK_BYTES, CHUNK_BYTES + 1, len(MANY)]


@pytest.mark.parametrize("form", ["bytes", "path", "stream"])
def test_what_was_put_is_what_is_got(kind: Kind, form: str) -> None:
    async def body(lake: Driven) -> None:
        for size in SIZES:
            content = content_of(size)
            told = Told()
            with _as(form, content, lake.engine.folder) as data:
                result = await lake.run(lake.steps.put(f"bkt/{size}", data, progress=told))
            assert (result.size_bytes, result.new_bytes, result.stat.size_bytes) == (size, size, size)
            assert (told.done, told.there) == (size, 0)
            told = Told()
            found = await lake.run(lake.steps.get(f"bkt/{size}", progress=told))
            assert type(found) is bytes
            assert found == content
            assert (told.done, told.there) == (size, 0)

    run(kind, body)


@contextmanager
def _as(form: str, content: bytes, folder: Path) -> Iterator[Any]:
    if form == "bytes":
        yield content
    elif form == "stream":
        yield io.BytesIO(content)
    else:
        path = folder / "file"
        path.write_bytes(content)
        os.chmod(path, 0o640)
        yield path


def test_a_second_put_sends_nothing_that_is_there(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        source = lake.engine.folder / "file"
        source.write_bytes(MANY)
        first = await lake.run(lake.steps.put("bkt/first", source))
        lake.asked.clear()
        told = Told()
        second = await lake.run(lake.steps.put("bkt/again", source, progress=told))
        assert second.stat.blob == first.stat.blob
        assert (second.size_bytes, second.new_bytes) == (len(MANY), 0)
        assert (told.done, told.there) == (len(MANY), len(MANY))
        if lake.steps.network:
            payloads = [asked for asked in lake.asked if isinstance(asked, m.StoreChunks) and 1 in asked.kinds]
            assert payloads == []
            assert lake.count(m.Offer) > 0

    run(kind, body)


def safetensors(shapes: dict[str, int], rng: random.Random) -> bytes:
    """Return a file of 8-bit tensors of these lengths."""
    header: dict[str, object] = {}
    offset = 0
    for name, length in shapes.items():
        header[name] = {"dtype": "U8", "shape": [length], "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + rng.randbytes(offset)


def test_an_unchanged_tensor_is_not_stored_again(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        first = safetensors({"a": 2 << 20, "b": 1 << 20, "c": 100}, random.Random(1))
        changed = bytearray(first)
        changed[-50:] = bytes(50)
        result = await lake.run(lake.steps.put("bkt/1.safetensors", first))
        assert result.stat.chunk_count == 4
        second = await lake.run(lake.steps.put("bkt/2.safetensors", bytes(changed)))
        assert second.new_bytes == 100
        assert await lake.run(lake.steps.get("bkt/2.safetensors")) == changed

    run(kind, body)


def test_a_chunk_may_come_many_times_in_a_blob(kind: Kind) -> None:
    content = bytes(4 * CHUNK_BYTES) + b"end"

    async def body(lake: Driven) -> None:
        result = await lake.run(lake.steps.put("bkt/zeros", content))
        assert result.stat.chunk_count == 5
        assert await lake.run(lake.steps.get("bkt/zeros")) == content
        opened = await lake.run(lake.steps.open("bkt/zeros"))
        assert await lake.run(lake.steps.read(opened, CHUNK_BYTES - 5, CHUNK_BYTES + 10)) == bytes(CHUNK_BYTES + 10)
        await lake.run(lake.steps.close(opened))

    run(kind, body)


def test_content_lands_in_the_readers_memory(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        for size in (0, 10, 100_000, len(MANY)):
            await lake.run(lake.steps.put("bkt/k", content_of(size)))
            memory = bytearray(size + 10)
            assert await lake.run(lake.steps.get_into("bkt/k", memory)) == size
            assert memory == content_of(size) + bytes(10)
        with pytest.raises(InvalidArgument):
            await lake.run(lake.steps.get_into("bkt/k", bytearray(len(MANY) - 1)))

    run(kind, body)


def test_many_objects_are_got_in_order_and_the_first_failure_is_raised(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        sizes = [*range(300), 70_000, 200_000]
        await lake.run(lake.steps.put_many([(f"bkt/{size}", content_of(size)) for size in sizes]))
        await lake.run(lake.steps.put("bkt/many", MANY))
        names = [*(f"bkt/{size}" for size in sizes), "bkt/many", "bkt/5"]
        contents = await lake.run(lake.steps.get_many(names))
        assert contents == [*(content_of(size) for size in sizes), MANY, content_of(5)]
        with pytest.raises(KeyNotFound):
            await lake.run(lake.steps.get_many(["bkt/1", "bkt/missing", "nowhere/x"]))

    run(kind, body)


def test_many_puts_are_each_whole_and_the_first_failure_is_raised_after_all(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        objects = [(f"bkt/{number}", b"%d" % number) for number in range(50)]
        objects[17] = ("bkt/" + "x" * 5000, b"bad")
        with pytest.raises(InvalidName):
            await lake.run(lake.steps.put_many(objects, in_flight=8))
        for number in (0, 16, 18, 49):
            assert await lake.run(lake.steps.get(f"bkt/{number}")) == b"%d" % number
        lake.asked.clear()
        stats = await lake.run(lake.steps.put_many([(f"bkt/{n}", bytes(100_000 + n)) for n in range(100)]))
        assert [stat.key for stat in stats] == [str(n) for n in range(100)]
        for bad in ([("no-key", b"x")], [("bkt/ok", b"x"), ("bkt/huge", bytes(CHUNK_BYTES + 1))]):
            lake.asked.clear()
            with pytest.raises((InvalidName, InvalidArgument)) as raised:
                await lake.run(lake.steps.put_many(bad))
            assert raised.value.subject == bad[-1][0]
            assert lake.asked == []

    run(kind, body)


# --- opened objects ------------------------------------------------------------------------------------


def test_ranges_of_an_open_object_are_those_of_its_content(kind: Kind) -> None:
    rng = random.Random(1)
    ranges = [(0, 10), (0, len(MANY)), (CHUNK_BYTES - 1, 2), (len(MANY) - 1, 100), (len(MANY), 5), (5, 0)]
    ranges += [(rng.randrange(len(MANY)), rng.randrange(CHUNK_BYTES + 9)) for _ in range(10)]

    async def body(lake: Driven) -> None:
        await lake.run(lake.steps.put("bkt/k", MANY))
        await lake.run(lake.steps.put("bkt/small", b"0123456789"))
        small = await lake.run(lake.steps.open("bkt/small"))
        opened = await lake.run(lake.steps.open("bkt/k"))
        await lake.run(lake.steps.put("bkt/k", b"replaced meanwhile"))
        await lake.run(lake.steps.remove("bkt/small"))
        await lake.run(lake.steps.gc())
        for offset, length in ranges:
            assert await lake.run(lake.steps.read(opened, offset, length)) == MANY[offset : offset + length]
        assert await lake.run(lake.steps.read(small, 3, 4)) == b"3456"
        with pytest.raises(InvalidArgument):
            await lake.run(lake.steps.read(opened, -1, 4))
        await lake.run(lake.steps.close(opened))
        await lake.run(lake.steps.close(small))

    run(kind, body)


def test_an_open_object_is_a_binary_file(kind: Kind) -> None:
    text = b"".join(b"line %d\n" % number for number in range(300_000))

    async def body(lake: Driven) -> None:
        await lake.run(lake.steps.put("bkt/text", text))
        if isinstance(lake.lake, TrioLake):
            async with await lake.lake.open("bkt/text") as opened:
                assert isinstance(opened, OpenedObject)
                assert await opened.read() == text
                assert await opened.read(7, 9) == text[7:16]
                assert await opened.read(len(text) + 5) == b""
                assert opened.stat.size_bytes == len(text)
            return
        await trio.to_thread.run_sync(_use_as_file, lake.lake, text)

    run(kind, body)


def _use_as_file(lake: Lake, text: bytes) -> None:
    with lake.open("bkt/text") as file:
        assert file.readable()
        assert file.seekable()
        assert not file.writable()
        assert file.readline() == b"line 0\n"
        assert file.tell() == 7
        assert file.seek(-8, io.SEEK_END) == len(text) - 8
        assert file.read() == text[-8:]
        assert file.read(10) == b""
        assert file.seek(1_000_000) == 1_000_000
        memory = bytearray(100_000)
        assert file.readinto(memory) == 100_000
        assert memory == text[1_000_000:1_100_000]
        assert file.seek(-100_000, io.SEEK_CUR) == 1_000_000
        assert file.read(5) == text[1_000_000:1_000_005]
        file.seek(0)
        assert file.read() == text
        with pytest.raises(ValueError, match="before the start"):
            file.seek(-1)
        file.seek(0)
        assert [file.readline() for _ in range(300_000)] == text.splitlines(keepends=True)
    assert file.closed
    with pytest.raises(ValueError, match="closed"):
        file.read()


def test_an_object_that_moved_on_disk_is_found_again(kind: Kind) -> None:
    """The reader has no lease: its content is freed and stored again elsewhere."""
    content = content_of(200_000)

    async def body(lake: Driven) -> None:
        steps = lake.steps
        await lake.run(steps.put("bkt/keeps", b"the bucket"))
        await lake.run(steps.put("bkt/k", content))
        opened = await lake.run(steps.open("bkt/k"))
        assert await lake.run(steps.read(opened, 10, 10)) == content[10:20]
        await lake.run(steps.close(opened))
        await lake.run(steps.remove("bkt/k"))
        assert await lake.run(collected_by(steps)) == 1
        await lake.run(steps.put("bkt/other", content_of(300_000)))
        with pytest.raises(LakeError):
            await lake.run(steps.read(opened, 0, 200_000))
        await lake.run(steps.put("bkt/back", content))
        assert await lake.run(steps.read(opened, 0, 200_000)) == content
        assert await lake.run(steps.read(opened, 70_000, 10)) == content[70_000:70_010]

    run(kind, body)


def test_damage_names_the_object_and_leaves_the_others_alone(kind: Kind) -> None:
    kind.need_segments()
    if kind.simulated:
        pytest.skip("the files of this store are in memory")

    async def body(lake: Driven) -> None:
        await lake.run(lake.steps.put("bkt/good", content_of(100_000)))
        await lake.run(lake.steps.put("bkt/bad", MANY))
        await lake.run(lake.steps.put("bkt/small", b"small content"))
        folder = lake.engine.folder / "store" / SEGMENTS_FOLDER
        for path in folder.iterdir():
            stored = path.read_bytes()
            for needle in (MANY[CHUNK_BYTES + 100 : CHUNK_BYTES + 200], b"small content"):
                at = stored.find(needle)
                if at >= 0:
                    with path.open("r+b") as file:
                        file.seek(at + 3)
                        file.write(b"\xff\x00")
        for name in ("bkt/bad", "bkt/small"):
            with pytest.raises(ChunkDamaged) as raised:
                await lake.run(lake.steps.get(name))
            assert raised.value.subject == name
            assert name in raised.value.message
        opened = await lake.run(lake.steps.open("bkt/bad"))
        assert await lake.run(lake.steps.read(opened, 0, 100)) == MANY[:100]
        with pytest.raises(ChunkDamaged, match="bkt/bad"):
            await lake.run(lake.steps.read(opened, CHUNK_BYTES + 90, 100))
        await lake.run(lake.steps.close(opened))
        assert await lake.run(lake.steps.get("bkt/good")) == content_of(100_000)

    run(kind, body)


# --- names ---------------------------------------------------------------------------------------------


def test_names_do_what_their_verbs_say(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        steps = lake.steps
        await lake.run(steps.put("lake://bkt/a/x", b"x", content_type="text/x", user_metadata={"k": "v"}))
        found = await lake.run(steps.stat("bkt/a/x"))
        assert (found.content_type, found.user_metadata) == ("text/x", {"k": "v"})
        assert await lake.run(steps.exists("bkt/a/x"))
        assert not await lake.run(steps.exists("bkt/a/y"))
        assert not await lake.run(steps.exists("nowhere/y"))
        await lake.run(steps.copy("bkt/a/x", "other/copy", create_bucket=True))
        await lake.run(steps.move("bkt/a/", "bkt/b/"))
        assert await lake.run(steps.get("bkt/b/x")) == await lake.run(steps.get("other/copy")) == b"x"
        page = await lake.run(steps.list_page("bkt/b"))
        assert [entry.key for entry in page.entries] == ["b/x"]
        assert await lake.run(steps.remove("bkt/b/x"))
        assert not await lake.run(steps.remove("bkt/b/x"))
        await lake.run(steps.make_folder("bkt/f"))
        assert (await lake.run(steps.stat("bkt/f/"))).kind == 1
        assert [bucket.name for bucket in await lake.run(steps.buckets())] == ["bkt", "other"]
        await lake.run(steps.remove("other/copy"))
        await lake.run(steps.remove_bucket("other"))
        for bad, error in (("", InvalidName), ("bkt", InvalidName), ("/k", InvalidName)):
            with pytest.raises(error):
                await lake.run(steps.get(bad))

    run(kind, body)


@pytest.mark.parametrize("size", [10, len(MANY)])
def test_a_condition_holds_or_nothing_is_changed(kind: Kind, size: int) -> None:
    content = content_of(size)

    async def body(lake: Driven) -> None:
        steps = lake.steps
        first = (await lake.run(steps.put("bkt/k", content, if_absent=True))).stat
        with pytest.raises(PreconditionFailed):
            await lake.run(steps.put("bkt/k", content + b"!", if_absent=True))
        with pytest.raises(PreconditionFailed):
            await lake.run(steps.put("bkt/k", content + b"!", if_match="another"))
        assert await lake.run(steps.stat("bkt/k")) == first
        second = (await lake.run(steps.put("bkt/k", content + b"!", if_match=first.etag))).stat
        assert second.etag != first.etag
        with pytest.raises(KeyNotFound):
            await lake.run(steps.put("fresh/k", content, if_match=first.etag, create_bucket=True))
        assert not await lake.run(steps.exists("fresh/k"))
        assert [bucket.name for bucket in await lake.run(steps.buckets())] == ["bkt"]

    run(kind, body)


# --- when things go wrong ------------------------------------------------------------------------------


def test_what_cannot_be_put_is_said(kind: Kind) -> None:
    class Breaks(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            raise OSError(5, "the disk is gone")

    class Waits(io.RawIOBase):
        def read(self, size: int = -1) -> None:
            return None

    async def body(lake: Driven) -> None:
        folder = lake.engine.folder
        bad: list[tuple[Any, type[LakeError]]] = [
            (folder / "missing", LocalFileError),
            (folder, LocalFileError),
            (42, InvalidArgument),
            ("a string", InvalidArgument),
            (io.StringIO("text"), InvalidArgument),
            (Breaks(), LocalFileError),
            (Waits(), InvalidArgument),
        ]
        for data, error in bad:
            with pytest.raises(error):
                await lake.run(lake.steps.put("bkt/k", data))
        assert not await lake.run(lake.steps.exists("bkt/k"))

    run(kind, body)


@pytest.mark.parametrize("change", ["rewritten", "shrunk"])
def test_a_file_that_changes_while_it_is_read_is_not_stored(kind: Kind, change: str) -> None:
    async def body(lake: Driven) -> None:
        path = lake.engine.folder / "file"
        path.write_bytes(MANY)

        def meddle(done: int, there: int) -> None:
            if change == "shrunk":
                os.truncate(path, 10)
            else:
                os.utime(path, ns=(1, 1))

        with pytest.raises(SourceChanged):
            await lake.run(lake.steps.put("bkt/k", path, progress=meddle))
        assert not await lake.run(lake.steps.exists("bkt/k"))

    run(kind, body)


def _losing(steps: Steps[T], times: int) -> Steps[T]:
    """Take the same steps, but end their session just before its commit, `times` times."""
    answer: Any = None
    error: BaseException | None = None
    while True:
        try:
            step = steps.throw(error) if error is not None else steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        request = step.effect.request if isinstance(step, Start) and isinstance(step.effect, Send) else None
        if isinstance(request, m.Commit) and times:
            times -= 1
            yield from send(m.SessionEnd(request.session))
        answer, error = None, None
        try:
            answer = yield step
        except LakeError as raised:
            error = raised


@pytest.mark.parametrize("form", ["bytes", "path"])
def test_a_put_that_lost_its_session_begins_again(kind: Kind, form: str) -> None:
    async def body(lake: Driven) -> None:
        told = Told()
        with _as(form, MANY, lake.engine.folder) as data:
            await lake.run(_losing(lake.steps.put("bkt/k", data, progress=told), 2))
            assert await lake.run(lake.steps.get("bkt/k")) == MANY
            assert told.done == len(MANY)
            with pytest.raises(SessionLost):
                await lake.run(_losing(lake.steps.put("bkt/never", data), 3))
        assert not await lake.run(lake.steps.exists("bkt/never"))

    run(kind, body)


def test_a_stream_that_lost_its_session_cannot_begin_again(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        with pytest.raises(SessionLost):
            await lake.run(_losing(lake.steps.put("bkt/k", io.BytesIO(MANY)), 1))
        assert not await lake.run(lake.steps.exists("bkt/k"))

    run(kind, body)


# --- cancellation --------------------------------------------------------------------------------------


def _interrupted(steps: Steps[T], after: int, interrupt: Callable[[], None]) -> Steps[T]:
    """Take the same steps; call `interrupt` just before step `after`."""
    answer: Any = None
    error: BaseException | None = None
    for number in range(1_000_000):
        try:
            step = steps.throw(error) if error is not None else steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        if number == after:
            interrupt()
        answer, error = None, None
        try:
            answer = yield step
        except BaseException as raised:  # noqa: BLE001 - thrown into the operation, which raises it
            error = raised
    raise AssertionError("an operation without end")


OPERATIONS: dict[str, Callable[[LakeSteps, Path], Steps[Any]]] = {
    "put bytes": lambda steps, folder: steps.put("bkt/new", MANY),
    "put file": lambda steps, folder: steps.put("bkt/new", folder / "file"),
    "put stream": lambda steps, folder: steps.put("bkt/new", io.BytesIO(MANY)),
    "put small": lambda steps, folder: steps.put("bkt/new", b"small"),
    "put many": lambda steps, folder: steps.put_many([(f"bkt/{n}", bytes(n)) for n in range(50)], in_flight=8),
    "get": lambda steps, folder: steps.get("bkt/there"),
    "get many": lambda steps, folder: steps.get_many(["bkt/there", "bkt/small", "bkt/missing", "bkt/there"]),
    "read": lambda steps, folder: _read_two_ranges(steps),
}


def _read_two_ranges(steps: LakeSteps) -> Steps[bytes]:
    opened: Opened = yield from steps.open("bkt/there")
    try:
        first = yield from steps.read(opened, CHUNK_BYTES - 10, 20)
        return first + (yield from steps.read(opened, 10, CHUNK_BYTES))
    finally:
        yield from steps.close(opened)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_cancelled_at_any_step_leaves_nothing_behind(trio_kind: Kind, operation: str) -> None:
    async def body(lake: Driven) -> None:
        assert isinstance(lake.lake, TrioLake)
        folder = lake.engine.folder
        (folder / "file").write_bytes(MANY)
        await lake.run(lake.steps.put("bkt/there", MANY))
        await lake.run(lake.steps.put("bkt/small", b"small"))
        after, ended = 0, False
        before: set[str] = set()
        while not ended:
            with trio.CancelScope() as scope:
                steps = _interrupted(OPERATIONS[operation](lake.steps, folder), after, scope.cancel)
                try:
                    await driver_of(lake.lake).run(steps)
                except KeyNotFound:
                    assert operation == "get many"
            ended = not scope.cancel_called
            after += 1
            await _settled(lake)
            if not kind_is_local(trio_kind):
                continue
            if after == 12:
                before = open_descriptors()
            elif after > 12:
                assert len(open_descriptors()) <= len(before) + 1, open_descriptors() - before
        assert after > 2
        assert await lake.run(lake.steps.get("bkt/there")) == MANY

    run(trio_kind, body)


def kind_is_local(kind: Kind) -> bool:
    """Return whether clients of this kind get descriptors of segments."""
    return kind.name in ("embedded", "unix")


async def _settled(lake: Driven) -> None:
    """Wait until the engine has noticed that requests were cancelled; then nothing is held any more."""
    with trio.fail_after(30):
        while True:
            if not any(lake.engine.held()):
                return
            await trio.sleep(0.001)


def test_a_lake_that_is_closed_says_so(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        if not isinstance(lake.lake, Lake):
            return
        blocking = lake.lake
        await lake.run(lake.steps.put("bkt/k", MANY))

        def use() -> None:
            file = blocking.open("bkt/k")
            file.read(10)
            blocking.close()
            file.close()
            with pytest.raises(LakeError):
                blocking.get("bkt/k")
            blocking.close()

        await trio.to_thread.run_sync(use)

    if kind.name != "blocking-embedded":
        run(kind, body)
