"""The lake's own mount or engine with one planted bug of what they decide upon: the checks have to see each.

python -m tests.mount.planted_conditions BUG --server ADDRESS mount ... : `lake mount` with the bug
python -m tests.mount.planted_conditions BUG serve ...                  : `lake serve` with the bug
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from cli.main import main as lake_main
from engine.namespace import binding, conditions, names, node_changes, removal, tree
from engine.requests.folder_changes import FolderChanges
from engine.store import names_store
from fuse import storing
from fuse.names import changes
from fuse.names.lookups import Lookups
from fuse.open_file import OpenFile
from fuse.state import decided_upon
from fuse.state.inodes import Inode
from fuse.state.mount import Mount
from lakefs.errors import PreconditionFailed
from lakefs.wire.messages import NO_CONDITION, Condition
from tests.planting import plant

# --- the mount acts upon what nobody has confirmed -------------------------------------------------------


def _kept_for_ever() -> None:
    """A kept answer is acted on whether or not its stamps stand."""
    plant(Mount, "stands", lambda mount, kept: kept is not None)


def _confirms_nothing() -> None:
    """A change rests on what the kernel may be given."""
    real = Lookups.look

    async def look(lookups: Lookups, parent: Inode, name: str, *, confirm: bool = False) -> Any:
        return await real(lookups, parent, name)

    plant(Lookups, "look", look)


def _listing_for_ever() -> None:
    """A folder that was known whole once is known whole for ever."""
    plant(Mount, "names_stand", lambda mount, folder: bool(folder.names_ns))
    plant(Mount, "names_are_fresh", lambda mount, folder: bool(folder.names_ns))
    plant(Inode, "doubt_names", lambda inode: None)


def _no_conditions() -> None:
    """Changes are sent without conditions."""
    _send(lambda condition: NO_CONDITION)


def _no_folder() -> None:
    """Changes do not say upon which folder they were decided."""
    _send(lambda condition: _with(condition, folder=0))


def _no_node() -> None:
    """Changes say upon which folder they were decided, and not what they replace."""
    _send(lambda condition: _with(condition, node=0, blob=b"", absent=False, alone=False, gone=0))


def _send(change: Callable[[Condition], Condition]) -> None:
    def condition(**fields: Any) -> Condition:
        return change(Condition(**fields))

    plant(changes, "Condition", condition)
    plant(decided_upon, "Condition", condition)


def _with(condition: Condition, **fields: Any) -> Condition:
    return Condition(**{name: getattr(condition, name) for name in condition.__struct_fields__} | fields)


def _appends_over() -> None:
    """Appended bytes are committed at the end that the mount believed in."""
    real = decided_upon.upon

    def upon(inode: Inode, found: Any, opened_node: int, *, is_appended: bool) -> Condition:
        return real(inode, found, opened_node, is_appended=False)

    plant(storing, "upon", upon)


def _appended_twice() -> None:
    """A commit that is sent again does not know its own first success."""

    async def has_appended(*_: object) -> bool:
        return False

    plant(storing, "_has_appended", has_appended)


def _taken_as_own() -> None:
    """Bytes that another mount has appended are taken for the first success of a commit that is sent again."""

    async def has_appended(*_: object) -> bool:
        return True

    plant(storing, "_has_appended", has_appended)


def _brought_back() -> None:
    """A file that lost its name is made again by its commit."""

    async def look_again(*_: object) -> None:
        return None

    real = decided_upon.upon

    def upon(inode: Inode, found: Any, opened_node: int, *, is_appended: bool) -> Condition:
        condition = real(inode, found, opened_node, is_appended=is_appended)
        return NO_CONDITION if found is None else condition

    plant(storing, "look_again", look_again)
    plant(storing, "upon", upon)


def _ends_in_silence() -> None:
    """The close of a file that lost its name says nothing."""
    real = OpenFile.commit

    async def commit(file: OpenFile, *, durable: bool) -> None:
        try:
            await real(file, durable=durable)
        except PreconditionFailed:
            return

    plant(OpenFile, "commit", commit)


# --- the engine does not hold what it was sent -----------------------------------------------------------


def _engine_ignores_all() -> None:
    """The engine does not look at conditions."""
    for module in (binding, conditions, names, node_changes, removal):
        plant(module, "check_condition", lambda *_: None)


def _engine_ignores_places() -> None:
    """The engine looks at the node, not at the folder."""
    plant(conditions, "_failed_of_place", lambda *_: "")


def _engine_ignores_nodes() -> None:
    """The engine looks at the folder, not at the node."""
    plant(conditions, "_failed_of_node", lambda *_: "")


def _folder_stays() -> None:
    """A name that is older than its folder's last change does not change the folder's record."""
    plant(tree, "with_change_time", lambda record, *_: record)


MOUNT_BUGS: Final[dict[str, Callable[[], None]]] = {
    "kept-for-ever": _kept_for_ever,
    "confirms-nothing": _confirms_nothing,
    "listing-for-ever": _listing_for_ever,
    "no-conditions": _no_conditions,
    "no-folder": _no_folder,
    "no-node": _no_node,
    "appends-over": _appends_over,
    "appended-twice": _appended_twice,
    "taken-as-own": _taken_as_own,
    "brought-back": _brought_back,
    "ends-in-silence": _ends_in_silence,
}
ENGINE_BUGS: Final[dict[str, Callable[[], None]]] = {
    "engine-ignores-all": _engine_ignores_all,
    "engine-ignores-places": _engine_ignores_places,
    "engine-ignores-nodes": _engine_ignores_nodes,
    "folder-stays": _folder_stays,
}


def _earlier_engine() -> None:
    """The engine is of a release that knows conditions on nodes alone, and says nothing of folders."""
    plant(names_store, "FEATURE_PLACES", 0)
    plant(names_store, "FEATURE_WATCH_ALL", 0)
    plant(conditions, "_failed_of_place", lambda *_: "")
    plant(names, "check_condition", lambda *_: None)
    plant(FolderChanges, "told", lambda changes, metadata, results: results)
    real = conditions._failed_of_node
    plant(conditions, "_failed_of_node", lambda upon, present: real(replace(upon, blob=b""), present))


EARLIER: Final = {"earlier-engine": _earlier_engine}
"""An engine without a bug."""


def lake_with(bug: str) -> list[str]:
    """Return the command `lake` with a bug."""
    return [sys.executable, "-m", "tests.mount.planted_conditions", bug]


def main() -> None:
    """Plant the bug that the first argument names, and run `lake` with the others."""
    (MOUNT_BUGS | ENGINE_BUGS | EARLIER)[sys.argv.pop(1)]()
    lake_main()


if __name__ == "__main__":
    main()
