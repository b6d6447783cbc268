"""The public clients: their methods, and that a user sees the real options of each."""

from __future__ import annotations

import inspect
import io
import subprocess
import sys
import typing
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, assert_type, cast

import pytest
import trio

import lakefs
from engine.process.embedded import open_lake
from lakefs.client.blocking.chunks import Chunks
from lakefs.client.blocking.driver import BlockingDriver
from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.client.trio.chunks import TrioChunks
from lakefs.client.trio.driver import TrioDriver
from lakefs.client.trio.lake import OpenedObject, TrioLake
from lakefs.errors import InvalidName
from lakefs.host.offload import InlineOffload
from lakefs.lake.lake_steps import LakeSteps
from lakefs.lake.multipart import UploadName
from lakefs.put.upload import PutResult
from lakefs.sync import sync_steps
from lakefs.trees import tree_steps
from lakefs.trees.walk import Totals
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import BucketStat, ListEntry, ObjectStat, PartStat, UploadEntry
from lakefs.wire.offers import Offers

SHARED = {
    "abort_upload", "access_keys", "bucket", "buckets", "chunks", "complete_upload", "copy", "copy_part",
    "create_access_key", "create_bucket", "create_upload", "exists", "find_access_key", "fsck", "gc", "get",
    "get_into", "get_many", "get_many_into", "get_tree", "known", "load_many", "ls", "make_folder", "map", "move",
    "open", "parts", "pool", "put", "put_many", "put_part", "put_tree", "rdma", "remove", "remove_access_key",
    "remove_bucket", "remove_space", "remove_tree", "scrub", "set_bucket", "shared_memory", "space", "spaces", "stat",
    "status", "sync", "uploads",
}  # fmt: skip
ONLY_BLOCKING = {"address", "close", "get_file"}
ONLY_TRIO = {"aclose", "watch"}
METHODS = sorted(SHARED - {"chunks", "known", "rdma"})
OF_TREES = {name: getattr(tree_steps, name) for name in ("get_tree", "put_tree", "remove_tree")}
OF_TREES["sync"] = sync_steps.sync
"""Steps of trees, which stand above `LakeSteps`."""
BY_HAND = {"load_many", "map", "open", "pool", "shared_memory", "space"}
"""Methods that cannot be made from steps in both clients; `load_many` is awaited from steps."""


def public(place: object) -> set[str]:
    return {name for name in dir(place) if not name.startswith("_")}


def test_the_clients_have_what_users_call_and_nothing_else(tmp_path: Path) -> None:
    assert public(Lake) == SHARED | ONLY_BLOCKING
    assert public(TrioLake) == SHARED | ONLY_TRIO
    assert public(Chunks) == public(TrioChunks) == {"get", "get_many", "get_into", "get_many_into"}
    (tmp_path / "store").mkdir()
    with open_lake(tmp_path / "store") as lake:
        assert lake.chunks is lake.chunks
        assert public(lake) == SHARED | ONLY_BLOCKING


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_both_clients_has_the_same_options_and_a_docstring(name: str) -> None:
    blocking, awaited = inspect.signature(getattr(Lake, name)), inspect.signature(getattr(TrioLake, name))
    if name == "open":  # it writes, too
        assert set(blocking.parameters) - set(awaited.parameters) == {"mode", "create_bucket"}
    else:
        assert blocking.parameters == awaited.parameters
    assert next(iter(blocking.parameters)) == "self"
    for option in blocking.parameters.values():
        assert option.kind not in (option.VAR_KEYWORD, option.VAR_POSITIONAL)
        assert option.name == "self" or option.annotation not in (option.empty, "Any", Any)
    returned = str(awaited.return_annotation)
    if name == "open":
        assert (blocking.return_annotation, returned) == ("io.BufferedReader | ObjectWriter", "OpenedObject")
    elif name == "space":
        assert (blocking.return_annotation, returned) == ("Space", "TrioSpace")
    else:
        assert blocking.return_annotation == returned.removeprefix("Async")
    assert inspect.getdoc(getattr(Lake, name))
    assert inspect.getdoc(getattr(TrioLake, name))


