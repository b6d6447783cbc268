"""DeleteObjects: up to a thousand names in one request, each removed or not by itself."""

from __future__ import annotations

from gateway.http.messages import Response
from gateway.s3.bodies import DeleteItem, read_delete
from gateway.s3.call import Call, lake_error, xml_response
from gateway.s3.errors import S3Error
from gateway.s3.proven_body import read_proven_body
from gateway.s3.xml import document, element
from lakefs.wire.messages import Condition, DeleteNames, NameResult, NameResults


async def delete_objects(call: Call) -> Response:
    """What was removed and what was not; a name that is not there counts as removed."""
    wanted = read_delete(await read_proven_body(call))
    results = await _removed(call, list(wanted.items))
    lines = [
        _line(call, item, result, wanted.quiet) for item, result in zip(wanted.items, results, strict=True)
    ]
    return xml_response(document("DeleteResult", "".join(lines)))


async def _removed(call: Call, items: list[DeleteItem]) -> list[NameResult | S3Error]:
    plain = [item for item in items if not item.etag and item.version_id in ("", "null")]
    names = [(call.bucket, item.key) for item in plain]
    answers = iter((await call.ask(DeleteNames(names), NameResults)).results if names else [])
    found: list[NameResult | S3Error] = []
    for item in items:
        if item.version_id not in ("", "null"):
            found.append(S3Error(404, "NoSuchVersion", "The specified version does not exist."))
        elif item.etag:
            condition = Condition(etags=[item.etag])
            request = DeleteNames([(call.bucket, item.key)], condition)
            found.append((await call.ask(request, NameResults)).results[0])
        else:
            found.append(next(answers))
    return found


def _line(call: Call, item: DeleteItem, result: NameResult | S3Error, quiet: bool) -> str:
    if isinstance(result, NameResult) and result.failure is not None:
        failure = result.failure
        result = lake_error(failure.as_error(), call)
    if isinstance(result, S3Error):
        fields = element("Key", item.key) + element("Code", result.code) + element("Message", result.message)
        return f"<Error>{fields}</Error>"
    return "" if quiet else f"<Deleted>{element('Key', item.key)}</Deleted>"
