"""References that keep chunks alive beside names: sessions (puts in progress) and leases (objects open for reading).

Rules kept here:
- A session holds every chunk that it stored or that was reported to it as present, by birth, until it ends: by a commit
  with `end_session`, by SessionEnd, or with its last connection.  A restart ends all.
- When its last connection ends, a session that holds nothing ends at once.  At most 64 others, those that this
  connection began or joined last, linger: they end `SESSION_LINGER_S` later, unless another connection joins them.  All
  others end at once.
- Any connection of the client that began a session may use it (the id is 16 random bytes, known to that client only).
- A lease keeps the blob that a name had when it was opened; it ends with its connection.
- Sessions and leases are bounded for each connection, for each user, and in all (`engine.host.user_shares`).
- While gc runs, every hold also marks (`barrier`): a chunk found present after the marker has passed stays.  Earlier
  holds are marked too (`held_sets`), even of sessions that end while gc runs: a name that one of them committed may be
  behind the marker.  `leased_blobs` are marked before the sweep.

All methods are synchronous and called on the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.host.user_shares import Shares, user_of
from engine.memory.lent_memory import LentMemory
from engine.segments.pins import ClientPins
from engine.tables.number_set import NumberSet
from lakefs.errors import EngineBusy, SessionLost
from lakefs.ids import Birth, BlobId, SessionId, new_id16
from lakefs.limits import (
    GATEWAYS_LISTED_MAX,
    LEASES_MAX,
    LEASES_PER_CONNECTION_MAX,
    SESSION_LINGER_S,
    SESSIONS_LINGERING_MAX,
    SESSIONS_MAX,
    SESSIONS_PER_CONNECTION_MAX,
)
from lakefs.ports import Clock
from lakefs.wire.engine_port import never, nothing
from lakefs.wire.session_messages import NoteGateway


@dataclass(eq=False)
class Session:
    """One put in progress, its user, and the connections that use it."""

    identifier: SessionId
    user: str
    held: NumberSet = field(default_factory=NumberSet)
    clients: list[Client] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True if it holds nothing."""
        return not self.held

    def ended(self) -> None:
        """Give up what it holds; called once, when it ends."""


def _first_number() -> int:
    """Return a random start, so that a number of a lost connection names nothing on the next; 0 means no lease."""
    return 1 + int.from_bytes(new_id16()[:5], "little")


@dataclass(eq=False)
class Client:
    """The engine's state of one connection.  `sessions` are in the order in which it began or joined them."""

    peer: str
    user: str
    descriptors: bool
    trusted: bool
    sessions: dict[SessionId, Session] = field(default_factory=dict)
    leases: dict[int, BlobId] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)
    memories: dict[int, LentMemory] = field(default_factory=dict)
    pins: ClientPins = field(default_factory=dict)
    gateway: NoteGateway | None = None
    """The last note of the S3 gateway that this client is."""
    stamps_of: Callable[[list[Any]], bytes] | None = None
    """Returns stamps of records for the head whose client this is, at the names of a lake; None: it has none."""
    next_number: int = field(default_factory=_first_number)
    has_left: Callable[[], bool] = never
    """Returns True once the client has ended the connection, before the engine has received that."""
    end: Callable[[], None] = nothing
    """Ends the connection, as when its server is stopped."""

    def number(self) -> int:
        """Return a number for a lease, source or lent memory: new on this connection, and most likely on all others."""
        self.next_number += 1
        return self.next_number - 1

    def check_its_memory(self) -> None:
        """Raise SessionLost if the client has left: its slots and pools are its own again, for whatever it likes.

        Called by the decision that binds what was copied from slots before, and before a load writes to a pool.
        """
        if self.has_left():
            raise SessionLost("the client has left, and its memory with it; nothing was stored or loaded")


