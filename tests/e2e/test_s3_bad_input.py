"""S3 requests that are wrong, over raw sockets, to one engine: each is refused, and nothing is stored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.s3_raw import UNSIGNED, Signer, signer_of
from tests.e2e.served import Served, serving

CONTENT = b"what is stored already"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine with S3 on a port of its own.  When all is done, nothing may be left of what was refused."""
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), "--s3", "127.0.0.1:0") as engine:
        yield engine
        assert names(engine) == ["kept"]
        assert engine.good("cat", "bucket/kept").out == CONTENT
        engine.good("gc")
        checked = json.loads(engine.good("fsck", "--json").text)["checked"]
        assert (checked["chunks"], checked["uploads"], checked["parts"]) == (1, 0, 0), checked
        clients = json.loads(engine.good("status", "--json").text)["clients"]
        assert (clients["sessions"], clients["leases"]) == (0, 0)


@pytest.fixture(scope="module")
def s3(served: Served) -> Signer:
    """A key that may do everything; `bucket/kept` is there."""
    signer = signer_of(served)
    assert signer.ask("PUT", "/bucket").status == 200
    assert signer.ask("PUT", "/bucket/kept", CONTENT).status == 200
    return signer


def names(served: Served) -> list[str]:
    """All objects."""
    return sorted(served.good("ls", "-r", "bucket").text.split())


def test_a_body_of_xml_is_what_was_signed_or_nothing_is_done(s3: Signer) -> None:
    named = b"<Delete><Object><Key>none</Key></Object></Delete>"
    other = b"<Delete><Object><Key>kept</Key></Object></Delete>"
    changed = replace(s3.request("POST", "/bucket?delete=", named), body=other).send()
    assert (changed.status, changed.code) == (400, "XAmzContentSHA256Mismatch")
    for headers in ({"content-md5": "1B2M2Y8AsgTpgAmY7PhCfg=="}, {"x-amz-checksum-crc32": "AAAAAA=="}):
        answer = s3.ask("POST", "/bucket?delete=", other, headers, payload=UNSIGNED)
        assert (answer.status, answer.code) == (400, "BadDigest")
    assert s3.ask("GET", "/bucket/kept").body == CONTENT
    made = b"<CreateBucketConfiguration></CreateBucketConfiguration>"
    answer = replace(s3.request("PUT", "/new-bucket", made), body=made.upper()).send()
    assert (answer.status, answer.code) == (400, "XAmzContentSHA256Mismatch")
    assert s3.ask("HEAD", "/new-bucket").status == 404
