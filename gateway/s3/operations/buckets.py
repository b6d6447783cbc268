"""Buckets: created, removed, listed, and described."""

from __future__ import annotations

import re
from base64 import b64decode, urlsafe_b64encode
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from gateway.http.messages import Response
from gateway.s3.protocol.bodies import read_create_bucket
from gateway.s3.protocol.errors import S3Error, bad_bucket, invalid_argument
from gateway.s3.protocol.xml import OWNER, document, element
from gateway.s3.request.call import Call, xml_response
from gateway.s3.request.payload import read_proven_xml
from lakefs.errors import AlreadyExists, InvalidName
from lakefs.limits import HTTP_DATES_CACHED, S3_BUCKETS_PAGE_MAX
from lakefs.names import is_bucket_name
from lakefs.wire.messages import BucketCreate, BucketList, BucketRemove, Buckets, Done

FIRST_REGION: Final = "us-east-1"
"""S3 names this region by an empty LocationConstraint; in it, creating a bucket that exists succeeds."""
_PAGE_PARAMETERS: Final = frozenset(("prefix", "max-buckets", "continuation-token", "bucket-region"))
_COUNT: Final = re.compile(r"[0-9]{1,5}")


async def list_buckets(call: Call) -> Response:
    """Return the buckets that the key may use: all, or with any paging parameter one page, in order.

    A page begins behind the last name of the one before, which is its token: no state here, and any gateway takes it.
    """
    is_page = not _PAGE_PARAMETERS.isdisjoint(call.target.parameters)
    prefix, region = call.parameter("prefix"), call.parameter("bucket-region")
    limit, after = _max_buckets(call), _continued_after(call)
    allowed = call.signature.key.buckets if call.signature else ()
    found = (await call.ask(BucketList(), Buckets)).buckets
    asked = [
        bucket
        for bucket in found
        if (not allowed or bucket.name in allowed)
        and bucket.name.startswith(prefix)
        and bucket.name > after
        and region in ("", call.region)
    ]
    page = asked[:limit] if is_page else asked
    of_region = element("BucketRegion", call.region) if is_page else ""
    shown = "".join(
        f"<Bucket>{element('Name', bucket.name)}{element('CreationDate', iso_time(bucket.created_ns))}{of_region}"
        "</Bucket>"
        for bucket in page
    )
    fields = f"{OWNER}<Buckets>{shown}</Buckets>"
    if len(page) < len(asked):
        fields += element("ContinuationToken", urlsafe_b64encode(page[-1].name.encode()).decode())
    if "prefix" in call.target.parameters:
        fields += element("Prefix", prefix)
    return xml_response(document("ListAllMyBucketsResult", fields))


def _max_buckets(call: Call) -> int:
    """Return the most buckets of a page.  S3Error."""
    text = call.target.parameters.get("max-buckets")
    if text is None:
        return S3_BUCKETS_PAGE_MAX
    limit = int(text) if _COUNT.fullmatch(text) else 0
    if not 1 <= limit <= S3_BUCKETS_PAGE_MAX:
        raise invalid_argument(
            f"Argument max-buckets must be an integer between 1 and {S3_BUCKETS_PAGE_MAX}", "max-buckets", text[:64]
        )
    return limit


def _continued_after(call: Call) -> str:
    """Return the name behind which a page begins, "" for the first.  S3Error for a token that no page returned."""
    token = call.parameter("continuation-token")
    try:
        after = b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except ValueError:
        after = ""
    if token and not is_bucket_name(after):
        raise invalid_argument("The continuation token provided is incorrect", "continuation-token", token[:64])
    return after


async def create_bucket(call: Call) -> Response:
    """Create a bucket.  One that exists is an error, as S3 has it, except in the first region."""
    wanted = await read_proven_xml(call, read_create_bucket)
    if wanted and wanted != call.region:
        raise S3Error(
            400, "InvalidLocationConstraint", f"The specified location-constraint is not valid here: {call.region} is"
        )
    try:
        await call.ask(BucketCreate(call.bucket), Buckets)
    except InvalidName as refusal:
        raise bad_bucket(call.bucket, refusal) from refusal
    except AlreadyExists:
        if call.region != FIRST_REGION:
            raise
    return Response(200, [(b"Location", b"/" + call.bucket.encode())])


async def delete_bucket(call: Call) -> Response:
    """Remove an empty bucket: 204; a bucket that is not empty stays."""
    await call.ask(BucketRemove(call.bucket), Done)
    return Response(204)


async def head_bucket(call: Call) -> Response:
    """Return 200 if the bucket exists."""
    await require_bucket(call)
    return Response(200, [(b"x-amz-bucket-region", call.region.encode())])


async def get_bucket_location(call: Call) -> Response:
    """Return the region; empty for the first."""
    await require_bucket(call)
    region = "" if call.region == FIRST_REGION else call.region
    return xml_response(document("LocationConstraint", region))


async def require_bucket(call: Call) -> None:
    """Raise BucketNotFound unless the bucket exists."""
    await call.ask(BucketList(call.bucket), Buckets)


def iso_time(epoch_ns: int) -> str:
    """Format a time for XML: `2026-11-21T09:00:00.000Z`."""
    seconds, rest_ns = divmod(epoch_ns, 1_000_000_000)
    return f"{_iso_second(seconds)}.{rest_ns // 1_000_000:03}Z"


@lru_cache(maxsize=HTTP_DATES_CACHED)
def _iso_second(epoch_s: int) -> str:
    return f"{datetime.fromtimestamp(epoch_s, UTC):%Y-%m-%dT%H:%M:%S}"
