"""Uploads in parts, as boto3 makes them, against a real engine."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.e2e.s3_client import client_of, refused
from tests.e2e.served import Served, serving

MIB = 1 << 20
NAME = {"Bucket": "bucket", "Key": "in parts/é"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine with S3 on a port of its own."""
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), "--s3", "127.0.0.1:0") as engine:
        yield engine


@pytest.fixture(scope="module")
def s3(served: Served) -> Any:
    """A client that may do everything; the bucket `bucket` is there."""
    client = client_of(served)
    client.create_bucket(Bucket="bucket")
    return client


def upload_parts(s3: Any, upload: str, contents: dict[int, bytes]) -> list[dict[str, Any]]:
    """Upload parts, the last number first; return the list for the completion."""
    told = []
    for number in sorted(contents, reverse=True):
        etag = s3.upload_part(**NAME, UploadId=upload, PartNumber=number, Body=contents[number])["ETag"]
        assert etag == f'"{hashlib.md5(contents[number]).hexdigest()}"'
        told.append({"PartNumber": number, "ETag": etag})
    return told[::-1]


def etag_of(contents: list[bytes]) -> str:
    digests = b"".join(hashlib.md5(content).digest() for content in contents)
    return f'"{hashlib.md5(digests).hexdigest()}-{len(contents)}"'


def test_parts_in_any_order_and_replaced_become_the_object(served: Served, s3: Any) -> None:
    upload = s3.create_multipart_upload(**NAME, Metadata={"a": "b"}, ContentType="text/x")["UploadId"]
    contents = {2: os.urandom(5 * MIB), 7: os.urandom(6 * MIB + 5), 9: os.urandom(100)}
    upload_parts(s3, upload, {7: os.urandom(5 * MIB)})
    told = upload_parts(s3, upload, contents)
    assert refused(s3.head_object, **NAME)[0] == 404
    listed = s3.list_parts(**NAME, UploadId=upload, MaxParts=2)
    assert [part["PartNumber"] for part in listed["Parts"]] == [2, 7]
    assert listed["IsTruncated"]
    following = listed["NextPartNumberMarker"]
    [last] = s3.list_parts(**NAME, UploadId=upload, PartNumberMarker=following)["Parts"]
    assert (last["PartNumber"], last["Size"]) == (9, 100)
    assert [entry["Key"] for entry in s3.list_multipart_uploads(Bucket="bucket")["Uploads"]] == [NAME["Key"]]
    whole = b"".join(contents.values())
    done = s3.complete_multipart_upload(**NAME, UploadId=upload, MultipartUpload={"Parts": told})
    again = s3.complete_multipart_upload(**NAME, UploadId=upload, MultipartUpload={"Parts": told})
    assert done["ETag"] == again["ETag"] == etag_of(list(contents.values()))
    got = s3.get_object(**NAME)
    assert (got["Body"].read(), got["Metadata"], got["ContentType"]) == (whole, {"a": "b"}, "text/x")
    assert s3.get_object(**NAME, Range="bytes=5242870-5242890")["Body"].read() == whole[5242870:5242891]
    assert served.good("cat", f"bucket/{NAME['Key']}").out == whole
    assert "Uploads" not in s3.list_multipart_uploads(Bucket="bucket")


def test_what_is_wrong_with_a_list_of_parts_is_said_and_the_upload_goes_on(s3: Any) -> None:
    upload = s3.create_multipart_upload(**NAME)["UploadId"]
    told = upload_parts(s3, upload, {1: os.urandom(5 * MIB), 2: b"short", 3: b"last"})

    def complete(parts: list[dict[str, Any]]) -> tuple[int, str]:
        return refused(s3.complete_multipart_upload, **NAME, UploadId=upload, MultipartUpload={"Parts": parts})

    assert complete(told) == (400, "EntityTooSmall")
    assert complete([told[1], told[0]]) == (400, "InvalidPartOrder")
    assert complete([{**told[0], "ETag": told[1]["ETag"]}]) == (400, "InvalidPart")
    assert complete([told[0], {**told[1], "PartNumber": 4}]) == (400, "InvalidPart")
    assert complete([]) == (400, "MalformedXML")
    s3.complete_multipart_upload(**NAME, UploadId=upload, MultipartUpload={"Parts": [told[0], told[2]]})
    assert s3.head_object(**NAME)["ContentLength"] == 5 * MIB + 4


