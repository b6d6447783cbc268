"""`lake presign`: the URL that boto3 would make, of whatever the options, the environment or the configuration say."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from cli.objects.presign import Signing, presigned
from lakefs.names import Name
from tests.unit.cli.objects.conftest import Shell

NOW_S = 1_700_000_000.0
SIGNING = Signing("KEY", "secret/+", "http://127.0.0.1:9000", "eu-west-1")
VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "AWS_ENDPOINT_URL_S3", "LAKE_S3"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.parametrize("key", ["k", "d/e f/ü+~%.bin", "a?b=c&d", "x" * 900])
def test_a_url_is_signed_as_botocore_signs_it(method: str, key: str) -> None:
    url = presigned(SIGNING, Name("bkt", key), method, 600, NOW_S)
    request = AWSRequest(method, url.partition("?")[0])
    signer = S3SigV4QueryAuth(Credentials("KEY", "secret/+"), "s3", "eu-west-1", 600)
    with mock.patch("botocore.auth.get_current_datetime") as now:
        from datetime import UTC, datetime

        now.return_value = datetime.fromtimestamp(NOW_S, UTC)
        signer.add_auth(request)
    assert parse_qs(urlsplit(url).query) == parse_qs(urlsplit(request.url).query)
    assert "secret" not in repr(SIGNING)


@pytest.mark.parametrize(
    ("endpoint", "sent"),
    [
        ("http://S3.Example.org:80", "http://s3.example.org"),
        ("https://s3.example.org:443", "https://s3.example.org"),
        ("http://s3.example.org:443", "http://s3.example.org:443"),
        ("http://[::1]:80", "http://[::1]"),
    ],
)
def test_a_url_is_signed_for_the_host_that_clients_send(endpoint: str, sent: str) -> None:
    name = Name("bkt", "k")
    one, other = (presigned(Signing("KEY", "s", place, "r"), name, "GET", 60, NOW_S) for place in (endpoint, sent))
    assert one == other
    assert one.startswith(f"{sent}/bkt/k?"), "curl and boto3 leave out a port that the scheme has anyway"


def signed_for(url: str) -> tuple[str, str, str, str]:
    """Return endpoint, key, region and expiry of a URL."""
    parts, query = urlsplit(url.strip()), parse_qs(urlsplit(url.strip()).query)
    key, _, region, *_ = query["X-Amz-Credential"][0].split("/")
    return f"{parts.scheme}://{parts.netloc}", key, region, query["X-Amz-Expires"][0]


def test_options_come_before_the_environment_and_that_before_the_configuration(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "EKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "esecret")
    monkeypatch.setenv("LAKE_S3", "0.0.0.0:9123")
    done = shell.good("presign", "bkt/k")
    assert signed_for(done.out) == ("http://127.0.0.1:9123", "EKEY", "us-east-1", "3600")
    assert "for others give --endpoint-url" in done.err
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.lake.test")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert signed_for(shell.good("presign", "bkt/k").out) == ("https://s3.lake.test", "EKEY", "eu-west-1", "3600")
    (tmp_path / "secret").write_text("other\n")
    options = ("--endpoint-url", "http://[::1]:9", "--access-key", "OKEY", "--secret-file", tmp_path / "secret")
    done = shell.good("presign", *options, "--region", "r", "--expires", "7d", "--method", "put", "--json", "bkt/k")
    found = json.loads(done.out)
    assert signed_for(found["url"]) == ("http://[::1]:9", "OKEY", "r", "604800")
    assert found["method"] == "PUT"


def test_the_engine_is_asked_for_the_secret_of_a_key(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    made = shell.lake.create_access_key()
    options = ("--endpoint-url", "http://h", "--region", "r", "--access-key", made.access_key, "bkt/k")
    asked = shell.good("presign", *options).out
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", made.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", made.secret_key)
    with mock.patch("cli.objects.presign.time.time", return_value=NOW_S):
        given = shell.good("presign", "--endpoint-url", "http://h", "--region", "r", "bkt/k").out
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with mock.patch("cli.objects.presign.time.time", return_value=NOW_S):
        assert shell.good("presign", *options).out == given
    assert signed_for(asked)[1] == made.access_key


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "no access key"),
        (("--access-key", "NONE"), "there is no access key NONE"),
        (("--expires", "8d"), "a URL holds from 1s to 7d"),
        (("--expires", "0"), "a URL holds from 1s to 7d"),
        (("--endpoint-url", "s3.lake.test"), "is no URL of an endpoint"),
        (("--access-key", "K", "--secret-file", "/nowhere/x"), "/nowhere/x: No such file"),
    ],
)
def test_what_cannot_be_signed_says_why(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    if "--expires" in options or "--endpoint-url" in options:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "K")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    done = shell("presign", "bkt/k", *options)
    assert (done.code != 0, said in done.err) == (True, True), done


def test_a_port_that_is_off_or_not_known_needs_a_url(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "K")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    for address in ("off", "127.0.0.1:0"):
        monkeypatch.setenv("LAKE_S3", address)
        assert "give --endpoint-url" in shell("presign", "bkt/k").err
    assert shell("presign", "bkt").code == 2
