"""Old ways that settings accept: signatures of version 2, and requests for encryption at rest."""

from __future__ import annotations

import base64
import hashlib
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import boto3
import pytest
from botocore.config import Config

from tests.e2e.s3_client import client_of, refused, url_of
from tests.e2e.s3_raw import Signer, signer_of
from tests.e2e.served import Served, serving

DOMAIN: Final = "s3.lake.test"
NAME: Final = {"Bucket": "bucket", "Key": "a key+ü"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine that accepts both."""
    flags = ("--s3", "127.0.0.1:0", "--s3-signature-v2", "on", "--s3-accept-sse", "AES256", "--s3-domains", DOMAIN)
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), *flags) as engine:
        yield engine


@pytest.fixture(scope="module")
def new(served: Served) -> Any:
    """A client that signs with version 4."""
    client = client_of(served)
    client.create_bucket(Bucket="bucket")
    return client


@pytest.fixture(scope="module")
def old(served: Served, new: Any) -> Any:
    """A client that signs with version 2, with the same key."""
    key = new._request_signer._credentials
    return boto3.client(
        "s3",
        endpoint_url=url_of(served),
        region_name="us-east-1",
        aws_access_key_id=key.access_key,
        aws_secret_access_key=key.secret_key,
        config=Config(retries={"max_attempts": 0}, signature_version="s3"),
    )


@pytest.fixture(scope="module")
def signer(served: Served, new: Any) -> Signer:
    """Requests of our own."""
    assert new
    return signer_of(served)


def fetched(url: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """Make a request as a browser or curl does with a URL."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, body, named, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_requests_signed_with_version_2_are_answered(old: Any, new: Any) -> None:
    old.put_object(**NAME, Body=b"content", Metadata={"a": "1"}, ContentType="text/plain")
    for _ in range(3):  # between answers that native code repeats
        assert old.get_object(**NAME)["Body"].read() == new.get_object(**NAME)["Body"].read() == b"content"
    found = old.head_object(**NAME)
    assert (found["Metadata"], found["ContentType"]) == ({"a": "1"}, "text/plain")
    assert old.get_object(**NAME, Range="bytes=1-2", ResponseContentType="a/b")["ContentType"] == "a/b"
    old.put_object_tagging(**NAME, Tagging={"TagSet": [{"Key": "a", "Value": "b"}]})
    assert [entry["Key"] for entry in old.list_objects_v2(Bucket="bucket", Prefix="a k")["Contents"]] == [NAME["Key"]]
    upload = {**NAME, "UploadId": old.create_multipart_upload(**NAME)["UploadId"]}
    part = {"PartNumber": 1, "ETag": old.upload_part(**upload, PartNumber=1, Body=b"part")["ETag"]}
    old.complete_multipart_upload(**upload, MultipartUpload={"Parts": [part]})
    assert new.get_object(**NAME)["Body"].read() == b"part"
    old.delete_objects(Bucket="bucket", Delete={"Objects": [{"Key": NAME["Key"]}]})
    assert refused(new.head_object, **NAME)[0] == 404


def test_urls_by_the_defaults_of_boto3_are_answered_until_they_expire(old: Any, new: Any) -> None:
    put = old.generate_presigned_url("put_object", Params=NAME)
    assert "AWSAccessKeyId=" in put
    assert fetched(put, "PUT", b"by url", content_type="")[0] == 200
    get = old.generate_presigned_url("get_object", Params={**NAME, "ResponseContentType": "a/b"})
    assert fetched(get) == fetched(get) == (200, b"by url")
    for changed in (get.replace("a%20key", "b%20key"), get.replace("Signature=", "Signature=A"), get + "0"):
        assert fetched(changed)[0] in (400, 403)
    assert fetched(get, "DELETE")[0] == 403
    over = old.generate_presigned_url("get_object", Params=NAME, ExpiresIn=-5)
    status, body = fetched(over)
    assert (status, b"Request has expired" in body) == (403, True)
    assert new.get_object(**NAME)["Body"].read() == b"by url"


def test_headers_in_the_query_of_a_url_are_held_to_as_headers_are(old: Any, new: Any) -> None:
    digest = base64.b64encode(hashlib.md5(b"agreed").digest()).decode()
    signed = {**NAME, "ContentMD5": digest, "ContentType": "text/plain"}
    put = old.generate_presigned_url("put_object", Params=signed)
    assert "content-md5=" in put
    status, body = fetched(put, "PUT", b"another", content_type="")
    assert (status, b"BadDigest" in body) == (400, True)
    assert fetched(put, "PUT", b"agreed", content_type="")[0] == 200
    found = new.get_object(**NAME)
    assert (found["Body"].read(), found["ContentType"]) == (b"agreed", "text/plain")


def test_a_plus_of_a_query_is_the_space_that_was_signed(old: Any, new: Any) -> None:
    new.put_object(**NAME, Body=b"x")
    shown = {**NAME, "ResponseContentDisposition": 'attachment; filename="a b"'}
    get = old.generate_presigned_url("get_object", Params=shown)
    assert fetched(get)[0] == fetched(get.replace("%20b", "+b"))[0] == 200
    of_plus = old.generate_presigned_url("get_object", Params={**NAME, "ResponseContentType": "a/b+c"})
    assert fetched(of_plus)[0] == 200
    assert fetched(of_plus.replace("%2B", "+"))[0] == 403  # it would be answered with a space


def test_parameters_that_only_end_like_a_signature_are_none(served: Served, new: Any) -> None:
    assert new
    status, body = fetched(f"{url_of(served)}/bucket/k?aAWSAccessKeyId=x&aSignature=y&aExpires=1")
    assert (status, b"AccessDenied" in body) == (403, True)


def test_a_wrong_secret_a_wrong_time_and_a_changed_body_are_refused(old: Any, served: Served, signer: Signer) -> None:
    key = old._request_signer._credentials
    wrong = boto3.client(
        "s3",
        endpoint_url=url_of(served),
        region_name="us-east-1",
        aws_access_key_id=key.access_key,
        aws_secret_access_key="wrong",
        config=Config(retries={"max_attempts": 0}, signature_version="s3"),
    )
    assert refused(wrong.list_buckets) == (403, "SignatureDoesNotMatch")
    now = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
    for authorization, date, code in (
        ("AWS nobody:" + "A" * 27 + "=", now, "InvalidAccessKeyId"),
        (f"AWS {key.access_key}:" + "A" * 27 + "=", now, "SignatureDoesNotMatch"),
        (f"AWS {key.access_key}:" + "A" * 27 + "=", "Thu, 01 Jan 2015 00:00:00 GMT", "RequestTimeTooSkewed"),
        (f"AWS {key.access_key}:" + "A" * 27 + "=", "", "AccessDenied"),
        ("AWS nothing", now, "InvalidArgument"),
    ):
        lines = {"host": signer.host, "date": date, "authorization": authorization}
        text = "GET / HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        assert signer.send(text.encode() + b"\r\n").code == code


def test_encryption_at_rest_is_accepted_and_answered(new: Any) -> None:
    named = {"Bucket": "bucket", "Key": "sse"}
    assert new.put_object(**named, Body=b"x", ServerSideEncryption="AES256")["ServerSideEncryption"] == "AES256"
    copied = new.copy_object(**named, CopySource=named, MetadataDirective="REPLACE", ServerSideEncryption="AES256")
    assert copied["ServerSideEncryption"] == "AES256"
    upload = new.create_multipart_upload(**named, ServerSideEncryption="AES256")
    assert upload["ServerSideEncryption"] == "AES256"
    assert refused(new.put_object, **named, Body=b"y", ServerSideEncryption="aws:kms") == (501, "NotImplemented")
    assert new.get_object(**named)["Body"].read() == b"x"
