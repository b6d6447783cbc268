"""Buckets: made, removed, listed, and what is said of one."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from gateway.http.messages import Response
from gateway.s3.bodies import read_create_bucket
from gateway.s3.call import Call, xml_response
from gateway.s3.errors import S3Error
from gateway.s3.proven_body import read_proven_xml
from gateway.s3.xml import document, element
from lakefs.errors import AlreadyExists
from lakefs.limits import HTTP_DATES_CACHED
from lakefs.wire.messages import BucketCreate, BucketList, BucketRemove, Buckets, Done

FIRST_REGION: Final = "us-east-1"
"""The region that S3 speaks of by saying nothing, and where a bucket that is there already is made again."""
OWNER_ID: Final = "lake"
"""Whom every bucket and object belongs to."""
OWNER: Final = "<Owner>" + element("ID", OWNER_ID) + element("DisplayName", OWNER_ID) + "</Owner>"


async def list_buckets(call: Call) -> Response:
    """The buckets that the key may use."""
    found = (await call.ask(BucketList(), Buckets)).buckets
    allowed = call.signature.key.buckets if call.signature else ()
    shown = "".join(
        f"<Bucket>{element('Name', bucket.name)}{element('CreationDate', iso_time(bucket.created_ns))}</Bucket>"
        for bucket in found
        if not allowed or bucket.name in allowed
    )
    return xml_response(document("ListAllMyBucketsResult", f"{OWNER}<Buckets>{shown}</Buckets>"))


async def create_bucket(call: Call) -> Response:
    """Made, or in the first region there already; elsewhere that is an error, as S3 has it."""
    wanted = await read_proven_xml(call, read_create_bucket)
    if wanted and wanted != call.region:
        raise S3Error(
            400,
            "InvalidLocationConstraint",
            f"The specified location-constraint is not valid here: {call.region} is",
        )
    try:
        await call.ask(BucketCreate(call.bucket), Buckets)
    except AlreadyExists:
        if call.region != FIRST_REGION:
            raise
    return Response(200, [(b"Location", b"/" + call.bucket.encode())])


async def delete_bucket(call: Call) -> Response:
    """204; a bucket that holds something stays."""
    await call.ask(BucketRemove(call.bucket), Done)
    return Response(204)


async def head_bucket(call: Call) -> Response:
    """200 when it is there."""
    await require_bucket(call)
    return Response(200, [(b"x-amz-bucket-region", call.region.encode())])


async def get_bucket_location(call: Call) -> Response:
    """The region; nothing for the first."""
    await require_bucket(call)
    region = "" if call.region == FIRST_REGION else call.region
    return xml_response(document("LocationConstraint", region))


async def require_bucket(call: Call) -> None:
    """BucketNotFound unless the bucket is there."""
    await call.ask(BucketList(call.bucket), Buckets)


def iso_time(epoch_ns: int) -> str:
    """Time in XML: `2026-11-21T09:00:00.000Z`."""
    seconds, rest_ns = divmod(epoch_ns, 1_000_000_000)
    return f"{_iso_second(seconds)}.{rest_ns // 1_000_000:03}Z"


@lru_cache(maxsize=HTTP_DATES_CACHED)
def _iso_second(epoch_s: int) -> str:
    return f"{datetime.fromtimestamp(epoch_s, UTC):%Y-%m-%dT%H:%M:%S}"
