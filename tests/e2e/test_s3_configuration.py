"""Configuration of buckets: what is not set answers as S3 does; tags and CORS rules are kept, and rules honoured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
from botocore.session import get_session

from gateway.s3.dispatch import OPERATIONS
from gateway.s3.protocol.operation import NOT_OFFERED, Operation
from tests.e2e.s3_client import client_of, refused
from tests.e2e.s3_raw import Answer, Signer, signer_of
from tests.e2e.served import Served, serving

PAGE: Final = "https://app.example.com"
TAGS: Final = [{"Key": "owner", "Value": "team a"}, {"Key": "stage", "Value": "ü"}]
RULES: Final[list[dict[str, Any]]] = [
    {
        "ID": "app",
        "AllowedOrigins": ["https://*.example.com"],
        "AllowedMethods": ["GET", "PUT"],
        "AllowedHeaders": ["x-amz-*", "Content-Type"],
        "ExposeHeaders": ["ETag", "x-amz-version-id"],
        "MaxAgeSeconds": 600,
    },
    {"AllowedOrigins": ["*"], "AllowedMethods": ["GET", "HEAD"]},
]
ABSENT: Final = {
    "get_bucket_policy": (404, "NoSuchBucketPolicy"),
    "get_bucket_lifecycle_configuration": (404, "NoSuchLifecycleConfiguration"),
    "get_bucket_cors": (404, "NoSuchCORSConfiguration"),
    "get_bucket_encryption": (404, "ServerSideEncryptionConfigurationNotFoundError"),
    "get_bucket_tagging": (404, "NoSuchTagSet"),
    "get_bucket_website": (404, "NoSuchWebsiteConfiguration"),
    "get_bucket_replication": (404, "ReplicationConfigurationNotFoundError"),
    "get_object_lock_configuration": (404, "ObjectLockConfigurationNotFoundError"),
    "get_public_access_block": (404, "NoSuchPublicAccessBlockConfiguration"),
    "get_bucket_ownership_controls": (404, "OwnershipControlsNotFoundError"),
}
EMPTY: Final[dict[str, dict[str, Any]]] = {
    "get_bucket_logging": {},
    "get_bucket_notification_configuration": {},
    "get_bucket_accelerate_configuration": {},
    "get_bucket_request_payment": {"Payer": "BucketOwner"},
    "get_bucket_policy_status": {"PolicyStatus": {"IsPublic": False}},
    "list_bucket_analytics_configurations": {"IsTruncated": False},
    "list_bucket_inventory_configurations": {"IsTruncated": False},
    "list_bucket_metrics_configurations": {"IsTruncated": False},
    "list_bucket_intelligent_tiering_configurations": {"IsTruncated": False},
}
REMOVED: Final = (
    "delete_bucket_policy",
    "delete_bucket_lifecycle",
    "delete_bucket_encryption",
    "delete_bucket_website",
    "delete_bucket_replication",
    "delete_public_access_block",
    "delete_bucket_ownership_controls",
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine with S3."""
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), "--s3", "127.0.0.1:0") as engine:
        yield engine


@pytest.fixture(scope="module")
def s3(served: Served) -> Any:
    """A client that may do everything; the bucket `bucket` has the object `kept`."""
    client = client_of(served)
    client.create_bucket(Bucket="bucket")
    client.put_object(Bucket="bucket", Key="kept", Body=b"kept")
    return client


@pytest.fixture(scope="module")
def signer(served: Served, s3: Any) -> Signer:
    """Requests of our own."""
    assert s3
    return signer_of(served)


# --- what is not set -----------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ABSENT)
def test_configuration_that_is_not_set_is_absent_in_s3s_words(s3: Any, asked: str) -> None:
    assert refused(getattr(s3, asked), Bucket="bucket") == ABSENT[asked]
    assert refused(getattr(s3, asked), Bucket="nowhere") == (404, "NoSuchBucket")


@pytest.mark.parametrize("asked", EMPTY)
def test_configuration_that_every_bucket_has_is_empty(s3: Any, asked: str) -> None:
    answer = getattr(s3, asked)(Bucket="bucket")
    del answer["ResponseMetadata"]
    assert answer == EMPTY[asked]
    assert refused(getattr(s3, asked), Bucket="nowhere") == (404, "NoSuchBucket")


