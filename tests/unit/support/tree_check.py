"""The invariants of the tree of names, checked over a whole store; run after every test that changes names."""

from __future__ import annotations

from engine.format.layouts import Node, NodeKind, Table, node_key, unpack_name, unpack_node
from engine.namespace.version_keys import bucket_of, group_of, group_of_key, is_null, order_key, path_of
from engine.namespace.versions import unpack_version
from engine.tables.views import View
from lakefs.ids import ROOT_NODE, NodeId
from lakefs.limits import COMPONENT_SPLIT_BYTES

_END = b"\xff" * 9


def check_tree(view: View) -> list[bytes]:
    """Return all keys of objects and of folders with a blob, as `bucket/key`, in the table's order, depth first.

    Raises AssertionError when a rule of `engine.namespace.tree` does not hold.
    """
    nodes = {int.from_bytes(key, "big"): unpack_node(value) for key, value in view.scan(Table.NODES, b"\0", _END)}
    named: dict[int, bytes] = {ROOT_NODE: b""}
    keys: list[bytes] = []

    def walk(parent: NodeId, path: bytes) -> None:
        start, end = node_key(parent), node_key(NodeId(parent + 1))
        names = list(view.scan(Table.NAMES, start, end))
        node = nodes[parent]
        bare = node.kind is NodeKind.HIDDEN or (node.kind is NodeKind.FOLDER and node.blob is None)
        assert names or not bare, f"{path!r} is empty and nobody made it"
        for key, value in names:
            kind, node_id = unpack_name(value)
            name = key[8:]
            assert node_id in nodes, f"{path + name!r} has no node"
            assert node_id not in named, f"{path + name!r} and {named[node_id]!r} are one node"
            named[node_id] = path + name
            assert nodes[node_id].kind is kind
            assert (kind is NodeKind.FOLDER) == name.endswith(b"/")
            assert (kind is NodeKind.HIDDEN) == (len(name) == COMPONENT_SPLIT_BYTES and not name.endswith(b"/"))
            assert b"/" not in name[:-1]
            target = nodes[node_id].attributes.symlink_target
            assert bool(target) == (kind is NodeKind.SYMLINK)
            assert not target or (nodes[node_id].blob is None and nodes[node_id].size_bytes == len(target))
            if kind not in (NodeKind.FOLDER, NodeKind.HIDDEN):
                keys.append(path + name)
                continue
            if kind is NodeKind.FOLDER and nodes[node_id].blob is not None:
                keys.append(path + name)
            walk(node_id, path + name)

    walk(ROOT_NODE, b"")
    old = _check_versions(view, nodes)
    assert not set(named) & old, "a node has a name and is an old version"
    assert set(named) | old == set(nodes), f"nodes without a name: {sorted(set(nodes) - set(named) - old)}"
    name_count = sum(1 for _ in view.scan(Table.NAMES, b"\0", _END))
    assert name_count == len(named) - 1, "names under nodes that are not there"
    buckets = {int.from_bytes(key, "big") for key, _ in view.scan(Table.BUCKETS, b"\0", _END)}
    assert buckets == {node for node, path in named.items() if path.count(b"/") == 1 and path.endswith(b"/")}
    return keys


def _check_versions(view: View, nodes: dict[int, Node]) -> set[int]:
    """Return the nodes that are old versions; raise AssertionError if a rule of `engine.namespace.versions` fails."""
    old: set[int] = set()
    for key, value in view.scan(Table.VERSIONS, b"\0", _END):
        record = unpack_version(value)
        path = path_of(key) or record.key
        assert group_of(bucket_of(key), path) == group_of_key(key), f"{path!r} under the key of another"
        assert node_key(bucket_of(key)) in dict(view.scan(Table.BUCKETS, b"\0", _END))
        assert record.node not in old, f"two versions of {path!r} are node {record.node}"
        old.add(record.node)
        node = nodes[record.node]
        number = node.attributes.version
        assert (number <= 0) == is_null(key)
        assert record.order == (abs(number) or record.node)
        assert is_null(key) or order_key(group_of_key(key), record.order) == key
        assert node.kind in (NodeKind.OBJECT, NodeKind.SYMLINK)
        assert not path.endswith(b"/")
    return old
