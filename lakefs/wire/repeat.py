"""Rules for a client whose connection was lost: which requests it repeats, and which sessions it joins again.  Sans-IO.

`docs/protocol.md` has the same list of requests with the reasons; a test compares the two.  Requests that change names
are never repeated: another client may have changed the name in between.  Sync is not repeated either: the next
engine's answer says nothing about the changes that the lost one had made visible.
"""

from __future__ import annotations

from typing import Final

from lakefs.errors import EngineUnreachable, LakeError, SessionLost
from lakefs.limits import SESSIONS_PER_CONNECTION_MAX
from lakefs.wire import messages as m

REPEATABLE: Final[frozenset[type[m.Request]]] = frozenset(
    (
        m.AcceptedAnswers,
        m.AccessKeyList,
        m.BucketList,
        m.ChangeMember,
        m.CloseLeases,
        m.CoordinatorKeepAlive,
        m.CoordinatorRange,
        m.CoordinatorRevoke,
        m.CoordinatorWatch,
        m.DropShards,
        m.FabricOpen,
        m.GcBegin,
        m.GcMark,
        m.JoinGeneration,
        m.LendMemory,
        m.KeyedMatch,
        m.KeyedRead,
        m.ListNames,
        m.ListShards,
        m.ListVersions,
        m.Locate,
        m.NameRoot,
        m.NoteGateway,
        m.NoteReads,
        m.Offer,
        m.OfferShards,
        m.OpenCheckpoint,
        m.OpenKeyedIndex,
        m.OpenKeyHomes,
        m.OpenSharedIndex,
        m.OpenObjects,
        m.OpenSegments,
        m.PinChunks,
        m.OpenSlabs,
        m.OpenStamps,
        m.Ping,
        m.ReadChunks,
        m.ReturnMemory,
        m.RefuseEpochs,
        m.RunFsck,
        m.RunGc,
        m.RunScrub,
        m.SessionEnd,
        m.SessionJoin,
        m.SessionOpen,
        m.SetEpoch,
        m.SetLake,
        m.SetSpaces,
        m.SourceClose,
        m.SourceOpen,
        m.SpaceList,
        m.StatNames,
        m.Status,
        m.StoreChunks,
        m.UnpinChunks,
        m.UploadList,
        m.UploadedParts,
        m.UploadParts,
    )
)
assert all(request.REPLY is not m.NameResults for request in REPEATABLE - {m.StatNames}), "names change once"
SESSION_REQUESTS: Final = (m.SessionOpen, m.SessionEnd)
"""The requests whose answers a `SessionKeeper` notes."""
ATTEMPTS_MAX: Final = 3
"""Most times that one request is sent: a request that crashes the engine each time is given up."""
GREETINGS_MAX: Final = 10
"""Most times in a row that a client connects to engines that refuse it as busy: one that shuts down does, and another
may listen there in a moment."""


def loss_error(request: m.Request, lost: LakeError) -> LakeError:
    """Return the error for a request that is not sent again after its connection was lost.

    SessionLost where a put or a load has to begin again anyway: it used descriptors of that connection.
    """
    error: LakeError
    if isinstance(request, m.StoreFromSource | m.StoreSlots):
        error = SessionLost("the connection was lost in the middle of a put; begin the put again")
    elif isinstance(request, m.LoadSlots | m.KeyedLoad):
        error = SessionLost("the connection was lost in the middle of a load; lend the memory again")
    else:
        doubt = "" if type(request) in REPEATABLE else "; the request may or may not have been done"
        error = EngineUnreachable(f"{lost.message}{doubt}", subject=lost.subject)
    error.goes_on = lost.goes_on
    return error


class SessionKeeper:
    """The put sessions of one client, which it joins again from its next connection."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, None] = {}  # oldest first

    def note(self, request: m.Request, message: m.Message) -> None:
        """Note an answered one of SESSION_REQUESTS: remember the session that it opened, forget the one that it ended.

        Other requests may be passed, and do nothing.
        """
        if isinstance(message, m.SessionOpened):
            self._sessions[message.session] = None
            if len(self._sessions) > SESSIONS_PER_CONNECTION_MAX:
                del self._sessions[next(iter(self._sessions))]
            assert len(self._sessions) <= SESSIONS_PER_CONNECTION_MAX, "the oldest session was forgotten"
        elif isinstance(request, m.SessionEnd):
            self._sessions.pop(request.session, None)

    def forget(self, session: bytes) -> None:
        """Forget a session that the engine no longer has."""
        self._sessions.pop(session, None)

    def joins(self) -> list[m.SessionJoin]:
        """Return the requests to send first on a new connection."""
        return [m.SessionJoin(session) for session in self._sessions]
