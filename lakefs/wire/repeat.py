"""What a client may do after it lost a connection, whichever client it is.  Sans-IO.

`docs/protocol.md` has the same list of requests with the reasons; a test compares.  Requests that change names are
never repeated: another client may have changed the name in between.  Nor is Sync: what it would answer of the next
engine says nothing about what the lost one had made visible.
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
ATTEMPTS_MAX: Final = 3
"""Times that one request is sent: a request that ends the engine each time is given up."""


def loss_error(request: Request, lost: LakeError) -> LakeError:
    """What to raise for a request that may not be repeated, and whose connection was lost.

    SessionLost where a put or a load has to begin again anyway: it used descriptors of that connection.
    """
    if isinstance(request, StoreFromSource | StoreSlots):
        return SessionLost("the connection was lost in the middle of a put; begin the put again")
    if isinstance(request, LoadSlots):
        return SessionLost("the connection was lost in the middle of a load; lend the memory again")
    doubt = "" if type(request) in REPEATABLE else "; the request may or may not have been done"
    return EngineUnreachable(f"{lost.message}{doubt}", subject=lost.subject)


class SessionKeeper:
    """The put sessions of one client, to be joined again from its next connection."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, None] = {}  # oldest first

    def note(self, request: Request, message: Message) -> None:
        """A request was answered."""
        if isinstance(message, SessionOpened):
            self._sessions[message.session] = None
            if len(self._sessions) > SESSIONS_PER_CONNECTION_MAX:
                del self._sessions[next(iter(self._sessions))]
        elif isinstance(request, SessionEnd):
            self._sessions.pop(request.session, None)

    def forget(self, session: bytes) -> None:
        """The engine no longer has the session."""
        self._sessions.pop(session, None)

    def joins(self) -> list[SessionJoin]:
        """What to send on a new connection before anything else."""
        return [SessionJoin(session) for session in self._sessions]