@pytest.mark.parametrize("name", sorted(set(METHODS) - BY_HAND))
def test_a_method_made_from_steps_says_what_the_steps_say(name: str) -> None:
    steps = OF_TREES.get(name) or getattr(LakeSteps, name)
    for owner in (Lake, TrioLake):
        method = getattr(owner, name)
        assert (method.__name__, method.__qualname__) == (name, f"{owner.__name__}.{name}")
        assert method.__module__ == owner.__module__
        assert method.__doc__ == steps.__doc__
        found, declared = inspect.signature(method), inspect.signature(steps)
        assert list(found.parameters.values())[1:] == list(declared.parameters.values())[1:]
        assert "Steps[" not in str(found.return_annotation)
        assert "Pages[" not in str(found.return_annotation)
    assert inspect.iscoroutinefunction(getattr(TrioLake, name)) != inspect.isasyncgenfunction(getattr(TrioLake, name))


def test_the_types_of_a_methods_options_can_be_looked_up() -> None:
    hints = typing.get_type_hints(Lake.put)
    assert (hints["create_bucket"], hints["return"]) == (bool, PutResult)
    hints = typing.get_type_hints(Lake.put_tree)
    assert (hints["compare"], hints["return"]) == (bool, Totals)


def test_help_shows_the_options_of_put() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import lakefs; help(lakefs.Lake.put)"], capture_output=True, text=True, check=True
    )
    shown = told.stdout
    assert "put(self, name: " in shown
    assert "create_bucket: 'bool' = False" in shown
    assert "if_absent" in shown
    assert "durable on return" in shown


def test_an_unknown_option_is_refused_where_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with open_lake(tmp_path / "store") as lake:
        with pytest.raises(TypeError, match="if_there"):
            lake.put("bkt/k", b"x", if_there=True)  # type: ignore[call-arg]
        with pytest.raises(InvalidName):
            lake.get("no key")
        names = lake.ls("no key")  # nothing is asked before the first entry is wanted
        with pytest.raises(lakefs.LakeError):
            next(names)


class PagedEngine:
    """An engine of either kind that has two entries in each of three pages."""

    address, epoch, carries_descriptors = "unix:/none", 0, False
    offers = Offers()

    def __init__(self) -> None:
        self.asked: list[m.Request] = []

    async def call(self, request: m.Request, *_: object, into: object = ()) -> Reply:
        return self._answer(request)

    def start(self, request: m.Request, *_: object, into: object = ()) -> m.Request:
        return request

    def finish(self, request: m.Request) -> Reply:
        return self._answer(request)

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _answer(self, request: m.Request) -> Reply:
        self.asked.append(request)
        assert isinstance(request, m.ListNames | m.UploadParts | m.UploadList)
        first = int(request.after or 0) + 1
        left = first + 1 if first < 5 else 0
        keys = [str(first), str(first + 1)]
        if isinstance(request, m.ListNames):
            return Reply(m.Listed([m.ListEntry(key) for key in keys], str(left or "")))
        if isinstance(request, m.UploadParts):
            parts = [m.PartStat(int(key), 1, b"", 0, b"") for key in keys]
            return Reply(m.Parts(m.UploadStat("bkt", "k", b"1" * 16, 0), parts, left))
        assert request.after_upload == request.after.encode()
        entries = [m.UploadEntry(key) for key in keys]
        return Reply(m.Uploads(entries, str(left or ""), str(left or "").encode()))


UPLOAD = UploadName("bkt", "k", b"1" * 16)
LISTS: list[tuple[str, object, list[object]]] = [
    ("ls", "bkt/", list("123456")),
    ("uploads", "bkt/", list("123456")),
    ("parts", UPLOAD, [1, 2, 3, 4, 5, 6]),
]


def told(entry: ListEntry | UploadEntry | PartStat) -> object:
    return entry.number if isinstance(entry, PartStat) else entry.key


