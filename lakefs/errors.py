"""The error tree, and the one table that gives each class its wire code, exit code, HTTP status and errno.

Four branches: errors that the user can mend, errors that the operator must mend (retryable or not), damage, and bugs.
Every error that crosses a port is one of these classes.  The part that answers the user (command line, S3, mount)
translates it once, from this table or one of its own.  A message says what happened, to which object, and what to do
next.
"""

from __future__ import annotations

from dataclasses import dataclass
from errno import (
    E2BIG,
    EACCES,
    EADDRINUSE,
    EBUSY,
    ECONNREFUSED,
    ECONNRESET,
    EEXIST,
    EINVAL,
    EIO,
    EISDIR,
    ENOENT,
    ENOKEY,
    ENOSPC,
    ENOTDIR,
    ENOTEMPTY,
    EPROTO,
    EPROTONOSUPPORT,
    EROFS,
    ESTALE,
    ETIMEDOUT,
    EXDEV,
)
from typing import ClassVar, Final

from lakefs.findings import Finding
from lakefs.python_words import in_python


class LakeError(Exception):
    """Root of the tree.  `subject` names the object concerned, if there is one.

    `finding` is the kind under which fsck and scrub report the error: given by the raiser, or else the class's own.
    It is not sent over the wire.
    """

    wire_code: ClassVar[int] = 0
    exit_code: ClassVar[int] = 70
    http_status: ClassVar[int] = 500
    errno: ClassVar[int] = EIO
    retryable: ClassVar[bool] = False
    finding: Finding = Finding.READ_FAILED
    goes_on: bool = False
    """True if a request was given up that the engine may still be doing, and go on with.  Not sent over the wire."""

    def __init__(self, message: str, *, subject: str = "", finding: Finding | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.subject = subject
        self.finding = finding or self.finding

    def __str__(self) -> str:
        """Return the message as a programmer reads it; faces show `message`."""
        return in_python(self.message)


class UserError(LakeError):
    """The request cannot be done as asked; asking differently can."""


class OperationalError(LakeError):
    """The service cannot do it now."""


class CorruptionError(LakeError):
    """Stored bytes are not what was written.  Never retried silently, never answered with other bytes."""


class BugError(LakeError):
    """The product broke one of its own rules."""


class InvalidArgument(UserError):
    """A value outside what the operation accepts."""


class InvalidName(UserError):
    """A bucket name or key that the store does not accept."""


class BucketNotFound(UserError):
    """No such bucket."""


class KeyNotFound(UserError, FileNotFoundError, KeyError):  # type: ignore[misc]  # `errno` is the class's
    """No such object or folder in the bucket.

    Python's own errors for a file and for a key that do not exist, too, so that programs written for files and mappings
    catch it.  `str()` is the message, as of all errors here, and so is `strerror`; `filename` is the name concerned.
    """

    @property
    def strerror(self) -> str:  # type: ignore[override]
        """The message, as `str()` returns it."""
        return str(self)

    @property
    def filename(self) -> str | None:
        """The name concerned, if it is known."""
        return self.subject or None


class KeyDeleted(KeyNotFound):
    """The key's current version is a delete marker; its bucket keeps versions."""


class VersionNotFound(KeyNotFound):
    """The key has no such version."""


class VersionIsMarker(UserError):
    """The named version is a delete marker, which has no content."""


class AlreadyExists(UserError):
    """The name is taken and the request wanted a new one."""


class BucketNotEmpty(UserError):
    """The bucket still contains names, so it is not removed."""


class FolderNotEmpty(UserError):
    """The folder still contains names, so it is not replaced or removed."""


class IsAFolder(UserError):
    """The request wants an object, and the name is a folder."""


class NotAFolder(UserError):
    """The request wants a folder, and the name or a part of it is an object."""


class PreconditionFailed(UserError):
    """If-Match, If-None-Match or an expected node did not hold; nothing was changed."""


class PermissionDenied(UserError):
    """Wrong token, wrong socket owner, or a file that may not be read."""


class SourceChanged(UserError):
    """A source file changed or shrank while it was read; nothing was stored under the name."""


class RequestTooLarge(UserError):
    """A batch, body or attribute set over its limit."""


class ConfigError(UserError):
    """The configuration cannot be used; the message names the nearest known key."""


class LocalFileError(UserError):
    """A local file or folder of the client cannot be read, written or created."""


class AccessKeyNotFound(UserError):
    """No such access key."""


class UploadNotFound(UserError):
    """No such multipart upload: it was completed, aborted, has expired, or never was."""


class InvalidPart(UserError):
    """A part of a multipart upload does not exist, differs from the part meant, or cannot be a part."""


class InvalidPartOrder(UserError):
    """The parts of a multipart upload are not listed in ascending order of part number."""


class PartTooSmall(UserError):
    """A part of a multipart upload, other than the last, is smaller than the minimum."""


class SpaceNotFound(UserError):
    """No such space of keyed blobs: it was removed, or never was."""


class AcrossShards(UserError):
    """The names of a lake are divided, and the two buckets of a move are in different parts: copy, then remove."""


class EngineUnreachable(OperationalError):
    """Nothing listens at the address, or the engine was lost and did not return in time."""

    retryable = True


class CoordinatorLost(EngineUnreachable):
    """The coordinator of the lake cannot be asked, or another process leads the names; content can be read on."""


class BucketElsewhere(OperationalError):
    """The bucket is assigned to another names shard; ask that one."""

    retryable = True


class EngineBusy(OperationalError):
    """A limit of the engine is reached; try again."""

    retryable = True


class DeadlineExceeded(OperationalError):
    """The deadline of the request passed; a write may or may not have been done."""

    retryable = True


class SessionLost(OperationalError):
    """The put session is gone (engine restart or expiry); offer the chunks again."""

    retryable = True


class StaleEpoch(OperationalError):
    """The request was made by an older ring epoch than the member has; look homes up in the newer table."""

    retryable = True


class ClusterDegraded(OperationalError):
    """Too many members of the lake are away to store this safely, or to read it; see: lake status."""

    retryable = True


class StaleGrant(OperationalError):
    """The chunk moved or was freed after it was located; locate again."""

    retryable = True


class ChunkNotFound(OperationalError):
    """A chunk is not in the store: it was freed, or never stored."""


class StoreFull(OperationalError):
    """No space for payload is left.  Removing names and running gc still work."""


class StoreLocked(OperationalError):
    """Another process has the store open."""


class StoreReadOnly(OperationalError):
    """A sync failed, or the disk is read-only: no write is accepted until restart."""


class StoreUnusable(OperationalError):
    """The store cannot be opened: unknown feature, other format, missing parts."""

    finding = Finding.STORE_UNUSABLE


class UnsupportedVersion(OperationalError):
    """The peer speaks another protocol version, or lacks an operation."""


class AddressInUse(OperationalError):
    """A socket or port to listen on is taken."""


class Unchecked(OperationalError):
    """A check could not run, so the state of what it covers is unknown."""


class DiskFailed(OperationalError):
    """The operating system reported an error of the device or file system."""


class FabricFailed(OperationalError):
    """RDMA cannot be used, or an operation over it failed; the same bytes can be had over TCP."""


class ChunkDamaged(CorruptionError):
    """A chunk's bytes do not match its checksum or id."""

    finding = Finding.CHUNK_DAMAGED


class IndexDamaged(CorruptionError):
    """A record of the index does not match its checksum; the index will be rebuilt."""

    finding = Finding.INDEX_DAMAGED


class JournalDamaged(CorruptionError):
    """A journal group that was durable cannot be read."""

    finding = Finding.JOURNAL_DAMAGED


class StoreDamaged(CorruptionError):
    """Damage to the superblock, a checkpoint or a segment's header; or found by fsck."""

    finding = Finding.STORE_DAMAGED


class ProtocolError(BugError):
    """The peer broke the protocol."""


class InternalError(BugError):
    """An internal invariant does not hold; please report it."""


@dataclass(frozen=True)
class ErrorRow:
    """The codes of one error class, for every face that has no table of its own."""

    error: type[LakeError]
    wire_code: int
    exit_code: int
    http_status: int
    errno: int


# Exit codes: 1 damage found, 2 usage or not checked, then sysexits.h where one fits.
#
# Programs act on errno, so it is chosen for their use of it: never EAGAIN or EINTR, which a blocking call must not see;
# EIO for damage, as a disk reports it; ESTALE when the object at a name is no longer the one meant.
ERROR_TABLE: Final[tuple[ErrorRow, ...]] = (
    ErrorRow(InvalidArgument, 1, 2, 400, EINVAL),
    ErrorRow(InvalidName, 2, 2, 400, EINVAL),
    ErrorRow(BucketNotFound, 3, 66, 404, ENOENT),
    ErrorRow(KeyNotFound, 4, 66, 404, ENOENT),
    ErrorRow(AlreadyExists, 5, 73, 409, EEXIST),
    ErrorRow(BucketNotEmpty, 6, 73, 409, ENOTEMPTY),
    ErrorRow(FolderNotEmpty, 7, 73, 409, ENOTEMPTY),
    ErrorRow(IsAFolder, 8, 73, 409, EISDIR),
    ErrorRow(NotAFolder, 9, 73, 409, ENOTDIR),
    ErrorRow(PreconditionFailed, 10, 73, 412, ESTALE),
    ErrorRow(PermissionDenied, 11, 77, 403, EACCES),
    ErrorRow(SourceChanged, 12, 65, 400, EIO),
    ErrorRow(RequestTooLarge, 13, 65, 413, E2BIG),
    ErrorRow(ConfigError, 14, 78, 500, EINVAL),
    ErrorRow(LocalFileError, 15, 74, 500, EIO),
    ErrorRow(AccessKeyNotFound, 16, 66, 404, ENOKEY),
    ErrorRow(UploadNotFound, 17, 66, 404, ENOENT),
    ErrorRow(InvalidPart, 18, 65, 400, EINVAL),
    ErrorRow(InvalidPartOrder, 19, 65, 400, EINVAL),
    ErrorRow(PartTooSmall, 20, 65, 400, EINVAL),
    ErrorRow(KeyDeleted, 21, 66, 404, ENOENT),
    ErrorRow(VersionNotFound, 22, 66, 404, ENOENT),
    ErrorRow(VersionIsMarker, 23, 65, 405, EINVAL),
    ErrorRow(SpaceNotFound, 24, 66, 404, ENOENT),
    ErrorRow(AcrossShards, 25, 73, 409, EXDEV),
    ErrorRow(EngineUnreachable, 32, 69, 503, ECONNREFUSED),
    ErrorRow(EngineBusy, 33, 75, 503, EBUSY),
    ErrorRow(DeadlineExceeded, 34, 75, 504, ETIMEDOUT),
    ErrorRow(SessionLost, 35, 75, 503, ECONNRESET),
    ErrorRow(StaleGrant, 36, 75, 503, EIO),
    ErrorRow(ChunkNotFound, 37, 66, 404, EIO),
    ErrorRow(StoreFull, 38, 74, 507, ENOSPC),
    ErrorRow(StoreLocked, 39, 75, 503, EBUSY),
    ErrorRow(StoreReadOnly, 40, 74, 503, EROFS),
    ErrorRow(StoreUnusable, 41, 78, 503, EIO),
    ErrorRow(UnsupportedVersion, 42, 76, 501, EPROTONOSUPPORT),
    ErrorRow(AddressInUse, 43, 71, 503, EADDRINUSE),
    ErrorRow(Unchecked, 44, 2, 503, EIO),
    ErrorRow(DiskFailed, 45, 74, 503, EIO),
    ErrorRow(FabricFailed, 46, 69, 503, EIO),
    ErrorRow(StaleEpoch, 47, 75, 503, EBUSY),
    ErrorRow(ClusterDegraded, 48, 69, 503, EIO),
    ErrorRow(CoordinatorLost, 49, 69, 503, ECONNREFUSED),
    ErrorRow(BucketElsewhere, 50, 75, 503, EBUSY),
    ErrorRow(ChunkDamaged, 64, 1, 500, EIO),
    ErrorRow(IndexDamaged, 65, 1, 500, EIO),
    ErrorRow(JournalDamaged, 66, 1, 500, EIO),
    ErrorRow(StoreDamaged, 67, 1, 500, EIO),
    ErrorRow(ProtocolError, 96, 76, 400, EPROTO),
    ErrorRow(InternalError, 97, 70, 500, EIO),
)

_BY_WIRE_CODE: Final = {row.wire_code: row.error for row in ERROR_TABLE}

for _row in ERROR_TABLE:
    _row.error.wire_code = _row.wire_code
    _row.error.exit_code = _row.exit_code
    _row.error.http_status = _row.http_status
    _row.error.errno = _row.errno


def from_wire(wire_code: int, message: str, subject: str = "") -> LakeError:
    """The error that a peer sent; an unknown code becomes an `InternalError` that says so."""
    error = _BY_WIRE_CODE.get(wire_code)
    if error is None:
        return InternalError(f"the peer answered with unknown error {wire_code}: {message}", subject=subject)
    return error(message, subject=subject)
