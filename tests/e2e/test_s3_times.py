"""Last-Modified and x-amz-meta-mtime: of what S3, `lake put`, and the other faces have stored."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

from lakefs.client.connect import connect
from tests.e2e.s3_client import client_of, refused
from tests.e2e.s3_raw import Signer, signer_of
from tests.e2e.served import Served, serving

OLD_NS: Final = 981_173_106_123_456_789
OLD: Final = "981173106.123456789"
BEFORE: Final = timedelta(days=1)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine with S3."""
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), "--s3", "127.0.0.1:0") as engine:
        yield engine


@pytest.fixture(scope="module")
def s3(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A client that may do everything; `lake put` has stored a file of 2001 as `bucket/file`."""
    client = client_of(served)
    client.create_bucket(Bucket="bucket")
    file = tmp_path_factory.mktemp("times") / "file"
    file.write_bytes(b"content")
    os.utime(file, ns=(OLD_NS, OLD_NS))
    served.good("put", file, "bucket/file")
    return client


@pytest.fixture(scope="module")
def signer(served: Served, s3: Any) -> Signer:
    """Requests of our own."""
    assert s3
    return signer_of(served)


def head(s3: Any, key: str) -> dict[str, Any]:
    """Return the answer to HEAD of an object in the bucket, which is GET's."""
    found: dict[str, Any] = s3.head_object(Bucket="bucket", Key=key)
    got = s3.get_object(Bucket="bucket", Key=key)
    assert (got["LastModified"], got["Metadata"]) == (found["LastModified"], found["Metadata"])
    return found


def is_new(when: datetime) -> bool:
    """Return True for a time of this test."""
    return abs(when - datetime.now(UTC)) < timedelta(minutes=5)


def mtime_of(served: Served, key: str) -> int:
    """Return the modification time that `lake stat` shows."""
    found: int = json.loads(served.good("stat", "--json", f"bucket/{key}").text)["mtime_ns"]
    return found


def test_last_modified_is_when_the_key_was_bound_and_the_files_time_is_metadata(s3: Any, served: Served) -> None:
    found = head(s3, "file")
    assert is_new(found["LastModified"])
    assert found["Metadata"] == {"mtime": OLD}
    assert mtime_of(served, "file") == OLD_NS
    (listed,) = s3.list_objects_v2(Bucket="bucket", Prefix="file")["Contents"]
    (version,) = s3.list_object_versions(Bucket="bucket", Prefix="file")["Versions"]
    attributes = s3.get_object_attributes(Bucket="bucket", Key="file", ObjectAttributes=["ETag"])
    for answer in (listed, version, attributes):
        assert answer["LastModified"].replace(microsecond=0) == found["LastModified"]


def test_conditions_compare_last_modified(s3: Any, signer: Signer) -> None:
    bound = head(s3, "file")["LastModified"]
    named = {"Bucket": "bucket", "Key": "file"}
    assert refused(s3.get_object, **named, IfModifiedSince=bound)[0] == 304
    assert s3.get_object(**named, IfModifiedSince=bound - BEFORE)["Body"].read() == b"content"
    assert refused(s3.get_object, **named, IfUnmodifiedSince=bound - BEFORE)[0] == 412
    copying = {"Bucket": "bucket", "Key": "conditional", "CopySource": named}
    assert refused(s3.copy_object, **copying, CopySourceIfUnmodifiedSince=bound - BEFORE)[0] == 412
    s3.copy_object(**copying, CopySourceIfUnmodifiedSince=bound)
    again = head(s3, "conditional")["LastModified"]
    old = "Sat, 03 Feb 2001 04:05:06 GMT"
    for when, status in ((old, 412), (again.strftime("%a, %d %b %Y %H:%M:%S GMT"), 204)):
        answer = signer.ask("DELETE", "/bucket/conditional", b"", {"x-amz-if-match-last-modified-time": when})
        assert answer.status == status


@pytest.mark.parametrize("sent", [OLD, "981173106", "981173106.5", "-1.25"])
def test_a_time_that_a_client_sends_is_the_modification_time_and_comes_back_as_sent(
    s3: Any, served: Served, sent: str
) -> None:
    s3.put_object(Bucket="bucket", Key="sent", Body=b"x", Metadata={"mtime": sent, "other": "1"})
    assert head(s3, "sent")["Metadata"] == {"mtime": sent, "other": "1"}
    assert is_new(head(s3, "sent")["LastModified"])
    seconds, _, fraction = sent.removeprefix("-").partition(".")
    expected = int(seconds) * 10**9 + int(fraction.ljust(9, "0"))
    assert mtime_of(served, "sent") == (-expected if sent.startswith("-") else expected)


@pytest.mark.parametrize("sent", ["yesterday", "", "99999999999", "9999999999", "1e9"])
def test_a_time_that_is_none_is_only_metadata(s3: Any, served: Served, sent: str) -> None:
    s3.put_object(Bucket="bucket", Key="odd", Body=b"x", Metadata={"mtime": sent})
    assert head(s3, "odd")["Metadata"] == {"mtime": sent}
    assert abs(mtime_of(served, "odd") - time.time_ns()) < 300 * 10**9


def test_a_time_is_never_invented(s3: Any) -> None:
    s3.put_object(Bucket="bucket", Key="plain", Body=b"x")
    upload = {"Bucket": "bucket", "Key": "parts"}
    upload["UploadId"] = s3.create_multipart_upload(**upload)["UploadId"]
    etag = s3.upload_part(**upload, PartNumber=1, Body=b"x")["ETag"]
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]})
    s3.copy_object(Bucket="bucket", Key="copied", CopySource="bucket/plain")
    s3.copy_object(Bucket="bucket", Key="bare", CopySource="bucket/file", MetadataDirective="REPLACE")
    for key in ("plain", "parts", "copied", "bare"):
        assert head(s3, key)["Metadata"] == {}
        assert is_new(head(s3, key)["LastModified"])


