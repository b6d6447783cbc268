"""Versioning as boto3 sees it, against a real engine."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.e2e.s3_client import client_of, refused, url_of
from tests.e2e.served import Served, serving

MIB = 1 << 20
KEYS = ["a", "d/e/f", "d/x", "é+&<>", "n" * 1024]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine with S3 on a port of its own."""
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), "--s3", "127.0.0.1:0") as engine:
        yield engine


@pytest.fixture(scope="module")
def s3(served: Served) -> Any:
    """A client that may do everything."""
    return client_of(served)


@pytest.fixture
def bucket(s3: Any, request: pytest.FixtureRequest) -> str:
    """A bucket of the test's own, whose versioning is enabled."""
    name: str = request.node.name[5:40].replace("_", "-").strip("-")
    s3.create_bucket(Bucket=name)
    set_versioning(s3, name)
    return name


def set_versioning(s3: Any, bucket: str, status: str = "Enabled") -> None:
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": status})


def put(s3: Any, bucket: str, key: str, body: bytes) -> str:
    version: str = s3.put_object(Bucket=bucket, Key=key, Body=body)["VersionId"]
    return version


def versions(s3: Any, bucket: str, **arguments: Any) -> list[tuple[str, str, bool, bool]]:
    """Return of each version: key, id, whether it is the latest, whether a delete marker.  By key, newest first."""
    found = s3.list_object_versions(Bucket=bucket, **arguments)
    lines = [(v["Key"], v["VersionId"], v["IsLatest"], False) for v in found.get("Versions", [])]
    lines += [(v["Key"], v["VersionId"], v["IsLatest"], True) for v in found.get("DeleteMarkers", [])]
    return sorted(lines, key=lambda line: (line[0].encode(), not line[2]))


def headers_of(call: Any, **arguments: Any) -> dict[str, str]:
    """Return the headers of a refusal."""
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    headers: dict[str, str] = caught.value.response["ResponseMetadata"]["HTTPHeaders"]
    return headers


def test_the_setting_is_what_was_put(s3: Any) -> None:
    s3.create_bucket(Bucket="setting")
    assert "Status" not in s3.get_bucket_versioning(Bucket="setting")
    put_status = s3.put_object(Bucket="setting", Key="k", Body=b"x")
    assert "VersionId" not in put_status
    assert "VersionId" not in s3.get_object(Bucket="setting", Key="k")
    for status in ("Enabled", "Suspended", "Enabled"):
        set_versioning(s3, "setting", status)
        assert s3.get_bucket_versioning(Bucket="setting")["Status"] == status
    assert s3.get_object(Bucket="setting", Key="k")["VersionId"] == "null"
    empty: dict[str, str] = {}
    assert refused(s3.put_bucket_versioning, Bucket="setting", VersioningConfiguration=empty)[0] == 400
    mfa = {"Status": "Enabled", "MFADelete": "Enabled"}
    assert refused(s3.put_bucket_versioning, Bucket="setting", VersioningConfiguration=mfa)[0] == 501
    assert refused(s3.get_bucket_versioning, Bucket="nowhere") == (404, "NoSuchBucket")


@pytest.mark.parametrize("key", KEYS)
def test_every_version_is_got_by_its_id(s3: Any, served: Served, key: str) -> None:
    name = f"by-id-{KEYS.index(key)}"
    s3.create_bucket(Bucket=name)
    s3.put_object(Bucket=name, Key=key, Body=b"before")
    set_versioning(s3, name)
    contents = {"null": b"before"}
    for number in range(3):
        body = os.urandom(100_000) if number else b"small"
        contents[put(s3, name, key, body)] = body
    assert len(contents) == 4
    for version, body in contents.items():
        got = s3.get_object(Bucket=name, Key=key, VersionId=version)
        assert (got["Body"].read(), got["VersionId"]) == (body, version)
        head = s3.head_object(Bucket=name, Key=key, VersionId=version)
        assert (head["ContentLength"], head["VersionId"]) == (len(body), version)
        part = s3.get_object(Bucket=name, Key=key, VersionId=version, Range="bytes=2-5")
        assert (part["Body"].read(), part["VersionId"]) == (body[2:6], version)
    newest = list(contents)[-1]
    assert s3.get_object(Bucket=name, Key=key)["VersionId"] == newest
    assert served.good("cat", f"{name}/{key}").out == contents[newest]
    assert [line[:3] for line in versions(s3, name)[:1]] == [(key, newest, True)]


