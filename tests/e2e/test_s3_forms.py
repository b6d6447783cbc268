"""Forms of requests and answers that clients of S3 rely upon: names, lists, parameters, dates, ranges, hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest

from tests.e2e.s3_client import client_of, url_of
from tests.e2e.s3_raw import Signed, Signer, signer_of
from tests.e2e.served import Served, serving

DOMAIN: Final = "s3.lake.test"
TWICE: Final = ("a-2", "a/1", "b/1", "c")
KEYS: Final = ("a", "a-1", "a-2", "a/1", "a/2", "a/b/3", "b/1", "c")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine with S3 on a port of its own; it knows a suffix of hosts."""
    flags = ("--s3", "127.0.0.1:0", "--s3-domains", DOMAIN)
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), *flags) as engine:
        yield engine


@pytest.fixture(scope="module")
def boto(served: Served) -> Any:
    """A client that may do everything; `bucket` has an object for each of KEYS, and two versions of some."""
    client = client_of(served)
    client.create_bucket(Bucket="bucket")
    client.put_bucket_versioning(Bucket="bucket", VersioningConfiguration={"Status": "Enabled"})
    for key in (*KEYS, *TWICE):
        client.put_object(Bucket="bucket", Key=key, Body=key.encode(), ChecksumAlgorithm="SHA256")
    client.create_bucket(Bucket="other")
    return client


@pytest.fixture(scope="module")
def s3(served: Served, boto: Any) -> Signer:
    """A key that may do everything."""
    assert boto
    return signer_of(served)


# --- copies --------------------------------------------------------------------------------------------


def test_a_plus_in_a_copys_source_is_a_space(s3: Signer) -> None:
    for name, content in (("x y", b"with a space"), ("x+y", b"with a plus")):
        assert s3.ask("PUT", f"/other/{quote(name, safe='')}", content).status == 200
    for source, content in (
        ("other/x+y", b"with a space"),
        ("/other/x%20y", b"with a space"),
        ("other/x%2By", b"with a plus"),
        ("other%2Fx+y", b"with a space"),
        ("other%2Fx%2By", b"with a plus"),
    ):
        assert s3.ask("PUT", "/other/copied", b"", {"x-amz-copy-source": source}).status == 200
        assert s3.ask("GET", "/other/copied").body == content
        upload = s3.ask("POST", "/other/parts?uploads=").field("UploadId")
        target = f"/other/parts?partNumber=1&uploadId={upload}"
        etag = s3.ask("PUT", target, b"", {"x-amz-copy-source": source}).field("ETag")
        part = f"<Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part>"
        body = f"<CompleteMultipartUpload>{part}</CompleteMultipartUpload>".encode()
        assert s3.ask("POST", f"/other/parts?uploadId={upload}", body).status == 200
        assert s3.ask("GET", "/other/parts").body == content


def test_boto3_copies_any_key(boto: Any) -> None:
    for key in ("x+y", "x y", "x%2By", "x%20+ y", "ü+?#&=/+"):
        boto.put_object(Bucket="other", Key=key, Body=key.encode())
        boto.copy_object(Bucket="other", Key="copied", CopySource={"Bucket": "other", "Key": key})
        assert boto.get_object(Bucket="other", Key="copied")["Body"].read() == key.encode()


def test_a_copys_result_names_its_checksum(boto: Any) -> None:
    source = {"Bucket": "other", "Key": "summed"}
    put = boto.put_object(Body=b"c", ChecksumAlgorithm="SHA1", **source)
    result = boto.copy_object(Bucket="other", Key="copied", CopySource=source)["CopyObjectResult"]
    assert (result["ChecksumSHA1"], result["ChecksumType"]) == (put["ChecksumSHA1"], "FULL_OBJECT")
    upload = boto.create_multipart_upload(Bucket="other", Key="parts", ChecksumAlgorithm="CRC32")["UploadId"]
    named = {"Bucket": "other", "Key": "parts", "UploadId": upload}
    part = boto.upload_part(**named, PartNumber=1, Body=b"x", ChecksumAlgorithm="CRC32")
    parts = [{"PartNumber": 1, "ETag": part["ETag"], "ChecksumCRC32": part["ChecksumCRC32"]}]
    whole = boto.complete_multipart_upload(**named, MultipartUpload={"Parts": parts})
    copied = boto.copy_object(Bucket="other", Key="copied", CopySource="other/parts")["CopyObjectResult"]
    assert (copied["ChecksumCRC32"], copied["ChecksumType"]) == (whole["ChecksumCRC32"], "COMPOSITE")
    assert copied["ChecksumCRC32"].endswith("-1")