class References:
    """All sessions and leases of an engine."""

    def __init__(self, clock: Clock, *, sessions: type[Session] = Session, clients: type[Client] = Client) -> None:
        """`sessions`, `clients`: what is made for each of them."""
        self._clock = clock
        self._session_type = sessions
        self._client_type = clients
        self._sessions: dict[SessionId, Session] = {}
        self._lingering: dict[SessionId, float] = {}
        """Time at which each session without a connection ends, earliest first."""
        self._clients: dict[int, Client] = {}
        self._session_shares = Shares(SESSIONS_MAX, "puts in progress")
        self._lease_shares = Shares(LEASES_MAX, "open objects")
        self.barrier: NumberSet | None = None

    # --- connections -------------------------------------------------------------------------------

    def connect(self, peer: str, *, descriptors: bool, trusted: bool, uid: int | None = None) -> Client:
        """Begin a connection.  `uid` is the peer's on a Unix socket, None over TCP."""
        client = self._client_type(peer, user_of(uid), descriptors, trusted)
        self._clients[id(client)] = client
        return client

    def disconnect(self, client: Client) -> None:
        """End a connection: its leases, and its sessions that no other connection uses, except those that linger."""
        self._clients.pop(id(client), None)
        self.end_leases(client, list(client.leases))
        lingering: list[SessionId] = []
        for session in reversed(client.sessions.values()):
            session.clients.remove(client)
            if session.clients:
                continue
            if not session.is_empty and len(lingering) < SESSIONS_LINGERING_MAX:
                lingering.append(session.identifier)
            else:
                self._drop(session)
        client.sessions.clear()
        self._lingering.update(dict.fromkeys(lingering, self._clock.monotonic() + SESSION_LINGER_S))

    # --- sessions ----------------------------------------------------------------------------------

    def begin_session(self, client: Client) -> Session:
        """Begin a session of this connection; EngineBusy when it, its user, or all together have too many."""
        self.expire()
        if len(client.sessions) >= SESSIONS_PER_CONNECTION_MAX:
            raise EngineBusy(
                f"{SESSIONS_PER_CONNECTION_MAX} puts are in progress on this connection, the most that one may "
                "have; try again when some have ended"
            )
        self._session_shares.take(client.user)
        session = self._session_type(SessionId(new_id16()), client.user)
        self._sessions[session.identifier] = session
        self._use(client, session)
        return session

    def join_session(self, client: Client, identifier: SessionId) -> Session:
        """Use a session from this connection; SessionLost when it has ended."""
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

    def end_session(self, identifier: SessionId) -> None:
        """End a session and its holds; does nothing if it has ended already."""
        session = self._sessions.get(identifier)
        if session is not None:
            self._drop(session)

    def _use(self, client: Client, session: Session) -> None:
        client.sessions[session.identifier] = session
        session.clients.append(client)

    def _drop(self, session: Session) -> None:
        is_lingering = session.identifier in self._lingering
        assert not (session.clients and is_lingering), "only a session without a connection lingers"
        del self._sessions[session.identifier]
        for client in session.clients:
            del client.sessions[session.identifier]
        session.clients.clear()
        self._lingering.pop(session.identifier, None)
        self._session_shares.give_back(session.user)
        session.ended()

    def is_open(self, session: Session) -> bool:
        """Return True if the session has not ended; called in the step in which a name is bound."""
        return session.identifier in self._sessions

    def expire(self) -> int:
        """Drop lingering sessions whose time is over; returns their number."""
        now = self._clock.monotonic()
        over: list[SessionId] = []
        for identifier, expires_at in self._lingering.items():
            if expires_at > now:
                break
            over.append(identifier)
        for identifier in over:
            self._drop(self._sessions[identifier])
        return len(over)

    def sessions(self) -> list[Session]:
        """Return all sessions; some may end while the caller waits for something."""
        self.expire()
        return list(self._sessions.values())

    def hold(self, session: Session, birth: Birth) -> None:
        """Keep a chunk for the session."""
        session.held.add(birth)
        self.keep(birth)

    def keep(self, birth: Birth) -> None:
        """Keep gc from freeing a chunk in this cycle, if it is marking: the chunk was found present or referred to."""
        if self.barrier is not None:
            self.barrier.add(birth)

    def held_sets(self) -> Iterator[NumberSet]:
        """Yield the births held by each session that exists at the first step, even if it has ended since."""
        yield from [session.held for session in self._sessions.values()]

    # --- leases ------------------------------------------------------------------------------------

    def lease(self, client: Client, blob: BlobId) -> int:
        """Keep a blob for the connection; EngineBusy when it, its user, or all together hold too many."""
        if len(client.leases) >= LEASES_PER_CONNECTION_MAX:
            raise EngineBusy(f"{LEASES_PER_CONNECTION_MAX} objects are open on this connection; close some")
        self._lease_shares.take(client.user)
        number = client.number()
        assert number not in client.leases, "a number is used once"
        client.leases[number] = blob
        return number

    def end_leases(self, client: Client, leases: Iterable[int]) -> None:
        """End leases; numbers that are not leases of the connection are ignored."""
        for lease in leases:
            if client.leases.pop(lease, None) is not None:
                self._lease_shares.give_back(client.user)

    def leased_blobs(self) -> Iterator[BlobId]:
        """Yield the blobs open for reading now."""
        for client in list(self._clients.values()):
            yield from list(client.leases.values())

    def statistics(self) -> dict[str, int]:
        """Counts for `lake status`."""
        self.expire()
        return {"connections": len(self._clients), "sessions": len(self._sessions), "leases": len(self._lease_shares)}

    def gateways(self) -> list[dict[str, Any]]:
        """Return the counts of connected S3 gateways for `lake status`, by address; the first GATEWAYS_LISTED_MAX."""
        noted = ((client.gateway, client.peer) for client in self._clients.values())
        found = [{"peer": peer, **msgspec.structs.asdict(note)} for note, peer in noted if note is not None]
        return sorted(found, key=lambda gateway: (gateway["url"], gateway["process"]))[:GATEWAYS_LISTED_MAX]
