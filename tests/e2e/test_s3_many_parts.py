"""An upload of 10,000 parts, the most that S3 allows: completed, read, listed; and one part too many.

The parts are put in through the native protocol, many at a time and all of the same content: the test does not wait for
10,000 requests to S3, nor for 49 GiB.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest
import trio

from lakefs.client.trio.reconnecting import connect_reconnecting
from lakefs.content.manifest import CutKind, build
from lakefs.ids import ChunkId
from lakefs.limits import PART_BYTES_MIN, S3_PARTS_MAX
from lakefs.wire import messages as m
from tests.e2e.s3_raw import Signer, signer_of
from tests.e2e.served import Served, serving
from tests.store_rig import ask, session_of, store_chunks

PART: Final = bytes(range(256)) * (PART_BYTES_MIN // 256)
ETAG: Final = hashlib.md5(PART)
SIZE: Final = S3_PARTS_MAX * len(PART)
AT_ONCE: Final = 48


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine with S3 on a port of its own."""
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), "--s3", "127.0.0.1:0") as engine:
        yield engine


@pytest.fixture(scope="module")
def s3(served: Served) -> Signer:
    """A key that may do everything; the bucket `bucket` is there."""
    signer = signer_of(served)
    assert signer.ask("PUT", "/bucket").status == 200
    return signer


def begin(s3: Signer, key: str) -> str:
    return s3.ask("POST", f"/bucket/{key}?uploads=").field("UploadId")


def fill(served: Served, key: str, upload: str) -> None:
    """Put all the parts."""

    async def main() -> None:
        async with connect_reconnecting(served.server) as engine:
            session = await session_of(engine)
            pieces = [PART[: 4 << 20], PART[4 << 20 :]]
            chunks = await store_chunks(engine, session, pieces)
            tree = build(CutKind.FIXED, list(zip(map(ChunkId, chunks), map(len, pieces), strict=True)))
            for _, manifest in tree.manifests:
                await store_chunks(engine, session, [manifest], kind=2)
            numbers = iter(range(1, S3_PARTS_MAX + 1))

            async def put() -> None:
                for number in numbers:
                    part = m.UploadPut(session, "bucket", key, bytes.fromhex(upload), number, tree.blob, ETAG.digest())
                    await ask(engine, part, m.PartStat)

            async with trio.open_nursery() as nursery:
                for _ in range(AT_ONCE):
                    nursery.start_soon(put)
            await ask(engine, m.SessionEnd(session), m.Done)

    trio.run(main)


def listing(numbers: list[int]) -> bytes:
    parts = "".join(
        f'<Part><PartNumber>{number}</PartNumber><ETag>"{ETAG.hexdigest()}"</ETag></Part>' for number in numbers
    )
    return f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()


def test_ten_thousand_parts_are_completed_and_one_more_is_refused(served: Served, s3: Signer) -> None:
    upload = begin(s3, "many")
    fill(served, "many", upload)
    target = f"/bucket/many?uploadId={upload}"
    more = s3.ask("PUT", f"/bucket/many?partNumber=10001&uploadId={upload}", b"x")
    assert (more.status, more.code) == (400, "InvalidArgument")
    page = s3.ask("GET", f"{target.replace('?', '?part-number-marker=9990&')}").body
    assert re.findall(rb"<PartNumber>(\d+)</PartNumber>", page) == [b"%d" % number for number in range(9991, 10001)]
    numbers = list(range(1, S3_PARTS_MAX + 1))
    for wrong, code in (
        ([*numbers, S3_PARTS_MAX + 1], "InvalidArgument"),
        ([*numbers, S3_PARTS_MAX], "MalformedXML"),
        (numbers[::-1], "InvalidPartOrder"),
    ):
        assert s3.ask("POST", target, listing(wrong)).code == code
    done = s3.ask("POST", target, listing(numbers))
    assert done.status == 200, done
    digest = hashlib.md5(ETAG.digest() * S3_PARTS_MAX).hexdigest()
    assert done.field("ETag") == f"&quot;{digest}-10000&quot;"
    again = s3.ask("POST", target, listing(numbers))
    assert again.field("ETag") == done.field("ETag"), "it is answered alike a second time"

    head = s3.ask("HEAD", "/bucket/many")
    assert (head.status, head.headers["content-length"]) == (200, str(SIZE))
    middle = SIZE // 2 - 3
    ranged = s3.ask("GET", "/bucket/many", headers={"range": f"bytes={middle}-{middle + 5}"})
    assert ranged.body == PART[-3:] + PART[:3]
    for number in (1, 5000, 10_000):
        part = s3.ask("HEAD", f"/bucket/many?partNumber={number}")
        first = (number - 1) * len(PART)
        assert part.headers["content-range"] == f"bytes {first}-{first + len(PART) - 1}/{SIZE}"
        assert part.headers["x-amz-mp-parts-count"] == "10000"
    wanted = {"x-amz-object-attributes": "ObjectParts", "x-amz-part-number-marker": "9000"}
    attributes = s3.ask("GET", "/bucket/many?attributes=", headers=wanted)
    assert (attributes.field("PartsCount"), attributes.field("IsTruncated")) == ("10000", "false")
    assert attributes.body.count(b"<Part>") == 1000
    assert json.loads(served.good("fsck", "--json").text)["damage"] == 0


def test_a_part_that_is_too_small_is_refused_unless_it_is_the_last(s3: Signer) -> None:
    upload = begin(s3, "small")
    etags = []
    for number, content in ((1, PART[:-1]), (2, b"last")):
        answer = s3.ask("PUT", f"/bucket/small?partNumber={number}&uploadId={upload}", content)
        etags.append(answer.headers["etag"])
    parts = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>" for number, etag in enumerate(etags, 1)
    )
    body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
    answer = s3.ask("POST", f"/bucket/small?uploadId={upload}", body)
    assert (answer.status, answer.code) == (400, "EntityTooSmall")
    assert s3.ask("HEAD", "/bucket/small").status == 404
    again = s3.ask("PUT", f"/bucket/small?partNumber=1&uploadId={upload}", PART)
    body = body.replace(etags[0].encode(), again.headers["etag"].encode())
    assert s3.ask("POST", f"/bucket/small?uploadId={upload}", body).status == 200
    assert s3.ask("GET", "/bucket/small").body == PART + b"last"
