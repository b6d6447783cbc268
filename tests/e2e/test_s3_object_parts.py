"""Parts of objects, and GetObjectAttributes, as boto3 asks for them, against a real engine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.e2e.s3_client import client_of, refused
from tests.e2e.s3_raw import Signer, signer_of
from tests.e2e.served import Served, serving

MIB = 1 << 20
PARTS = [os.urandom(5 * MIB), os.urandom(6 * MIB + 7), b"tail"]
WHOLE = b"".join(PARTS)
NAME = {"Bucket": "bucket", "Key": "parts é"}
ALL = ["ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine with S3 on a port of its own."""
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), "--s3", "127.0.0.1:0") as engine:
        yield engine


@pytest.fixture(scope="module")
def s3(served: Served) -> Any:
    """A client that may do everything; there are an object of three parts, its copy, and an ordinary one."""
    client = client_of(served)
    client.create_bucket(Bucket="bucket")
    upload(client, NAME, ChecksumAlgorithm="SHA256")
    client.copy_object(Bucket="bucket", Key="copy", CopySource=NAME)
    client.put_object(Bucket="bucket", Key="ordinary", Body=b"ordinary", ChecksumAlgorithm="CRC32C")
    client.put_object(Bucket="bucket", Key="empty", Body=b"")
    return client


@pytest.fixture(scope="module")
def raw(served: Served, s3: Any) -> Signer:
    """A key for requests that boto3 would not send."""
    return signer_of(served)


def upload(client: Any, name: dict[str, str], **options: Any) -> dict[int, dict[str, Any]]:
    """Put PARTS together at a name; return the answer to each."""
    identifier = client.create_multipart_upload(**name, **options)["UploadId"]
    answers = {}
    for number, part in enumerate(PARTS, 1):
        answers[number] = client.upload_part(**name, UploadId=identifier, PartNumber=number, Body=part, **options)
    listed = [
        {"PartNumber": number, **{field: answer[field] for field in answer if field != "ResponseMetadata"}}
        for number, answer in answers.items()
    ]
    client.complete_multipart_upload(**name, UploadId=identifier, MultipartUpload={"Parts": listed})
    return answers


def test_each_part_is_answered_with_its_place_its_checksum_and_their_count(s3: Any) -> None:
    first = 0
    for number, part in enumerate(PARTS, 1):
        for ask in (s3.get_object, s3.head_object):
            found = ask(**NAME, PartNumber=number, ChecksumMode="ENABLED")
            assert found["ResponseMetadata"]["HTTPStatusCode"] == 206
            headers = found["ResponseMetadata"]["HTTPHeaders"]
            assert headers["content-range"] == f"bytes {first}-{first + len(part) - 1}/{len(WHOLE)}"
            assert (found["PartsCount"], found["ContentLength"]) == (3, len(part))
            assert found["ChecksumType"] == "COMPOSITE"
            if ask == s3.get_object:
                assert found["Body"].read() == part, "boto3 has compared the checksum"
        first += len(part)
    assert "PartsCount" not in s3.head_object(**NAME)
    assert s3.get_object(**NAME)["Body"].read() == WHOLE


def test_an_ordinary_object_is_one_part_and_so_is_a_copy(s3: Any) -> None:
    for key, content in (("ordinary", b"ordinary"), ("copy", WHOLE)):
        found = s3.get_object(Bucket="bucket", Key=key, PartNumber=1)
        assert (found["ResponseMetadata"]["HTTPStatusCode"], found["Body"].read()) == (206, content)
        assert "PartsCount" not in found
        assert refused(s3.get_object, Bucket="bucket", Key=key, PartNumber=2) == (416, "InvalidPartNumber")
    found = s3.get_object(Bucket="bucket", Key="empty", PartNumber=1)
    assert (found["ResponseMetadata"]["HTTPStatusCode"], found["Body"].read()) == (200, b"")


def test_a_part_that_is_none_is_refused(s3: Any, raw: Signer) -> None:
    assert refused(s3.get_object, **NAME, PartNumber=4) == (416, "InvalidPartNumber")
    assert refused(s3.head_object, **NAME, PartNumber=4)[0] == 416
    for number in ("0", "10001", "-1", "x", "1.0", "%D9%A1"):
        answer = raw.ask("GET", f"/bucket/ordinary?partNumber={number}")
        assert (answer.status, answer.code) == (400, "InvalidArgument"), number
    answer = raw.ask("GET", "/bucket/ordinary?partNumber=1", headers={"range": "bytes=0-1"})
    assert (answer.status, answer.code) == (400, "InvalidRequest")