def test_a_delete_leaves_a_marker_and_taking_the_marker_away_brings_the_object_back(s3: Any, bucket: str) -> None:
    kept = put(s3, bucket, "f/k", b"kept")
    deleted = s3.delete_object(Bucket=bucket, Key="f/k")
    marker = deleted["VersionId"]
    assert deleted["DeleteMarker"] is True
    for call in (s3.get_object, s3.head_object):
        assert refused(call, Bucket=bucket, Key="f/k")[0] == 404
        assert headers_of(call, Bucket=bucket, Key="f/k")["x-amz-delete-marker"] == "true"
        assert refused(call, Bucket=bucket, Key="f/k", VersionId=marker)[0] == 405
        assert headers_of(call, Bucket=bucket, Key="f/k", VersionId=marker)["x-amz-delete-marker"] == "true"
    assert refused(s3.get_object, Bucket=bucket, Key="f/k") == (404, "NoSuchKey")
    assert refused(s3.get_object, Bucket=bucket, Key="f/k", VersionId=marker) == (405, "MethodNotAllowed")
    assert "Contents" not in s3.list_objects_v2(Bucket=bucket)
    assert versions(s3, bucket) == [("f/k", marker, True, True), ("f/k", kept, False, False)]
    assert refused(s3.delete_bucket, Bucket=bucket) == (409, "BucketNotEmpty")
    gone = s3.delete_object(Bucket=bucket, Key="f/k", VersionId=marker)
    assert (gone["VersionId"], gone["DeleteMarker"]) == (marker, True)
    assert s3.get_object(Bucket=bucket, Key="f/k")["Body"].read() == b"kept"
    last = s3.delete_object(Bucket=bucket, Key="f/k", VersionId=kept)
    assert last["VersionId"] == kept
    assert "DeleteMarker" not in last
    assert versions(s3, bucket) == []
    s3.delete_bucket(Bucket=bucket)


def test_ids_that_are_none_and_versions_that_are_not_there_are_told_apart(s3: Any, bucket: str) -> None:
    put(s3, bucket, "k", b"x")
    unknown = "0" * 15 + "1"
    assert refused(s3.get_object, Bucket=bucket, Key="k", VersionId=unknown) == (404, "NoSuchVersion")
    assert refused(s3.head_object, Bucket=bucket, Key="k", VersionId=unknown)[0] == 404
    for bad in ("../k", "KHTvmFgd7jb7pd6wKkOAC2wJ", "F" * 16, "0x00000000000001"):
        assert refused(s3.get_object, Bucket=bucket, Key="k", VersionId=bad) == (400, "InvalidArgument")
        assert refused(s3.delete_object, Bucket=bucket, Key="k", VersionId=bad) == (400, "InvalidArgument")
    assert s3.delete_object(Bucket=bucket, Key="k", VersionId=unknown)["VersionId"] == unknown
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"x"


def test_while_versioning_is_suspended_there_is_one_null_version(s3: Any, bucket: str) -> None:
    kept = put(s3, bucket, "k", b"kept")
    set_versioning(s3, bucket, "Suspended")
    assert put(s3, bucket, "k", b"1") == "null"
    assert put(s3, bucket, "k", b"2") == "null"
    assert versions(s3, bucket) == [("k", "null", True, False), ("k", kept, False, False)]
    assert s3.delete_object(Bucket=bucket, Key="k")["VersionId"] == "null"
    assert versions(s3, bucket) == [("k", "null", True, True), ("k", kept, False, False)]
    assert s3.get_object(Bucket=bucket, Key="k", VersionId=kept)["Body"].read() == b"kept"


