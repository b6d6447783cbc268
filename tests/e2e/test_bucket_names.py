"""Names of buckets: a new bucket needs a name that S3 takes; an old one with another name stays usable."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from engine.process.embedded import open_lake
from lakefs.client.connect import connect
from lakefs.errors import BucketNotFound, InvalidName
from tests.e2e.mount_rig import mount_rig
from tests.e2e.s3_raw import signer_of
from tests.e2e.served import LAKE, Served, lake, serving
from tests.old_buckets import any_new_name

PLANTED = "buckets with old names are planted in a store that nobody serves"
LARGE = os.urandom(5_000_000)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine on a store that has buckets `b` and `My_Models`."""
    with TemporaryDirectory(prefix="lake-") as folder:
        with any_new_name(), open_lake(Path(folder) / "store") as planted:
            planted.create_access_key()  # so that the engine prints no line about a missing one
            for bucket in ("b", "My_Models"):
                planted.create_bucket(bucket)
                planted.put(f"{bucket}/run/old", LARGE)
        with serving(Path(folder), "--s3", "127.0.0.1:0") as engine:
            yield engine


def buckets_of(served: Served) -> list[str]:
    with connect(served.server) as client:
        return [bucket.name for bucket in client.buckets()]


def test_a_new_bucket_that_s3_would_refuse_is_refused_with_the_rule(served: Served, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(LARGE)
    (tmp_path / "two").write_bytes(b"two")
    before = buckets_of(served)
    for args in (("bucket", "create", "My_Data"), ("put", "-r", tmp_path, "My_Data/")):
        done = served(*args)
        assert (done.code, done.out) == (2, b""), done
        assert done.err.splitlines() == [
            "lake: bucket name 'My_Data' is not valid: use lower-case letters, digits, '.' and '-' only; "
            "for example: my-models"
        ]
    s3 = signer_of(served)
    for name in ("My_Data", "c", "xn--abc", "abc--table-s3", "1.2.3.4", "abc-"):
        answer = s3.ask("PUT", f"/{name}")
        assert (answer.status, answer.code) == (400, "InvalidBucketName")
        assert answer.field("BucketName") == name
        assert answer.field("Message").endswith("; for example: my-models")
    assert buckets_of(served) == before
    assert s3.ask("PUT", "/my-data").status == 200
    assert s3.ask("DELETE", "/my-data").status == 204


@pytest.mark.one_engine(PLANTED)
@pytest.mark.fuse
def test_a_mount_makes_no_bucket_that_s3_would_refuse(served: Served) -> None:
    before = buckets_of(served)
    with mount_rig(LAKE, served.server) as rig:
        rig.mount()
        for name in ("My_Data", "c", "xn--abc"):
            with pytest.raises(OSError) as refused:
                (rig.place / name).mkdir()
            assert refused.value.errno == errno.EINVAL
        (rig.place / "my-data").mkdir()
        (rig.place / "my-data").rmdir()
        assert sorted(os.listdir(rig.place)) == before
        with pytest.raises(FileExistsError):
            (rig.place / "b").mkdir()
        assert (rig.place / "b/run/old").read_bytes() == LARGE
        (rig.place / "My_Models/run/new").write_bytes(b"new")
        assert (rig.place / "My_Models/run/new").read_bytes() == b"new"
        (rig.place / "My_Models/run/new").unlink()
    assert buckets_of(served) == before


@pytest.mark.one_engine(PLANTED)
def test_a_bucket_that_exists_with_another_name_is_used_as_any_other(served: Served, tmp_path: Path) -> None:
    assert buckets_of(served) == ["My_Models", "b"]
    (tmp_path / "file").write_bytes(LARGE)
    assert "did not exist" not in served.good("put", "-r", tmp_path, "b/tree/").err
    assert served.good("cat", "b/tree/file").out == LARGE
    served.good("mv", "b/tree/", "My_Models/tree/")
    s3 = signer_of(served)
    assert s3.ask("PUT", "/b").status == 200, "as S3 answers for a bucket of the caller's own"
    assert s3.ask("PUT", "/My_Models/s3", b"by S3").status == 200
    assert s3.ask("GET", "/My_Models/s3").body == b"by S3"
    listed = s3.ask("GET", "/My_Models?list-type=2").body
    assert [key in listed for key in (b"<Key>s3</Key>", b"<Key>tree/file</Key>")] == [True, True]
    assert b"<Name>My_Models</Name>" in s3.ask("GET", "/").body
    assert s3.ask("DELETE", "/My_Models/s3").status == 204
    with connect(served.server) as client:
        assert client.create_access_key(buckets=["b"], read_only=True).buckets == ["b"]


@pytest.mark.one_engine(PLANTED)
def test_recovery_and_rebuilding_keep_a_bucket_with_another_name(served: Served) -> None:
    with connect(served.server) as client:
        client.put("b/before", b"before the kill")
    served.kill()
    with open_lake(served.data) as recovered:
        assert recovered.get("b/before") == b"before the kill"
    shutil.rmtree(served.data / "index")
    rebuilt = lake("fsck", "--data", served.data, "--rebuild", "--json")
    assert rebuilt.code == 0, rebuilt
    with open_lake(served.data) as client:
        assert client.fsck(full=True)["damage"] == 0
        assert client.get("b/before") == b"before the kill"
        assert client.get("My_Models/run/old") == LARGE
        for entry in client.ls("My_Models/"):
            client.remove(f"My_Models/{entry.key}")
        client.remove_bucket("My_Models")
        with pytest.raises(InvalidName):
            client.create_bucket("My_Models")
        with pytest.raises(BucketNotFound, match="a new one cannot have that name: use lower-case"):
            client.bucket("My_Models")
        assert [bucket.name for bucket in client.buckets()] == ["b"]
