"""x-amz-* headers that ask for something: honoured, checked, or refused before anything is touched.

One test goes through all headers that botocore's model of S3 has, for every operation that is offered here.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
from botocore.session import get_session

from gateway.s3.operations.configuration import ABSENT, EMPTY, REMOVED
from gateway.s3.protocol.operation import NOT_OFFERED, Operation
from tests.e2e.s3_client import client_of, refused, url_of
from tests.e2e.s3_raw import Answer, Signer
from tests.e2e.served import Served, serving

MIB = 1 << 20
NAME = {"Bucket": "bucket", "Key": "kept"}
CONTENT = b"kept content"
NOT_IMPLEMENTED = (501, "NotImplemented")
SSE_C = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "0" * 32}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine with S3."""
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), "--s3", "127.0.0.1:0") as engine:
        yield engine


@pytest.fixture(scope="module")
def s3(served: Served) -> Any:
    """A client that may do everything; the bucket `bucket` has the object `kept`, and `empty` has none."""
    client = client_of(served)
    client.create_bucket(Bucket="bucket")
    client.create_bucket(Bucket="empty")
    client.put_object(**NAME, Body=CONTENT, Metadata={"a": "1"}, Tagging="t=1")
    return client


@pytest.fixture(scope="module")
def signer(served: Served, s3: Any) -> Signer:
    """The same key, for requests of our own."""
    key = s3._request_signer._credentials
    return Signer(key.access_key, key.secret_key, address_of(served))


def address_of(served: Served) -> tuple[str, int]:
    host, _, port = url_of(served).removeprefix("http://").partition(":")
    return host, int(port)