def test_an_upload_that_is_dropped_leaves_the_object_alone(s3: Any) -> None:
    s3.put_object(**NAME, Body=b"there")
    upload = s3.create_multipart_upload(**NAME)["UploadId"]
    upload_parts(s3, upload, {1: b"part"})
    s3.abort_multipart_upload(**NAME, UploadId=upload)
    for call, more in (
        (s3.abort_multipart_upload, {}),
        (s3.list_parts, {}),
        (s3.upload_part, {"PartNumber": 1, "Body": b"x"}),
    ):
        assert refused(call, **NAME, UploadId=upload, **more) == (404, "NoSuchUpload")
    assert refused(s3.list_parts, **NAME, UploadId="nonsense") == (404, "NoSuchUpload")
    assert s3.get_object(**NAME)["Body"].read() == b"there"


def test_completing_honours_conditions(s3: Any) -> None:
    s3.put_object(**NAME, Body=b"there")
    upload = s3.create_multipart_upload(**NAME)["UploadId"]
    told = {"Parts": upload_parts(s3, upload, {1: b"part"})}
    complete = s3.complete_multipart_upload
    assert refused(complete, **NAME, UploadId=upload, MultipartUpload=told, IfNoneMatch="*") == (
        412,
        "PreconditionFailed",
    )
    assert s3.get_object(**NAME)["Body"].read() == b"there"
    s3.delete_object(**NAME)
    complete(**NAME, UploadId=upload, MultipartUpload=told, IfNoneMatch="*")
    assert s3.get_object(**NAME)["Body"].read() == b"part"


def test_ranges_of_objects_are_parts_without_being_sent(s3: Any) -> None:
    content = os.urandom(12 * MIB)
    s3.put_object(Bucket="bucket", Key="source", Body=content)
    upload = s3.create_multipart_upload(**NAME)["UploadId"]
    source = {"Bucket": "bucket", "Key": "source"}
    ranges = [(0, 6 * MIB), (6 * MIB, 12 * MIB)]
    told = []
    for number, (begin, end) in enumerate(ranges, 1):
        copied = s3.upload_part_copy(
            **NAME, UploadId=upload, PartNumber=number, CopySource=source, CopySourceRange=f"bytes={begin}-{end - 1}"
        )
        told.append({"PartNumber": number, "ETag": copied["CopyPartResult"]["ETag"]})
    assert refused(
        s3.upload_part_copy,
        **NAME,
        UploadId=upload,
        PartNumber=3,
        CopySource=source,
        CopySourceRange=f"bytes=5-{len(content)}",
    ) == (416, "InvalidRange")
    s3.complete_multipart_upload(**NAME, UploadId=upload, MultipartUpload={"Parts": told})
    assert s3.get_object(**NAME)["Body"].read() == content


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [("CRC32", "COMPOSITE"), ("CRC32", "FULL_OBJECT"), ("SHA256", "COMPOSITE"), ("CRC64NVME", "FULL_OBJECT")],
)
def test_the_checksum_of_the_whole_is_kept(s3: Any, algorithm: str, kind: str) -> None:
    begun = s3.create_multipart_upload(**NAME, ChecksumAlgorithm=algorithm, ChecksumType=kind)
    contents = [os.urandom(5 * MIB), os.urandom(1000)]
    told = []
    for number, content in enumerate(contents, 1):
        part = s3.upload_part(
            **NAME, UploadId=begun["UploadId"], PartNumber=number, Body=content, ChecksumAlgorithm=algorithm
        )
        field = f"Checksum{algorithm}"
        told.append({"PartNumber": number, "ETag": part["ETag"], field: part[field]})
    wrong = [{**told[0], field: told[1][field]}, told[1]]
    name = {**NAME, "UploadId": begun["UploadId"]}
    assert refused(s3.complete_multipart_upload, **name, MultipartUpload={"Parts": wrong})[0] == 400
    done = s3.complete_multipart_upload(**name, MultipartUpload={"Parts": told})
    found = s3.head_object(**NAME, ChecksumMode="ENABLED")
    assert found[field] == done[field]
    assert found["ChecksumType"] == done["ChecksumType"] == kind
    if kind == "FULL_OBJECT":
        put = s3.put_object(Bucket="bucket", Key="whole", Body=b"".join(contents), ChecksumAlgorithm=algorithm)
        assert put[field] == found[field]


