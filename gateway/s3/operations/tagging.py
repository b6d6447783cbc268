"""Tags of objects: read and changed.

They are changed in place by one request to the store: ETag, Last-Modified and content stay, and an answered change is
durable.  The rules for tags are in `gateway.s3.protocol.attributes`.
"""

from __future__ import annotations

from gateway.http.messages import Response
from gateway.s3.operations.versions import asked_stat, asked_version, version_headers
from gateway.s3.protocol.attributes import checked_tags
from gateway.s3.protocol.bodies import read_tagging
from gateway.s3.protocol.errors import no_such_key
from gateway.s3.protocol.xml import document, element
from gateway.s3.request.call import Call, xml_response
from gateway.s3.request.payload import read_proven_xml
from lakefs.wire.messages import ObjectStat, SetAttributes


async def get_object_tagging(call: Call) -> Response:
    """Return all tags, in the order of their keys."""
    stat = await asked_stat(call)
    _require_object(call, stat)
    tags = "".join(
        f"<Tag>{element('Key', key)}{element('Value', value)}</Tag>" for key, value in sorted(stat.tags.items())
    )
    return xml_response(document("Tagging", f"<TagSet>{tags}</TagSet>"), version_headers(stat))


async def put_object_tagging(call: Call) -> Response:
    """Replace all tags.  Durable on return."""
    version = asked_version(call)
    tags = checked_tags(await read_proven_xml(call, read_tagging))
    stat = await call.ask_one(SetAttributes(call.bucket, call.key, tags=tags, version=version))
    return Response(200, version_headers(stat))


async def delete_object_tagging(call: Call) -> Response:
    """Remove all tags.  Durable on return."""
    stat = await call.ask_one(SetAttributes(call.bucket, call.key, tags={}, version=asked_version(call)))
    return Response(204, version_headers(stat))


def _require_object(call: Call, stat: ObjectStat) -> None:
    """Raise NoSuchKey for a folder, or nothing."""
    if not stat.blob:
        raise no_such_key(call.key)
