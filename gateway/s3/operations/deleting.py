"""Deletes: of one object, and of up to a thousand in one request, each removed or not by itself.

In a bucket that keeps versions a delete leaves a delete marker; a delete of a version removes that one for good.
Conditions apply to the version that a key is bound to, and the store checks them in the step that removes it: no write
happens in between.  S3 has no conditions beside a version's id; they are answered with 501.
"""

from __future__ import annotations

from gateway.http.messages import Response
from gateway.s3.operations.versions import MARKER_HEADER, VERSION_HEADER, asked_version
from gateway.s3.protocol.bodies import DeleteItem, read_delete
from gateway.s3.protocol.errors import S3Error, not_implemented
from gateway.s3.protocol.headers import delete_condition
from gateway.s3.protocol.xml import document, element
from gateway.s3.request.call import Call, lake_error, xml_response
from gateway.s3.request.payload import read_proven_xml
from lakefs.wire.messages import NO_CONDITION, Condition, DeleteNames, NameResult, NameResults


async def delete_object(call: Call) -> Response:
    """Delete an object: 204, existing or not; 412 if a condition fails, 404 for If-Match without an object."""
    version, condition = asked_version(call), delete_condition(call.headers)
    if version and condition != NO_CONDITION:
        raise _version_and_condition()
    request = DeleteNames([(call.bucket, call.key)], condition, versions=[version])
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
    """Delete objects and list the results; a name that does not exist counts as removed, unless it has an ETag."""
    wanted = await read_proven_xml(call, read_delete)
    asked = [item for item in wanted.items if not _is_refused(item)]
    results = iter(await _removed(call, asked))
    lines = [
        _refusal(item, _version_and_condition())
        if _is_refused(item)
        else _line(call, item, next(results), wanted.quiet)
        for item in wanted.items
    ]
    return xml_response(document("DeleteResult", "".join(lines)))


async def _removed(call: Call, items: list[DeleteItem]) -> list[NameResult]:
    if not items:
        return []
    request = DeleteNames(
        [(call.bucket, item.key) for item in items],
        versions=[item.version_id for item in items],
        conditions=[_condition(item) for item in items],
    )
    return (await call.ask(request, NameResults)).results


def _condition(item: DeleteItem) -> Condition:
    etags = [] if item.etag is None else [item.etag]
    return Condition(etags=etags, size_bytes=item.size_bytes, mtime_s=item.mtime_s)


def _is_refused(item: DeleteItem) -> bool:
    return bool(item.version_id) and _condition(item) != NO_CONDITION


def _version_and_condition() -> S3Error:
    return not_implemented("a delete of a version under a condition")


def _line(call: Call, item: DeleteItem, result: NameResult, quiet: bool) -> str:
    if result.failure is not None:
        failure = result.failure
        return _refusal(item, lake_error(failure.as_error(), call))
    marker = result.marker
    if result.stat is not None and result.stat.is_marker:
        marker = item.version_id
    fields = _named(item)
    if marker:
        fields += element("DeleteMarker", True) + element("DeleteMarkerVersionId", marker)
    return "" if quiet else f"<Deleted>{fields}</Deleted>"


def _refusal(item: DeleteItem, error: S3Error) -> str:
    return f"<Error>{_named(item)}{element('Code', error.code)}{element('Message', error.message)}</Error>"


def _named(item: DeleteItem) -> str:
    return element("Key", item.key) + (element("VersionId", item.version_id) if item.version_id else "")
