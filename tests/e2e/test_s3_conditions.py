"""Writes and deletes under conditions, and lists of buckets, as boto3 asks for them, against a real engine."""

from __future__ import annotations

import threading
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.e2e.s3_client import client_of, refused
from tests.e2e.s3_raw import Signer, signer_of
from tests.e2e.served import Served, serving

FAILED = (412, "PreconditionFailed")
NOTHING = (404, "NoSuchKey")
NOT_OFFERED = (501, "NotImplemented")
LONG_AGO = datetime(2015, 1, 1, tzinfo=UTC)
OTHER = '"0123456789abcdef0123456789abcdef"'
CONTENT = b"twelve bytes"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine with S3 on a port of its own."""
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), "--s3", "127.0.0.1:0") as engine:
        yield engine


@pytest.fixture(scope="module")
def s3(served: Served) -> Any:
    """A client that may do everything; `bucket` keeps no versions, `kept` does."""
    client = client_of(served)
    client.create_bucket(Bucket="bucket")
    client.create_bucket(Bucket="kept")
    client.put_bucket_versioning(Bucket="kept", VersioningConfiguration={"Status": "Enabled"})
    return client


@pytest.fixture(scope="module")
def signer(served: Served) -> Signer:
    """A key, for requests of any form."""
    return signer_of(served)


def put(s3: Any, bucket: str, key: str) -> tuple[str, datetime]:
    """Put a new object; return its ETag and time."""
    s3.put_object(Bucket=bucket, Key=key, Body=CONTENT)
    head = s3.head_object(Bucket=bucket, Key=key)
    return head["ETag"], head["LastModified"]


def keys_of(s3: Any, bucket: str, prefix: str = "") -> list[str]:
    """Return the keys of a bucket."""
    return [found["Key"] for found in s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])]


# --- DeleteObject --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", ["bucket", "kept"])
def test_a_delete_whose_condition_does_not_hold_deletes_nothing(s3: Any, bucket: str) -> None:
    etag, modified = put(s3, bucket, "k")
    for condition in (
        {"IfMatch": OTHER},
        {"IfMatchSize": len(CONTENT) + 1},
        {"IfMatchSize": 0},
        {"IfMatchLastModifiedTime": LONG_AGO},
        {"IfMatchLastModifiedTime": modified + timedelta(seconds=1)},
        {"IfMatch": etag, "IfMatchSize": 1},
        {"IfMatch": "*", "IfMatchLastModifiedTime": LONG_AGO},
    ):
        assert refused(s3.delete_object, Bucket=bucket, Key="k", **condition) == FAILED, condition
    assert keys_of(s3, bucket, "k") == ["k"]
    for condition in (
        {"IfMatch": etag},
        {"IfMatch": etag.strip('"')},
        {"IfMatch": "*"},
        {"IfMatch": f"{OTHER}, {etag}"},
        {"IfMatchSize": len(CONTENT)},
        {"IfMatchLastModifiedTime": modified},
        {"IfMatch": etag, "IfMatchSize": len(CONTENT), "IfMatchLastModifiedTime": modified},
    ):
        now = s3.put_object(Bucket=bucket, Key="k", Body=CONTENT)
        assert now["ETag"] == etag
        if "IfMatchLastModifiedTime" in condition:
            condition["IfMatchLastModifiedTime"] = s3.head_object(Bucket=bucket, Key="k")["LastModified"]
        s3.delete_object(Bucket=bucket, Key="k", **condition)
        assert keys_of(s3, bucket, "k") == [], condition


@pytest.mark.parametrize("bucket", ["bucket", "kept"])
def test_if_match_on_a_key_that_is_not_there_is_404_also_below_a_delete_marker(s3: Any, bucket: str) -> None:
    etag, _ = put(s3, bucket, "gone")
    s3.delete_object(Bucket=bucket, Key="gone")
    for key in ("gone", "never"):
        for match in (etag, "*"):
            assert refused(s3.delete_object, Bucket=bucket, Key=key, IfMatch=match) == NOTHING
            write = {"Bucket": bucket, "Key": key, "IfMatch": match}
            assert refused(s3.put_object, **write, Body=b"x") == NOTHING
            s3.put_object(Bucket="bucket", Key="source", Body=b"x")
            source = {"Bucket": "bucket", "Key": "source"}
            assert refused(s3.copy_object, **write, CopySource=source) == NOTHING
    upload = {"Bucket": bucket, "Key": "never"}
    upload["UploadId"] = s3.create_multipart_upload(**upload)["UploadId"]
    part = s3.upload_part(**upload, PartNumber=1, Body=b"x")["ETag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": part}]}
    assert refused(s3.complete_multipart_upload, **upload, MultipartUpload=parts, IfMatch=etag) == NOTHING
    s3.complete_multipart_upload(**upload, MultipartUpload=parts)
    s3.delete_object(Bucket=bucket, Key="gone", IfMatchSize=7, IfMatchLastModifiedTime=LONG_AGO)
    s3.delete_object(Bucket=bucket, Key="never")


def test_a_condition_beside_a_version_id_is_not_offered_and_deletes_nothing(s3: Any) -> None:
    version = s3.put_object(Bucket="kept", Key="one", Body=CONTENT)
    name = {"Bucket": "kept", "Key": "one", "VersionId": version["VersionId"]}
    for condition in ({"IfMatch": version["ETag"]}, {"IfMatchSize": 1}, {"IfMatchLastModifiedTime": LONG_AGO}):
        assert refused(s3.delete_object, **name, **condition) == NOT_OFFERED
    entry = {"Key": "one", "VersionId": version["VersionId"], "ETag": version["ETag"]}
    [error] = s3.delete_objects(Bucket="kept", Delete={"Objects": [entry]})["Errors"]
    assert (error["Key"], error["VersionId"], error["Code"]) == ("one", version["VersionId"], "NotImplemented")
    assert s3.get_object(**name)["Body"].read() == CONTENT
    s3.delete_object(**name)
    assert keys_of(s3, "kept", "one") == []


def test_of_many_deletes_of_one_etag_one_is_done_and_what_replaced_it_stays(s3: Any) -> None:
    for turn in range(5):
        old = s3.put_object(Bucket="bucket", Key="race", Body=b"old")["ETag"]
        outcomes: list[object] = []

        def delete(old: str = old, outcomes: list[object] = outcomes) -> None:
            try:
                outcomes.append(s3.delete_object(Bucket="bucket", Key="race", IfMatch=old))
            except s3.exceptions.ClientError as error:
                outcomes.append(error.response["ResponseMetadata"]["HTTPStatusCode"])

        def replace(turn: int = turn) -> None:
            s3.put_object(Bucket="bucket", Key="race", Body=b"new %d" % turn)

        threads = [threading.Thread(target=work) for work in (delete, replace, delete, delete)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert s3.get_object(Bucket="bucket", Key="race")["Body"].read() == b"new %d" % turn
        assert sum(isinstance(outcome, dict) for outcome in outcomes) <= 1
        assert {outcome for outcome in outcomes if isinstance(outcome, int)} <= {404, 412}


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"x-amz-if-match-size": "many"}, 400, "InvalidArgument"),
        ({"x-amz-if-match-size": "-1"}, 400, "InvalidArgument"),
        ({"x-amz-if-match-size": "\u00b2"}, 400, "InvalidArgument"),
        ({"x-amz-if-match-size": "9" * 40}, 400, "InvalidArgument"),
        ({"x-amz-if-match-last-modified-time": "yesterday"}, 400, "InvalidArgument"),
        ({"x-amz-if-match-last-modified-time": "9" * 200}, 400, "InvalidArgument"),
        ({"if-match": ""}, 412, "PreconditionFailed"),
        ({"if-none-match": "*"}, 501, "NotImplemented"),
        ({"if-unmodified-since": "Thu, 01 Jan 2015 00:00:00 GMT"}, 501, "NotImplemented"),
        ({"if-modified-since": "Thu, 01 Jan 2015 00:00:00 GMT"}, 501, "NotImplemented"),
    ],
)
def test_a_condition_that_cannot_be_read_or_is_not_known_is_refused(
    s3: Any, signer: Signer, headers: dict[str, str], status: int, code: str
) -> None:
    put(s3, "bucket", "odd")
    answer = signer.ask("DELETE", "/bucket/odd", headers=headers)
    assert (answer.status, answer.code) == (status, code)
    assert keys_of(s3, "bucket", "odd") == ["odd"]


def test_a_write_under_a_condition_that_it_does_not_know_is_refused(s3: Any, signer: Signer) -> None:
    put(s3, "bucket", "odd")
    since = {"if-unmodified-since": "Thu, 01 Jan 2015 00:00:00 GMT"}
    body = b"<Delete><Object><Key>odd</Key></Object></Delete>"
    for answer in (
        signer.ask("PUT", "/bucket/odd", b"changed", since),
        signer.ask("POST", "/bucket?delete=", body, {"if-match": OTHER}),
        signer.ask("PUT", "/bucket/odd?tagging=", b"<Tagging><TagSet/></Tagging>", {"if-match": OTHER}),
        signer.ask("DELETE", "/bucket", b"", {"if-match": OTHER}),
    ):
        assert (answer.status, answer.code) == NOT_OFFERED
    assert s3.get_object(Bucket="bucket", Key="odd")["Body"].read() == CONTENT


# --- DeleteObjects -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", ["bucket", "kept"])
def test_each_entry_of_many_is_deleted_under_its_own_conditions(s3: Any, bucket: str) -> None:
    found = {key: put(s3, bucket, f"m/{key}") for key in "abcdefghi"}
    etag = found["a"][0]
    entries: list[dict[str, Any]] = [
        {"Key": "m/a"},
        {"Key": "m/b", "ETag": OTHER},
        {"Key": "m/c", "ETag": etag},
        {"Key": "m/d", "ETag": "*"},
        {"Key": "m/e", "Size": 1},
        {"Key": "m/f", "Size": len(CONTENT)},
        {"Key": "m/g", "LastModifiedTime": LONG_AGO},
        {"Key": "m/h", "LastModifiedTime": found["h"][1]},
        {"Key": "m/i", "LastModifiedTime": found["i"][1], "Size": len(CONTENT), "ETag": OTHER},
        {"Key": "m/none", "ETag": "*"},
        {"Key": "m/none", "Size": 3},
    ]
    answer = s3.delete_objects(Bucket=bucket, Delete={"Objects": entries})
    assert [entry["Key"] for entry in answer["Deleted"]] == ["m/a", "m/c", "m/d", "m/f", "m/h", "m/none"]
    assert [(error["Key"], error["Code"]) for error in answer["Errors"]] == [
        ("m/b", "PreconditionFailed"),
        ("m/e", "PreconditionFailed"),
        ("m/g", "PreconditionFailed"),
        ("m/i", "PreconditionFailed"),
        ("m/none", "NoSuchKey"),
    ]
    assert keys_of(s3, bucket, "m/") == ["m/b", "m/e", "m/g", "m/i"]


@pytest.mark.parametrize(
    "condition", ["<Size>many</Size>", "<LastModifiedTime></LastModifiedTime>", "<ETag><Of>x</Of></ETag>"]
)
def test_an_entry_whose_condition_cannot_be_read_is_refused_with_all_others(
    s3: Any, signer: Signer, condition: str
) -> None:
    put(s3, "bucket", "odd")
    body = f"<Delete><Object><Key>odd</Key></Object><Object><Key>odd</Key>{condition}</Object></Delete>"
    answer = signer.ask("POST", "/bucket?delete=", body.encode())
    assert (answer.status, answer.code) == (400, "MalformedXML")
    assert keys_of(s3, "bucket", "odd") == ["odd"]


# --- ListBuckets ---------------------------------------------------------------------------------------


def test_buckets_are_listed_by_prefix_and_in_pages(served: Served, s3: Any) -> None:
    names = [f"test-{number}" for number in range(5)]
    for name in [*names, "tesu", "tes"]:
        s3.create_bucket(Bucket=name)
    answer = s3.list_buckets(Prefix="test-")
    assert [bucket["Name"] for bucket in answer["Buckets"]] == names
    assert answer["Prefix"] == "test-"
    assert {bucket["BucketRegion"] for bucket in answer["Buckets"]} == {"us-east-1"}
    assert "ContinuationToken" not in answer
    assert s3.list_buckets(Prefix="Test-")["Buckets"] == []
    assert len(s3.list_buckets()["Buckets"]) > len(names)
    for size in (1, 2, 5):
        pages = list(s3.get_paginator("list_buckets").paginate(Prefix="test-", PaginationConfig={"PageSize": size}))
        assert [len(page["Buckets"]) for page in pages] == [size] * (5 // size) + ([5 % size] if 5 % size else [])
        assert [bucket["Name"] for page in pages for bucket in page["Buckets"]] == names
    everywhere = [bucket["Name"] for bucket in s3.list_buckets(MaxBuckets=10_000)["Buckets"]]
    assert everywhere == [bucket["Name"] for bucket in s3.list_buckets(ContinuationToken="")["Buckets"]]
    assert s3.list_buckets(BucketRegion="us-east-1", Prefix="test-")["Buckets"] == answer["Buckets"]
    assert s3.list_buckets(BucketRegion="eu-west-1")["Buckets"] == []
    page = s3.list_buckets(Prefix="test-", MaxBuckets=2)
    s3.delete_bucket(Bucket="test-1")
    rest = s3.list_buckets(Prefix="test-", ContinuationToken=page["ContinuationToken"])
    assert [bucket["Name"] for bucket in rest["Buckets"]] == names[2:]
    only = client_of(served, "--bucket", "test-2", "--bucket", "test-4")
    page = only.list_buckets(MaxBuckets=1)
    assert [bucket["Name"] for bucket in page["Buckets"]] == ["test-2"]
    page = only.list_buckets(MaxBuckets=1, ContinuationToken=page["ContinuationToken"])
    assert [bucket["Name"] for bucket in page["Buckets"]] == ["test-4"]
    assert "ContinuationToken" not in page


@pytest.mark.parametrize(
    "query",
    [
        "max-buckets=0",
        "max-buckets=10001",
        "max-buckets=-1",
        "max-buckets=ten",
        "max-buckets=%C2%B2",
        "max-buckets=" + "1" * 5000,
        "max-buckets=",
        "continuation-token=!",
        "continuation-token=YQ",
        "continuation-token=YQ%3D%3D%3D%3D",
        "continuation-token=Y%20Q%3D%3D",
        "continuation-token=" + urlsafe_b64encode(b"no/bucket").decode().replace("=", "%3D"),
        "continuation-token=" + urlsafe_b64encode(b"a" * 64).decode().replace("=", "%3D"),
        "continuation-token=" + "YWFh" * 5000,
    ],
)
def test_a_page_of_buckets_that_cannot_be_is_refused(signer: Signer, query: str) -> None:
    answer = signer.ask("GET", f"/?{query}")
    assert (answer.status, answer.code) == (400, "InvalidArgument")
    assert answer.field("ArgumentName") == query.partition("=")[0]