def test_many_are_deleted_each_as_it_is_named(s3: Any, bucket: str) -> None:
    first, second = put(s3, bucket, "a", b"1"), put(s3, bucket, "a", b"2")
    put(s3, bucket, "b", b"3")
    objects = [{"Key": "a", "VersionId": first}, {"Key": "b"}, {"Key": "never"}, {"Key": "a", "VersionId": "?"}]
    answer = s3.delete_objects(Bucket=bucket, Delete={"Objects": objects})
    [version] = [found for found in answer["Deleted"] if found["Key"] == "a"]
    assert version == {"Key": "a", "VersionId": first}
    markers = {found["Key"]: found for found in answer["Deleted"] if found["Key"] != "a"}
    assert markers.keys() == {"b", "never"}
    assert all(found["DeleteMarker"] for found in markers.values())
    [error] = answer["Errors"]
    assert (error["Key"], error["VersionId"], error["Code"]) == ("a", "?", "InvalidArgument")
    marker = markers["b"]["DeleteMarkerVersionId"]
    answer = s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "b", "VersionId": marker}]})
    assert answer["Deleted"] == [
        {"Key": "b", "VersionId": marker, "DeleteMarker": True, "DeleteMarkerVersionId": marker}
    ]
    assert s3.get_object(Bucket=bucket, Key="b")["Body"].read() == b"3"
    assert s3.get_object(Bucket=bucket, Key="a")["VersionId"] == second


def test_old_versions_are_copied_whole_and_in_parts(s3: Any, bucket: str) -> None:
    content = os.urandom(6 * MIB)
    old = put(s3, bucket, "k", content)
    put(s3, bucket, "k", b"new")
    marker = s3.delete_object(Bucket=bucket, Key="gone")["VersionId"]
    source = {"Bucket": bucket, "Key": "k", "VersionId": old}
    copied = s3.copy_object(Bucket=bucket, Key="copy", CopySource=source)
    assert copied["CopySourceVersionId"] == old
    assert copied["VersionId"] == s3.head_object(Bucket=bucket, Key="copy")["VersionId"]
    assert s3.get_object(Bucket=bucket, Key="copy")["Body"].read() == content
    restored = s3.copy_object(Bucket=bucket, Key="k", CopySource=source)
    assert s3.get_object(Bucket=bucket, Key="k", VersionId=restored["VersionId"])["Body"].read() == content
    upload = s3.create_multipart_upload(Bucket=bucket, Key="parts")["UploadId"]
    name = {"Bucket": bucket, "Key": "parts", "UploadId": upload}
    part = s3.upload_part_copy(**name, PartNumber=1, CopySource=source)
    assert part["CopySourceVersionId"] == old
    listed = {"Parts": [{"PartNumber": 1, "ETag": part["CopyPartResult"]["ETag"]}]}
    done = s3.complete_multipart_upload(**name, MultipartUpload=listed)
    assert s3.get_object(Bucket=bucket, Key="parts")["VersionId"] == done["VersionId"]
    of_marker = {"Bucket": bucket, "Key": "gone", "VersionId": marker}
    assert refused(s3.copy_object, Bucket=bucket, Key="copy", CopySource=of_marker) == (400, "InvalidRequest")
    of_nothing = {"Bucket": bucket, "Key": "k", "VersionId": "0" * 15 + "1"}
    assert refused(s3.copy_object, Bucket=bucket, Key="copy", CopySource=of_nothing) == (404, "NoSuchVersion")


