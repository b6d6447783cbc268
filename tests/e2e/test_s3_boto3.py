"""S3 as boto3 speaks it, against a real engine: unmodified, with its defaults."""

from __future__ import annotations

import hashlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gateway.s3.request.authorization import FRESH_S
from tests.e2e.s3_client import KEYS_ARE_FRESH_S, client_of, refused, url_of
from tests.e2e.served import Served, serving

MIB = 1 << 20
ODD_KEYS = ["a/b c+é.txt", "..", "a//b", "%2e%2e/x", "q?x=1&y=2#z", "tab\there", "漢字/🚀", "a" * 1024, "=&;,@:$!*'()"]


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


@pytest.mark.parametrize("size", [0, 1, 100_000, 4 * MIB, 4 * MIB + 1, 21 * MIB])
def test_what_is_put_is_got_with_its_etag_and_is_the_lakes_object_too(served: Served, s3: Any, size: int) -> None:
    content = os.urandom(size)
    etag = s3.put_object(Bucket="bucket", Key=f"size/{size}", Body=content)["ETag"]
    assert etag == f'"{hashlib.md5(content).hexdigest()}"'
    got = s3.get_object(Bucket="bucket", Key=f"size/{size}")
    assert got["Body"].read() == content
    assert (got["ETag"], got["ContentLength"]) == (etag, size)
    assert served.good("cat", f"bucket/size/{size}").out == content


def test_headers_and_metadata_are_kept_exactly(s3: Any) -> None:
    given = {
        "ContentType": "text/x-odd; charset=utf-8",
        "ContentEncoding": "gzip",
        "ContentDisposition": 'attachment; filename="a b"',
        "ContentLanguage": "de",
        "CacheControl": "max-age=3, private",
        "Metadata": {"one": "1", "two-words": "a b  c"},
    }
    s3.put_object(Bucket="bucket", Key="meta", Body=b"x", **given)
    got = s3.get_object(Bucket="bucket", Key="meta")
    assert got["Body"].read() == b"x"
    for found in (s3.head_object(Bucket="bucket", Key="meta"), got):
        assert {name: found[name] for name in given} == given
    overridden = s3.head_object(Bucket="bucket", Key="meta", ResponseContentType="text/plain")
    assert overridden["ContentType"] == "text/plain"