# --- lists ---------------------------------------------------------------------------------------------


def expected(prefix: str, delimiter: str, after: str, passed: str) -> list[str]:
    """Return what a list names: the keys behind `after`, rolled up, without the group called `passed`."""
    named: list[str] = []
    for key in (key for key in KEYS if key.startswith(prefix) and key.encode() > after.encode()):
        end = key.find(delimiter, len(prefix)) if delimiter else -1
        name = key if end < 0 else key[: end + len(delimiter)]
        if name not in (*named, passed if end >= 0 else None):
            named.append(name)
    return named


PLACES: Final = (
    "",
    "a",
    "a-",
    "a-1",
    "a/",
    "a/1",
    "a/15",
    "a/2",
    "a/b",
    "a/b/3",
    "a/b/4",
    "a/c",
    "a0",
    "b/",
    "b/1",
    "z",
)


def named_in(page: dict[str, Any], entries: str = "Contents") -> list[str]:
    """Return the names of a page, once each."""
    found = {entry["Key"] for entry in page.get(entries, [])}
    return sorted(found | {entry["Prefix"] for entry in page.get("CommonPrefixes", [])})


@pytest.mark.parametrize("delimiter", ["", "/", "-", "/b"])
@pytest.mark.parametrize("prefix", ["", "a", "a/", "b/"])
def test_a_group_with_keys_behind_the_place_where_a_list_begins_is_listed(
    boto: Any, prefix: str, delimiter: str
) -> None:
    for place in PLACES:
        asked = {"Bucket": "bucket", "Prefix": prefix, "Delimiter": delimiter}
        whole = expected(prefix, delimiter, place, passed="")
        assert named_in(boto.list_objects_v2(**asked, StartAfter=place)) == whole, place
        from_marker = expected(prefix, delimiter, place, passed=place)
        assert named_in(boto.list_objects(**asked, Marker=place)) == from_marker, place
        assert named_in(boto.list_object_versions(**asked, KeyMarker=place), "Versions") == from_marker, place
        for size in (1, 2):
            pages = boto.get_paginator("list_objects_v2").paginate(**asked, StartAfter=place, MaxKeys=size)
            found = [named_in(page) for page in pages]
            assert [name for page in found for name in page] == whole, (place, size)
            assert all(len(page) <= size for page in found)
            if delimiter:  # without, the next marker is not named
                paged = boto.get_paginator("list_objects").paginate(**asked, Marker=place, MaxKeys=size)
                assert [name for page in paged for name in named_in(page)] == from_marker, (place, size)


def test_pages_of_versions_pass_over_each_group_once(boto: Any) -> None:
    asked = {"Bucket": "bucket", "Delimiter": "/"}
    for place in PLACES:
        found: list[str] = []
        page = boto.list_object_versions(**asked, KeyMarker=place, MaxKeys=1)
        found += named_in(page, "Versions")
        while page["IsTruncated"]:
            more = {"KeyMarker": page["NextKeyMarker"], "MaxKeys": 1}
            if page.get("NextVersionIdMarker"):
                more["VersionIdMarker"] = page["NextVersionIdMarker"]
            page = boto.list_object_versions(**asked, **more)
            found += named_in(page, "Versions")
        once = expected("", "/", place, passed=place)
        assert found == [name for name in once for _ in range(1 + (name in TWICE))]


