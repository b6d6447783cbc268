"""Removes trees: all objects and folders below a name, as steps over `LakeSteps`, with counts.

Each name is removed atomically; a removal that was interrupted leaves the rest, and what it has counted is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from lakefs.errors import FolderNotEmpty
from lakefs.lake.lake_steps import LakeSteps
from lakefs.names import Name
from lakefs.steps.steps import Steps


@dataclass
class RemovedNames:
    """Counts of what was removed."""

    objects: int = 0
    folders: int = 0
    size_bytes: int = 0

    @property
    def count(self) -> int:
        """Objects and folders."""
        return self.objects + self.folders


def remove_below(lake: LakeSteps, folder: Name, removed: RemovedNames) -> Steps[None]:
    """Remove all below a folder or in a bucket, and the folder: the objects, then folders that stay when empty."""
    yield from _remove_objects(lake, folder, removed)
    # A listing has parents before their children: those that are not empty yet wait, innermost last.
    waiting: list[Name] = []
    after = ""
    while True:
        page = yield from lake.list_page(str(folder), after=after, folders=True)
        for entry in reversed(page.entries):
            one = Name(folder.bucket, entry.key)
            try:
                removed.folders += yield from lake.remove_many([one])
            except FolderNotEmpty:
                waiting.append(one)
        after = page.next_after
        if not after:
            break
    for one in sorted(waiting, key=lambda one: one.key, reverse=True):
        removed.folders += yield from lake.remove_many([one])


def _remove_objects(lake: LakeSteps, folder: Name, removed: RemovedNames) -> Steps[None]:
    after = ""
    while True:
        page = yield from lake.list_page(str(folder), after=after)
        objects = [entry for entry in page.entries if not entry.key.endswith("/")]
        if objects:
            removed.objects += yield from lake.remove_many([Name(folder.bucket, entry.key) for entry in objects])
            removed.size_bytes += sum(entry.size_bytes for entry in objects)
        after = page.next_after
        if not after:
            return