def test_attributes_are_those_that_were_asked_for(s3: Any, raw: Signer) -> None:
    found = s3.get_object_attributes(**NAME, ObjectAttributes=ALL)
    whole = s3.head_object(**NAME, ChecksumMode="ENABLED")
    assert (found["ETag"], found["ObjectSize"], found["StorageClass"]) == (
        whole["ETag"].strip('"'),
        len(WHOLE),
        "STANDARD",
    )
    assert found["LastModified"] == whole["LastModified"]
    assert found["Checksum"] == {
        "ChecksumSHA256": whole["ChecksumSHA256"].removesuffix("-3"),
        "ChecksumType": "COMPOSITE",
    }
    parts = found["ObjectParts"]
    assert (parts["TotalPartsCount"], parts["IsTruncated"]) == (3, False)
    assert [(part["PartNumber"], part["Size"]) for part in parts["Parts"]] == [
        (number, len(part)) for number, part in enumerate(PARTS, 1)
    ]
    for part in parts["Parts"]:
        one = s3.head_object(**NAME, PartNumber=part["PartNumber"], ChecksumMode="ENABLED")
        assert part["ChecksumSHA256"] == one["ChecksumSHA256"]
    ordinary = s3.get_object_attributes(Bucket="bucket", Key="ordinary", ObjectAttributes=ALL)
    assert "ObjectParts" not in ordinary
    assert ordinary["Checksum"]["ChecksumType"] == "FULL_OBJECT"
    repeated = raw.request("GET", "/bucket/ordinary?attributes=", headers={"x-amz-object-attributes": "a"})
    assert repeated.send().code == "InvalidArgument"
    only = s3.get_object_attributes(**NAME, ObjectAttributes=["ObjectSize"])
    assert set(only) == {"ObjectSize", "LastModified", "ResponseMetadata"}


def test_parts_are_listed_in_pages(s3: Any) -> None:
    found, marker = [], 0
    while True:
        page = s3.get_object_attributes(**NAME, ObjectAttributes=["ObjectParts"], MaxParts=2, PartNumberMarker=marker)[
            "ObjectParts"
        ]
        assert (page["MaxParts"], page["PartNumberMarker"], page["TotalPartsCount"]) == (2, marker, 3)
        found += [part["PartNumber"] for part in page["Parts"]]
        marker = page["NextPartNumberMarker"]
        if not page["IsTruncated"]:
            break
    assert found == [1, 2, 3]


def test_attributes_that_are_none_are_refused(s3: Any, raw: Signer) -> None:
    assert raw.ask("GET", "/bucket/ordinary?attributes").code == "InvalidRequest"
    for text in ("etag", "ETag,,", "ETag;ObjectSize", "Everything"):
        answer = raw.ask("GET", "/bucket/ordinary?attributes", headers={"x-amz-object-attributes": text})
        assert (answer.status, answer.code) == (400, "InvalidArgument"), text
    pages = {"x-amz-object-attributes": "ObjectParts", "x-amz-max-parts": "-1"}
    assert raw.ask("GET", "/bucket/ordinary?attributes", headers=pages).code == "InvalidArgument"
    missing = {"Bucket": "bucket", "Key": "missing"}
    assert refused(s3.get_object_attributes, **missing, ObjectAttributes=ALL) == (404, "NoSuchKey")


def test_an_old_version_keeps_its_parts(served: Served, s3: Any) -> None:
    s3.create_bucket(Bucket="versions")
    s3.put_bucket_versioning(Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
    name = {"Bucket": "versions", "Key": "k"}
    upload(s3, name)
    old = s3.head_object(**name)["VersionId"]
    s3.put_object(**name, Body=b"new")
    served.good("gc")
    found = s3.get_object(**name, VersionId=old, PartNumber=2)
    assert (found["PartsCount"], found["Body"].read()) == (3, PARTS[1])
    parts = s3.get_object_attributes(**name, VersionId=old, ObjectAttributes=["ObjectParts"])
    assert parts["ObjectParts"]["TotalPartsCount"] == 3
    assert refused(s3.get_object, **name, PartNumber=2) == (416, "InvalidPartNumber")
    s3.delete_object(**name, VersionId=old)
    served.good("gc")
    assert json.loads(served.good("fsck", "--json").text)["damage"] == 0
