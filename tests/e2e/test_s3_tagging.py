"""Object tags as boto3 asks for them, against a real engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.e2e.s3_client import client_of, refused
from tests.e2e.served import Served, serving
from tests.served_devices import DEVICES

NAME = {"Bucket": "bucket", "Key": "folder/tagged é"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine with S3 on a port of its own, another after a restart; the bucket `bucket` is there."""
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), "--s3", "127.0.0.1:0") as engine:
        engine.good("bucket", "create", "bucket")
        yield engine


def tag_set(**tags: str) -> dict[str, list[dict[str, str]]]:
    return {"TagSet": [{"Key": key, "Value": value} for key, value in tags.items()]}


def tags_of(s3: Any, key: str = NAME["Key"]) -> dict[str, str]:
    found = s3.get_object_tagging(Bucket="bucket", Key=key)["TagSet"]
    return {tag["Key"]: tag["Value"] for tag in found}


def test_changing_tags_changes_nothing_else_and_survives_a_kill_and_a_rebuild(served: Served) -> None:
    s3 = client_of(served)
    s3.put_object(**NAME, Body=b"content", Metadata={"a": "1"}, Tagging="a=1&b%20c=2")
    before = s3.head_object(**NAME)
    assert tags_of(s3) == {"a": "1", "b c": "2"}
    assert s3.get_object(**NAME)["TagCount"] == 2
    s3.put_object_tagging(**NAME, Tagging=tag_set(only="é /+=._:@-"))
    after = s3.head_object(**NAME)
    said = ("ETag", "LastModified", "ContentLength", "Metadata", "ContentType")
    assert [after[field] for field in said] == [before[field] for field in said]
    assert s3.get_object(**NAME)["Body"].read() == b"content"

    served.kill()
    served.start()
    again = client_of(served)
    assert tags_of(again) == {"only": "é /+=._:@-"}
    assert served.stop() == 0
    if DEVICES:
        shutil.rmtree(served.folders[0] / "names" / "index")  # a start makes it anew
    else:
        rebuilt = served("fsck", "--rebuild", "--data", served.data)
        assert rebuilt.code == 0, rebuilt
    served.start()
    again = client_of(served)
    assert tags_of(again) == {"only": "é /+=._:@-"}
    served.good("mv", f"bucket/{NAME['Key']}", "bucket/moved")
    assert tags_of(again, "moved") == {"only": "é /+=._:@-"}
    again.delete_object_tagging(Bucket="bucket", Key="moved")
    assert tags_of(again, "moved") == {}
    assert (
        "x-amz-tagging-count" not in again.head_object(Bucket="bucket", Key="moved")["ResponseMetadata"]["HTTPHeaders"]
    )


def test_a_put_brings_its_tags_and_takes_the_old_ones(served: Served) -> None:
    s3 = client_of(served)
    s3.put_object(Bucket="bucket", Key="again", Body=b"1", Tagging="old=1")
    s3.put_object(Bucket="bucket", Key="again", Body=b"2")
    assert tags_of(s3, "again") == {}
    upload = s3.create_multipart_upload(Bucket="bucket", Key="again", Tagging="parts=1")["UploadId"]
    part = s3.upload_part(Bucket="bucket", Key="again", UploadId=upload, PartNumber=1, Body=b"3")
    listed = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    s3.complete_multipart_upload(Bucket="bucket", Key="again", UploadId=upload, MultipartUpload=listed)
    assert tags_of(s3, "again") == {"parts": "1"}


def test_a_copy_keeps_or_replaces_tags_by_themselves(served: Served) -> None:
    s3 = client_of(served)
    s3.put_object(Bucket="bucket", Key="source", Body=b"x", Tagging="a=1", Metadata={"m": "1"})
    copying = {"Bucket": "bucket", "Key": "copy", "CopySource": {"Bucket": "bucket", "Key": "source"}}
    s3.copy_object(**copying)
    assert tags_of(s3, "copy") == {"a": "1"}
    s3.copy_object(**copying, MetadataDirective="REPLACE", Metadata={"n": "2"})
    assert tags_of(s3, "copy") == {"a": "1"}
    s3.copy_object(**copying, TaggingDirective="REPLACE", Tagging="b=2")
    assert tags_of(s3, "copy") == {"b": "2"}
    assert s3.head_object(Bucket="bucket", Key="copy")["Metadata"] == {"m": "1"}


def test_wrong_tags_are_refused_and_change_nothing(served: Served) -> None:
    s3 = client_of(served)
    name = {"Bucket": "bucket", "Key": "kept"}
    s3.put_object(**name, Body=b"kept", Tagging="a=1")
    many = {f"k{number}": "" for number in range(11)}
    twice = {"TagSet": [{"Key": "a", "Value": "1"}, {"Key": "a", "Value": "2"}]}
    assert refused(s3.put_object_tagging, **name, Tagging=tag_set(**many)) == (400, "BadRequest")
    assert refused(s3.put_object_tagging, **name, Tagging=twice) == (400, "InvalidTag")
    assert refused(s3.put_object_tagging, **name, Tagging=tag_set(a="\U0001f642")) == (400, "InvalidTag")
    assert refused(s3.put_object, **name, Body=b"new", Tagging="a=1&a=2") == (400, "InvalidArgument")
    assert refused(s3.put_object, **name, Body=b"new", Tagging="k" * 129 + "=") == (400, "InvalidTag")
    assert (tags_of(s3, "kept"), s3.get_object(**name)["Body"].read()) == ({"a": "1"}, b"kept")


def test_what_is_no_object_has_no_tags(served: Served) -> None:
    s3 = client_of(served)
    s3.put_object(Bucket="bucket", Key="nobody/made/this", Body=b"")
    for key in ("missing", "nobody/made/"):
        assert refused(s3.get_object_tagging, Bucket="bucket", Key=key) == (404, "NoSuchKey")
        tags = tag_set(a="1")
        assert refused(s3.put_object_tagging, Bucket="bucket", Key=key, Tagging=tags) == (404, "NoSuchKey")
        assert refused(s3.delete_object_tagging, Bucket="bucket", Key=key) == (404, "NoSuchKey")
    reader = client_of(served, "--read-only")
    name = {"Bucket": "bucket", "Key": "nobody/made/this"}
    assert reader.get_object_tagging(**name)["TagSet"] == []
    assert refused(reader.delete_object_tagging, **name) == (403, "AccessDenied")
