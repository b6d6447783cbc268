"""Requests about put sessions and leases, which keep content alive for a client."""

from __future__ import annotations

from engine.requests.handlers import handles
from engine.sessions.references import Client, References
from lakefs.errors import InvalidArgument, RequestTooLarge
from lakefs.ids import SessionId
from lakefs.limits import LEASES_PER_CONNECTION_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class SessionRequests:
    """Handlers of the requests that begin and end sessions."""

    def __init__(self, references: References) -> None:
        self._references = references

    @handles(m.SessionOpen)
    async def session_open(self, client: Client, request: m.SessionOpen) -> Reply:
        if request.domain != 0:
            raise InvalidArgument(f"there is no domain {request.domain}")
        return Reply(m.SessionOpened(self._references.begin_session(client).identifier))

    @handles(m.SessionJoin)
    async def session_join(self, client: Client, request: m.SessionJoin) -> Reply:
        self._references.join_session(client, SessionId(request.session))
        return Reply(m.Done())

    @handles(m.SessionEnd)
    async def session_end(self, client: Client, request: m.SessionEnd) -> Reply:
        self._references.end_session(SessionId(request.session))
        return Reply(m.Done())


class LeaseRequests:
    """Handler of the request that ends leases."""

    def __init__(self, references: References) -> None:
        self._references = references

    @handles(m.CloseLeases)
    async def close_leases(self, client: Client, request: m.CloseLeases) -> Reply:
        if len(request.leases) > LEASES_PER_CONNECTION_MAX:
            raise RequestTooLarge(f"{len(request.leases)} leases; a connection has {LEASES_PER_CONNECTION_MAX}")
        self._references.end_leases(client, request.leases)
        return Reply(m.Done())
