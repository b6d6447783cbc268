"""Deletes: of one object, and of up to a thousand in one request, each removed or not by itself.

In a bucket that keeps versions a delete leaves a delete marker; a delete of a version removes that one for good.
"""

from __future__ import annotations

from gateway.http.messages import Response
from gateway.s3.bodies import DeleteItem, read_delete
from gateway.s3.call import Call, lake_error, xml_response
from gateway.s3.errors import S3Error
from gateway.s3.proven_body import read_proven_xml
from gateway.s3.versions import MARKER_HEADER, VERSION_HEADER, asked_version
from gateway.s3.xml import document, element
from lakefs.wire.messages import Condition, DeleteNames, NameResult, NameResults


async def delete_object(call: Call) -> Response:
    """204, whether it was there or not."""
    version = asked_version(call)
    request = DeleteNames([(call.bucket, call.key)], versions=[version])
    (result,) = (await call.ask(request, NameResults)).results
    if result.failure is not None:
        failure = result.failure
        raise failure.as_error()
    shown = version or result.marker
    headers = [(VERSION_HEADER, shown.encode())] if shown else []
    if result.marker or (result.stat is not None and result.stat.is_marker):
        headers.append(MARKER_HEADER)
    return Response(204, headers)


async def delete_objects(call: Call) -> Response:
    """What was removed and what was not; a name that is not there counts as removed."""
    wanted = await read_proven_xml(call, read_delete)
    results = await _removed(call, list(wanted.items))
    lines = [
        _line(call, item, result, wanted.quiet) for item, result in zip(wanted.items, results, strict=True)
    ]
    return xml_response(document("DeleteResult", "".join(lines)))


async def _removed(call: Call, items: list[DeleteItem]) -> list[NameResult]:
    plain = [item for item in items if not item.etag]
    names = [(call.bucket, item.key) for item in plain]
    request = DeleteNames(names, versions=[item.version_id for item in plain])
    answers = iter((await call.ask(request, NameResults)).results if names else [])
    found: list[NameResult] = []
    for item in items:
        if not item.etag:
            found.append(next(answers))
            continue
        condition = Condition(etags=[item.etag])
        request = DeleteNames([(call.bucket, item.key)], condition, versions=[item.version_id])
        found.append((await call.ask(request, NameResults)).results[0])
    return found


def _line(call: Call, item: DeleteItem, result: NameResult, quiet: bool) -> str:
    fields = element("Key", item.key) + (element("VersionId", item.version_id) if item.version_id else "")
    if result.failure is not None:
        failure = result.failure
        error: S3Error = lake_error(failure.as_error(), call)
        fields += element("Code", error.code) + element("Message", error.message)
        return f"<Error>{fields}</Error>"
    marker = result.marker
    if result.stat is not None and result.stat.is_marker:
        marker = item.version_id
    if marker:
        fields += element("DeleteMarker", True) + element("DeleteMarkerVersionId", marker)
    return "" if quiet else f"<Deleted>{fields}</Deleted>"
