"""What keeps chunks alive beside names: sessions (puts in progress) and leases (objects open for reading).

Rules kept here:
- A session holds every chunk that it stored or was told is there, by birth, until it ends: by commit with
  `end_session`, by SessionEnd, or `SESSION_LINGER_S` after its last connection has gone.  A restart voids all.
- A session may be used by any connection of the client that began it (the id is 16 random bytes: who knows it is
  that client); the number of sessions is bounded.
- A lease keeps the blob that a name had when it was opened; it ends with its connection.  Leases are bounded, for
  each connection and in all.
- gc asks `is_held` inside the commit that frees, and marks `leased_blobs` before it sweeps.
- While gc runs, every hold also marks (`barrier`): a chunk found present after the marker has passed stays.  A
  session that ends meanwhile leaves its holds to the cycle: a name that it committed may be behind the marker.

All methods are synchronous and called on the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from engine.lent_memory import LentMemory
from engine.number_set import NumberSet
from engine.pins import ClientPins
from lakefs.errors import EngineBusy, SessionLost
from lakefs.ids import Birth, BlobId, SessionId, new_id16
from lakefs.limits import LEASES_MAX, LEASES_PER_CONNECTION_MAX, SESSION_LINGER_S, SESSIONS_MAX
from lakefs.ports import Clock


@dataclass
class Session:
    """One put in progress."""

    identifier: SessionId
    held: NumberSet = field(default_factory=NumberSet)
    connections: int = 1
    expires_at: float | None = None


def _first_number() -> int:
    """Random, so that a number of a lost connection names nothing on the next one; 0 is no lease."""
    return 1 + int.from_bytes(new_id16()[:5], "little")


@dataclass
class Client:
    """What the engine keeps for one connection."""

    peer: str
    descriptors: bool
    trusted: bool
    sessions: set[SessionId] = field(default_factory=set)
    leases: dict[int, BlobId] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)
    memories: dict[int, LentMemory] = field(default_factory=dict)
    pins: ClientPins = field(default_factory=dict)
    next_number: int = field(default_factory=_first_number)

    def number(self) -> int:
        """A number for a lease, source or lent memory: new on this connection, and most likely on any other."""
        self.next_number += 1
        return self.next_number - 1


class Holds:
    """All sessions and leases of an engine."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions: dict[SessionId, Session] = {}
        self._clients: dict[int, Client] = {}
        self._lease_count = 0
        self.barrier: NumberSet | None = None

    # --- connections -------------------------------------------------------------------------------

    def connect(self, peer: str, *, descriptors: bool, trusted: bool) -> Client:
        """A connection has begun."""
        client = Client(peer, descriptors, trusted)
        self._clients[id(client)] = client
        return client

    def disconnect(self, client: Client) -> None:
        """A connection has ended: its leases go, its sessions linger."""
        self._clients.pop(id(client), None)
        self._lease_count -= len(client.leases)
        client.leases.clear()
        for identifier in client.sessions:
            session = self._sessions.get(identifier)
            if session is not None:
                session.connections -= 1
                if not session.connections:
                    session.expires_at = self._clock.monotonic() + SESSION_LINGER_S
        client.sessions.clear()

    # --- sessions ----------------------------------------------------------------------------------

    def begin_session(self, client: Client) -> Session:
        """A new session of this connection; EngineBusy when there are too many."""
        self.expire()
        if len(self._sessions) >= SESSIONS_MAX:
            raise EngineBusy(f"{SESSIONS_MAX} puts are in progress; try again")
        session = Session(SessionId(new_id16()))
        self._sessions[session.identifier] = session
        client.sessions.add(session.identifier)
        return session

    def join_session(self, client: Client, identifier: SessionId) -> Session:
        """Use a session from this connection; SessionLost when it is gone."""
        self.expire()
        session = self._sessions.get(identifier)
        if session is None:
            raise SessionLost("the put session is gone (engine restart or expiry); offer the chunks again")
        if identifier not in client.sessions:
            client.sessions.add(identifier)
            session.connections += 1
            session.expires_at = None
        return session

    def end_session(self, client: Client, identifier: SessionId) -> None:
        """Drop a session and its holds; nothing happens when it is gone already."""
        client.sessions.discard(identifier)
        session = self._sessions.pop(identifier, None)
        if session is not None:
            self._leave_to_gc(session)

    def is_open(self, session: Session) -> bool:
        """Whether the session still holds what it held; asked in the step in which a name is bound."""
        return session.identifier in self._sessions

    def expire(self) -> int:
        """Drop lingering sessions whose time is over; how many."""
        now = self._clock.monotonic()
        over = [
            s.identifier for s in self._sessions.values() if s.expires_at is not None and s.expires_at <= now
        ]
        for identifier in over:
            self._leave_to_gc(self._sessions.pop(identifier))
        return len(over)

    def _leave_to_gc(self, session: Session) -> None:
        if self.barrier is not None:
            self.barrier.update(session.held)

    def hold(self, session: Session, birth: Birth) -> None:
        """Keep a chunk for the session."""
        session.held.add(birth)
        self.keep(birth)

    def keep(self, birth: Birth) -> None:
        """A chunk was found referred to or present: gc, when it is marking, must not free it in this cycle."""
        if self.barrier is not None:
            self.barrier.add(birth)

    def is_held(self, birth: Birth) -> bool:
        """Whether any session holds the chunk."""
        return any(birth in session.held for session in self._sessions.values())

    # --- leases ------------------------------------------------------------------------------------

    def lease(self, client: Client, blob: BlobId) -> int:
        """Keep a blob for the connection; EngineBusy when it, or all of them together, hold too many."""
        if len(client.leases) >= LEASES_PER_CONNECTION_MAX:
            raise EngineBusy(f"{LEASES_PER_CONNECTION_MAX} objects are open on this connection; close some")
        if self._lease_count >= LEASES_MAX:
            raise EngineBusy(f"{LEASES_MAX} objects are open on all connections together; try again later")
        number = client.number()
        client.leases[number] = blob
        self._lease_count += 1
        return number

    def end_leases(self, client: Client, leases: Iterable[int]) -> None:
        """Let blobs go; numbers that are no leases of the connection are ignored."""
        for lease in leases:
            if client.leases.pop(lease, None) is not None:
                self._lease_count -= 1

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
            "leases": self._lease_count,
        }