def test_entries_and_locks_that_nothing_has(s3: Any) -> None:
    for kind in ("analytics", "inventory", "metrics"):
        for verb in ("get", "delete"):
            call = getattr(s3, f"{verb}_bucket_{kind}_configuration")
            assert refused(call, Bucket="bucket", Id="one") == (404, "NoSuchConfiguration")
    for call in (s3.get_object_retention, s3.get_object_legal_hold):
        assert refused(call, Bucket="bucket", Key="kept") == (400, "InvalidRequest")
        assert refused(call, Bucket="bucket", Key="absent") == (404, "NoSuchKey")


def test_what_does_not_exist_is_deleted(s3: Any) -> None:
    for asked in REMOVED:
        assert getattr(s3, asked)(Bucket="bucket")["ResponseMetadata"]["HTTPStatusCode"] == 204
        assert refused(getattr(s3, asked), Bucket="nowhere") == (404, "NoSuchBucket")


def test_every_operation_of_configuration_is_s3s_and_answered_or_refused(signer: Signer) -> None:
    names = set(get_session().get_service_model("s3").operation_names)
    assert {operation.value for operation in Operation} - {"OptionsObject"} <= names
    assert OPERATIONS.keys() == set(Operation)
    for target in ("/bucket?policy", "/bucket?acl", "/bucket/kept?acl", "/bucket?encryption", "/bucket?logging"):
        answer = signer.ask("PUT", target, b"<Any/>")
        assert (answer.status, answer.code) == (501, "NotImplemented")
    assert signer.ask("GET", "/bucket/kept?torrent").status == 501
    assert Operation.PUT_BUCKET_POLICY in NOT_OFFERED


def test_the_owner_has_full_control_and_everybody_reads_an_open_bucket(s3: Any, served: Served) -> None:
    for answer in (s3.get_bucket_acl(Bucket="bucket"), s3.get_object_acl(Bucket="bucket", Key="kept")):
        (grant,) = answer["Grants"]
        assert (grant["Grantee"]["ID"], grant["Permission"]) == (answer["Owner"]["ID"], "FULL_CONTROL")
    s3.create_bucket(Bucket="open")
    s3.put_object(Bucket="open", Key="kept", Body=b"")
    served.good("bucket", "set", "open", "--anonymous-read")
    for answer in (s3.get_bucket_acl(Bucket="open"), s3.get_object_acl(Bucket="open", Key="kept")):
        assert [grant["Permission"] for grant in answer["Grants"]] == ["FULL_CONTROL", "READ"]
        assert answer["Grants"][1]["Grantee"]["URI"].endswith("/AllUsers")
    assert s3.get_bucket_policy_status(Bucket="open")["PolicyStatus"]["IsPublic"]


# --- tags and rules ------------------------------------------------------------------------------------


def test_tags_of_buckets_are_kept(s3: Any) -> None:
    s3.put_bucket_tagging(Bucket="bucket", Tagging={"TagSet": TAGS})
    assert s3.get_bucket_tagging(Bucket="bucket")["TagSet"] == TAGS
    many = [{"Key": f"k{number}", "Value": ""} for number in range(51)]
    assert refused(s3.put_bucket_tagging, Bucket="bucket", Tagging={"TagSet": many}) == (400, "BadRequest")
    s3.put_bucket_tagging(Bucket="bucket", Tagging={"TagSet": many[1:]})
    assert len(s3.get_bucket_tagging(Bucket="bucket")["TagSet"]) == 50
    s3.put_bucket_cors(Bucket="bucket", CORSConfiguration={"CORSRules": RULES})
    s3.delete_bucket_tagging(Bucket="bucket")
    assert refused(s3.get_bucket_tagging, Bucket="bucket") == (404, "NoSuchTagSet")
    assert s3.get_bucket_cors(Bucket="bucket")["CORSRules"] == RULES
    s3.delete_bucket_cors(Bucket="bucket")
    assert refused(s3.put_bucket_tagging, Bucket="nowhere", Tagging={"TagSet": TAGS}) == (404, "NoSuchBucket")


@pytest.fixture
def rules(s3: Any) -> Iterator[None]:
    """The rules are set meanwhile."""
    s3.put_bucket_cors(Bucket="bucket", CORSConfiguration={"CORSRules": RULES})
    yield
    s3.delete_bucket_cors(Bucket="bucket")


def preflight(signer: Signer, target: str, **headers: str) -> Answer:
    """Send what a browser sends before the request."""
    lines = {"host": signer.host} | {name.replace("_", "-"): value for name, value in headers.items()}
    text = f"OPTIONS {target} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return signer.send(text.encode() + b"\r\n")


