"""Objects written by `lake.open(name, "wb")`: whole and at once when they are closed, and not at all after an error.

Errors on the way, long content and processes: tests/plugins/fsspec/test_written.py, of the same writer.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.process.embedded import open_lake
from lakefs.client.blocking.lake import Lake
from lakefs.client.blocking.object_writer import STORED_AT_ONCE_BYTES
from lakefs.client.facade import driver_of
from lakefs.errors import AlreadyExists, BucketNotFound, InvalidArgument, InvalidName, LakeError
from lakefs.put.upload import only_result
from lakefs.steps.steps import send
from lakefs.wire.messages import NameChange, ObjectAttributes, PutObjects


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    """A lake in this process, with an object `bkt/old`."""
    with open_lake(tmp_path) as opened:
        opened.put("bkt/old", b"old", create_bucket=True)
        yield opened


@pytest.mark.parametrize("length", [0, 5, STORED_AT_ONCE_BYTES + 3])
def test_the_name_changes_when_the_file_is_closed(lake: Lake, length: int) -> None:
    content = bytes(range(256)) * (length // 256 + 1)
    with lake.open("bkt/old", "wb") as file:
        assert file.writable()
        assert file.write(content[: length // 2]) == length // 2
        file.write(bytearray(content[length // 2 : length]))
        file.flush()
        assert (file.tell(), file.size) == (length, length)
        assert lake.get("bkt/old") == b"old"
        with pytest.raises(io.UnsupportedOperation):
            file.seek(0)
    assert lake.get("bkt/old") == content[:length]
    with pytest.raises(ValueError, match="closed"):
        file.write(b"more")


def test_an_error_in_the_block_leaves_the_name_as_it_is(lake: Lake) -> None:
    with pytest.raises(RuntimeError), lake.open("bkt/old", "wb") as file:
        file.write(bytes(STORED_AT_ONCE_BYTES))
        raise RuntimeError
    left = lake.open("bkt/new", "wb")
    left.write(b"dropped")
    left.discard()
    assert lake.get("bkt/old") == b"old"
    assert [entry.key for entry in lake.ls("bkt")] == ["old"]


def test_a_file_that_is_never_closed_stores_nothing(lake: Lake) -> None:
    left: Any = lake.open("bkt/old", "wb")
    left.write(b"dropped")
    with pytest.warns(ResourceWarning, match="bkt/old was never closed"):
        del left
    assert lake.get("bkt/old") == b"old"


def test_an_object_that_exists_is_appended_to_or_refused(lake: Lake) -> None:
    with lake.open("bkt/old", "ab") as file:
        file.write(b" and new")
    assert lake.get("bkt/old") == b"old and new"
    with pytest.raises(AlreadyExists, match="bkt/old exists already"):
        lake.open("bkt/old", "xb")
    late = lake.open("bkt/late", "xb")
    lake.put("bkt/late", b"first")
    with pytest.raises(AlreadyExists, match="bkt/late exists already"):
        late.close()
    assert lake.get("bkt/late") == b"first"


def test_what_is_appended_to_keeps_its_attributes_but_not_its_time(lake: Lake) -> None:
    metadata = {"k": "v", "mtime": "1.5"}
    attributes = ObjectAttributes(
        mode=0o751, mtime_ns=1_500_000_000, content_type="text/x", user_metadata=metadata, tags={"t": "1"}
    )
    change = NameChange("bkt", "attributes", b"", attributes)
    with lake.open("bkt/other", "wb") as file:
        file.write(b"x")
    only_result(driver_of(lake).run(send(PutObjects([1], [change]), body=[memoryview(b"x")])))
    with lake.open("bkt/attributes", "ab") as file:
        file.write(b"y")
    found = lake.stat("bkt/attributes")
    assert (found.mode, found.content_type, found.user_metadata, found.tags) == (
        0o751,
        "text/x",
        {"k": "v"},
        {"t": "1"},
    )
    assert found.mtime_ns > 1_500_000_000
    assert lake.get("bkt/attributes") == b"xy"


def test_a_missing_bucket_is_made_only_if_that_was_asked(lake: Lake) -> None:
    for _ in range(2):
        with pytest.raises(BucketNotFound), lake.open("fresh/x", "wb") as file:
            file.write(b"x")
    with lake.open("fresh/x", "wb", create_bucket=True) as file:
        file.write(b"x")
    assert lake.get("fresh/x") == b"x"


@pytest.mark.parametrize(
    ("name", "mode", "error", "message"),
    [
        ("bkt/x", "w", InvalidArgument, "rb, wb, xb or ab, not 'w'; for text, encode it"),
        ("bkt/x", "r+b", InvalidArgument, "not 'r\\+b'"),
        ("bkt", "wb", InvalidName, "names a bucket"),
        ("bkt/../x", "wb", InvalidName, "no path"),
    ],
)
def test_other_modes_and_names_are_refused_at_once(
    lake: Lake, name: str, mode: Any, error: type[LakeError], message: str
) -> None:
    with pytest.raises(error, match=message):
        lake.open(name, mode)


def test_libraries_write_through_it(lake: Lake) -> None:
    grid = np.arange(12.0).reshape(3, 4)
    with lake.open("bkt/grid.npy", "wb") as file:
        np.save(file, grid)
    with lake.open("bkt/grid.npy") as back:
        assert np.array_equal(np.load(back), grid)
