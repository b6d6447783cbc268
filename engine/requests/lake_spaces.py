"""The request by which heads of a lake give a member the spaces whose keys it keeps."""

from __future__ import annotations

from engine.keyed.lake_spaces import check_listed, compare, set_spaces
from engine.keyed.spaces import list_spaces
from engine.requests.answers import Decisions
from engine.requests.handlers import handles
from engine.requests.shards import check_epoch_number, member_of
from engine.sessions.references import Client
from engine.store.store import Store
from engine.tables.views import Transaction
from lakefs.errors import InvalidArgument
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class LakeSpaceRequests:
    """Handler of SetSpaces."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keyed = store.keyed
        self._decisions = Decisions(store.metadata)

    @handles(m.SetSpaces)
    async def set_spaces(self, client: Client, request: m.SetSpaces) -> Reply:
        shards = member_of(self._store).shards
        check_epoch_number(request.epoch)
        if not 1 <= request.version <= m.EPOCH_MAX:
            raise InvalidArgument("a list of spaces has a version")
        check_listed(request.spaces)

        def decide(txn: Transaction) -> None:
            shards.check_epoch(request.epoch)
            if request.version >= self._keyed.lake_version:
                set_spaces(txn, request.spaces)
                self._keyed.lake_version = request.version

        shards.check_epoch(request.epoch)
        if request.version >= self._keyed.lake_version:
            differs, grows = await self._decisions.look(lambda view: compare(view, request.spaces), durable=False)
            if differs:
                async with self._store.features.using_spaces():
                    self._keyed.used.set()
                    await self._decisions.change(client, decide, grows=grows)
            else:
                self._keyed.lake_version = request.version
        spaces = await self._decisions.look(list_spaces)
        return Reply(m.Spaces(spaces, self._keyed.lake_version))