@pytest.mark.usefixtures("rules")
def test_a_preflight_is_allowed_by_a_rule(signer: Signer) -> None:
    presigned = signer.presigned("PUT", "/bucket/kept")
    for target in ("/bucket/kept", presigned, "/bucket?uploads", "/bucket/new?uploadId=u&partNumber=1"):
        answer = preflight(
            signer,
            target,
            origin=PAGE,
            access_control_request_method="PUT",
            access_control_request_headers="content-type, X-Amz-Date",
        )
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-methods"] == "GET, PUT"
        assert answer.headers["access-control-allow-headers"] == "content-type, x-amz-date"
        assert answer.headers["access-control-allow-credentials"] == "true"
        assert answer.headers["access-control-max-age"] == "600"
        assert "Origin" in answer.headers["vary"]
    answer = preflight(signer, "/bucket/kept", origin="http://other", access_control_request_method="GET")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.usefixtures("rules")
def test_a_preflight_that_no_rule_allows_is_refused(signer: Signer, s3: Any) -> None:
    for headers, status, code in (
        ({"origin": PAGE, "access_control_request_method": "DELETE"}, 403, "AccessForbidden"),
        ({"origin": "http://other", "access_control_request_method": "PUT"}, 403, "AccessForbidden"),
        (
            {"origin": PAGE, "access_control_request_method": "PUT", "access_control_request_headers": "x-mine"},
            403,
            "AccessForbidden",
        ),
        ({"access_control_request_method": "PUT"}, 400, "BadRequest"),
        ({"origin": PAGE}, 400, "BadRequest"),
    ):
        answer = preflight(signer, "/bucket/kept", **headers)
        assert (answer.status, answer.code) == (status, code)
        assert "access-control-allow-origin" not in answer.headers
    s3.create_bucket(Bucket="shut")
    asked = {"origin": PAGE, "access_control_request_method": "GET"}
    assert preflight(signer, "/shut/x", **asked).code == "AccessForbidden"
    assert preflight(signer, "/nowhere/x", **asked).code == "NoSuchBucket"


@pytest.mark.usefixtures("rules")
def test_answers_to_a_page_have_the_lines_that_let_it_read_them(signer: Signer) -> None:
    for _ in range(3):  # also when the answer without an origin is one that is repeated
        assert "access-control-allow-origin" not in signer.ask("GET", "/bucket/kept").headers
        answer = signer.ask("GET", "/bucket/kept", b"", {"origin": PAGE})
        assert (answer.status, answer.body) == (200, b"kept")
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-expose-headers"] == "ETag, x-amz-version-id"
        assert "vary" in answer.headers
    for _ in range(2):
        answer = signer.ask("PUT", "/bucket/put", b"1", {"origin": PAGE})
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    absent = signer.ask("GET", "/bucket/absent", b"", {"origin": PAGE})
    assert (absent.status, absent.headers["access-control-allow-origin"]) == (404, PAGE)
    other = signer.ask("PUT", "/bucket/put", b"1", {"origin": "http://other"})
    assert (other.status, "access-control-allow-origin" in other.headers) == (200, False)
    assert signer.ask("GET", "/nowhere/x", b"", {"origin": PAGE}).code == "NoSuchBucket"


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ({"AllowedOrigins": ["*"], "AllowedMethods": ["PATCH"]}, "InvalidRequest"),
        ({"AllowedOrigins": ["http://*.*"], "AllowedMethods": ["GET"]}, "InvalidRequest"),
        ({"AllowedOrigins": ["*"], "AllowedMethods": ["GET"], "ExposeHeaders": ["*"]}, "InvalidRequest"),
        ({"AllowedOrigins": ["*"], "AllowedMethods": ["GET"], "ID": "x" * 256}, "InvalidRequest"),
        ({"AllowedOrigins": [], "AllowedMethods": ["GET"]}, "MalformedXML"),
        ({"AllowedOrigins": ["*" + "o" * 33_000], "AllowedMethods": ["GET"]}, "EntityTooLarge"),
    ],
)
def test_rules_that_s3_does_not_take_are_refused(s3: Any, rule: dict[str, Any], code: str) -> None:
    configuration = {"CORSRules": [rule]}
    assert refused(s3.put_bucket_cors, Bucket="bucket", CORSConfiguration=configuration) == (400, code)
    assert refused(s3.get_bucket_cors, Bucket="bucket") == (404, "NoSuchCORSConfiguration")