def test_an_upload_in_parts_and_a_copy_carry_the_time(s3: Any, served: Served) -> None:
    upload = {"Bucket": "bucket", "Key": "dated"}
    upload["UploadId"] = s3.create_multipart_upload(**upload, Metadata={"mtime": OLD})["UploadId"]
    etag = s3.upload_part(**upload, PartNumber=1, Body=b"x")["ETag"]
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]})
    s3.copy_object(Bucket="bucket", Key="dated-copy", CopySource="bucket/dated")
    s3.copy_object(Bucket="bucket", Key="file-copy", CopySource="bucket/file")
    for key in ("dated", "dated-copy", "file-copy"):
        assert head(s3, key)["Metadata"] == {"mtime": OLD}
        assert mtime_of(served, key) == OLD_NS
        assert is_new(head(s3, key)["LastModified"])
    s3.copy_object(
        Bucket="bucket", Key="file", CopySource="bucket/file", MetadataDirective="REPLACE", Metadata={"mtime": "7"}
    )
    assert mtime_of(served, "file") == 7 * 10**9  # as rclone sets a time


def test_tags_modes_and_times_that_are_set_later_leave_last_modified(s3: Any, served: Served) -> None:
    s3.put_object(Bucket="bucket", Key="touched", Body=b"x", Metadata={"mtime": OLD})
    before = head(s3, "touched")["LastModified"]
    s3.put_object_tagging(Bucket="bucket", Key="touched", Tagging={"TagSet": [{"Key": "a", "Value": "b"}]})
    served.good("mv", "bucket/touched", "bucket/renamed")
    assert head(s3, "renamed")["LastModified"] == before
    assert head(s3, "renamed")["Metadata"] == {"mtime": OLD}


def test_content_that_python_puts_has_no_other_time(s3: Any, served: Served) -> None:
    with connect(served.server) as lake:
        lake.put("bucket/python", b"x")
        lake.put_many([("bucket/python-1", b"x"), ("bucket/python-2", b"y")])
    for key in ("python", "python-1", "python-2"):
        assert head(s3, key)["Metadata"] == {}
