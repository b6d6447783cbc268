"""Bugs for `tests.sim.planted` in stamps: they turn too late, or do not cover all that an answer rests on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import msgspec

from engine.format.columns import Insertions
from engine.format.layouts import Mutation, Table
from engine.metadata.metadata_store import Metadata
from engine.metadata.stamps import Stamps
from engine.requests.table import Service
from engine.tables.merged_tables import TableView
from engine.tables.recorded_view import RecordedView


def turn_when_durable() -> AbstractContextManager[Any]:
    """Turn stamps when the group of a change is durable, not when the change becomes visible."""
    original = Metadata.use_stamps

    def use_stamps(self: Metadata, stamps: Stamps | None) -> None:
        original(self, stamps)
        assert stamps is not None
        late: list[Mutation | Insertions] = []
        after_group, turn = self._committer.after_group, stamps.turn

        def turn_late() -> None:
            turn(late)
            late.clear()
            after_group()

        self._committer.turn_stamps = late.extend
        self._committer.after_group = turn_late

    return mock.patch.object(Metadata, "use_stamps", use_stamps)


def leave_nodes_out() -> AbstractContextManager[Any]:
    """Do not note nodes that an answer was read from."""
    original = RecordedView.get

    def get(self: RecordedView, table: Table, key: bytes) -> bytes | None:
        return TableView.get(self, table, key) if table is Table.NODES else original(self, table, key)

    return mock.patch.object(RecordedView, "get", get)


def answer_before_durable() -> AbstractContextManager[Any]:
    """Answer with stamps before the state that was read is durable."""
    original = Service.serve

    async def serve(self: Service, client: Any, request: Any, body: Any, descriptors: Any) -> Any:
        if getattr(request, "stamps", False):
            request = msgspec.structs.replace(request, durable=False)
        return await original(self, client, request, body, descriptors)

    return mock.patch.object(Service, "serve", serve)


def never_end() -> AbstractContextManager[Any]:
    """Leave stamps standing when the engine has stopped."""
    return mock.patch.object(Stamps, "end", return_value=None)
