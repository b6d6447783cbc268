"""Requests about the process that serves: greeting, state, sync, notes of gateways."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from engine.requests.handlers import handles
from engine.sessions.references import Client
from engine.store.names_store import NamesStore
from lakefs.errors import InvalidArgument
from lakefs.limits import GATEWAY_REASON_CHARACTERS_MAX, GATEWAY_REASONS_MAX, GATEWAY_URL_CHARACTERS_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

MoreStatus = Callable[[], Awaitable[dict[str, Any]]]
"""Returns what a status says beside that of the store; JSON-able."""


class AboutRequests:
    """Handlers of requests that every process serves."""

    def __init__(self, store: NamesStore, more_status: MoreStatus | None = None) -> None:
        self._store = store
        self._more_status = more_status

    @handles(m.Hello)
    async def _hello(self, client: Client) -> Reply:
        return Reply(self._store.hello(descriptors=client.descriptors))

    @handles(m.Ping)
    async def _ping(self) -> Reply:
        return Reply(m.Done())

    @handles(m.Status)
    async def _status(self) -> Reply:
        found = await self._store.status()
        if self._more_status is not None:
            found |= await self._more_status()
        return Reply(m.StatusReply(json.dumps(found)))

    @handles(m.NoteGateway)
    async def _note_gateway(self, client: Client, request: m.NoteGateway) -> Reply:
        check_note(request)
        client.gateway = request
        return Reply(m.Done())

    @handles(m.Sync)
    async def _sync(self) -> Reply:
        await self._store.metadata.sync()
        return Reply(m.Done())


def check_note(note: m.NoteGateway) -> None:
    """Raise InvalidArgument for counts and texts that no gateway has."""
    texts = [(note.url, GATEWAY_URL_CHARACTERS_MAX)]
    texts += [(reason, GATEWAY_REASON_CHARACTERS_MAX) for reason in note.passed_on]
    if len(note.passed_on) > GATEWAY_REASONS_MAX or any(
        len(text) > most or not (text.isascii() and text.isprintable()) for text, most in texts
    ):
        raise InvalidArgument(
            f"a gateway has an address of at most {GATEWAY_URL_CHARACTERS_MAX} characters, and at most "
            f"{GATEWAY_REASONS_MAX} reasons of {GATEWAY_REASON_CHARACTERS_MAX} each, all printable ASCII"
        )
    if min(note.process, note.answers, note.repeated, *note.passed_on.values()) < 0:
        raise InvalidArgument("a gateway's counts are not negative")