@pytest.mark.parametrize(("method", "argument", "wanted"), LISTS)
def test_lists_are_read_page_by_page_as_they_are_used(method: str, argument: object, wanted: list[object]) -> None:
    engine = PagedEngine()
    with Lake(cast("Any", engine)) as lake:
        entries = getattr(lake, method)(argument)
        assert engine.asked == []
        assert [told(next(entries)), told(next(entries))] == wanted[:2]
        assert len(engine.asked) == 1
        assert [told(entry) for entry in entries] == wanted[2:]
        assert len(engine.asked) == 3

    async def main() -> None:
        engine = PagedEngine()
        lake = TrioLake(cast("Any", engine), InlineOffload())
        entries = getattr(lake, method)(argument)
        assert [told(await anext(entries)), told(await anext(entries))] == wanted[:2]
        assert len(engine.asked) == 1
        assert [told(entry) async for entry in entries] == wanted[2:]
        assert len(engine.asked) == 3

    trio.run(main)


def test_options_reach_every_page() -> None:
    engine = PagedEngine()
    with Lake(cast("Any", engine)) as lake:
        assert len(list(lake.ls("bkt/a", delimiter="/", folders=True))) == 6
    assert engine.asked == [m.ListNames("bkt", "a", after, "/", 1000, True) for after in ("", "2", "4")]


def test_the_blocking_client_loads_no_trio() -> None:
    program = """if True:
        import sys
        import lakefs
        from lakefs.client.facade import driver_of
        assert not {"trio", "lakefs.lake.lake_steps", "lakefs.wire"} & set(sys.modules)
        assert lakefs.Lake, lakefs.connect
        assert not {"trio", "engine"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", program], check=True)


def checked_by_mypy(lake: Lake, awaited: TrioLake) -> None:
    """Never called: `mypy` reads it, and reports an option or a type that is not seen."""
    assert_type(lake.put("bkt/k", b"x", create_bucket=True), PutResult)
    assert_type(lake.put(name="bkt/k", data=Path("x"), user_metadata={"a": "b"}, if_match="x"), PutResult)
    lake.put("bkt/k", b"x", create_buckets=True)  # type: ignore[call-arg]
    lake.put("bkt/k", b"x", create_bucket="yes")  # type: ignore[arg-type]
    lake.put("bkt/k")  # type: ignore[call-arg]
    lake.put("bkt/k", "text")  # type: ignore[arg-type]
    lake.scrub(60.0)  # type: ignore[call-arg]
    assert_type(lake.get("bkt/k", progress=lambda done, present: None), bytes)
    assert_type(lake.get_many_into(["bkt/k"], [bytearray(1)]), list[int])
    assert_type(lake.exists("bkt/k"), bool)
    assert_type(lake.remove_bucket("bkt"), None)
    assert_type(lake.bucket("bkt"), BucketStat)
    assert_type(lake.status(), dict[str, Any])
    assert_type(lake.ls("bkt/", delimiter="/"), Iterator[ListEntry])
    assert_type(lake.uploads("bkt/"), Iterator[UploadEntry])
    assert_type(lake.parts(UPLOAD), Iterator[PartStat])
    lake.ls("bkt/", limit=10)  # type: ignore[call-arg]
    assert_type(lake.open("bkt/k"), io.BufferedReader)
    assert_type(driver_of(lake), BlockingDriver)
    assert_type(driver_of(awaited), TrioDriver)
    assert_type(awaited.ls("bkt/", folders=True), AsyncIterator[ListEntry])


async def checked_by_mypy_in_trio(lake: TrioLake) -> None:
    """Never called, like `checked_by_mypy`."""
    assert_type(await lake.put("bkt/k", b"x", create_bucket=True), PutResult)
    await lake.put("bkt/k", b"x", create_buckets=True)  # type: ignore[call-arg]
    await lake.put("bkt/k", b"x", create_bucket="yes")  # type: ignore[arg-type]
    lake.put("bkt/k", b"x")  # type: ignore[unused-coroutine]
    assert_type(await lake.stat("bkt/k"), ObjectStat)
    assert_type(await lake.put_many([("bkt/k", b"x")], in_flight=4), list[ObjectStat])
    assert_type(await lake.open("bkt/k"), OpenedObject)
    assert_type([entry async for entry in lake.ls("bkt/")], list[ListEntry])
