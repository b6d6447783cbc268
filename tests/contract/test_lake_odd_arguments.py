"""Arguments that are no name or no memory, in every call of the public clients: refused, and nothing is touched."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import pytest
import trio

from engine.process.embedded import open_lake
from lakefs.client.blocking.lake import Lake
from lakefs.client.trio.lake import TrioLake
from lakefs.errors import InvalidArgument, InvalidName
from lakefs.get.pools import Pool
from lakefs.host.plain_bytes import plain_bytes
from lakefs.lake.multipart import UploadName
from lakefs.limits import MIB
from tests.contract.engines import Kind
from tests.contract.test_lake import Driven, run

POOL: Final = Pool(size_bytes=MIB)
UPLOAD: Final = UploadName("bkt", "k", bytes(16))
Call = Callable[[Any, Any], Any]

NAMES: Final[dict[str, list[Call]]] = {
    "put": [lambda lake, bad: lake.put(bad, b"x")],
    "put_many": [lambda lake, bad: lake.put_many([("bkt/x", b"x"), (bad, b"x")])],
    "create_upload": [lambda lake, bad: lake.create_upload(bad)],
    "copy_part": [lambda lake, bad: lake.copy_part(UPLOAD, 1, bad)],
    "uploads": [lambda lake, bad: lake.uploads(bad)],
    "get": [lambda lake, bad: lake.get(bad)],
    "get_into": [lambda lake, bad: lake.get_into(bad, bytearray(9))],
    "get_many": [lambda lake, bad: lake.get_many(["bkt/a", bad])],
    "get_many_into": [lambda lake, bad: lake.get_many_into(["bkt/a", bad], [bytearray(9), bytearray(9)])],
    "get_file": [lambda lake, bad: lake.get_file(bad, "/nowhere/file")],
    "open": [lambda lake, bad: lake.open(bad)],
    "map": [lambda lake, bad: lake.map(bad)],
    "stat": [lambda lake, bad: lake.stat(bad)],
    "exists": [lambda lake, bad: lake.exists(bad)],
    "ls": [lambda lake, bad: lake.ls(bad)],
    "remove": [lambda lake, bad: lake.remove(bad)],
    "move": [lambda lake, bad: lake.move(bad, "bkt/b"), lambda lake, bad: lake.move("bkt/a", bad)],
    "copy": [lambda lake, bad: lake.copy(bad, "bkt/b"), lambda lake, bad: lake.copy("bkt/a", bad)],
    "make_folder": [lambda lake, bad: lake.make_folder(bad)],
    "put_tree": [lambda lake, bad: lake.put_tree(bad, "/nowhere")],
    "get_tree": [lambda lake, bad: lake.get_tree(bad, "/nowhere")],
    "sync": [lambda lake, bad: lake.sync(no_path(bad), "bkt/b"), lambda lake, bad: lake.sync("bkt/a", no_path(bad))],
    "remove_tree": [lambda lake, bad: lake.remove_tree(bad)],
    "watch": [lambda lake, bad: lake.watch(bad)],
    "create_bucket": [lambda lake, bad: lake.create_bucket(bad)],
    "remove_bucket": [lambda lake, bad: lake.remove_bucket(bad)],
    "bucket": [lambda lake, bad: lake.bucket(bad)],
    "set_bucket": [lambda lake, bad: lake.set_bucket(bad, versioning="enabled")],
    "space": [lambda lake, bad: lake.space(bad)],
    "remove_space": [lambda lake, bad: lake.remove_space(bad)],
    "create_access_key": [lambda lake, bad: lake.create_access_key(buckets=["bkt", bad])],
    "find_access_key": [lambda lake, bad: lake.find_access_key(bad)],
    "remove_access_key": [lambda lake, bad: lake.remove_access_key(bad)],
}
"""Each public method that takes names, called with a bad one in each place."""
LOAD_MANY: Final[Call] = lambda lake, bad: lake.load_many(["bkt/a", bad], POOL, [0, 100])  # noqa: E731
BLOCKING_ONLY: Final = {"get_file"}
TRIO_ONLY: Final = {"watch"}
PARAMETERS_OF_NAMES: Final = {
    *("name", "names", "source", "target", "objects", "bucket", "buckets", "access_key", "wanted")
}


def no_path(bad: Any) -> Any:
    """Return a bad name where a path would be a folder."""
    return 7 if isinstance(bad, PurePosixPath) else bad


def given(call: Call, bad: Any) -> Callable[[Any], Any]:
    """Return the call with its bad argument."""
    return lambda lake: call(lake, bad)


async def outcome_of(lake: Lake | TrioLake, call: Callable[[Any], Any]) -> Any:
    """Return what a call of either client returns: a page's entries as a list, an entered context for a context."""

    def blocking() -> Any:
        found = call(lake)
        if isinstance(found, AbstractContextManager) and not hasattr(found, "read"):
            with found as entered:
                return entered
        return list(found) if inspect.isgenerator(found) else found

    if isinstance(lake, Lake):
        return await trio.to_thread.run_sync(blocking)
    found = call(lake)
    if isinstance(found, AbstractAsyncContextManager) and not inspect.isawaitable(found):
        async with found as entered:
            return entered
    if inspect.isasyncgen(found) or hasattr(found, "__aiter__"):
        return [entry async for entry in found]
    return await found


