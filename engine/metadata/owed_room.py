"""The disk room that the present records of a store still need: for its journal, index and next checkpoint."""

from __future__ import annotations

from typing import NamedTuple

from engine.format.sizes import MetadataSizes
from engine.metadata.checkpoint import Checkpoint
from engine.tables.lmdb_index import IndexPages
from engine.tables.overlay import Overlay


class JournalRoom(NamedTuple):
    """The length of the journal since the last checkpoint, and that at which the next one is due."""

    written_bytes: int
    due_bytes: int


def owed_bytes(
    pages: IndexPages, overlay: Overlay, checkpoint: Checkpoint | None, sizes: MetadataSizes, journal: JournalRoom
) -> int:
    """Return an upper bound of the room.

    The journal grows until the next checkpoint is due.  The index writes each changed page to a new place: all its
    pages, or one for each entry of a round; twice, because pages freed by a round are free for the next but one.  A
    checkpoint is written whole beside the last one, and is no longer than its sources.
    """
    changed = min(max(overlay.entry_count, sizes.overlay_entries_apply), pages.used)
    index_bytes = max(0, 2 * changed - pages.free) * pages.page_bytes + overlay.nbytes
    checkpoint_bytes = pages.used * pages.page_bytes
    if checkpoint is not None:
        checkpoint_bytes = min(checkpoint_bytes, checkpoint.file_bytes + journal.written_bytes)
    return max(0, journal.due_bytes - journal.written_bytes) + index_bytes + checkpoint_bytes
