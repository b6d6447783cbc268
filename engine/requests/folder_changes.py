"""Folders of changed names: their state before and after the change, sent with its result (`FolderChange`).

    folders = FolderChanges(txn, names, conditions)     # in the decision, before it changes anything
    folders.decided(txn)                                # in the decision, after that
    results = folders.told(metadata, results)           # in the step of the decision: its stamps have turned

A client that has all names of a folder goes on knowing them, if nobody else has changed one since: the change time
before its own change is the one it knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from engine.format.layouts import Table, changed_at, node_key
from engine.namespace.buckets import find_bucket
from engine.namespace.conditions import folder_node, node_of
from engine.namespace.keys import lookup_path
from engine.namespace.tree import find_place
from engine.tables.recorded_view import STAMPED, Record, StampsOf
from engine.tables.views import View
from lakefs.errors import UserError
from lakefs.ids import NodeId, Sequence as Group
from lakefs.wire.messages import Condition, FolderChange, NameResult

Folder = tuple[str, str]
"""A folder by its bucket and its key there, which is empty or ends with `/`."""


class FolderChanges:
    """The folders of the names of one request, each looked up once before the change and once after it."""

    def __init__(self, view: View, names: Sequence[tuple[str, str]], conditions: Sequence[Condition] = ()) -> None:
        """`names`: bucket and key of each name that is to change; a folder's key ends with `/`.

        `conditions`: those of the names, or none.  A folder that one gives is not looked up by its path: if it is
        another, the change is refused.
        """
        self._folders = [_folder_of(*name) for name in names]
        self._given = dict(zip(self._folders, (node_of(condition.folder) for condition in conditions), strict=False))
        self._before = {folder: _before_ns(view, folder, self._given.get(folder)) for folder in self._folders}
        self._after: dict[Folder, tuple[NodeId, int, list[Record]]] = {}

    def decided(self, view: View) -> None:
        """Look at the folders after the change."""
        for folder in self._before:
            noting = _Noting(view)
            node, changed_ns = _state(noting, folder)
            self._after[folder] = node, changed_ns, noting.records
            if node and self._given.get(folder, 0) not in (0, node):  # one name gave it, and another was changed
                self._before[folder] = 0

    def told(self, stamps_of: StampsOf | None, results: Sequence[NameResult]) -> list[NameResult]:
        """Return the results, each with what became of its name's folder, and its stamps if there are any."""
        told = {
            folder: FolderChange(node, self._before[folder], after_ns, b"" if stamps_of is None else stamps_of(records))
            for folder, (node, after_ns, records) in self._after.items()
        }
        return [
            msgspec.structs.replace(result, folder=told[folder])
            for result, folder in zip(results, self._folders, strict=True)
        ]


class _Noting:
    """A view that notes the records by which a folder was found; a decision's own view cannot be a `RecordedView`."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.records: list[Record] = []

    @property
    def sequence(self) -> Group:
        return self._view.sequence

    def get(self, table: Table, key: bytes) -> bytes | None:
        assert table in STAMPED, "a folder is found by records with stamps"
        self.records.append((table, key))
        return self._view.get(table, key)

    def present(self, table: Table, keys: list[bytes]) -> set[bytes]:
        return {key for key in keys if self.get(table, key) is not None}

    def scan(self, table: Table, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        raise AssertionError("a folder is found by keys")


def _folder_of(bucket: str, key: str) -> Folder:
    path = key.removesuffix("/")
    return bucket, path[: path.rfind("/") + 1]


def _before_ns(view: View, folder: Folder, given: NodeId | None) -> int:
    return _changed_ns(view, given) if given else _state(view, folder)[1]


def _state(view: View, folder: Folder) -> tuple[NodeId, int]:
    """Return node and change time of a folder; zeros if it does not exist."""
    try:
        bucket = find_bucket(view, folder[0])
    except UserError:
        return NodeId(0), 0
    node = bucket.node
    if folder[1]:
        node = folder_node(find_place(view, node, lookup_path(folder[1]) + b"-"))  # of any name in it
    changed_ns = _changed_ns(view, node) if node else 0
    return (node, changed_ns) if changed_ns else (NodeId(0), 0)


def _changed_ns(view: View, node: NodeId) -> int:
    """Return the change time of a node; 0 if it does not exist."""
    record = view.get(Table.NODES, node_key(node))
    return 0 if record is None else changed_at(record)
