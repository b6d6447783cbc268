"""What keeps chunks alive beside names: sessions (puts in progress) and leases (objects open for reading).

Rules kept here:
- A session holds every chunk that it stored or was told is there, by birth, until it ends: by commit with
  `end_session`, by SessionEnd, or with its last connection.  A restart voids all.
- With its last connection a session that holds nothing ends at once.  Of the others the 64 that this connection used
  last linger: they end `SESSION_LINGER_S` later, unless another connection joins them.
- A session may be used by any connection of the client that began it (the id is 16 random bytes: who knows it is
  that client).
- A lease keeps the blob that a name had when it was opened; it ends with its connection.
- Sessions and leases are bounded for each connection, for each user, and in all (`engine.host.user_shares`).
- While gc runs, every hold also marks (`barrier`): a chunk found present after the marker has passed stays.  What was
  held before is marked, too (`held_sets`), also of sessions that end while gc runs: a name that one of them committed
  may be behind the marker.  `leased_blobs` are marked before the sweep.

All methods are synchronous and called on the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from engine.host.user_shares import Shares, user_of
from engine.memory.lent_memory import LentMemory
from engine.segments.pins import ClientPins
from engine.tables.number_set import NumberSet
from lakefs.errors import EngineBusy, SessionLost
from lakefs.ids import Birth, BlobId, SessionId, new_id16
from lakefs.limits import (
    LEASES_MAX,
    LEASES_PER_CONNECTION_MAX,
    SESSION_LINGER_S,
    SESSIONS_LINGERING_MAX,
    SESSIONS_MAX,
    SESSIONS_PER_CONNECTION_MAX,
)
from lakefs.ports import Clock


@dataclass(eq=False)
class Session:
    """One put in progress, of the user who began it, and the connections that use it."""

    identifier: SessionId
    user: str
    held: NumberSet = field(default_factory=NumberSet)
    clients: list[Client] = field(default_factory=list)


def _first_number() -> int:
    """Random, so that a number of a lost connection names nothing on the next one; 0 is no lease."""
    return 1 + int.from_bytes(new_id16()[:5], "little")


@dataclass(eq=False)
class Client:
    """What the engine keeps for one connection.  `sessions` are in the order in which it began or joined them."""

    peer: str
    user: str
    descriptors: bool
    trusted: bool
    sessions: dict[SessionId, Session] = field(default_factory=dict)
    leases: dict[int, BlobId] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)
    memories: dict[int, LentMemory] = field(default_factory=dict)
    pins: ClientPins = field(default_factory=dict)
    next_number: int = field(default_factory=_first_number)

    def number(self) -> int:
        """A number for a lease, source or lent memory: new on this connection, and most likely on any other."""
        self.next_number += 1
        return self.next_number - 1


class References:
    """All sessions and leases of an engine."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions: dict[SessionId, Session] = {}
        self._lingering: dict[SessionId, float] = {}
        """When sessions without a connection end; the first one first."""
        self._clients: dict[int, Client] = {}
        self._session_shares = Shares(SESSIONS_MAX, "puts in progress")
        self._lease_shares = Shares(LEASES_MAX, "open objects")
        self.barrier: NumberSet | None = None

    # --- connections -------------------------------------------------------------------------------

    def connect(self, peer: str, *, descriptors: bool, trusted: bool, uid: int | None = None) -> Client:
        """A connection has begun.  `uid` is the peer's on a Unix socket, None over TCP."""
        client = Client(peer, user_of(uid), descriptors, trusted)
        self._clients[id(client)] = client
        return client

    def disconnect(self, client: Client) -> None:
        """A connection has ended: its leases go, and its sessions but for those that linger."""
        self._clients.pop(id(client), None)
        self.end_leases(client, list(client.leases))
        lingering: list[SessionId] = []
        for session in reversed(client.sessions.values()):
            session.clients.remove(client)
            if session.clients:
                continue
            if session.held and len(lingering) < SESSIONS_LINGERING_MAX:
                lingering.append(session.identifier)
            else:
                self._drop(session)
        client.sessions.clear()
        self._lingering.update(dict.fromkeys(lingering, self._clock.monotonic() + SESSION_LINGER_S))

    # --- sessions ----------------------------------------------------------------------------------

    def begin_session(self, client: Client) -> Session:
        """A new session of this connection; EngineBusy when it, its user, or all together have too many."""
        self.expire()
        if len(client.sessions) >= SESSIONS_PER_CONNECTION_MAX:
            raise EngineBusy(
                f"{SESSIONS_PER_CONNECTION_MAX} puts are in progress on this connection, the most that one may "
                "have; try again when some have ended"
            )
        self._session_shares.take(client.user)
        session = Session(SessionId(new_id16()), client.user)
        self._sessions[session.identifier] = session
        self._use(client, session)
        return session

    def join_session(self, client: Client, identifier: SessionId) -> Session:
        """Use a session from this connection; SessionLost when it is gone."""
        self.expire()
        session = self._sessions.get(identifier)
        if session is None:
            raise SessionLost(
                "the put session is gone (engine restart, lost connection or expiry); offer the chunks again"
            )
        if identifier not in client.sessions:
            self._use(client, session)
            self._lingering.pop(identifier, None)
        return session

    def end_session(self, client: Client, identifier: SessionId) -> None:
        """Drop a session and its holds; nothing happens when it is gone already."""
        session = self._sessions.get(identifier)
        if session is not None:
            self._drop(session)

    def _use(self, client: Client, session: Session) -> None:
        client.sessions[session.identifier] = session
        session.clients.append(client)

    def _drop(self, session: Session) -> None:
        del self._sessions[session.identifier]
        for client in session.clients:
            del client.sessions[session.identifier]
        session.clients.clear()
        self._lingering.pop(session.identifier, None)
        self._session_shares.give_back(session.user)

    def is_open(self, session: Session) -> bool:
        """Whether the session still holds what it held; asked in the step in which a name is bound."""
        return session.identifier in self._sessions

    def expire(self) -> int:
        """Drop lingering sessions whose time is over; how many."""
        now = self._clock.monotonic()
        over: list[SessionId] = []
        for identifier, expires_at in self._lingering.items():
            if expires_at > now:
                break
            over.append(identifier)
        for identifier in over:
            self._drop(self._sessions[identifier])
        return len(over)

    def hold(self, session: Session, birth: Birth) -> None:
        """Keep a chunk for the session."""
        session.held.add(birth)
        self.keep(birth)

    def keep(self, birth: Birth) -> None:
        """A chunk was found referred to or present: gc, when it is marking, must not free it in this cycle."""
        if self.barrier is not None:
            self.barrier.add(birth)

    def held_sets(self) -> Iterator[NumberSet]:
        """Births that sessions hold: a set of each session that there is at the first step, also when it has ended."""
        yield from [session.held for session in self._sessions.values()]

    # --- leases ------------------------------------------------------------------------------------

    def lease(self, client: Client, blob: BlobId) -> int:
        """Keep a blob for the connection; EngineBusy when it, its user, or all together hold too many."""
        if len(client.leases) >= LEASES_PER_CONNECTION_MAX:
            raise EngineBusy(f"{LEASES_PER_CONNECTION_MAX} objects are open on this connection; close some")
        self._lease_shares.take(client.user)
        number = client.number()
        client.leases[number] = blob
        return number

    def end_leases(self, client: Client, leases: Iterable[int]) -> None:
        """Let blobs go; numbers that are no leases of the connection are ignored."""
        for lease in leases:
            if client.leases.pop(lease, None) is not None:
                self._lease_shares.give_back(client.user)

    def leased_blobs(self) -> Iterator[BlobId]:
        """Blobs open for reading now."""
        for client in list(self._clients.values()):
            yield from list(client.leases.values())

    def statistics(self) -> dict[str, int]:
        """Counts for `lake status`."""
        self.expire()
        return {
            "connections": len(self._clients),
            "sessions": len(self._sessions),
            "leases": len(self._lease_shares),
        }