def test_lists_name_the_checksums_algorithm_and_type(boto: Any) -> None:
    pages = (
        boto.list_objects_v2(Bucket="bucket")["Contents"],
        boto.list_objects(Bucket="bucket")["Contents"],
        boto.list_object_versions(Bucket="bucket")["Versions"],
    )
    for entries, count in zip(pages, (len(KEYS), len(KEYS), len(KEYS) + len(TWICE)), strict=True):
        assert [entry["ChecksumAlgorithm"] for entry in entries] == [["SHA256"]] * count
        assert {entry["ChecksumType"] for entry in entries} == {"FULL_OBJECT"}
    boto.create_multipart_upload(Bucket="other", Key="sums", ChecksumAlgorithm="CRC32C", ChecksumType="FULL_OBJECT")
    (upload,) = boto.list_multipart_uploads(Bucket="other", Prefix="sums")["Uploads"]
    assert (upload["ChecksumAlgorithm"], upload["ChecksumType"]) == ("CRC32C", "FULL_OBJECT")


def test_the_uploads_to_a_key_are_listed_in_the_order_of_their_begin(boto: Any) -> None:
    begun = [boto.create_multipart_upload(Bucket="other", Key="often")["UploadId"] for _ in range(12)]
    listed = boto.list_multipart_uploads(Bucket="other", Prefix="often")["Uploads"]
    assert [upload["UploadId"] for upload in listed] == begun
    pages = boto.get_paginator("list_multipart_uploads").paginate(
        Bucket="other", Prefix="often", PaginationConfig={"PageSize": 5}
    )
    assert [upload["UploadId"] for page in pages for upload in page["Uploads"]] == begun


def test_a_group_of_uploads_behind_the_marker_is_listed(boto: Any) -> None:
    for key in ("g/1", "g/2", "h"):
        boto.create_multipart_upload(Bucket="other", Key=key)
    for marker, expected_names in (("g", ["g/", "h"]), ("g/1", ["g/", "h"]), ("g/2", ["h"]), ("g/", ["h"])):
        page = boto.list_multipart_uploads(Bucket="other", Delimiter="/", KeyMarker=marker, MaxUploads=2)
        assert [name for name in named_in(page, "Uploads") if name in ("g/", "h")] == expected_names, marker


# --- parameters and headers ----------------------------------------------------------------------------


def test_parameters_of_the_clients_own_change_nothing(s3: Signer) -> None:
    assert s3.ask("PUT", "/other/mine?x-mine=1", b"mine").status == 200
    assert s3.ask("GET", "/other/mine?x-mine=2&x-other=").body == b"mine"
    assert s3.ask("DELETE", "/other/mine?x-mine=3").status == 204
    assert s3.ask("PUT", "/third?x-mine=4").status == 200
    assert s3.ask("DELETE", "/third?x-mine=5").status == 204


def test_a_buckets_sub_resource_asked_of_a_key_is_a_bad_request(s3: Signer) -> None:
    for name in ("uploads", "versions", "versioning", "location"):
        answer = s3.ask("GET", f"/bucket/c?{name}=")
        assert (answer.status, answer.code) == (400, "InvalidRequest")
        assert s3.ask("HEAD", f"/bucket/c?{name}=").status == 400
    assert s3.ask("GET", "/bucket/c").body == b"c"


def with_date(request: Signed, date: str) -> Signed:
    """Sign a request anew with a Date header in the place of x-amz-date."""
    signer = request.signer
    headers = {**request.headers, "date": date}
    del headers["x-amz-date"], headers["authorization"]
    names = sorted(name for name in headers if name != "content-length")
    lines = "".join(f"{name}:{headers[name]}\n" for name in names)
    signed = ";".join(names)
    canonical = "\n".join([request.method, request.target, "", lines, signed, headers["x-amz-content-sha256"]])
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={signer.access_key}/{signer.scope(request.stamp)},SignedHeaders={signed},"
        f"Signature={signer.sign(request.stamp, canonical)}"
    )
    return replace(request, headers=headers)