@pytest.mark.parametrize("size", [1000, 9 * MIB])
def test_ranges_are_single_suffix_open_or_unsatisfiable(s3: Any, size: int) -> None:
    content = os.urandom(size)
    s3.put_object(Bucket="bucket", Key="ranged", Body=content)

    def ranged(text: str) -> bytes:
        found = s3.get_object(Bucket="bucket", Key="ranged", Range=text)
        assert found["ResponseMetadata"]["HTTPStatusCode"] == 206
        body: bytes = found["Body"].read()
        return body

    assert ranged("bytes=1-5") == content[1:6]
    assert ranged(f"bytes={size // 2}-") == content[size // 2 :]
    assert ranged("bytes=-7") == content[-7:]
    assert ranged(f"bytes=10-{10 * size}") == content[10:]
    assert refused(s3.get_object, Bucket="bucket", Key="ranged", Range=f"bytes={size}-") == (416, "InvalidRange")
    several = s3.get_object(Bucket="bucket", Key="ranged", Range="bytes=0-1,4-5")
    assert several["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert several["Body"].read() == content


def test_conditions_are_honoured_for_reads_and_writes(s3: Any) -> None:
    etag = s3.put_object(Bucket="bucket", Key="conditional", Body=b"old")["ETag"]
    name = {"Bucket": "bucket", "Key": "conditional"}
    assert s3.get_object(**name, IfMatch=etag)["Body"].read() == b"old"
    assert refused(s3.get_object, **name, IfMatch='"other"')[0] == 412
    assert refused(s3.get_object, **name, IfNoneMatch=etag)[0] == 304
    assert refused(s3.put_object, **name, Body=b"new", IfNoneMatch="*") == (412, "PreconditionFailed")
    assert refused(s3.put_object, **name, Body=b"new", IfMatch='"other"') == (412, "PreconditionFailed")
    s3.put_object(**name, Body=b"new", IfMatch=etag)
    assert s3.get_object(**name)["Body"].read() == b"new"
    s3.put_object(Bucket="bucket", Key="first", Body=b"1", IfNoneMatch="*")


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
@pytest.mark.parametrize("size", [10, 5 * MIB])
def test_checksums_are_verified_kept_and_returned(s3: Any, algorithm: str, size: int) -> None:
    content = os.urandom(size)
    name = {"Bucket": "bucket", "Key": "summed"}
    put = s3.put_object(**name, Body=content, ChecksumAlgorithm=algorithm)
    got = s3.get_object(**name, ChecksumMode="ENABLED")
    assert got["Body"].read() == content
    assert got[f"Checksum{algorithm}"] == put[f"Checksum{algorithm}"]
    wrong = {f"Checksum{algorithm}": put[f"Checksum{algorithm}"]}
    status, _ = refused(s3.put_object, **name, Body=content[:-1] + bytes([content[-1] ^ 1]), **wrong)
    assert status == 400
    assert s3.get_object(**name)["Body"].read() == content, "nothing was stored"


def test_a_wrong_content_md5_stores_nothing(s3: Any) -> None:
    answer = refused(s3.put_object, Bucket="bucket", Key="wrong", Body=b"abc", ContentMD5="1B2M2Y8AsgTpgAmY7PhCfg==")
    assert answer == (400, "BadDigest")
    assert refused(s3.head_object, Bucket="bucket", Key="wrong")[0] == 404


def test_odd_keys_are_ordinary_names(s3: Any) -> None:
    s3.create_bucket(Bucket="odd-keys")
    for number, key in enumerate(ODD_KEYS):
        s3.put_object(Bucket="odd-keys", Key=key, Body=b"%d" % number)
    for number, key in enumerate(ODD_KEYS):
        assert s3.get_object(Bucket="odd-keys", Key=key)["Body"].read() == b"%d" % number
    listed = s3.list_objects_v2(Bucket="odd-keys")["Contents"]
    assert [entry["Key"] for entry in listed] == sorted(ODD_KEYS, key=str.encode)


@pytest.mark.parametrize("delimiter", ["", "/", "-"])
@pytest.mark.parametrize("operation", ["list_objects", "list_objects_v2"])
def test_lists_have_every_name_once_in_byte_order(s3: Any, operation: str, delimiter: str) -> None:
    s3.create_bucket(Bucket="lists")
    keys = [f"{folder}/{number}-x" for folder in ("a", "a-b", "b") for number in range(7)] + ["a", "z", "é"]
    for key in keys:
        s3.put_object(Bucket="lists", Key=key, Body=b"")
    found: list[str] = []
    for page in s3.get_paginator(operation).paginate(
        Bucket="lists", Delimiter=delimiter, PaginationConfig={"PageSize": 3}
    ):
        entries = [entry["Key"] for entry in page.get("Contents", [])]
        entries += [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
        assert len(entries) <= 3
        found += sorted(entries, key=str.encode)
    rolled = {key[: key.index(delimiter) + 1] if delimiter and delimiter in key else key for key in keys}
    assert found == sorted(rolled, key=str.encode)


def test_a_copy_keeps_or_replaces_what_is_said_of_the_content(s3: Any) -> None:
    content = os.urandom(5 * MIB)
    put = s3.put_object(Bucket="bucket", Key="source é", Body=content, Metadata={"a": "1"}, ContentType="text/plain")
    source = {"Bucket": "bucket", "Key": "source é"}
    copied = s3.copy_object(Bucket="bucket", Key="copied", CopySource=source)
    assert copied["CopyObjectResult"]["ETag"] == put["ETag"]
    found = s3.get_object(Bucket="bucket", Key="copied")
    assert (found["Body"].read(), found["Metadata"], found["ContentType"]) == (content, {"a": "1"}, "text/plain")
    s3.copy_object(Bucket="bucket", Key="copied", CopySource=source, MetadataDirective="REPLACE", Metadata={"b": "2"})
    found = s3.head_object(Bucket="bucket", Key="copied")
    assert (found["ETag"], found["Metadata"]) == (put["ETag"], {"b": "2"})
    assert refused(s3.copy_object, Bucket="bucket", Key="copied", CopySource={"Bucket": "bucket", "Key": "no"}) == (
        404,
        "NoSuchKey",
    )


def test_many_objects_are_deleted_at_once(s3: Any) -> None:
    for number in range(5):
        s3.put_object(Bucket="bucket", Key=f"many/{number}", Body=b"x")
    wanted = [{"Key": f"many/{number}"} for number in range(7)]
    answer = s3.delete_objects(Bucket="bucket", Delete={"Objects": wanted})
    assert [entry["Key"] for entry in answer["Deleted"]] == [entry["Key"] for entry in wanted]
    assert "Contents" not in s3.list_objects_v2(Bucket="bucket", Prefix="many/")
    s3.delete_object(Bucket="bucket", Key="many/0")


def test_buckets_are_made_listed_and_removed_when_they_are_empty(s3: Any) -> None:
    s3.create_bucket(Bucket="short-lived")
    s3.create_bucket(Bucket="short-lived")
    assert "short-lived" in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]
    s3.put_object(Bucket="short-lived", Key="x", Body=b"")
    assert refused(s3.delete_bucket, Bucket="short-lived") == (409, "BucketNotEmpty")
    s3.delete_object(Bucket="short-lived", Key="x")
    s3.delete_bucket(Bucket="short-lived")
    assert refused(s3.head_bucket, Bucket="short-lived")[0] == 404
    assert refused(s3.list_objects_v2, Bucket="short-lived") == (404, "NoSuchBucket")


def test_what_is_not_offered_is_501_and_touches_nothing(s3: Any) -> None:
    s3.put_object(Bucket="bucket", Key="kept", Body=b"kept")
    assert refused(s3.put_object_acl, Bucket="bucket", Key="kept", ACL="private") == (501, "NotImplemented")
    policy = json.dumps({"Version": "2012-10-17", "Statement": []})
    assert refused(s3.put_bucket_policy, Bucket="bucket", Policy=policy) == (501, "NotImplemented")
    versioning = {"Status": "Enabled", "MFADelete": "Enabled"}
    assert refused(s3.put_bucket_versioning, Bucket="bucket", VersioningConfiguration=versioning) == (
        501,
        "NotImplemented",
    )
    assert s3.get_object(Bucket="bucket", Key="kept")["Body"].read() == b"kept"


def test_a_key_may_do_what_it_was_made_for(served: Served, s3: Any) -> None:
    s3.put_object(Bucket="bucket", Key="guarded", Body=b"x")
    s3.create_bucket(Bucket="other")
    reader = client_of(served, "--bucket", "bucket", "--read-only")
    assert reader.get_object(Bucket="bucket", Key="guarded")["Body"].read() == b"x"
    assert refused(reader.put_object, Bucket="bucket", Key="guarded", Body=b"y") == (403, "AccessDenied")
    assert refused(reader.list_objects_v2, Bucket="other") == (403, "AccessDenied")
    copying = {"Bucket": "other", "Key": "x"}
    writer = client_of(served, "--bucket", "bucket")
    assert refused(writer.copy_object, Bucket="bucket", Key="y", CopySource=copying) == (403, "AccessDenied")
    assert [bucket["Name"] for bucket in reader.list_buckets()["Buckets"]] == ["bucket"]
    [key] = [part for part in [reader._request_signer._credentials.access_key] if part]
    served.good("key", "rm", key)
    time.sleep(KEYS_ARE_FRESH_S)
    assert refused(reader.get_object, Bucket="bucket", Key="guarded") == (403, "InvalidAccessKeyId")


def test_a_revoked_key_stops_working_within_a_second_in_every_way(served: Served, s3: Any) -> None:
    s3.put_object(Bucket="bucket", Key="revoked", Body=b"x")
    holder = client_of(served, "--bucket", "bucket")
    name = {"Bucket": "bucket", "Key": "revoked"}
    url = holder.generate_presigned_url("get_object", Params=name)

    def by_url() -> None:
        with urllib.request.urlopen(url) as answer:
            answer.read()

    ways = {
        "GET": lambda: holder.get_object(**name)["Body"].read(),  # repeated by the door
        "PUT": lambda: holder.put_object(Bucket="bucket", Key="other", Body=b"y"),
        "list": lambda: holder.list_objects_v2(Bucket="bucket"),
        "presigned": by_url,
    }
    for way in ways.values():
        way()
    served.good("key", "rm", holder._request_signer._credentials.access_key)
    revoked_s = time.monotonic()
    left = dict(ways)
    while left:
        for which, way in list(left.items()):
            began_s = time.monotonic()
            try:
                way()
            except (ClientError, urllib.error.HTTPError):
                del left[which]
            else:
                assert began_s - revoked_s < FRESH_S, f"{which} was served {began_s - revoked_s:.2f} s afterwards"


def test_presigned_urls_work_for_anybody_until_they_expire(s3: Any) -> None:
    name = {"Bucket": "bucket", "Key": "signed é"}
    put = urllib.request.Request(s3.generate_presigned_url("put_object", Params=name), b"content", method="PUT")
    with urllib.request.urlopen(put) as answer:
        assert answer.status == 200
    with urllib.request.urlopen(s3.generate_presigned_url("get_object", Params=name, ExpiresIn=60)) as answer:
        assert answer.read() == b"content"
    url = s3.generate_presigned_url("get_object", Params=name, ExpiresIn=1)
    time.sleep(2.1)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(url)


def test_strangers_read_what_is_open_to_all_and_nothing_else(served: Served, s3: Any) -> None:
    s3.create_bucket(Bucket="open")
    s3.put_object(Bucket="open", Key="x", Body=b"for all")
    url = f"{url_of(served)}/open/x"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(url)
    served.good("bucket", "set", "open", "--anonymous-read")
    with urllib.request.urlopen(url) as answer:
        assert answer.read() == b"for all"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(urllib.request.Request(url, b"mine", method="PUT"))
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(url_of(served))
