"""Errors as S3 has them: `S3Error`, the one table from the store's errors to S3's codes, and the XML body.

Every class of `lakefs.errors` has a row; a test holds that.  The store's messages are shown unchanged, except for bugs
and damage, where the client can do nothing with them and the log has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from gateway.s3.protocol.xml import document, element
from lakefs import errors as lake

_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class S3Error(Exception):
    """A refusal by an operation: `status` and `code` as S3 has them, `message` for a person.

    `resource` is the object of the error (S3: the path); `headers` are sent with the answer (Content-Range of a 416,
    Allow of a 405), `details` in its XML (Region of a wrong region).
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        resource: str = "",
        headers: Mapping[str, str] = _NONE,
        details: Mapping[str, str] = _NONE,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.resource = resource
        self.headers = headers
        self.details = details


class Row(NamedTuple):
    """The answer for one class of the store's errors.  `shown`: with its own message."""

    status: int
    code: str
    shown: bool = True
    headers: Mapping[str, str] = _NONE


_DELETED: Final[Mapping[str, str]] = MappingProxyType({"x-amz-delete-marker": "true"})
_RETRY: Final[Mapping[str, str]] = MappingProxyType({"Retry-After": "1"})
_INTERNAL: Final = Row(500, "InternalError", shown=False)
_UNAVAILABLE: Final = Row(503, "ServiceUnavailable")
_INTERNAL_MESSAGE: Final = "We encountered an internal error. Please try again; the server's log says more."

# S3 has no folders: a key that is only a folder, or lies below an object, is a key that does not exist.
TABLE: Final[Mapping[type[lake.LakeError], Row]] = MappingProxyType(
    {
        lake.LakeError: _INTERNAL,
        lake.UserError: Row(400, "InvalidRequest"),
        lake.OperationalError: _UNAVAILABLE,
        lake.CorruptionError: _INTERNAL,
        lake.BugError: _INTERNAL,
        lake.InvalidArgument: Row(400, "InvalidArgument"),
        lake.InvalidName: Row(400, "InvalidArgument"),
        lake.BucketNotFound: Row(404, "NoSuchBucket"),
        lake.KeyNotFound: Row(404, "NoSuchKey"),
        lake.AccessKeyNotFound: Row(403, "InvalidAccessKeyId"),
        lake.UploadNotFound: Row(404, "NoSuchUpload"),
        lake.InvalidPart: Row(400, "InvalidPart"),
        lake.InvalidPartOrder: Row(400, "InvalidPartOrder"),
        lake.PartTooSmall: Row(400, "EntityTooSmall"),
        lake.KeyDeleted: Row(404, "NoSuchKey", headers=_DELETED),
        lake.VersionNotFound: Row(404, "NoSuchVersion"),
        lake.VersionIsMarker: Row(405, "MethodNotAllowed", headers={**_DELETED, "Allow": "DELETE"}),
        lake.SpaceNotFound: _INTERNAL,
        lake.AcrossShards: Row(409, "OperationAborted"),
        lake.AlreadyExists: Row(409, "BucketAlreadyOwnedByYou"),
        lake.BucketNotEmpty: Row(409, "BucketNotEmpty"),
        lake.FolderNotEmpty: Row(409, "OperationAborted"),
        lake.IsAFolder: Row(404, "NoSuchKey"),
        lake.NotAFolder: Row(404, "NoSuchKey"),
        lake.PreconditionFailed: Row(412, "PreconditionFailed"),
        lake.PermissionDenied: Row(403, "AccessDenied"),
        lake.SourceChanged: Row(409, "OperationAborted"),
        lake.RequestTooLarge: Row(400, "EntityTooLarge"),
        lake.ConfigError: _INTERNAL,
        lake.LocalFileError: _INTERNAL,
        lake.EngineUnreachable: _UNAVAILABLE,
        lake.CoordinatorLost: _UNAVAILABLE,
        lake.BucketElsewhere: _UNAVAILABLE,
        lake.EngineBusy: Row(503, "SlowDown"),
        lake.DeadlineExceeded: _UNAVAILABLE,
        lake.SessionLost: _UNAVAILABLE,
        lake.StaleEpoch: _UNAVAILABLE,
        lake.ClusterDegraded: _UNAVAILABLE,
        lake.StaleGrant: _UNAVAILABLE,
        lake.ChunkNotFound: _INTERNAL,
        lake.StoreFull: Row(507, "InsufficientStorage"),
        lake.StoreLocked: _UNAVAILABLE,
        lake.StoreReadOnly: _UNAVAILABLE,
        lake.StoreUnusable: _UNAVAILABLE,
        lake.UnsupportedVersion: Row(501, "NotImplemented"),
        lake.AddressInUse: _INTERNAL,
        lake.Unchecked: _UNAVAILABLE,
        lake.DiskFailed: _INTERNAL,
        lake.FabricFailed: _UNAVAILABLE,
        lake.ChunkDamaged: _INTERNAL,
        lake.IndexDamaged: _INTERNAL,
        lake.JournalDamaged: _INTERNAL,
        lake.StoreDamaged: _INTERNAL,
        lake.ProtocolError: _INTERNAL,
        lake.InternalError: _INTERNAL,
    }
)


def from_lake(error: lake.LakeError, resource: str = "") -> S3Error:
    """Return the store's error as an S3 client sees it; a class that is not in the table has its parent's row."""
    row = next(TABLE[parent] for parent in type(error).__mro__ if parent in TABLE)
    message = error.message if row.shown else _INTERNAL_MESSAGE
    return S3Error(row.status, row.code, message, resource, _RETRY if row.status == 503 else row.headers)


def internal_error(resource: str = "") -> S3Error:
    """Return a 500, for a bug that was logged."""
    return S3Error(500, "InternalError", _INTERNAL_MESSAGE, resource)


def not_implemented(what: str, resource: str = "") -> S3Error:
    """Return a 501, for a feature of S3 that this store does not have."""
    return S3Error(501, "NotImplemented", f"{what} is not offered by this store; nothing was done", resource)


def invalid_argument(message: str, name: str = "", value: str = "") -> S3Error:
    """Return a 400 InvalidArgument; `name` and `value` as S3 repeats them."""
    details = {"ArgumentName": name, "ArgumentValue": value} if name else _NONE
    return S3Error(400, "InvalidArgument", message, details=details)


def bad_bucket(bucket: str, refusal: lake.InvalidName) -> S3Error:
    """Return a 400 InvalidBucketName; the store's refusal has the rule that the name breaks."""
    return S3Error(400, "InvalidBucketName", refusal.message, details={"BucketName": bucket[:64]})


def no_such_key(key: str) -> S3Error:
    """Return a 404: no object has that key."""
    return S3Error(404, "NoSuchKey", "The specified key does not exist.", details={"Key": key})


def precondition_failed() -> S3Error:
    """Return a 412: a condition of the request does not hold."""
    return S3Error(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")


def error_body(error: S3Error, request_id: str, host_id: str) -> bytes:
    """Return the XML of an answer; an answer to HEAD, and a 304, have none."""
    fields = {"Code": error.code, "Message": error.message, **error.details}
    fields |= {"Resource": error.resource, "RequestId": request_id, "HostId": host_id}
    return document("Error", "".join(map(element, fields, fields.values())), namespace=False)
