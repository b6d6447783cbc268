"""Rules for a client whose connection was lost: which requests it repeats, and which sessions it joins again.  Sans-IO.

`docs/protocol.md` has the same list of requests with the reasons; a test compares the two.  Requests that change names
are never repeated: another client may have changed the name in between.  Sync is not repeated either: the next
engine's answer says nothing about the changes that the lost one had made visible.
"""

from __future__ import annotations

from typing import Final

from lakefs.errors import EngineUnreachable, LakeError, SessionLost
from lakefs.limits import SESSIONS_PER_CONNECTION_MAX
from lakefs.wire.messages import (
    AccessKeyList,
    BucketList,
    CloseLeases,
    LendMemory,
    ListNames,
    ListVersions,
    LoadSlots,
    Locate,
    Message,
    NameResults,
    NoteReads,
    Offer,
    OpenObjects,
    OpenSegments,
    OpenSharedIndex,
    OpenSlabs,
    PinChunks,
    Ping,
    ReadChunks,
    Request,
    ReturnMemory,
    RunFsck,
    RunGc,
    RunScrub,
    SessionEnd,
    SessionJoin,
    SessionOpen,
    SessionOpened,
    SourceClose,
    SourceOpen,
    StatNames,
    Status,
    StoreChunks,
    StoreFromSource,
    StoreSlots,
    UnpinChunks,
    UploadedParts,
    UploadList,
    UploadParts,
)

REPEATABLE: Final[frozenset[type[Request]]] = frozenset(
    (
        AccessKeyList,
        BucketList,
        CloseLeases,
        LendMemory,
        ListNames,
        ListVersions,
        Locate,
        NoteReads,
        Offer,
        OpenSharedIndex,
        OpenObjects,
        OpenSegments,
        PinChunks,
        OpenSlabs,
        Ping,
        ReadChunks,
        ReturnMemory,
        RunFsck,
        RunGc,
        RunScrub,
        SessionEnd,
        SessionJoin,
        SessionOpen,
        SourceClose,
        SourceOpen,
        StatNames,
        Status,
        StoreChunks,
        UnpinChunks,
        UploadList,
        UploadedParts,
        UploadParts,
    )
)
assert all(request.REPLY is not NameResults for request in REPEATABLE - {StatNames}), "names change once"
ATTEMPTS_MAX: Final = 3
"""Most times that one request is sent: a request that crashes the engine each time is given up."""


def loss_error(request: Request, lost: LakeError) -> LakeError:
    """Return the error for a request that is not sent again after its connection was lost.

    SessionLost where a put or a load has to begin again anyway: it used descriptors of that connection.
    """
    if isinstance(request, StoreFromSource | StoreSlots):
        return SessionLost("the connection was lost in the middle of a put; begin the put again")
    if isinstance(request, LoadSlots):
        return SessionLost("the connection was lost in the middle of a load; lend the memory again")
    doubt = "" if type(request) in REPEATABLE else "; the request may or may not have been done"
    return EngineUnreachable(f"{lost.message}{doubt}", subject=lost.subject)


class SessionKeeper:
    """The put sessions of one client, which it joins again from its next connection."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, None] = {}  # oldest first

    def note(self, request: Request, message: Message) -> None:
        """Note an answered request: remember the session that it opened, forget the one that it ended."""
        if isinstance(message, SessionOpened):
            self._sessions[message.session] = None
            if len(self._sessions) > SESSIONS_PER_CONNECTION_MAX:
                del self._sessions[next(iter(self._sessions))]
            assert len(self._sessions) <= SESSIONS_PER_CONNECTION_MAX, "the oldest session was forgotten"
        elif isinstance(request, SessionEnd):
            self._sessions.pop(request.session, None)

    def forget(self, session: bytes) -> None:
        """Forget a session that the engine no longer has."""
        self._sessions.pop(session, None)

    def joins(self) -> list[SessionJoin]:
        """Return the requests to send first on a new connection."""
        return [SessionJoin(session) for session in self._sessions]
