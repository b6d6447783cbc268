"""What can be told of a journal some of which is gone: whether its newest part is there, and where a part begins.

For recovery, which must not take what is left for the whole, and for repair, which reads groups behind unreadable ones
when the index has those.  All functions block; nothing is changed on disk.
"""

from __future__ import annotations

from engine.format.layouts import PAGE
from engine.journal.reader import (
    Beginning,
    DamagedAt,
    GroupPlace,
    JournalDamage,
    JournalFile,
    good_headers,
    missing,
)
from lakefs.ids import Sequence
from lakefs.ports import Disk


def refuse_lost_boot(files: tuple[JournalFile, ...], end: Sequence, boot: bytes) -> None:
    """JournalDamaged when the store was not stopped cleanly and what its last boot wrote is in no file.

    `boot` is the superblock's, whose journal file was durable before that superblock was.  The file is there, or one
    of a later boot that saw the same superblock and took its place.
    """
    if not files or not any(boot) or not any(files[-1].tag_before):
        return
    if not any(file.boot_tag == boot[:8] or file.tag_before == boot[:4] for file in files):
        raise DamagedAt(missing(Sequence(end + 1), "the file that the last start began is missing"))


def place_behind(disk: Disk, entry: JournalFile, after: Sequence) -> Beginning:
    """Where group `after` + 1 begins in the file that holds it, or the end, by the headers that can be read.

    JournalDamaged when neither that group's nor the one's before can.
    """
    if after < entry.first_sequence:
        return Beginning(entry.path, PAGE, entry.first_sequence)
    file = disk.open(entry.path, read_only=True)
    try:
        found: dict[Sequence, list[GroupPlace]] = {}
        for header in good_headers(file, entry):
            if header.sequence in (after, after + 1):
                found.setdefault(header.sequence, []).append(header)
    finally:
        file.close()
    for sequence in (after, Sequence(after + 1)):
        if len(headers := found.get(sequence, [])) == 1:  # of two, one is content that poses as a header
            at = headers[0].next_offset if sequence == after else headers[0].offset
            return Beginning(entry.path, at, Sequence(after + 1))
    raise DamagedAt(JournalDamage(entry.path, PAGE, Sequence(after + 1), "it cannot be told where it begins"))


def highest_readable(disk: Disk, entry: JournalFile) -> Sequence:
    """The highest sequence of a group's header in the file, wherever it lies; 0 when there is none."""
    file = disk.open(entry.path, read_only=True)
    try:
        found = [header.sequence for header in good_headers(file, entry)]
        return max(found, default=Sequence(0))
    finally:
        file.close()
