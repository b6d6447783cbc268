"""Refusals of etcd: which say that nothing was done, which leave it open, and the errors that they become.

Etcd answers with a code of gRPC and a sentence.  Where the code does not tell apart what matters here, its sentence
does; these sentences are part of its API, and the same in all releases since 3.1.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import grpc

from lakefs.errors import (
    EngineBusy,
    EngineUnreachable,
    LakeError,
    PermissionDenied,
    RequestTooLarge,
    StoreFull,
    UnsupportedVersion,
)

_Code = grpc.StatusCode
_OPEN: Final = frozenset(
    {_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED, _Code.CANCELLED, _Code.UNKNOWN, _Code.INTERNAL, _Code.ABORTED}
)
_NOBODY_LISTENS: Final = "Connection refused"
"""gRPC's own words, which end with the system's."""
_TOKEN_REFUSED: Final = "invalid auth token", "revision of auth store is old"
_USER_REFUSED: Final = "authentication failed", "user name is empty", "permission denied", "authentication is not"


class Status(NamedTuple):
    """The end of a call that has no answer."""

    code: grpc.StatusCode
    details: str

    @property
    def is_open(self) -> bool:
        """True if the request may have been done, or may yet be: the next endpoint can be asked."""
        return self.code in _OPEN

    @property
    def is_silence(self) -> bool:
        """True if the endpoint did not answer in time."""
        return bool(self.code == _Code.DEADLINE_EXCEEDED)

    @property
    def is_refused(self) -> bool:
        """True if nobody listens at the endpoint: nothing was sent."""
        return self.code == _Code.UNAVAILABLE and _NOBODY_LISTENS in self.details

    @property
    def is_token_refused(self) -> bool:
        """True if another token of the same user may be accepted; nothing was done."""
        return self.code == _Code.UNAUTHENTICATED or any(words in self.details for words in _TOKEN_REFUSED)

    @property
    def is_lease_gone(self) -> bool:
        """True if a lease that the request names does not exist; nothing was done."""
        return self.code == _Code.NOT_FOUND and "lease not found" in self.details

    @property
    def is_lease_there(self) -> bool:
        """True if a lease of that number was granted already."""
        return self.code == _Code.FAILED_PRECONDITION and "lease already exists" in self.details

    @property
    def is_compacted(self) -> bool:
        """True if etcd does not hold what the request asks for any more."""
        return self.code == _Code.OUT_OF_RANGE and "compacted" in self.details

    @property
    def is_to_come(self) -> bool:
        """True if the request names a revision that does not exist yet."""
        return self.code == _Code.OUT_OF_RANGE and "future revision" in self.details


def status_of(error: grpc.RpcError) -> Status:
    """Return the end of a call as gRPC raised it."""
    return Status(error.code(), error.details() or "")


def error_of(status: Status, address: str) -> LakeError:
    """Return the error that says what an endpoint refused, and why."""
    words = f"etcd at {address} says: {status.details or status.code.name}"
    if status.code == _Code.RESOURCE_EXHAUSTED:
        if "space exceeded" in status.details:
            return StoreFull(
                f"{words}; compact and defragment it, then disarm its alarm, or raise its quota", subject=address
            )
        return EngineBusy(words, subject=address)
    if "request is too large" in status.details or "too many operations" in status.details:
        return RequestTooLarge(f"{words}; its --max-request-bytes and --max-txn-ops must not be below the defaults")
    if status.code == _Code.PERMISSION_DENIED or any(refused in status.details for refused in _USER_REFUSED):
        return PermissionDenied(f"{words}; check the user, the password, and the roles of the user", subject=address)
    if status.code == _Code.UNIMPLEMENTED:
        return UnsupportedVersion(
            f"what answers at {address} is not an etcd with version 3 of its API", subject=address
        )
    return EngineUnreachable(words, subject=address)