def test_a_list_has_every_version_once_in_pages_of_any_size(s3: Any, bucket: str) -> None:
    keys = ["a", "a b", "d/1", "d/2", "d/e/3", "z+é"]
    put_order = [(key, put(s3, bucket, key, key.encode())) for _ in range(3) for key in keys]
    s3.delete_object(Bucket=bucket, Key="d/1")
    whole = versions(s3, bucket)
    assert len(whole) == len(put_order) + 1
    assert {(key, version) for key, version, _, _ in whole} >= set(put_order)
    for size in (1, 2, 5):
        paginator = s3.get_paginator("list_object_versions")
        seen: list[tuple[str, str]] = []
        for page in paginator.paginate(Bucket=bucket, PaginationConfig={"PageSize": size}):
            found = page.get("Versions", []) + page.get("DeleteMarkers", [])
            assert len(found) <= size
            seen += [(entry["Key"], entry["VersionId"]) for entry in found]
        assert sorted(seen) == sorted((key, version) for key, version, _, _ in whole)
    rolled = s3.list_object_versions(Bucket=bucket, Delimiter="/")
    assert rolled["CommonPrefixes"] == [{"Prefix": "d/"}]
    assert {entry["Key"] for entry in rolled["Versions"]} == {"a", "a b", "z+é"}
    inside = s3.list_object_versions(Bucket=bucket, Prefix="d/", Delimiter="/")
    assert inside["CommonPrefixes"] == [{"Prefix": "d/e/"}]
    odd = s3.list_object_versions(Bucket=bucket, Delimiter=" ", MaxKeys=4)
    assert [entry["Prefix"] for entry in odd["CommonPrefixes"]] == ["a "]
    assert odd["IsTruncated"] is False or odd["NextKeyMarker"] == "a "
    encoded = s3.list_object_versions(Bucket=bucket, EncodingType="url", Prefix="z")
    assert {entry["Key"] for entry in encoded["Versions"]} == {"z%2B%C3%A9"}
    assert s3.list_object_versions(Bucket=bucket, MaxKeys=0)["IsTruncated"] is False
    assert refused(s3.list_object_versions, Bucket=bucket, VersionIdMarker="null")[0] == 400


def test_conditions_take_a_delete_marker_for_nothing(s3: Any, bucket: str) -> None:
    first = s3.put_object(Bucket=bucket, Key="k", Body=b"1")
    assert refused(s3.put_object, Bucket=bucket, Key="k", Body=b"2", IfNoneMatch="*")[0] == 412
    s3.delete_object(Bucket=bucket, Key="k")
    assert refused(s3.put_object, Bucket=bucket, Key="k", Body=b"2", IfMatch=first["ETag"])[0] in (404, 412)
    s3.put_object(Bucket=bucket, Key="k", Body=b"2", IfNoneMatch="*")
    assert len(versions(s3, bucket)) == 3


def test_tags_and_attributes_are_those_of_the_version(s3: Any, bucket: str) -> None:
    old = put(s3, bucket, "k", b"old one")
    new = put(s3, bucket, "k", b"new")
    tags = [{"Key": "of", "Value": "old"}]
    tagged = s3.put_object_tagging(Bucket=bucket, Key="k", VersionId=old, Tagging={"TagSet": tags})
    assert tagged["VersionId"] == old
    assert s3.get_object_tagging(Bucket=bucket, Key="k", VersionId=old)["TagSet"] == tags
    current = s3.get_object_tagging(Bucket=bucket, Key="k")
    assert (current["TagSet"], current["VersionId"]) == ([], new)
    s3.delete_object_tagging(Bucket=bucket, Key="k", VersionId=old)
    assert s3.get_object_tagging(Bucket=bucket, Key="k", VersionId=old)["TagSet"] == []
    asked = {"Bucket": bucket, "Key": "k", "ObjectAttributes": ["ObjectSize"]}
    assert s3.get_object_attributes(**asked, VersionId=old)["ObjectSize"] == 7
    assert s3.get_object_attributes(**asked)["VersionId"] == new


def test_strangers_read_what_a_key_is_bound_to_and_nothing_older(served: Served, s3: Any, bucket: str) -> None:
    old = put(s3, bucket, "k", b"secret once")
    put(s3, bucket, "k", b"public")
    served.good("bucket", "set", bucket, "--anonymous-read")
    address = f"{url_of(served)}/{bucket}/k"
    with urllib.request.urlopen(address) as answer:
        assert answer.read() == b"public"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{address}?versionId={old}")


def test_what_the_command_line_does_is_kept_too(served: Served, s3: Any, bucket: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"from the command line")
    old = put(s3, bucket, "f/k", b"old")
    served.good("put", str(tmp_path / "file"), f"{bucket}/f/k")
    served.good("rm", f"{bucket}/f/k")
    assert [line[3] for line in versions(s3, bucket)] == [True, False, False]
    assert s3.get_object(Bucket=bucket, Key="f/k", VersionId=old)["Body"].read() == b"old"
    assert served("bucket", "rm", bucket).code == 73
    assert served.good("fsck", "--full", "--json").code == 0
