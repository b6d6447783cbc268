"""Requests about access keys.

Every served connection presented the store's token, or arrived over a Unix socket that checked its owner, or lives in
the engine's own process.  So each may ask for secrets, as a gateway has to.  A reply holds secrets only if the request
sets `secrets`.
"""

from __future__ import annotations

from engine.namespace.access_keys import (
    create_access_key,
    find_access_key,
    list_access_keys,
    new_key_pair,
    remove_access_key,
)
from engine.requests.decisions import Decisions
from engine.requests.handlers import handles
from engine.sessions.references import Client
from engine.store.store import Store
from engine.tables.views import Transaction, View
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class AccessKeyRequests:
    """Handlers of the requests about access keys."""

    def __init__(self, store: Store) -> None:
        self._decisions = Decisions(store.metadata)
        self._clock = store.clock

    @handles(m.AccessKeyCreate)
    async def create(self, client: Client, request: m.AccessKeyCreate) -> Reply:
        key_pair = new_key_pair()

        def decide(txn: Transaction) -> m.AccessKeyStat:
            now_ns = self._clock.wall_ns()
            return create_access_key(txn, key_pair, request.buckets, request.read_only, now_ns)

        return Reply(m.AccessKeys([await self._decisions.change(client, decide)]))

    @handles(m.AccessKeyList)
    async def list_(self, request: m.AccessKeyList) -> Reply:
        def look(view: View) -> m.AccessKeys:
            if request.access_key:
                found = find_access_key(view, request.access_key, with_secret=request.secrets)
                return m.AccessKeys([] if found is None else [found])
            return m.AccessKeys(*list_access_keys(view, request.after, request.limit, with_secret=request.secrets))

        return Reply(await self._decisions.look(look))

    @handles(m.AccessKeyRemove)
    async def remove(self, client: Client, request: m.AccessKeyRemove) -> Reply:
        await self._decisions.change(client, lambda txn: remove_access_key(txn, request.access_key), grows=False)
        return Reply(m.Done())
