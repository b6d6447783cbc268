"""Configuration of buckets: tags and CORS rules are stored; any other is answered as S3 answers where none is set.

Tools ask for all of a bucket's configuration before they change one part of it, and take a refusal for a failure; that
nothing is set is true.  To set it is refused with 501.  To delete a configuration that does not exist succeeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from gateway.http.messages import Response
from gateway.s3.operations.buckets import require_bucket
from gateway.s3.operations.versions import asked_stat, asked_version
from gateway.s3.protocol.attributes import BUCKET_TAGS_MAX, checked_tags
from gateway.s3.protocol.bodies import read_cors, read_tagging
from gateway.s3.protocol.cors import cors_xml, preflight_lines
from gateway.s3.protocol.errors import S3Error, no_such_key, not_implemented
from gateway.s3.protocol.operation import Operation
from gateway.s3.protocol.xml import OWNER, OWNER_ID, document, element
from gateway.s3.request.call import Call, xml_response
from gateway.s3.request.payload import read_proven_xml
from lakefs.wire.messages import BucketList, Buckets, BucketSet, BucketStat


class _Absent(NamedTuple):
    """S3's refusal where nothing is set."""

    code: str
    message: str
    status: int = 404


_NO_ENTRY: Final = _Absent("NoSuchConfiguration", "The specified configuration does not exist.")
_NO_LOCKS: Final = _Absent("InvalidRequest", "Bucket is missing Object Lock Configuration", 400)
ABSENT: Final[Mapping[Operation, _Absent]] = {
    Operation.GET_BUCKET_ENCRYPTION: _Absent(
        "ServerSideEncryptionConfigurationNotFoundError", "The server side encryption configuration was not found"
    ),
    Operation.GET_BUCKET_LIFECYCLE_CONFIGURATION: _Absent(
        "NoSuchLifecycleConfiguration", "The lifecycle configuration does not exist"
    ),
    Operation.GET_BUCKET_OWNERSHIP_CONTROLS: _Absent(
        "OwnershipControlsNotFoundError", "The bucket ownership controls were not found"
    ),
    Operation.GET_BUCKET_POLICY: _Absent("NoSuchBucketPolicy", "The bucket policy does not exist"),
    Operation.GET_BUCKET_REPLICATION: _Absent(
        "ReplicationConfigurationNotFoundError", "The replication configuration was not found"
    ),
    Operation.GET_BUCKET_WEBSITE: _Absent(
        "NoSuchWebsiteConfiguration", "The specified bucket does not have a website configuration"
    ),
    Operation.GET_OBJECT_LOCK_CONFIGURATION: _Absent(
        "ObjectLockConfigurationNotFoundError", "Object Lock configuration does not exist for this bucket"
    ),
    Operation.GET_PUBLIC_ACCESS_BLOCK: _Absent(
        "NoSuchPublicAccessBlockConfiguration", "The public access block configuration was not found"
    ),
    Operation.GET_BUCKET_ANALYTICS_CONFIGURATION: _NO_ENTRY,
    Operation.GET_BUCKET_INTELLIGENT_TIERING_CONFIGURATION: _NO_ENTRY,
    Operation.GET_BUCKET_INVENTORY_CONFIGURATION: _NO_ENTRY,
    Operation.GET_BUCKET_METRICS_CONFIGURATION: _NO_ENTRY,
    Operation.DELETE_BUCKET_ANALYTICS_CONFIGURATION: _NO_ENTRY,
    Operation.DELETE_BUCKET_INTELLIGENT_TIERING_CONFIGURATION: _NO_ENTRY,
    Operation.DELETE_BUCKET_INVENTORY_CONFIGURATION: _NO_ENTRY,
    Operation.DELETE_BUCKET_METRICS_CONFIGURATION: _NO_ENTRY,
    Operation.GET_OBJECT_LEGAL_HOLD: _NO_LOCKS,
    Operation.GET_OBJECT_RETENTION: _NO_LOCKS,
}
"""Refusals of questions for what is not set."""

_LAST_PAGE: Final = element("IsTruncated", False)
EMPTY: Final[Mapping[Operation, bytes]] = {
    Operation.GET_BUCKET_ACCELERATE_CONFIGURATION: document("AccelerateConfiguration", ""),
    Operation.GET_BUCKET_LOGGING: document("BucketLoggingStatus", ""),
    Operation.GET_BUCKET_NOTIFICATION_CONFIGURATION: document("NotificationConfiguration", ""),
    Operation.GET_BUCKET_REQUEST_PAYMENT: document("RequestPaymentConfiguration", element("Payer", "BucketOwner")),
    Operation.LIST_BUCKET_ANALYTICS_CONFIGURATIONS: document("ListBucketAnalyticsConfigurationResult", _LAST_PAGE),
    Operation.LIST_BUCKET_INTELLIGENT_TIERING_CONFIGURATIONS: document(
        "ListBucketIntelligentTieringConfigurationsOutput", _LAST_PAGE
    ),
    Operation.LIST_BUCKET_INVENTORY_CONFIGURATIONS: document("ListInventoryConfigurationsResult", _LAST_PAGE),
    Operation.LIST_BUCKET_METRICS_CONFIGURATIONS: document("ListMetricsConfigurationsResult", _LAST_PAGE),
}
"""Answers that say that nothing is set."""

REMOVED: Final = frozenset(
    (
        Operation.DELETE_BUCKET_ENCRYPTION,
        Operation.DELETE_BUCKET_LIFECYCLE,
        Operation.DELETE_BUCKET_OWNERSHIP_CONTROLS,
        Operation.DELETE_BUCKET_POLICY,
        Operation.DELETE_BUCKET_REPLICATION,
        Operation.DELETE_BUCKET_WEBSITE,
        Operation.DELETE_PUBLIC_ACCESS_BLOCK,
    )
)
"""Deletions that succeed: none of it exists."""

