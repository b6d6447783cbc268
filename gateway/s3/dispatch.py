"""S3 requests: authenticated, dispatched to an operation, answered; the one place where errors become answers.

Rules kept here:
- A request is authenticated and allowed, and all its headers are understood, before anything of its body is read.
- An error of the store becomes S3's by the table of `gateway.s3.protocol.errors`.  Any other exception is a bug: 500,
  logged with its trace under the request's id; other requests are not affected.
- Secrets and signatures are never logged: a log line has the request's id, its path without the query, and the error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from gateway.http.head import HttpRefusal, RequestHead
from gateway.http.messages import Request, Response
from gateway.s3.operations import (
    buckets,
    configuration,
    copying,
    deleting,
    list_objects as listing,
    multipart,
    objects,
    storing,
    tagging,
    versions,
)
from gateway.s3.operations.gathered import GatheredPuts
from gateway.s3.protocol.cors import ORIGIN, answer_lines
from gateway.s3.protocol.errors import S3Error, error_body, from_lake, internal_error, not_implemented
from gateway.s3.protocol.headers import check_headers
from gateway.s3.protocol.operation import NOT_OFFERED, Operation
from gateway.s3.protocol.sigv4 import authenticate
from gateway.s3.protocol.targets import Target, parse_target
from gateway.s3.request.authorization import FRESH_S, KnownKeys, check_key, check_stranger
from gateway.s3.request.call import XML, Call, Lakes
from lakefs.errors import LakeError
from lakefs.wire.messages import BucketList, Buckets

_log: Final = structlog.get_logger(__name__)
_PREFLIGHT: Final = "OPTIONS"
_ID_MASK: Final = (1 << 64) - 1
OPERATIONS: Final[Mapping[Operation, Callable[[Call], Awaitable[Response]]]] = {
    Operation.LIST_BUCKETS: buckets.list_buckets,
    Operation.CREATE_BUCKET: buckets.create_bucket,
    Operation.DELETE_BUCKET: buckets.delete_bucket,
    Operation.HEAD_BUCKET: buckets.head_bucket,
    Operation.GET_BUCKET_LOCATION: buckets.get_bucket_location,
    Operation.GET_BUCKET_VERSIONING: versions.get_bucket_versioning,
    Operation.PUT_BUCKET_VERSIONING: versions.put_bucket_versioning,
    Operation.LIST_OBJECT_VERSIONS: versions.list_object_versions,
    Operation.LIST_OBJECTS: listing.list_objects,
    Operation.LIST_OBJECTS_V2: listing.list_objects_v2,
    Operation.DELETE_OBJECTS: deleting.delete_objects,
    Operation.GET_OBJECT: objects.get_object,
    Operation.HEAD_OBJECT: objects.head_object,
    Operation.PUT_OBJECT: storing.put_object,
    Operation.COPY_OBJECT: copying.copy_object,
    Operation.DELETE_OBJECT: deleting.delete_object,
    Operation.GET_OBJECT_ATTRIBUTES: objects.get_object_attributes,
    Operation.GET_OBJECT_TAGGING: tagging.get_object_tagging,
    Operation.PUT_OBJECT_TAGGING: tagging.put_object_tagging,
    Operation.DELETE_OBJECT_TAGGING: tagging.delete_object_tagging,
    Operation.CREATE_MULTIPART_UPLOAD: multipart.create_multipart_upload,
    Operation.UPLOAD_PART: multipart.upload_part,
    Operation.UPLOAD_PART_COPY: multipart.upload_part_copy,
    Operation.COMPLETE_MULTIPART_UPLOAD: multipart.complete_multipart_upload,
    Operation.ABORT_MULTIPART_UPLOAD: multipart.abort_multipart_upload,
    Operation.LIST_PARTS: multipart.list_upload_parts,
    Operation.LIST_MULTIPART_UPLOADS: multipart.list_multipart_uploads,
    Operation.GET_BUCKET_ACL: configuration.get_bucket_acl,
    Operation.GET_OBJECT_ACL: configuration.get_object_acl,
    Operation.GET_BUCKET_POLICY_STATUS: configuration.get_bucket_policy_status,
    Operation.GET_BUCKET_TAGGING: configuration.get_bucket_tagging,
    Operation.PUT_BUCKET_TAGGING: configuration.put_bucket_tagging,
    Operation.DELETE_BUCKET_TAGGING: configuration.delete_bucket_tagging,
    Operation.GET_BUCKET_CORS: configuration.get_bucket_cors,
    Operation.PUT_BUCKET_CORS: configuration.put_bucket_cors,
    Operation.DELETE_BUCKET_CORS: configuration.delete_bucket_cors,
    Operation.OPTIONS_OBJECT: configuration.answer_preflight,
    **dict.fromkeys(configuration.ABSENT, configuration.answer_absent),
    **dict.fromkeys(configuration.EMPTY, configuration.answer_empty),
    **dict.fromkeys(configuration.REMOVED, configuration.answer_removed),
    **dict.fromkeys(NOT_OFFERED, configuration.answer_not_offered),
}
assert OPERATIONS.keys() == set(Operation), "each operation has its function"


class S3Service:
    """Answers S3 requests from one store."""

    def __init__(self, lakes: Lakes, region: str, domains: tuple[str, ...]) -> None:
        """`region`: the one that clients sign for.  `domains`: host suffixes that follow a bucket's name."""
        self._lakes = lakes
        self._region = region
        self._domains = domains
        self._keys = KnownKeys(lakes.engine, self._keys_were_read)
        if lakes.door is not None:
            lakes.door.refresh_keys = partial(self._keys.refresh, FRESH_S / 2)
            lakes.door.find_key = self._keys.find
            lakes.door.contents = lakes.contents
            lakes.door.gathering.store = GatheredPuts(lakes.engine, lakes.door, domains, self._keys.find).store
        self._host_id = os.urandom(8).hex()
        self._first_id = int.from_bytes(os.urandom(8), "big")
        self._requests = 0

    def _keys_were_read(self, began: float, have_changed: bool) -> None:
        if self._lakes.door is not None:
            self._lakes.door.keys_were_read(began, FRESH_S, have_changed=have_changed)

    async def handle(self, request: Request) -> Response:
        """Return the answer to a request.  HttpRefusal if its body breaks HTTP."""
        request_id = self._new_id()
        try:
            response = await self._dispatched(request)
        except S3Error as error:
            response = self._refusal(request, error, request_id)
        except LakeError as error:
            response = self._refusal(request, self._translated(error, request_id), request_id)
        except HttpRefusal:
            raise
        except Exception:  # noqa: BLE001 - a bug, met by one request
            _log.exception("s3_request_failed", request_id=request_id, path=request.head.path[:256])
            response = self._refusal(request, internal_error(), request_id)
        response.headers = [(b"x-amz-request-id", request_id.encode()), *response.headers, *request.answer_headers]
        return response

    def _new_id(self) -> str:
        """Return a request id.  Ids count up from a random number: unlike other gateways', and no system call each."""
        self._requests += 1
        return f"{(self._first_id + self._requests) & _ID_MASK:016X}"

    def refused(self, refusal: HttpRefusal) -> Response:
        """Return the answer to a request that breaks HTTP."""
        error = S3Error(refusal.status, refusal.code, refusal.message)
        request_id = self._new_id()
        body = error_body(error, request_id, self._host_id)
        return Response(
            refusal.status, [(b"x-amz-request-id", request_id.encode()), XML], [body], close=True, code=refusal.code
        )

    async def _dispatched(self, request: Request) -> Response:
        head = request.head
        if request.failure is not None:
            request.target = parse_target(head, self._domains)
            with suppress(S3Error):  # it was proven at the door; the clock, or the keys, may have gone on
                request.signature = authenticate(head, region=self._region, now_s=time.time(), find_key=self._keys.find)
            raise request.failure
        if head.method == _PREFLIGHT:
            return await self._preflight(request)
        if self._keys.are_old:
            await self._keys.refresh()
        signature = authenticate(head, region=self._region, now_s=time.time(), find_key=self._keys.find)
        request.signature = signature
        target = request.target = parse_target(head, self._domains)
        if ORIGIN in head.headers and target.bucket:
            request.answer_headers = await self._cors_lines(head, target)
        if signature is None:
            await check_stranger(self._lakes.engine, target)
        else:
            check_key(signature.key, target)
        headers = {**head.headers, **target.moved} if target.moved else head.headers
        if target.operation in NOT_OFFERED:
            raise not_implemented(target.operation.value)
        check_headers(target.operation, headers)
        return await OPERATIONS[target.operation](Call(request, target, headers, signature, self._lakes, self._region))

    async def _preflight(self, request: Request) -> Response:
        """Answer a preflight.  A browser signs none, even if the URL has a signature: that is of the next request."""
        target = request.target = parse_target(request.head, self._domains)
        call = Call(request, target, request.head.headers, None, self._lakes, self._region)
        return await OPERATIONS[target.operation](call)

    async def _cors_lines(self, head: RequestHead, target: Target) -> list[tuple[bytes, bytes]]:
        """Return the lines that let the page which a browser sends a request for read the answer."""
        try:
            message = (await self._lakes.engine.call(BucketList(target.bucket))).message
        except LakeError:  # the request finds out
            return []
        assert isinstance(message, Buckets)
        return answer_lines(message.buckets[0].cors, head.method, head.headers[ORIGIN])

    def _translated(self, error: LakeError, request_id: str) -> S3Error:
        translated = from_lake(error)
        if translated.status >= 500:
            _log.error("s3_request_failed", request_id=request_id, error=error.message, subject=error.subject)
        return translated

    def _refusal(self, request: Request, error: S3Error, request_id: str) -> Response:
        headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in error.headers.items()]
        if request.head.method == "HEAD":
            return Response(error.status, headers, length=0, code=error.code)
        error.resource = error.resource or request.head.path.decode("latin-1")
        body = error_body(error, request_id, self._host_id)
        return Response(error.status, [XML, *headers], [body], code=error.code)
