"""Keeps the puts in progress at a head current: what a session holds is offered again when gc has gone on.

In the cycle of generation g members free what was touched before g - 1 and has no name.  A put of hours has no name
until its end, and its source may be a stream that cannot be sent again.  So a head looks every
30 s which sessions are of an earlier generation than it knows, and lets them begin anew in that one, chunk by chunk.

Rules kept here:
- A session is renewed as long as it lasts, and no longer: chunks of one that has ended are garbage two cycles later.
- What could not be offered now is offered before it is bound, as ever (`engine.head.head_binds`).
- Memory: none of its own.  One session at a time.
"""

from __future__ import annotations

from typing import Final

import structlog
import trio

from engine.head.head_chunks import HeadChunks
from engine.head.head_clients import NOT_BEGUN, HeadSession
from engine.sessions.references import References
from lakefs.errors import LakeError

LOOK_EVERY_S: Final = 30.0
"""20 looks in a cycle of gc; what sessions hold outlives one whole cycle."""
_log: Final = structlog.get_logger(__name__)


class SessionRenewal:
    """Renews the sessions of one head."""

    def __init__(self, references: References, chunks: HeadChunks) -> None:
        self._references = references
        self._chunks = chunks

    async def run(self) -> None:
        """Renew sessions until cancelled."""
        while True:
            await trio.sleep(LOOK_EVERY_S)
            for session in self._references.sessions():
                assert isinstance(session, HeadSession)
                await self._renew(session)

    async def _renew(self, session: HeadSession) -> None:
        generation = self._chunks.generation
        if session.is_over or session.is_empty or not NOT_BEGUN < session.generation < generation:
            return
        session.begin_anew(generation)
        try:
            await self._chunks.prepare(session, [*session.earlier])
        except LakeError as error:
            _log.warning("a put in progress could not be renewed", reason=error.message)
