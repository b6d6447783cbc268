"""Exchanges of names on a mount: refusals before any request, and the inode table after one."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from pyfuse3 import RENAME_EXCHANGE, FUSEError

from fuse.names.changes import Changes
from fuse.names.lookups import Lookups
from fuse.names.renames import Renames
from fuse.state.inodes import Inode
from tests.unit.fuse.names.slow_mount import SlowMount


def known(mount: SlowMount, parent: Inode, name: str, key: str, node: int) -> Inode:
    """Put a name into the store; return its inode."""
    mount.put(key, node)
    return mount.table.adopt(parent, name, node, mount.owner.shown(mount.records[key]), 0.0)


def test_an_engine_of_an_earlier_release_is_not_asked_to_exchange_names() -> None:
    mount = SlowMount()
    mount.engine = cast(Any, SimpleNamespace(hello=SimpleNamespace(features=0)))
    root = mount.table.root
    for name in ("a", "b"):
        known(mount, root, name, name, ord(name))
    lookups = Lookups(mount)
    renames = Renames(mount, lookups, Changes(mount, lookups))
    with pytest.raises(FUSEError) as raised:
        trio.run(renames.rename, root, "a", root, "b", RENAME_EXCHANGE)
    assert raised.value.errno == errno.EINVAL


def test_an_exchange_moves_both_inodes_and_all_that_is_below_them() -> None:
    mount = SlowMount()
    table = mount.table
    folder = known(mount, table.root, "f", "f/", 10)
    inner = known(mount, folder, "in", "f/in", 11)
    outer = known(mount, table.root, "d", "d/", 12)
    file = known(mount, outer, "x", "d/x", 13)
    gone = known(mount, outer, "y", "d/y", 14)
    table.exchange((table.root, "f", folder), (outer, "x", file))
    assert [str(table.name_of(inode)) for inode in (folder, inner, file)] == ["bkt/d/x/", "bkt/d/x/in", "bkt/f"]
    assert [table.by_node(inode.node) for inode in (folder, inner, file)] == [folder, inner, file]
    assert (table.root.children["f"], outer.children["x"], outer.children["y"]) == (file, folder, gone)
    # What another client has put there since has lost its name: the store has just said so.
    other = known(mount, table.root, "f", "f", 15)
    table.exchange((table.root, "f", file), (outer, "x", folder))
    assert (table.root.children["f"], outer.children["x"], other.parent) == (folder, file, None)
