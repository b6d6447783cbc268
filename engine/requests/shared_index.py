"""The request that sends the shared index to clients, which then look chunks up by themselves."""

from __future__ import annotations

from engine.requests.handlers import handles
from engine.sessions.references import Client
from engine.store.store import Store
from lakefs.errors import PermissionDenied, UnsupportedVersion
from lakefs.shared_index.table_format import entries_max
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class SharedIndexRequests:
    """Handler of the request for the shared index."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @handles(m.OpenSharedIndex)
    async def open(self, client: Client) -> Reply:
        if not (client.descriptors and client.trusted):
            raise PermissionDenied("the shared index is shared on the Unix socket only; use Locate instead")
        index = self._store.shared_index
        if index is None:
            raise UnsupportedVersion("this engine shares no shared index; use Locate instead")
        index.counts.lent += 1
        return Reply(m.SharedIndexOpened(entries_max(index.table.capacity)), descriptors=[index.backing.descriptor])
