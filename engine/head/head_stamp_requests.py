"""Requests about stamps at a head: clients on its machine open them, and StatNames has them."""

from __future__ import annotations

import msgspec

from engine.head.head_clients import HeadClient
from engine.head.head_stamps import HeadStamps
from engine.head.names_link import NamesLink
from engine.requests.handlers import handles
from engine.requests.local_clients import require_local
from lakefs.errors import UnsupportedVersion
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class HeadStampRequests:
    """Handlers of OpenStamps and StatNames."""

    def __init__(self, stamps: HeadStamps | None) -> None:
        self._stamps = stamps

    @handles(m.OpenStamps)
    async def open_stamps(self, client: HeadClient) -> Reply:
        require_local(client, "stamps are shared on the Unix socket only; ask for each answer instead")
        if self._stamps is None:
            raise UnsupportedVersion("this head has no stamps; ask for each answer instead")
        return Reply(m.StampsOpened(), descriptors=[self._stamps.descriptor])

    @handles(m.StatNames)
    async def stat_names(self, client: HeadClient, request: m.StatNames) -> Reply:
        if request.stamps and not await may_ask_for_stamps(self._stamps, client):
            request = msgspec.structs.replace(request, stamps=False)
        return Reply(await client.names.call(request))


async def may_ask_for_stamps(stamps: HeadStamps | None, client: HeadClient) -> bool:
    """Return True if answers for a client may have stamps now.  Errors of its connection to the names.

    Over several shards each is looked at when it is asked (`engine.head.client_names`).
    """
    return await may_have_stamps(stamps, client.first) if client.shards is None else stamps is not None


async def may_have_stamps(stamps: HeadStamps | None, link: NamesLink) -> bool:
    """Return True if the answers on a link have stamps now.  Errors of its connection."""
    return stamps is not None and await stamps.join(link)
