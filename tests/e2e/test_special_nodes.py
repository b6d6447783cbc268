"""Special nodes beside objects: S3 does not know them, `lake` names them, `get -r` leaves them out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import lakefs
from lakefs.client.facade import driver_of
from lakefs.steps.steps import send
from lakefs.wire.messages import MakeNode, ObjectAttributes
from tests.e2e.s3_raw import Signer, signer_of
from tests.e2e.served import Served, serving
from tests.e2e.test_s3_odd_keys import listed

SPECIAL = {"k/0-pipe": (5, 0), "k/b-socket": (6, 0), "k/null": (7, 259), "z/only": (8, 0x1_0003)}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine with S3, whose bucket has objects and special nodes."""
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), "--s3", "127.0.0.1:0") as engine:
        with lakefs.connect(engine.server) as client:
            for name in ("bkt/k/a", "bkt/k/c"):
                client.put(name, b"1", create_bucket=True)
            for length in (1024, 1025, 4095):
                client.put("long/" + "n" * length, b"1", create_bucket=True)
            for key, (kind, device) in SPECIAL.items():
                driver_of(client).run(send(MakeNode("bkt", key, kind, ObjectAttributes(mode=0o640), device)))
        yield engine


@pytest.fixture(scope="module")
def s3(served: Served) -> Signer:
    """A key that may do everything."""
    return signer_of(served)


@pytest.mark.parametrize("query", ["", "&prefix=k%2F", "&delimiter=%2F&prefix=k%2F", "&delimiter=l"])
def test_s3_lists_objects_alone_also_in_short_pages(s3: Signer, query: str) -> None:
    assert listed(s3, "bkt", query) == ["k/a", "k/c"]
    first = s3.ask("GET", f"/bkt?encoding-type=url&list-type=2&max-keys=1{query}").body
    assert (first.count(b"<Contents>"), b"<IsTruncated>true<" in first) == (1, True)
    versions = s3.ask("GET", f"/bkt?encoding-type=url&max-keys=9&versions={query}").body
    assert (versions.count(b"<Version>"), b"pipe" in versions) == (2, False)
    assert s3.ask("GET", "/bkt?encoding-type=url&list-type=2&prefix=z%2F").body.count(b"<Contents>") == 0


@pytest.mark.parametrize("key", SPECIAL)
def test_s3_answers_that_there_is_no_such_key(s3: Signer, key: str) -> None:
    answer = s3.ask("GET", f"/bkt/{key}")
    assert (answer.status, b"<Code>NoSuchKey</Code>" in answer.body) == (404, True)
    assert s3.ask("HEAD", f"/bkt/{key}").status == 404
    assert s3.ask("PUT", "/bkt/copy", b"", {"x-amz-copy-source": f"/bkt/{key}"}).status == 404


def test_the_commands_name_them_and_fetch_the_rest(served: Served, tmp_path: Path) -> None:
    lines = served.good("ls", "-l", "-r", "bkt").lines
    modes = {line.split()[-1]: line.split()[0] for line in lines}
    assert [modes[f"bkt/{key}" if f"bkt/{key}" in modes else key][0] for key in SPECIAL] == ["p", "s", "c", "b"]
    found = json.loads(served.good("stat", "--json", "bkt/k/null").out)
    assert (found["kind"], found["device"]) == ("character device", "1:3")
    done = served("get", "-r", "--json", "bkt", tmp_path / "out")
    fates = {file["name"]: file["status"] for file in json.loads(done.out)["files"]}
    assert {name for name, fate in fates.items() if fate == "skipped"} == {f"bkt/{key}" for key in SPECIAL}
    assert sorted(path.name for path in (tmp_path / "out" / "k").iterdir()) == ["a", "c"]
    assert done.code == 0
    assert served.good("find", "bkt", "--type", "p").lines == ["bkt/k/0-pipe"]
    assert len(served.good("find", "bkt").lines) == len(SPECIAL) + 2
    single = served("get", "bkt/k/0-pipe", tmp_path / "single")
    assert (single.code != 0, "is a pipe" in single.err) == (True, True)


def test_s3_lists_no_key_that_it_does_not_take(s3: Signer, served: Served) -> None:
    assert [len(key) for key in listed(s3, "long")] == [1024]
    assert s3.ask("GET", "/long?encoding-type=url&versions=").body.count(b"<Version>") == 1
    assert [len(line) for line in served.good("ls", "long").lines] == [1024, 1025, 4095]