def test_boto3_uploads_and_downloads_large_files_by_itself(s3: Any, tmp_path: Path) -> None:
    content = os.urandom(40 * MIB)
    (tmp_path / "source").write_bytes(content)
    s3.upload_file(str(tmp_path / "source"), "bucket", "large")
    s3.download_file("bucket", "large", str(tmp_path / "target"))
    assert (tmp_path / "target").read_bytes() == content
    stream = io.BytesIO()
    s3.download_fileobj("bucket", "large", stream)
    assert stream.getvalue() == content


def test_of_concurrent_completions_one_object_comes(s3: Any) -> None:
    upload = s3.create_multipart_upload(**NAME)["UploadId"]
    contents = {1: os.urandom(5 * MIB), 2: b"end"}
    told = {"Parts": upload_parts(s3, upload, contents)}

    def complete(_: int) -> str:
        etag: str = s3.complete_multipart_upload(**NAME, UploadId=upload, MultipartUpload=told)["ETag"]
        return etag

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(complete, range(8))) == {etag_of(list(contents.values()))}


def test_an_upload_outlives_the_engine(served: Served, s3: Any) -> None:
    upload = s3.create_multipart_upload(**NAME)["UploadId"]
    told = upload_parts(s3, upload, {1: b"kept"})
    served.good("gc")
    assert [part["ETag"] for part in s3.list_parts(**NAME, UploadId=upload)["Parts"]] == [told[0]["ETag"]]
    s3.complete_multipart_upload(**NAME, UploadId=upload, MultipartUpload={"Parts": told})
    assert s3.get_object(**NAME)["Body"].read() == b"kept"


def test_uploads_are_listed_in_pages_rolled_up_at_any_delimiter(s3: Any) -> None:
    s3.create_bucket(Bucket="uploads")
    keys = ["a--b", "a--c", "b/x/y", "b/é", "c"]
    uploads = [s3.create_multipart_upload(Bucket="uploads", Key=key)["UploadId"] for key in [*keys, "c"]]

    def listed(**options: Any) -> list[str]:
        found: list[str] = []
        pages = s3.get_paginator("list_multipart_uploads").paginate(
            Bucket="uploads", PaginationConfig={"PageSize": 1}, **options
        )
        for page in pages:
            entries = [entry["Key"] for entry in page.get("Uploads", [])]
            entries += [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
            assert len(entries) <= 1
            found += entries
        return found

    assert listed() == [*keys, "c"]
    assert listed(Delimiter="--") == ["a--", "b/x/y", "b/é", "c", "c"]
    assert listed(Delimiter="/", Prefix="b/") == ["b/x/", "b/é"]
    assert refused(s3.list_multipart_uploads, Bucket="uploads", KeyMarker="a", UploadIdMarker="odd") == (
        400,
        "InvalidArgument",
    )
    for key, upload in zip([*keys, "c"], uploads, strict=True):
        s3.abort_multipart_upload(Bucket="uploads", Key=key, UploadId=upload)