def test_a_date_serves_without_x_amz_date(s3: Signer) -> None:
    for method, body in (("PUT", b"dated"), ("GET", b"")):
        request = s3.request(method, "/other/dated", body)
        at = time.strptime(request.stamp, "%Y%m%dT%H%M%SZ")
        for date in (time.strftime("%a, %d %b %Y %H:%M:%S GMT", at), request.stamp):
            assert with_date(request, date).send().status == 200
    assert s3.ask("GET", "/other/dated").body == b"dated"
    request = s3.request("GET", "/other/dated")
    for date, code in (
        (formatdate(time.time() - 100, usegmt=True), "SignatureDoesNotMatch"),
        ("yesterday", "AccessDenied"),
        ("", "AccessDenied"),
    ):
        answer = with_date(request, date).send()
        assert (answer.status, answer.code) == (403, code)
    late = replace(s3, offset_s=-20 * 60).request("GET", "/other/dated")
    at = time.strptime(late.stamp, "%Y%m%dT%H%M%SZ")
    answer = with_date(late, time.strftime("%a, %d %b %Y %H:%M:%S GMT", at)).send()
    assert (answer.status, answer.code) == (403, "RequestTimeTooSkewed")


def test_many_headers_are_accepted_within_their_bytes(s3: Signer) -> None:
    many = {f"h{number}": "v" for number in range(1000)}
    assert s3.ask("PUT", "/other/many", b"many", many).status == 200
    assert s3.ask("GET", "/other/many", b"", many).body == b"many"


def test_the_last_bytes_of_an_empty_object_are_none(s3: Signer) -> None:
    assert s3.ask("PUT", "/other/empty", b"").status == 200
    for method in ("GET", "HEAD") * 2:
        answer = s3.ask(method, "/other/empty", b"", {"range": "bytes=-5"})
        assert (answer.status, answer.headers["content-length"], answer.body) == (200, "0", b"")
        assert "content-range" not in answer.headers
        for value in ("bytes=0-", "bytes=-0", "bytes=0-5"):
            assert s3.ask(method, "/other/empty", b"", {"range": value}).status == 416


def test_a_range_with_spaces_is_no_range(s3: Signer) -> None:
    assert s3.ask("PUT", "/other/ranged", b"0123456789").status == 200
    for value in ("bytes= 0-1", "bytes =0-1", "bytes=0 - 1", "bytes=0- 1", "bytes= -1"):
        for method in ("GET", "HEAD") * 2:
            answer = s3.ask(method, "/other/ranged", b"", {"range": value})
            assert (answer.status, answer.headers["content-length"]) == (200, "10")
    assert s3.ask("GET", "/other/ranged", b"", {"range": "bytes=0-1"}).body == b"01"


def test_a_dot_at_the_end_of_a_host_is_the_same_host(s3: Signer) -> None:
    for host in (f"bucket.{DOMAIN}", f"bucket.{DOMAIN}.", f"bucket.{DOMAIN}.:9000"):
        assert s3.ask("GET", "/c", b"", {"host": host}).body == b"c"
    assert s3.ask("GET", "/bucket/c", b"", {"host": f"{DOMAIN}."}).body == b"c"


def test_a_wrong_region_is_told_the_right_one_in_a_header(s3: Signer) -> None:
    elsewhere = replace(s3, region="eu-west-1")
    for method, target in (("HEAD", "/bucket"), ("GET", "/bucket"), ("HEAD", "/bucket/c")):
        answer = elsewhere.ask(method, target)
        assert (answer.status, answer.headers["x-amz-bucket-region"]) == (400, "us-east-1")


def test_whoever_has_the_url_of_lake_presign_gets_and_puts_the_object(served: Served, boto: Any, s3: Signer) -> None:
    boto.put_object(Bucket="other", Key="for others/ü+~.txt", Body=b"content")
    options = ("--endpoint-url", url_of(served), "--access-key", s3.access_key)
    name = "other/for others/ü+~.txt"
    url = served.good("presign", name, *options).text.strip()
    with urlopen(url, timeout=30) as answer:
        assert answer.read() == b"content"
    put = served.good("presign", "--method", "PUT", name, *options).text.strip()
    with urlopen(Request(put, data=b"changed", method="PUT"), timeout=30) as answer:
        assert answer.status == 200
    assert boto.get_object(Bucket="other", Key="for others/ü+~.txt")["Body"].read() == b"changed"
    for spoilt in (url.replace(".txt", ".tex"), url + "&partNumber=1", put):
        with pytest.raises(HTTPError) as refused:
            urlopen(spoilt, timeout=30)
        with refused.value:
            assert refused.value.code == 403
