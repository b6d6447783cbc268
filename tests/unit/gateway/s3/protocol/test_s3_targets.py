"""Targets: bucket, key and operation of a request."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given, settings, strategies as st

from gateway.http.head import RequestHead
from gateway.s3.protocol.errors import S3Error
from gateway.s3.protocol.operation import BY_ID, NOT_OFFERED, SUB_RESOURCES, Level, Operation
from gateway.s3.protocol.targets import Target, parse_copy_source, parse_target
from lakefs.names import is_bucket_name
from tests.lengths import repeated

DOMAINS = ("s3.lake", "localhost")


def head_of(method: str, target: str, *, host: str = "lake:9000", copy_source: str = "") -> RequestHead:
    path, _, query = target.encode().partition(b"?")
    headers = {b"host": host.encode()} | ({b"x-amz-copy-source": copy_source.encode()} if copy_source else {})
    return RequestHead(method, target.encode(), path, query, host.encode(), (1, 1), headers, keep_alive=True)


def parse(method: str, target: str, *, host: str = "lake:9000", copy_source: str = "") -> Target:
    return parse_target(head_of(method, target, host=host, copy_source=copy_source), DOMAINS)


def refusal(method: str, target: str, *, host: str = "lake:9000") -> tuple[int, str]:
    with pytest.raises(S3Error) as caught:
        parse(method, target, host=host)
    return caught.value.status, caught.value.code


@pytest.mark.parametrize(
    ("method", "target", "operation"),
    [
        ("GET", "/", Operation.LIST_BUCKETS),
        ("GET", "/?x-id=ListBuckets", Operation.LIST_BUCKETS),
        ("PUT", "/bkt", Operation.CREATE_BUCKET),
        ("PUT", "/bkt/", Operation.CREATE_BUCKET),
        ("PUT", "/bkt?versioning", Operation.PUT_BUCKET_VERSIONING),
        ("DELETE", "/bkt", Operation.DELETE_BUCKET),
        ("HEAD", "/bkt", Operation.HEAD_BUCKET),
        ("GET", "/bkt", Operation.LIST_OBJECTS),
        ("GET", "/bkt?prefix=a&unheard-of", Operation.LIST_OBJECTS),
        ("GET", "/bkt/?list-type=2&prefix=a", Operation.LIST_OBJECTS_V2),
        ("GET", "/bkt?location", Operation.GET_BUCKET_LOCATION),
        ("GET", "/bkt?location=", Operation.GET_BUCKET_LOCATION),
        ("GET", "/bkt?versioning", Operation.GET_BUCKET_VERSIONING),
        ("GET", "/bkt?versions&prefix=a", Operation.LIST_OBJECT_VERSIONS),
        ("GET", "/bkt?uploads", Operation.LIST_MULTIPART_UPLOADS),
        ("POST", "/bkt?delete", Operation.DELETE_OBJECTS),
        ("GET", "/bkt/k", Operation.GET_OBJECT),
        ("GET", "/bkt/k?versionId=v&response-content-type=a", Operation.GET_OBJECT),
        ("GET", "/bkt/k?partNumber=1", Operation.GET_OBJECT),
        ("GET", "/bkt/k?attributes", Operation.GET_OBJECT_ATTRIBUTES),
        ("GET", "/bkt/k?tagging", Operation.GET_OBJECT_TAGGING),
        ("GET", "/bkt/k?uploadId=u", Operation.LIST_PARTS),
        ("HEAD", "/bkt/k", Operation.HEAD_OBJECT),
        ("PUT", "/bkt/k", Operation.PUT_OBJECT),
        ("PUT", "/bkt/k?x-id=PutObject&X-Amz-Date=1&X-Amz-Signature=2", Operation.PUT_OBJECT),
        ("PUT", "/bkt/k?tagging&versionId=v", Operation.PUT_OBJECT_TAGGING),
        ("PUT", "/bkt/k?partNumber=1&uploadId=u", Operation.UPLOAD_PART),
        ("POST", "/bkt/k?uploads", Operation.CREATE_MULTIPART_UPLOAD),
        ("POST", "/bkt/k?uploadId=u", Operation.COMPLETE_MULTIPART_UPLOAD),
        ("DELETE", "/bkt/k?uploadId=u", Operation.ABORT_MULTIPART_UPLOAD),
        ("DELETE", "/bkt/k?tagging", Operation.DELETE_OBJECT_TAGGING),
        ("DELETE", "/bkt/k?versionId=v", Operation.DELETE_OBJECT),
    ],
)
def test_method_level_and_parameters_name_the_operation(method: str, target: str, operation: Operation) -> None:
    assert parse(method, target).operation is operation


def test_every_operation_can_be_asked_for() -> None:
    asked = {
        mark.args[1][number][2]
        for mark in test_method_level_and_parameters_name_the_operation.pytestmark  # type: ignore[attr-defined]
        for number in range(len(mark.args[1]))
    }
    of_sub_resources = {
        operation
        for of_level in SUB_RESOURCES.values()
        for operations in of_level.values()
        for operation in operations.values()
    }
    others = {Operation.COPY_OBJECT, Operation.UPLOAD_PART_COPY, Operation.OPTIONS_OBJECT, *BY_ID.values()}
    assert asked | others | of_sub_resources == set(Operation)


def test_a_copy_is_a_put_with_a_source() -> None:
    assert parse("PUT", "/bkt/k", copy_source="/b/k").operation is Operation.COPY_OBJECT
    assert parse("PUT", "/bkt/k?partNumber=1&uploadId=u", copy_source="b/k").operation is Operation.UPLOAD_PART_COPY
    assert parse("PUT", "/bkt/k?tagging", copy_source="b/k").operation is Operation.PUT_OBJECT_TAGGING


OF_LEVELS = [(level, name) for level, names in SUB_RESOURCES.items() for name in names]
WITHOUT_OPERATIONS = ["abac", "annotation", "metadataConfiguration", "metadataTable", "session"]
PATHS = {Level.BUCKET: "/bkt", Level.OBJECT: "/bkt/k"}


@pytest.mark.parametrize(("level", "name"), OF_LEVELS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "POST", "DELETE"])
def test_a_sub_resource_is_its_own_operation_or_touches_nothing(level: Level, name: str, method: str) -> None:
    known = SUB_RESOURCES[level][name].get(method)
    for query in (name, f"{name}="):
        if known is None and (level, name) != (Level.OBJECT, "tagging"):
            assert refusal(method, f"{PATHS[level]}?{query}") == (501, "NotImplemented")
        else:
            assert parse(method, f"{PATHS[level]}?{query}&x-id=Any").operation is known
    if method != "GET" and method != "HEAD":
        for query in (f"{name}=1&partNumber=1&uploadId=u", f"uploads&delete&{name}"):
            assert refusal(method, f"{PATHS[level]}?{query}") == (501, "NotImplemented")


def test_an_entry_of_a_list_of_configurations_is_asked_for_by_its_id() -> None:
    assert parse("GET", "/bkt?inventory").operation is Operation.LIST_BUCKET_INVENTORY_CONFIGURATIONS
    assert parse("GET", "/bkt?inventory&id=one").operation is Operation.GET_BUCKET_INVENTORY_CONFIGURATION
    assert parse("DELETE", "/bkt?metrics&id=one").operation is Operation.DELETE_BUCKET_METRICS_CONFIGURATION


def test_what_sets_a_configuration_is_refused_under_its_name() -> None:
    for method, target, operation in (
        ("PUT", "/bkt?policy", Operation.PUT_BUCKET_POLICY),
        ("PUT", "/bkt/k?acl", Operation.PUT_OBJECT_ACL),
        ("POST", "/bkt/k?restore", Operation.RESTORE_OBJECT),
    ):
        assert parse(method, target).operation is operation
        assert operation in NOT_OFFERED


@pytest.mark.parametrize("query", ["", "?uploads", "?policy&X-Amz-Signature=1", "?session"])
@pytest.mark.parametrize("path", ["/bkt", "/bkt/k"])
def test_a_preflight_may_ask_for_any_request(path: str, query: str) -> None:
    assert parse("OPTIONS", path + query).operation is Operation.OPTIONS_OBJECT


@pytest.mark.parametrize("name", WITHOUT_OPERATIONS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "POST", "DELETE"])
@pytest.mark.parametrize("path", ["/bkt", "/bkt/k"])
def test_a_sub_resource_that_is_not_offered_touches_nothing(name: str, method: str, path: str) -> None:
    for query in (name, f"{name}=", f"{name}=1&partNumber=1&uploadId=u", f"uploads&delete&{name}"):
        assert refusal(method, f"{path}?{query}") == (501, "NotImplemented")


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("PUT", "/bkt/k?some-day"),
        ("PUT", "/bkt/k?uploadId=u"),
        ("PUT", "/bkt/k?partNumber=1"),
        ("PUT", "/bkt/k?versionId=v"),
        ("PUT", "/bkt/k?Acl"),
        ("PUT", "/bkt?location"),
        ("PUT", "/bkt/k?X-mine"),
        ("DELETE", "/bkt?delete"),
        ("DELETE", "/bkt/k?some-day"),
        ("POST", "/bkt/k?uploads&some-day"),
        ("POST", "/bkt"),
        ("POST", "/bkt/k"),
        ("POST", "/"),
        ("PUT", "/bkt/k?%61cl&versionId=v"),
        ("PUT", "/bkt?cors&some-day"),
        ("OPTIONS", "/"),
    ],
)
def test_a_write_with_an_unknown_wish_is_not_done(method: str, target: str) -> None:
    assert refusal(method, target) == (501, "NotImplemented")


@pytest.mark.parametrize("name", ["location", "uploads", "versioning", "versions", "delete"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "POST"])
def test_a_sub_resource_of_buckets_is_none_of_a_key(name: str, method: str) -> None:
    if (name, method) == ("uploads", "POST"):
        return
    for more in ("", "&x-id=GetObject", "&versionId=null"):
        assert refusal(method, f"/bkt/k?{name}{more}") == (400, "InvalidRequest")
        assert refusal(method, f"/bkt/k?{name}=1{more}") == (400, "InvalidRequest")


@pytest.mark.parametrize("name", ["attributes", "uploadId=u"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "POST"])
def test_a_sub_resource_of_keys_is_none_of_a_bucket(name: str, method: str) -> None:
    assert refusal(method, f"/bkt?{name}") == (400, "InvalidRequest")


@pytest.mark.parametrize(
    ("method", "target", "operation"),
    [
        ("GET", "/bkt/k", Operation.GET_OBJECT),
        ("PUT", "/bkt/k", Operation.PUT_OBJECT),
        ("DELETE", "/bkt/k", Operation.DELETE_OBJECT),
        ("PUT", "/bkt", Operation.CREATE_BUCKET),
        ("DELETE", "/bkt", Operation.DELETE_BUCKET),
    ],
)
def test_a_parameter_of_the_clients_own_changes_nothing(method: str, target: str, operation: Operation) -> None:
    assert parse(method, f"{target}?x-mine=1&x-user=a%20b&x-").operation is operation


@pytest.mark.parametrize(("method", "target"), [("PUT", "/"), ("DELETE", "/"), ("PATCH", "/bkt/k"), ("TRACE", "/bkt")])
def test_a_method_that_s3_does_not_have_is_not_allowed(method: str, target: str) -> None:
    assert refusal(method, target) == (405, "MethodNotAllowed")


@pytest.mark.parametrize(
    ("target", "bucket", "key"),
    [
        ("/bkt", "bkt", ""),
        ("/bkt/", "bkt", ""),
        ("/bkt//", "bkt", "/"),
        ("/bkt//a", "bkt", "/a"),
        ("/bkt/a/", "bkt", "a/"),
        ("/bkt/a//b", "bkt", "a//b"),
        ("/bkt/../other/k", "bkt", "../other/k"),
        ("/bkt/%2e%2e/k", "bkt", "../k"),
        ("/bkt/%2E%2E%2Fk", "bkt", "../k"),
        ("/bkt/./k", "bkt", "./k"),
        ("/bkt/%252e", "bkt", "%2e"),
        ("/bkt/a+b%2Bc%20d", "bkt", "a+b+c d"),
        ("/bkt/a@b%40c", "bkt", "a@b@c"),
        ("/bkt/%C3%A9%F0%9F%99%82", "bkt", "é\U0001f642"),
        ("/bkt/%01%7F%0D%0A", "bkt", "\x01\x7f\r\n"),
        ("/bkt/a%3Fb%23%26", "bkt", "a?b#&"),
        ("/bkt/a\\b", "bkt", "a\\b"),
        ("/my.bucket-1/k", "my.bucket-1", "k"),
        ("/My_Bucket/k", "My_Bucket", "k"),
    ],
)
def test_a_path_is_decoded_once_and_never_normalised(target: str, bucket: str, key: str) -> None:
    found = parse("GET", target)
    assert (found.bucket, found.key) == (bucket, key)


@pytest.mark.parametrize(
    ("host", "bucket"),
    [
        ("bkt.s3.lake", "bkt"),
        ("BKT.S3.lake:9000", "bkt"),
        ("my.bkt.s3.lake", "my.bkt"),
        ("bkt.localhost:9000", "bkt"),
        ("bkt.s3.lake.", "bkt"),
        ("bkt.s3.lake.:9000", "bkt"),
    ],
)
def test_the_host_may_name_the_bucket(host: str, bucket: str) -> None:
    found = parse("GET", "/a%40b//c", host=host)
    assert (found.bucket, found.key) == (bucket, "a@b//c")
    assert parse("GET", "/", host=host).operation is Operation.LIST_OBJECTS


@pytest.mark.parametrize(
    "host",
    ["s3.lake", "s3.lake:9000", "s3.lake.", "bkt.s3.lake..", "lake", "127.0.0.1:9000", "[::1]:9000", "evils3.lake", ""],
)
def test_another_host_names_no_bucket(host: str) -> None:
    assert parse("GET", "/bkt/k", host=host).bucket == "bkt"


@pytest.mark.parametrize("host", ["a b.s3.lake", "bkt.s3.lake:x", "a/b", "a@s3.lake", "b%2Ekt.s3.lake"])
def test_a_host_that_is_none_is_refused(host: str) -> None:
    assert refusal("GET", "/bkt/k", host=host) == (400, "InvalidRequest")


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("/bkt/%00", "InvalidURI"),
        ("/bkt/a%00b", "InvalidURI"),
        ("/bkt/%ff", "InvalidURI"),
        ("/bkt/%C3", "InvalidURI"),
        ("/bkt/%ED%A0%80", "InvalidURI"),
        ("/bkt/%C0%AF", "InvalidURI"),
        ("/bkt/%", "InvalidURI"),
        ("/bkt/%4", "InvalidURI"),
        ("/bkt/%zz", "InvalidURI"),
        ("/bkt?prefix=%ff", "InvalidURI"),
        ("/bkt?prefix=%00", "InvalidURI"),
        ("/bkt/" + "k" * 1025, "KeyTooLongError"),
        ("/bkt/" + "%C3%A9" * 513, "KeyTooLongError"),
        ("/../k", "InvalidBucketName"),
        ("//k", "InvalidBucketName"),
        ("/%2e%2e/k", "InvalidBucketName"),
        ("/a%2Fb/k", "InvalidBucketName"),
        ("/a%20b", "InvalidBucketName"),
        ("/127.0.0.1/k", "InvalidBucketName"),
        ("/" + "b" * 64, "InvalidBucketName"),
        ("/bkt?prefix=a&prefix=b", "InvalidArgument"),
        ("/bkt?" + "&".join(f"a{number}" for number in range(65)), "InvalidArgument"),
    ],
)
def test_what_names_nothing_is_refused(target: str, code: str) -> None:
    assert refusal("GET", target) == (400, code)


def test_a_key_may_be_as_long_as_s3s() -> None:
    for key in ("k" * 1024, "é" * 512):
        assert parse("GET", f"/bkt/{quote(key)}").key == key


def test_parameters_are_decoded_with_plus_for_a_space() -> None:
    found = parse("GET", "/bkt?prefix=a+b%2Bc&delimiter=%2F&marker&&x%2Dy=1")
    assert found.parameters == {"prefix": "a b+c", "delimiter": "/", "marker": "", "x-y": "1"}


def test_headers_in_the_query_are_headers_and_the_signatures_own_are_not() -> None:
    found = parse(
        "PUT", "/bkt/k?X-Amz-Date=1&x-id=PutObject&X-Amz-Meta-A=%20b%2Bc+d&x-amz-acl=private&X-Amz-SignedHeaders=host"
    )
    assert found.moved == {b"x-amz-meta-a": b"b+c d", b"x-amz-acl": b"private"}
    assert found.parameters == {"x-id": "PutObject"}
    copied = parse("PUT", "/bkt/k?X-Amz-Copy-Source=%2Fb%2Fa%2520key")
    assert (copied.operation, copied.moved) == (Operation.COPY_OBJECT, {b"x-amz-copy-source": b"/b/a%20key"})


@pytest.mark.parametrize(
    "query",
    [
        "x-amz-meta-a=%0D%0Ab",
        "x-amz-meta-a=%7F",
        "x-amz-meta-%C3%A9=1",
        "x-amz-meta-%3A=1",
        "x-amz-meta-a=1&X-AMZ-meta-a=2",
        "x-amz-copy-source=a",
        "x-amz-date=1",
        "X-AMZ-SIGNATURE=1",
    ],
)
def test_a_parameter_that_is_no_header_or_says_another_thing_is_refused(query: str) -> None:
    with pytest.raises(S3Error) as caught:
        parse("GET", f"/bkt/k?{query}", copy_source="b/k")
    assert (caught.value.status, caught.value.code) == (400, "InvalidArgument")


@pytest.mark.parametrize(
    ("value", "source"),
    [
        (b"/bkt/a%20key", ("bkt", "a key", "")),
        (b"bkt/a/../b", ("bkt", "a/../b", "")),
        (b"bkt%2Fa%2Fb%2520", ("bkt", "a/b%20", "")),
        (b"bkt/k?versionId=null", ("bkt", "k", "null")),
        (b"bkt/a%3Fb?versionId=v", ("bkt", "a?b", "v")),
        (b"bkt/a+b%2Bc%20d", ("bkt", "a b+c d", "")),
        (b"bkt%2Fa+b%2Bc%252B", ("bkt", "a b+c%2B", "")),
        ("bkt/é".encode(), ("bkt", "é", "")),
    ],
)
def test_a_copys_source_is_a_bucket_and_a_key(value: bytes, source: tuple[str, str, str]) -> None:
    assert parse_copy_source(value) == source


@pytest.mark.parametrize("value", [b"", b"/", b"bkt", b"bkt/", b"//k", b"../k", b"bkt/%00", b"bkt/%ff", b"b%20t/k"])
def test_a_copys_source_that_names_nothing_is_refused(value: bytes) -> None:
    with pytest.raises(S3Error) as caught:
        parse_copy_source(value)
    assert caught.value.status == 400


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40))
@settings(max_examples=300)
def test_every_key_is_reached_by_both_styles(key: str) -> None:
    for encoded in (quote(key, safe="/~"), quote(key, safe=""), "".join(f"%{byte:02x}" for byte in key.encode())):
        assert parse("GET", f"/bkt/{encoded}").key == key
        assert parse("GET", f"/{encoded}", host="bkt.s3.lake").key == key
        assert parse_copy_source(f"bkt/{encoded}".encode()) == ("bkt", key, "")


@pytest.mark.slow
@given(
    st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD", "PATCH"]),
    st.text("/%2eEfF0.?&=+abAx-\\:@;é", max_size=30),
    st.text("ab.:[]1s3lake@/", max_size=12),
)
@settings(max_examples=repeated(300, 1000))
def test_any_target_is_understood_or_refused_in_s3s_words(method: str, target: str, host: str) -> None:
    try:
        found = parse(method, "/" + target, host=host)
    except S3Error:
        return
    assert not found.bucket or is_bucket_name(found.bucket)
    assert not found.key or found.bucket
    assert "\0" not in found.key
