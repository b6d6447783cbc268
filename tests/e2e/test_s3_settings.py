"""The settings of the S3 face, and their effect on boto3."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import boto3
import pytest
from botocore.config import Config

from tests.e2e.s3_client import client_of, refused, url_of
from tests.e2e.served import Served, serving

REGION = "rack-7"
DOMAIN = "s3.test"


@pytest.fixture(scope="module")
def engine() -> Iterator[Served]:
    """An engine with a region and a domain of its own."""
    with TemporaryDirectory(prefix="lake-") as folder:
        with serving(Path(folder), "--s3", "127.0.0.1:0", "--s3-region", REGION, "--s3-domains", DOMAIN) as started:
            yield started


@pytest.fixture
def _names_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every name under the domain resolve to this machine, as its name server would."""
    real = socket.getaddrinfo

    def resolved(host: Any, *arguments: Any, **named: Any) -> Any:
        return real("127.0.0.1" if str(host).endswith(DOMAIN) else host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


def _client(engine: Served, region: str, style: str, host: str) -> Any:
    made = client_of(engine)
    keys = made._request_signer._credentials
    return boto3.client(
        "s3",
        endpoint_url=url_of(engine).replace("127.0.0.1", host),
        region_name=region,
        aws_access_key_id=keys.access_key,
        aws_secret_access_key=keys.secret_key,
        config=Config(retries={"max_attempts": 0}, s3={"addressing_style": style}),
    )


@pytest.mark.usefixtures("_names_resolve")
def test_a_bucket_may_be_named_by_the_host(engine: Served) -> None:
    by_host = _client(engine, REGION, "virtual", DOMAIN)
    by_path = _client(engine, REGION, "path", DOMAIN)
    by_path.create_bucket(Bucket="hosted", CreateBucketConfiguration={"LocationConstraint": REGION})
    by_host.put_object(Bucket="hosted", Key="a/b c", Body=b"by host")
    assert by_path.get_object(Bucket="hosted", Key="a/b c")["Body"].read() == b"by host"
    assert [found["Key"] for found in by_host.list_objects_v2(Bucket="hosted")["Contents"]] == ["a/b c"]


def test_the_region_is_what_clients_sign_for(engine: Served) -> None:
    assert _client(engine, REGION, "path", "127.0.0.1").list_buckets()["ResponseMetadata"]
    elsewhere = _client(engine, "us-east-1", "path", "127.0.0.1")
    assert refused(elsewhere.list_buckets) == (400, "AuthorizationHeaderMalformed")
