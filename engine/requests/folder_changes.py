"""Folders of changed names: their state before and after the change, sent with its result (`FolderChange`).

    folders = FoldersBefore(txn, names)             # in the decision, before it changes anything
    changes = folders.after(metadata)               # in the step of the decision, after it

A client that has all names of a folder goes on knowing them, if nobody else has changed one since: the change time
before its own change is the one it knows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.format.layouts import Table, changed_at, node_key
from engine.metadata.metadata_store import Metadata
from engine.namespace.buckets import find_bucket
from engine.namespace.conditions import folder_node
from engine.namespace.keys import lookup_path
from engine.namespace.tree import find_place
from engine.tables.recorded_view import RecordedView
from engine.tables.views import View
from lakefs.errors import UserError
from lakefs.ids import NodeId
from lakefs.wire.messages import FolderChange, NameResult

Folder = tuple[str, str]
"""A folder by its bucket and its key there, which is empty or ends with `/`."""


class FoldersBefore:
    """The folders of some names as they are before a change; each is looked up once."""

    def __init__(self, view: View, names: Sequence[tuple[str, str]]) -> None:
        """`names`: bucket and key of each name that is to change; a folder's key ends with `/`."""
        self._folders = [_folder_of(*name) for name in names]
        self._before = {folder: _state(view, folder)[1] for folder in dict.fromkeys(self._folders)}

    def after(self, metadata: Metadata) -> list[FolderChange]:
        """Return what became of the folder of each name; called without a checkpoint since the decision."""
        found: dict[Folder, FolderChange] = {}
        with metadata.recorded_view() as view:
            for folder, before_ns in self._before.items():
                node, after_ns = _state(view, folder)
                stamps = view.take_stamps() if isinstance(view, RecordedView) else b""
                found[folder] = FolderChange(node, before_ns, after_ns, stamps)
        return [found[folder] for folder in self._folders]

    def with_changes(self, metadata: Metadata, results: Sequence[NameResult]) -> list[NameResult]:
        """Return the results, each with what became of its name's folder."""
        changes = self.after(metadata)
        return [msgspec.structs.replace(result, folder=change) for result, change in zip(results, changes, strict=True)]


def _folder_of(bucket: str, key: str) -> Folder:
    path = key.removesuffix("/")
    return bucket, path[: path.rfind("/") + 1]


def _state(view: View, folder: Folder) -> tuple[NodeId, int]:
    """Return node and change time of a folder; zeros if it does not exist."""
    try:
        bucket = find_bucket(view, folder[0])
    except UserError:
        return NodeId(0), 0
    node = bucket.node
    if folder[1]:
        node = folder_node(find_place(view, node, lookup_path(folder[1]) + b"-"))  # of any name in it
    record = view.get(Table.NODES, node_key(node)) if node else None
    return (NodeId(0), 0) if record is None else (node, changed_at(record))