@pytest.mark.parametrize("bad", [PurePosixPath("bkt/a"), None, 5, b"bkt/a"], ids=["path", "none", "number", "bytes"])
def test_what_is_no_text_is_no_name_in_every_call(kind: Kind, bad: Any) -> None:
    async def body(driven: Driven) -> None:
        lake = driven.lake
        await outcome_of(lake, lambda lake: lake.put("bkt/a", b"content"))
        calls = dict(NAMES)
        if not isinstance(bad, bytes):  # which are a chunk's id there
            calls["load_many"] = [LOAD_MANY]
        for method, ways in calls.items():
            if method in (TRIO_ONLY if isinstance(lake, Lake) else BLOCKING_ONLY):
                continue
            for way in ways:
                with pytest.raises(InvalidName, match="text"):
                    await outcome_of(lake, given(way, bad))
        assert [entry.key for entry in await outcome_of(lake, lambda lake: lake.ls("bkt"))] == ["a"]
        assert await outcome_of(lake, lambda lake: lake.get("bkt/a")) == b"content"  # the connection goes on

    run(kind, body)


@pytest.mark.parametrize("client", [Lake, TrioLake])
def test_every_method_that_takes_a_name_is_walked(client: type[Any]) -> None:
    for method, function in inspect.getmembers(client, callable):
        if not method.startswith("_") and PARAMETERS_OF_NAMES & set(inspect.signature(function).parameters):
            assert method in {*NAMES, "load_many"}, f"{method} is not in the table"


@pytest.mark.parametrize("key", ["a//b", "/a", "../a", "a/..", "./a", "a/./b", "a//"])
def test_a_name_that_no_path_can_say_is_made_by_no_call(kind: Kind, key: str) -> None:
    bad = f"bkt/{key}"
    made: list[Callable[[Any], Any]] = [
        lambda lake: lake.put(bad, b"x"),
        lambda lake: lake.put_many([("bkt/x", b"x"), (bad, b"x")]),
        lambda lake: lake.copy("bkt/a", bad),
        lambda lake: lake.move("bkt/a", bad),
        lambda lake: lake.make_folder(bad),
        lambda lake: lake.create_upload(bad),
    ]

    async def body(driven: Driven) -> None:
        lake = driven.lake
        await outcome_of(lake, lambda lake: lake.put("bkt/a", b"content"))
        for call in made:
            with pytest.raises(InvalidName, match="no path"):
                await outcome_of(lake, call)
        assert [entry.key for entry in await outcome_of(lake, lambda lake: lake.ls("bkt"))] == ["a"]
        assert not await outcome_of(lake, lambda lake: lake.exists(bad))  # it may be asked for

    run(kind, body)


# --- memory ------------------------------------------------------------------------------------------------------


def objects() -> list[Any]:
    """Buffers that hold references to Python objects."""
    first: Any = np.array([b"one", b"two"], dtype=object)
    pairs = np.zeros(2, dtype=[("O", "f4"), ("held", "O")])
    pair: list[Any] = [b"one", b"two"]
    references: Any = (ctypes.py_object * 2)(*pair)
    return [first, memoryview(first), pairs, references, np.zeros((1, 2), dtype=object)]


def plain() -> list[Any]:
    """Buffers of bytes, whatever the names of their fields."""
    return [
        bytearray(16),
        np.zeros(2, dtype=[("O", "f4"), ("aOb", "f4")]),
        np.zeros((2, 2), ">f4"),
        (ctypes.c_int * 4)(),
    ]


def test_objects_of_python_are_no_bytes_and_all_other_memory_is() -> None:
    for lent in objects():
        with pytest.raises(TypeError, match="Python objects"):
            plain_bytes(lent)
    for lent in plain():
        view = plain_bytes(lent)
        assert (view.format, view.ndim, view.nbytes) == ("B", 1, 16)
    for lent in (5, "text", np.zeros((4, 4))[:, ::2], np.zeros(2, "M8[s]")):
        with pytest.raises(TypeError):
            plain_bytes(lent)