_XSI: Final = 'xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"'
_GRANTED: Final = (
    f'<Grant><Grantee {_XSI} xsi:type="CanonicalUser">{element("ID", OWNER_ID)}{element("DisplayName", OWNER_ID)}'
    f"</Grantee>{element('Permission', 'FULL_CONTROL')}</Grant>"
)
_EVERYBODY: Final = (
    f'<Grant><Grantee {_XSI} xsi:type="Group">{element("URI", "http://acs.amazonaws.com/groups/global/AllUsers")}'
    f"</Grantee>{element('Permission', 'READ')}</Grant>"
)


# --- what is not set ---------------------------------------------------------------------------------------


async def answer_absent(call: Call) -> Response:
    """Raise the S3Error with which S3 says that nothing is set.  BucketNotFound; NoSuchKey for one that is asked of."""
    await _require(call)
    code, message, status = ABSENT[call.target.operation]
    raise S3Error(status, code, message, details={"BucketName": call.bucket})


async def answer_empty(call: Call) -> Response:
    """Return the answer which says that nothing is set.  BucketNotFound."""
    await require_bucket(call)
    return xml_response(EMPTY[call.target.operation])


async def answer_removed(call: Call) -> Response:
    """Return the answer to a deletion of what does not exist.  BucketNotFound."""
    await require_bucket(call)
    return Response(204)


async def answer_not_offered(call: Call) -> Response:
    """Raise S3Error NotImplemented."""
    raise not_implemented(call.target.operation.value)


async def _require(call: Call) -> None:
    if not call.key:
        await require_bucket(call)
    elif not (await asked_stat(call)).blob:
        raise no_such_key(call.key)


# --- who may read it ---------------------------------------------------------------------------------------


async def get_bucket_acl(call: Call) -> Response:
    """Return the owner's FULL_CONTROL, and everybody's READ of a bucket that is open to strangers."""
    return _acl((await _bucket(call)).anonymous_read)


async def get_object_acl(call: Call) -> Response:
    """Return the owner's FULL_CONTROL, and everybody's READ; strangers do not read a version by its id."""
    await _require(call)
    return _acl((await _bucket(call)).anonymous_read and not asked_version(call))


async def get_bucket_policy_status(call: Call) -> Response:
    """Return whether the bucket is open to strangers."""
    return xml_response(document("PolicyStatus", element("IsPublic", (await _bucket(call)).anonymous_read)))


def _acl(is_open: bool) -> Response:
    grants = _GRANTED + (_EVERYBODY if is_open else "")
    return xml_response(document("AccessControlPolicy", f"{OWNER}<AccessControlList>{grants}</AccessControlList>"))


async def _bucket(call: Call) -> BucketStat:
    return (await call.ask(BucketList(call.bucket), Buckets)).buckets[0]


# --- tags --------------------------------------------------------------------------------------------------


async def get_bucket_tagging(call: Call) -> Response:
    """Return all tags, in the order of their keys.  S3Error NoSuchTagSet if there are none."""
    tags = (await _bucket(call)).tags
    if not tags:
        raise S3Error(404, "NoSuchTagSet", "The TagSet does not exist", details={"BucketName": call.bucket})
    shown = "".join(f"<Tag>{element('Key', key)}{element('Value', tags[key])}</Tag>" for key in sorted(tags))
    return xml_response(document("Tagging", f"<TagSet>{shown}</TagSet>"))


async def put_bucket_tagging(call: Call) -> Response:
    """Replace all tags.  Durable on return."""
    tags = checked_tags(await read_proven_xml(call, read_tagging), BUCKET_TAGS_MAX)
    if (await _set(call, BucketSet(call.bucket, tags=tags))).tags != tags:
        raise _not_kept("tags of buckets")
    return Response(204)


async def delete_bucket_tagging(call: Call) -> Response:
    """Remove all tags.  Durable on return."""
    await _set(call, BucketSet(call.bucket, tags={}))
    return Response(204)


# --- cross-origin requests ---------------------------------------------------------------------------------


async def get_bucket_cors(call: Call) -> Response:
    """Return the rules.  S3Error NoSuchCORSConfiguration if there are none."""
    rules = (await _bucket(call)).cors
    if not rules:
        message = "The CORS configuration does not exist"
        raise S3Error(404, "NoSuchCORSConfiguration", message, details={"BucketName": call.bucket})
    return xml_response(document("CORSConfiguration", cors_xml(rules)))


async def put_bucket_cors(call: Call) -> Response:
    """Replace all rules.  Durable on return."""
    rules = await read_proven_xml(call, read_cors)
    if (await _set(call, BucketSet(call.bucket, cors=rules))).cors != rules:
        raise _not_kept("CORS rules")
    return Response(200)


async def delete_bucket_cors(call: Call) -> Response:
    """Remove all rules.  Durable on return."""
    await _set(call, BucketSet(call.bucket, cors=[]))
    return Response(204)


async def answer_preflight(call: Call) -> Response:
    """Return the lines that allow a browser to send the request which it asks for.  S3Error AccessForbidden."""
    return Response(200, preflight_lines((await _bucket(call)).cors, call.headers))


async def _set(call: Call, request: BucketSet) -> BucketStat:
    return (await call.ask(request, Buckets)).buckets[0]


def _not_kept(what: str) -> S3Error:
    """Return a 501: an engine of an earlier release ignores a setting that it does not know."""
    return not_implemented(f"setting {what}, in the engine's release,")