def begun(s3: Any, key: str, *sizes: int, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Begin an upload with parts of these sizes; return the arguments that name it, and the list of its parts."""
    upload = {
        "Bucket": "bucket",
        "Key": key,
        "UploadId": s3.create_multipart_upload(Bucket="bucket", Key=key, **options)["UploadId"],
    }
    parts = [
        {"PartNumber": number, "ETag": s3.upload_part(**upload, PartNumber=number, Body=bytes(size))["ETag"]}
        for number, size in enumerate(sizes, 1)
    ]
    return upload, {"Parts": parts}


# --- one by one, as clients ask ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {"WriteOffsetBytes": len(CONTENT)},
        {"ObjectLockMode": "COMPLIANCE", "ObjectLockRetainUntilDate": datetime(2040, 1, 1, tzinfo=UTC)},
        {"ObjectLockLegalHoldStatus": "ON"},
        {"ServerSideEncryption": "AES256"},
        {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "a-key"},
        SSE_C,
        {"StorageClass": "GLACIER"},
        {"ACL": "public-read"},
        {"GrantRead": 'uri="http://acs.amazonaws.com/groups/global/AllUsers"'},
        {"WebsiteRedirectLocation": "/elsewhere"},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_an_object_is_not_stored_otherwise_than_was_asked(s3: Any, asked: dict[str, Any]) -> None:
    assert refused(s3.put_object, **NAME, Body=b"other", **asked) == NOT_IMPLEMENTED
    if "WriteOffsetBytes" not in asked:
        assert refused(s3.create_multipart_upload, **NAME, **asked) == NOT_IMPLEMENTED
        assert refused(s3.copy_object, **NAME, CopySource="bucket/kept", **asked) == NOT_IMPLEMENTED
    assert s3.get_object(**NAME)["Body"].read() == CONTENT
    assert "Uploads" not in s3.list_multipart_uploads(Bucket="bucket", Prefix="kept")


def test_content_that_is_not_encrypted_is_not_read_as_if_it_were(s3: Any) -> None:
    assert refused(s3.get_object, **NAME, **SSE_C) == NOT_IMPLEMENTED
    assert refused(s3.head_object, **NAME, **SSE_C)[0] == 501


def test_a_bucket_is_not_made_without_the_locks_that_it_was_to_have(s3: Any) -> None:
    assert refused(s3.create_bucket, Bucket="locked", ObjectLockEnabledForBucket=True) == NOT_IMPLEMENTED
    assert refused(s3.create_bucket, Bucket="locked", ACL="public-read") == NOT_IMPLEMENTED
    assert refused(s3.create_bucket, Bucket="locked", ObjectOwnership="ObjectWriter") == NOT_IMPLEMENTED
    assert refused(s3.head_bucket, Bucket="locked")[0] == 404


def test_a_delete_with_a_proof_that_nobody_checks_is_refused(s3: Any) -> None:
    assert refused(s3.delete_object, **NAME, MFA="serial 123456") == NOT_IMPLEMENTED
    assert s3.get_object(**NAME)["Body"].read() == CONTENT


def test_what_changes_nothing_is_accepted(s3: Any) -> None:
    name = {"Bucket": "bucket", "Key": "plain"}
    for acl in ("private", "bucket-owner-full-control"):
        s3.put_object(**name, Body=b"1", StorageClass="STANDARD", ACL=acl, RequestPayer="requester")
    s3.copy_object(Bucket="bucket", Key="plain-copy", CopySource="bucket/plain", StorageClass="STANDARD", ACL="private")
    s3.create_bucket(
        Bucket="plain", ACL="private", ObjectOwnership="BucketOwnerEnforced", ObjectLockEnabledForBucket=False
    )
    s3.list_objects_v2(Bucket="bucket", OptionalObjectAttributes=["RestoreStatus"], RequestPayer="requester")
    for key in ("plain", "plain-copy"):
        s3.delete_object(Bucket="bucket", Key=key, BypassGovernanceRetention=True)
    assert "Contents" not in s3.list_objects_v2(Bucket="bucket", Prefix="plain")
    s3.delete_bucket(Bucket="plain")


def test_the_expected_owner_of_a_bucket_is_the_one_that_it_has(s3: Any) -> None:
    owner, other = s3.list_buckets()["Owner"]["ID"], "111122223333"
    denied = (403, "AccessDenied")
    assert s3.get_object(**NAME, ExpectedBucketOwner=owner)["Body"].read() == CONTENT
    assert refused(s3.get_object, **NAME, ExpectedBucketOwner=other) == denied
    assert refused(s3.put_object, **NAME, Body=b"x", ExpectedBucketOwner=other) == denied
    assert refused(s3.delete_object, **NAME, ExpectedBucketOwner=other) == denied
    assert refused(s3.delete_bucket, Bucket="empty", ExpectedBucketOwner=other) == denied
    copy = {"Bucket": "bucket", "Key": "copied", "CopySource": "bucket/kept"}
    assert refused(s3.copy_object, **copy, ExpectedSourceBucketOwner=other) == denied
    s3.copy_object(**copy, ExpectedBucketOwner=owner, ExpectedSourceBucketOwner=owner)
    s3.delete_object(Bucket="bucket", Key="copied", ExpectedBucketOwner=owner)
    s3.head_bucket(Bucket="empty")
    assert s3.get_object(**NAME)["Body"].read() == CONTENT


# --- uploads -------------------------------------------------------------------------------------------------


def test_an_upload_is_completed_only_with_the_size_that_is_stated(s3: Any) -> None:
    upload, parts = begun(s3, "sized", 5 * MIB, 7)
    complete = {**upload, "MultipartUpload": parts}
    for size in (5 * MIB + 6, 7, 0):
        assert refused(s3.complete_multipart_upload, **complete, MpuObjectSize=size) == (400, "InvalidRequest")
    assert refused(s3.head_object, Bucket="bucket", Key="sized")[0] == 404
    assert len(s3.list_parts(**upload)["Parts"]) == 2
    first = s3.complete_multipart_upload(**complete, MpuObjectSize=5 * MIB + 7)
    again = s3.complete_multipart_upload(**complete, MpuObjectSize=5 * MIB + 7)
    assert again["ETag"] == first["ETag"]
    assert refused(s3.complete_multipart_upload, **complete, MpuObjectSize=7) == (400, "InvalidRequest")


def crc32(content: bytes) -> str:
    return base64.b64encode(zlib.crc32(content).to_bytes(4, "big")).decode()


def test_the_checksum_that_a_completion_states_is_compared_or_refused(s3: Any) -> None:
    whole = bytes(5 * MIB + 7)
    upload, parts = begun(s3, "summed", 5 * MIB, 7, ChecksumAlgorithm="CRC32", ChecksumType="FULL_OBJECT")
    complete = {**upload, "MultipartUpload": parts}
    wrong_type = {"ChecksumCRC32": crc32(whole), "ChecksumType": "COMPOSITE"}
    assert refused(s3.complete_multipart_upload, **complete, **wrong_type) == (400, "BadDigest")
    assert refused(s3.complete_multipart_upload, **complete, ChecksumCRC32=crc32(b"other")) == (400, "BadDigest")
    other = base64.b64encode(hashlib.sha256(whole).digest()).decode()
    assert refused(s3.complete_multipart_upload, **complete, ChecksumSHA256=other) == (400, "InvalidRequest")
    assert refused(s3.head_object, Bucket="bucket", Key="summed")[0] == 404
    s3.complete_multipart_upload(**complete, ChecksumCRC32=crc32(whole), ChecksumType="FULL_OBJECT")
    # For an upload that was begun without an algorithm.
    upload, parts = begun(s3, "unsummed", 5 * MIB, 7)
    complete = {**upload, "MultipartUpload": parts, "ChecksumType": "FULL_OBJECT"}
    assert refused(s3.complete_multipart_upload, **complete, ChecksumCRC32=crc32(b"other")) == (400, "BadDigest")
    assert refused(s3.complete_multipart_upload, **complete, ChecksumCRC32C="AAAAAA==") == (400, "InvalidRequest"), (
        "no part came with a CRC32C: there is nothing to compare"
    )
    s3.complete_multipart_upload(**complete, ChecksumCRC32=crc32(whole))
    found = s3.head_object(Bucket="bucket", Key="unsummed", ChecksumMode="ENABLED")
    assert found["ChecksumCRC32"] == crc32(whole)


def test_a_checksum_that_is_announced_and_does_not_come_is_missed(signer: Signer) -> None:
    for target, method in (("/bucket/kept", "PUT"), ("/bucket?delete", "POST")):
        answer = signer.ask(method, target, b"<Delete/>", {"x-amz-sdk-checksum-algorithm": "CRC32"})
        assert (answer.status, answer.code) == (400, "InvalidRequest")
        answer = signer.ask(method, target, b"<Delete/>", {"x-amz-trailer": "x-amz-checksum-crc32"})
        assert (answer.status, answer.code) == (400, "InvalidRequest")
    assert signer.ask("GET", "/bucket/kept").body == CONTENT


def test_a_copy_gets_the_checksum_that_it_is_to_have_or_is_not_made(s3: Any) -> None:
    s3.put_object(Bucket="bucket", Key="sum", Body=b"x", ChecksumAlgorithm="SHA256")
    copy = {"Bucket": "bucket", "Key": "sum-copy", "CopySource": "bucket/sum"}
    assert refused(s3.copy_object, **copy, ChecksumAlgorithm="SHA1") == NOT_IMPLEMENTED
    assert refused(s3.head_object, Bucket="bucket", Key="sum-copy")[0] == 404
    s3.copy_object(**copy, ChecksumAlgorithm="SHA256")
    for key in ("sum", "sum-copy"):
        s3.delete_object(Bucket="bucket", Key=key)


# --- in the query, where SDKs put them when they presign -------------------------------------------------------


def presigned(signer: Signer, method: str, path: str, body: bytes = b"", **more: str) -> Answer:
    """Send a request to a presigned URL, with these headers moved into it; return the answer."""
    target = signer.presigned(method, path, more={name.replace("_", "-"): value for name, value in more.items()})
    lines = [f"{method} {target} HTTP/1.1", f"host: {signer.host}", f"content-length: {len(body)}", "", ""]
    return signer.send("\r\n".join(lines).encode() + body)


def test_a_presigned_url_obeys_the_same_list(s3: Any, signer: Signer) -> None:
    for more in (
        {"x_amz_storage_class": "GLACIER"},
        {"X_Amz_Server_Side_Encryption": "AES256"},
        {"x_amz_write_offset_bytes": "12"},
        {"x_amz_unheard_of": ""},
    ):
        answer = presigned(signer, "PUT", "/bucket/kept", b"other", **more)
        assert (answer.status, answer.code) == NOT_IMPLEMENTED
    answer = presigned(signer, "GET", "/bucket/kept", x_amz_expected_bucket_owner="111122223333")
    assert (answer.status, answer.code) == (403, "AccessDenied")
    answer = presigned(signer, "GET", "/bucket/kept", x_amz_checksum_mode="ENABLED", x_id="GetObject")
    assert (answer.status, answer.body) == (200, CONTENT)
    assert "x-amz-checksum-crc32" in answer.headers


def test_what_a_presigned_url_says_of_an_object_is_kept_and_compared(s3: Any, signer: Signer) -> None:
    said = {"X_Amz_Meta_Colour": "dark red", "x_amz_tagging": "a=1&b=2", "x_amz_acl": "private"}
    answer = presigned(signer, "PUT", "/bucket/moved", b"moved", **said, x_amz_checksum_crc32=crc32(b"moved"))
    assert answer.status == 200
    found = s3.head_object(Bucket="bucket", Key="moved", ChecksumMode="ENABLED")
    assert (found["Metadata"], found["ChecksumCRC32"]) == ({"colour": "dark red"}, crc32(b"moved"))
    assert s3.get_object_tagging(Bucket="bucket", Key="moved")["TagSet"] == [
        {"Key": "a", "Value": "1"},
        {"Key": "b", "Value": "2"},
    ]
    # The AWS SDK for JavaScript signs the checksum of no bytes, unless it is configured not to.
    answer = presigned(signer, "PUT", "/bucket/kept", b"other", x_amz_checksum_crc32="AAAAAA==")
    assert (answer.status, answer.code) == (400, "BadDigest")
    answer = presigned(signer, "PUT", "/bucket/moved", x_amz_copy_source="/bucket/kept")
    assert answer.status == 200
    assert s3.get_object(Bucket="bucket", Key="moved")["Body"].read() == CONTENT
    assert s3.get_object(**NAME)["Body"].read() == CONTENT
    s3.delete_object(Bucket="bucket", Key="moved")


def test_a_header_that_cannot_be_one_or_says_two_things_is_refused(signer: Signer) -> None:
    for more in (
        {"x_amz_meta_a": "1\r\nx-amz-meta-b: 2"},
        {"x_amz_meta_a%20b": "1"},
        {"x_amz_meta_a": "1", "X_Amz_Meta_A": "2"},
        {"x_amz_content_sha256": "0" * 64},
    ):
        answer = presigned(signer, "PUT", "/bucket/kept", b"other", **more)
        assert (answer.status, answer.code) == (400, "InvalidArgument"), more
    assert signer.ask("GET", "/bucket/kept").body == CONTENT


# --- when it is refused ----------------------------------------------------------------------------------------


def test_a_refusal_is_sent_before_any_of_the_body_is_received(signer: Signer) -> None:
    asked = signer.request("PUT", "/bucket/kept", headers={"x-amz-storage-class": "GLACIER"}, payload="0" * 64)
    asked.headers["content-length"] = str(4 * MIB)
    asked.headers["expect"] = "100-continue"
    answer = asked.send()
    assert (answer.status, answer.code) == NOT_IMPLEMENTED


def test_strangers_learn_nothing_by_headers(served: Served) -> None:
    stranger = Signer("", "", address_of(served))
    host = stranger.host
    answers = [
        stranger.send(f"PUT /bucket/kept HTTP/1.1\r\nhost: {host}\r\n{line}content-length: 0\r\n\r\n".encode())
        for line in ("", "x-amz-storage-class: GLACIER\r\n", "x-amz-expected-bucket-owner: lake\r\n")
    ]
    assert [(answer.status, answer.code) for answer in answers] == [(403, "AccessDenied")] * 3


# --- the walk ----------------------------------------------------------------------------------------------------

DELETE = b"<Delete><Object><Key>kept</Key></Object></Delete>"
VERSIONING = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
TAGGING = b"<Tagging><TagSet><Tag><Key>x</Key><Value>y</Value></Tag></TagSet></Tagging>"
PARTS = b"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>%b</ETag></Part></CompleteMultipartUpload>"
COPY = (("x-amz-copy-source", "/bucket/other"),)


@dataclass(frozen=True)
class Asked:
    """A request that is good without more headers; `UPLOAD` in its target is an upload of `kept`."""

    method: str
    target: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


CORS: Final = (
    b"<CORSConfiguration><CORSRule><AllowedOrigin>*</AllowedOrigin><AllowedMethod>GET</AllowedMethod></CORSRule>"
    b"</CORSConfiguration>"
)
ASKED: Final = {
    "ListBuckets": Asked("GET", "/"),
    "CreateBucket": Asked("PUT", "/another"),
    "DeleteBucket": Asked("DELETE", "/empty"),
    "HeadBucket": Asked("HEAD", "/bucket"),
    "GetBucketLocation": Asked("GET", "/bucket?location"),
    "GetBucketVersioning": Asked("GET", "/bucket?versioning"),
    "PutBucketVersioning": Asked("PUT", "/bucket?versioning", VERSIONING),
    "ListObjects": Asked("GET", "/bucket"),
    "ListObjectsV2": Asked("GET", "/bucket?list-type=2"),
    "ListObjectVersions": Asked("GET", "/bucket?versions"),
    "ListMultipartUploads": Asked("GET", "/bucket?uploads"),
    "DeleteObjects": Asked("POST", "/bucket?delete", DELETE),
    "GetObject": Asked("GET", "/bucket/kept"),
    "HeadObject": Asked("HEAD", "/bucket/kept"),
    "PutObject": Asked("PUT", "/bucket/kept", b"other"),
    "CopyObject": Asked("PUT", "/bucket/kept", headers=COPY),
    "DeleteObject": Asked("DELETE", "/bucket/kept"),
    "GetObjectAttributes": Asked("GET", "/bucket/kept?attributes", headers=(("x-amz-object-attributes", "ETag"),)),
    "GetObjectTagging": Asked("GET", "/bucket/kept?tagging"),
    "PutObjectTagging": Asked("PUT", "/bucket/kept?tagging", TAGGING),
    "DeleteObjectTagging": Asked("DELETE", "/bucket/kept?tagging"),
    "CreateMultipartUpload": Asked("POST", "/bucket/kept?uploads"),
    "UploadPart": Asked("PUT", "/bucket/kept?partNumber=2&uploadId=UPLOAD", b"other"),
    "UploadPartCopy": Asked("PUT", "/bucket/kept?partNumber=2&uploadId=UPLOAD", headers=COPY),
    "CompleteMultipartUpload": Asked("POST", "/bucket/kept?uploadId=UPLOAD", PARTS),
    "AbortMultipartUpload": Asked("DELETE", "/bucket/kept?uploadId=UPLOAD"),
    "ListParts": Asked("GET", "/bucket/kept?uploadId=UPLOAD"),
    "GetBucketAcl": Asked("GET", "/bucket?acl"),
    "GetObjectAcl": Asked("GET", "/bucket/kept?acl"),
    "GetBucketTagging": Asked("GET", "/bucket?tagging"),
    "PutBucketTagging": Asked("PUT", "/bucket?tagging", TAGGING),
    "DeleteBucketTagging": Asked("DELETE", "/bucket?tagging"),
    "GetBucketCors": Asked("GET", "/bucket?cors"),
    "PutBucketCors": Asked("PUT", "/bucket?cors", CORS),
    "DeleteBucketCors": Asked("DELETE", "/bucket?cors"),
}
CHECKED: Final = {
    "x-amz-expected-bucket-owner": 403,
    "x-amz-source-expected-bucket-owner": 403,
    "x-amz-mp-object-size": 400,
    "x-amz-sdk-checksum-algorithm": 400,
    "x-amz-checksum-algorithm": 400,
    "x-amz-checksum-type": 400,
    "x-amz-checksum-crc32": 400,
    "x-amz-checksum-crc32c": 400,
    "x-amz-checksum-crc64nvme": 400,
    "x-amz-checksum-sha1": 400,
    "x-amz-checksum-sha256": 400,
}
"""The status when the header's value is `odd`; every other header is refused with 501."""
UNDERSTOOD: Final = {
    "x-amz-bypass-governance-retention",
    "x-amz-checksum-mode",
    "x-amz-copy-source",
    "x-amz-copy-source-if-match",
    "x-amz-copy-source-if-modified-since",
    "x-amz-copy-source-if-none-match",
    "x-amz-copy-source-if-unmodified-since",
    "x-amz-copy-source-range",
    "x-amz-if-match-last-modified-time",
    "x-amz-if-match-size",
    "x-amz-max-parts",
    "x-amz-meta-",
    "x-amz-metadata-directive",
    "x-amz-object-attributes",
    "x-amz-part-number-marker",
    "x-amz-request-payer",
    "x-amz-tagging",
    "x-amz-tagging-directive",
}
"""Honoured, or they ask for nothing; other tests cover how."""


def asked_headers() -> Iterator[tuple[str, str]]:
    """Yield each operation that is offered, with each x-amz-* header of botocore's model and two that do not exist."""
    model = get_session().get_service_model("s3")
    for operation in ASKED:
        yield operation, "x-amz-some-day"
        yield operation, "x-amz-checksum-md4"
        shape = model.operation_model(operation).input_shape
        for member in shape.members.values() if shape else ():
            name = member.serialization.get("name", "").lower()
            if member.serialization.get("location") in ("header", "headers") and name.startswith("x-amz-"):
                yield operation, name


def test_every_header_of_botocores_model_is_understood_checked_or_refused(s3: Any, signer: Signer) -> None:
    s3.put_object(Bucket="bucket", Key="other", Body=b"other")
    upload, parts = begun(s3, "kept", 1)
    [part] = parts["Parts"]
    listed = PARTS % part["ETag"].encode()
    refused_count = 0
    for operation, header in asked_headers():
        if header in UNDERSTOOD:
            continue
        asked = ASKED[operation]
        target = asked.target.replace("UPLOAD", upload["UploadId"])
        body = listed if asked.body is PARTS else asked.body
        answer = signer.ask(asked.method, target, body, {**dict(asked.headers), header: "odd"})
        assert answer.status == CHECKED.get(header, 501), (operation, header, answer)
        if answer.status == 501 and asked.method != "HEAD":
            assert header in answer.field("Message"), (operation, header)
            refused_count += 1
    assert refused_count > 100
    assert s3.get_object(**NAME)["Body"].read() == CONTENT
    assert s3.get_object(**NAME)["Metadata"] == {"a": "1"}
    assert s3.get_object_tagging(**NAME)["TagSet"] == [{"Key": "t", "Value": "1"}]
    assert [part["PartNumber"] for part in s3.list_parts(**upload)["Parts"]] == [1]
    assert [found["UploadId"] for found in s3.list_multipart_uploads(Bucket="bucket")["Uploads"]] == [
        upload["UploadId"]
    ]
    assert "Status" not in s3.get_bucket_versioning(Bucket="bucket")
    assert [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]] == ["bucket", "empty"]


def test_the_walk_has_every_operation_that_is_offered() -> None:
    without_lists = NOT_OFFERED | ABSENT.keys() | EMPTY.keys() | REMOVED
    others = {Operation.GET_BUCKET_POLICY_STATUS, Operation.OPTIONS_OBJECT}
    assert ASKED.keys() == {operation.value for operation in Operation if operation not in without_lists | others}
