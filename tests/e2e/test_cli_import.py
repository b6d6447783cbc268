"""`lake import` from an S3 store: the S3 face of the engine that it imports into."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.e2e.s3_client import client_of, url_of
from tests.e2e.served import Served, serving

MIB = 1 << 20


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One engine, source and target."""
    with TemporaryDirectory(prefix="lake-") as folder, serving(Path(folder), "--s3", "127.0.0.1:0") as engine:
        yield engine


@pytest.fixture(scope="module")
def s3(served: Served) -> Any:
    client = client_of(served)
    credentials = client._request_signer._credentials
    client.environment = {
        "AWS_ACCESS_KEY_ID": credentials.access_key,
        "AWS_SECRET_ACCESS_KEY": credentials.secret_key,
        "AWS_ENDPOINT_URL": url_of(served),
        "AWS_CONFIG_FILE": os.devnull,
    }
    return client


@pytest.fixture(autouse=True)
def _credentials(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)


def stat(served: Served, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(served.good("stat", "--json", name).out)
    return found


def upload_parts(s3: Any, bucket: str, key: str, parts: list[bytes]) -> str:
    upload = s3.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    done = []
    for number, part in enumerate(parts, 1):
        answer = s3.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=number, Body=part)
        done.append({"PartNumber": number, "ETag": answer["ETag"]})
    named = {"Bucket": bucket, "Key": key, "UploadId": upload}
    etag: str = s3.complete_multipart_upload(MultipartUpload={"Parts": done}, **named)["ETag"]
    return etag.strip('"')


def test_a_bucket_comes_with_all_that_it_has(served: Served, s3: Any, tmp_path: Path) -> None:
    s3.create_bucket(Bucket="models")
    s3.put_object(
        Bucket="models",
        Key="run/a",
        Body=b"1",
        ContentType="text/x",
        CacheControl="no-store",
        Metadata={"k": "v", "mtime": "1354040105.5"},
        Tagging="t=1",
    )
    whole, tail = os.urandom(5 * MIB), os.urandom(MIB)
    parts = upload_parts(s3, "models", "run/parts", [whole, whole, tail])
    odd = upload_parts(s3, "models", "run/uneven", [whole, whole + b"x", tail])
    (tmp_path / "f").write_bytes(b"put by lake")
    served.good("put", tmp_path / "f", "models/run/of-lake")
    s3.put_object(Bucket="models", Key="elsewhere", Body=b"2")

    dry = served.good("import", "-n", "s3://models/run", "imported/k")
    assert [line.split()[2] for line in dry.lines] == ["a", "of-lake", "parts", "uneven"]
    assert served("ls", "imported").code != 0, "nothing was made"
    done = served.good("import", "--json", "s3://models/run", "imported/k")
    report = json.loads(done.out)
    by_size = [one["name"] for one in report["names"] if "reason" in one]
    assert (report["totals"]["copied"], report["totals"]["failed"], by_size) == (4, 0, ["of-lake", "uneven"])
    a = stat(served, "imported/k/a")
    assert (a["content_type"], a["headers"]) == ("text/x", {"Cache-Control": "no-store"})
    assert (a["user_metadata"]["k"], a["mtime_ns"]) == ("v", 1_354_040_105_500_000_000)
    assert stat(served, "imported/k/parts")["etag"] == parts
    assert stat(served, "imported/k/uneven")["etag"] == odd
    assert served.good("cat", "imported/k/parts").out == whole + whole + tail
    again = json.loads(served.good("import", "--json", "s3://models/run", "imported/k").out)
    assert (again["names"], again["totals"]["unchanged"]) == ([], 4)
    assert served.good("import", "--include", "else*", "s3://models", "imported").code == 0
    assert served.good("cat", "imported/elsewhere").out == b"2"


def test_versions_come_if_they_are_wanted(served: Served, s3: Any) -> None:
    s3.create_bucket(Bucket="versions")
    s3.put_bucket_versioning(Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
    for body in (b"1", b"22"):
        s3.put_object(Bucket="versions", Key="k", Body=body)
        s3.delete_object(Bucket="versions", Key="k")
    s3.put_object(Bucket="versions", Key="k", Body=b"333")
    s3.delete_object(Bucket="versions", Key="gone")
    s3.put_object(Bucket="versions", Key="back", Body=b"1")
    s3.delete_object(Bucket="versions", Key="back")
    report = json.loads(served.good("import", "--json", "--versions", "s3://versions", "kept").out)
    assert (report["totals"]["copied"], report["in_step"]) == (8, True)
    listed = [one["size_bytes"] for one in report["names"] if one["name"] == "k"]
    assert listed == [1, 0, 2, 0, 3], "in their order, although their times are of one second"
    assert served.good("cat", "kept/k").out == b"333"
    assert served("cat", "kept/back").code != 0
    assert json.loads(served.good("import", "--json", "--versions", "s3://versions", "kept").out)["names"] == []
    served.good("bucket", "create", "plain")
    refused = served("import", "--versions", "s3://versions", "plain")
    assert (refused.code, "keeps no versions" in refused.err) == (2, True)


def test_what_cannot_be_read_is_said(served: Served, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = served("import", "s3://nowhere-at-all", "imported")
    assert (missing.code != 0, "s3://nowhere-at-all does not exist" in missing.err) == (True, True)
    s3.create_bucket(Bucket="empty-one")
    empty = served("import", "s3://empty-one/x", "imported")
    assert (empty.code != 0, "holds no object" in empty.err) == (True, True)
    assert "no S3 source" in served("import", "models", "imported").err
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    denied = served("import", "s3://models", "imported")
    assert (denied.code != 0, "SignatureDoesNotMatch" in denied.err) == (True, True)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert "credentials" in served("import", "s3://models", "imported").err
    gone = served("import", "--anonymous", "--endpoint-url", "http://127.0.0.1:9", "s3://models", "imported")
    assert (gone.code != 0, "127.0.0.1:9" in gone.err) == (True, True)