async def stored_by_each_call(lake: Any, data: Any) -> list[Any]:
    """Store an array by each call that stores; return what each name, and the key of a space, has then."""
    space = await outcome_of(lake, lambda lake: lake.space("kv"))
    upload = await outcome_of(lake, lambda lake: lake.create_upload("bkt/parts"))
    part = await outcome_of(lake, lambda lake: lake.put_part(upload, 1, data))
    await outcome_of(lake, lambda lake: lake.complete_upload(upload, [(1, part.etag)]))
    await outcome_of(lake, lambda lake: lake.put("bkt/alone", data))
    await outcome_of(lake, lambda lake: lake.put_many([("bkt/many", data)]))
    await outcome_of(lake, lambda _: space.put_many([b"k"], [data]))
    value = bytearray(data.nbytes)
    await outcome_of(lake, lambda _: space.get_many_into([b"k"], [value]))
    names = ["bkt/parts", "bkt/alone", "bkt/many"]
    return [*(await outcome_of(lake, lambda lake: lake.get_many(names))), bytes(value)]


@pytest.mark.parametrize(
    "data",
    [
        np.array(["2026-01-01", "2026-01-02"], dtype="M8[ns]"),  # it lends no buffer
        np.arange(30_000, dtype="f8").reshape(30, 1000),
    ],
    ids=["interface", "rows"],
)
def test_every_call_that_stores_takes_arrays(kind: Kind, data: Any) -> None:
    async def body(driven: Driven) -> None:
        assert await stored_by_each_call(driven.lake, data) == 4 * [data.tobytes()]

    run(kind, body)


def test_no_call_stores_or_fills_an_array_of_objects(kind: Kind) -> None:
    async def body(driven: Driven) -> None:
        lake = driven.lake
        await outcome_of(lake, lambda lake: lake.put_many([("bkt/a", bytes(range(16))), ("bkt/b", b"content")]))
        space = await outcome_of(lake, lambda lake: lake.space("kv"))
        await outcome_of(lake, lambda _: space.put_many([b"k"], [bytes(16)]))
        chunk = (await outcome_of(lake, lambda lake: lake.stat("bkt/a"))).blob
        upload = await outcome_of(lake, lambda lake: lake.create_upload("bkt/parts"))
        for bad in objects():
            before = list(bad[0]) if isinstance(bad, np.ndarray) and bad.ndim == 2 else repr(bad)
            calls: list[Call] = [
                lambda lake, bad: lake.put("bkt/x", bad),
                lambda lake, bad: lake.put_many([("bkt/x", b"good"), ("bkt/y", bad)]),
                lambda lake, bad: lake.put_part(upload, 1, bad),
                lambda lake, bad: lake.get_into("bkt/a", bad),
                lambda lake, bad: lake.get_many_into(["bkt/b", "bkt/a"], [bytearray(9), bad]),
                lambda lake, bad: lake.chunks.get_into(chunk, bad),
                lambda lake, bad: lake.chunks.get_many_into([chunk], [bad]),
                lambda lake, bad: space.put_many([b"a", b"b"], [b"good", bad]),
                lambda lake, bad: space.get_many_into([b"k"], [bad]),
            ]
            for call in calls:
                with pytest.raises(InvalidArgument):
                    await outcome_of(lake, given(call, bad))
            assert (list(bad[0]) if isinstance(bad, np.ndarray) and bad.ndim == 2 else repr(bad)) == before
        found = [entry.key for entry in await outcome_of(lake, lambda lake: lake.ls("bkt"))]
        assert found == ["a", "b"]
        assert (await outcome_of(lake, lambda _: space.match([b"a", b"b", b"k"]))).present == [False, False, True]
        await outcome_of(lake, lambda lake: lake.abort_upload(upload))

    run(kind, body)


def test_a_file_of_an_object_fills_no_array_of_objects(tmp_path: Path) -> None:
    with open_lake(tmp_path) as lake:
        lake.put("bkt/a", bytes(range(1, 255)) * 9000, create_bucket=True)
        arrays: list[Any] = [np.array([None] * count, dtype=object) for count in (4, 1 << 18)]
        for bad in arrays:
            with lake.open("bkt/a") as file:
                for fill in (file.readinto, file.readinto1, file.raw.readinto):
                    with pytest.raises(TypeError, match="Python objects"):
                        fill(bad)
            assert all(element is None for element in bad)
