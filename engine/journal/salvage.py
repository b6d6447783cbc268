"""Reads a journal of which a part may be missing or unreadable.

After an unclean stop the journal's end is certain only if the file that the last boot began, or a later one, exists.
Recovery checks this; else it would take the remaining files for the whole journal.  Without that file, JournalDamaged.
Repair also finds the groups behind unreadable ones that the index has.  All functions block.  Nothing is changed on
disk.
"""

from __future__ import annotations

from contextlib import closing

from engine.format.layouts import PAGE
from engine.journal.reader import (
    Beginning,
    DamagedAt,
    GroupPlace,
    JournalDamage,
    JournalEnd,
    JournalFile,
    check_groups,
    find_end,
    good_headers,
    missing,
)
from lakefs.ids import Sequence
from lakefs.ports import Disk


def checked_end(
    disk: Disk, files: tuple[JournalFile, ...], after: Sequence, durable: Sequence, boot: bytes
) -> JournalEnd:
    """Return the journal's end, after reading and decoding every group behind `after`; else as `certain_end`."""
    end = certain_end(disk, files, durable, boot)
    check_groups(disk, files, after, end.sequence)
    return end


def certain_end(disk: Disk, files: tuple[JournalFile, ...], durable: Sequence, boot: bytes) -> JournalEnd:
    """Return the journal's end.  JournalDamaged when it lies before `durable`, or the last boot's file is gone.

    `boot` as in `refuse_lost_boot`.
    """
    end = find_end(disk, files, durable)
    assert end.sequence >= durable, "the journal ends behind every group known to be durable"
    refuse_lost_boot(files, end.sequence, boot)
    return end


def refuse_lost_boot(files: tuple[JournalFile, ...], end: Sequence, boot: bytes) -> None:
    """Raise JournalDamaged when, after an unclean stop, the journal file that the last boot began is missing.

    `boot` is the boot id in the superblock, or zeros or nothing after a clean stop.  That boot's journal file was
    durable before the superblock.  Either it exists, or one of a later boot that saw the same superblock and replaced
    it.
    """
    if not files or not any(boot) or not any(files[-1].tag_before):
        return
    if not any(file.boot_tag == boot[:8] or file.tag_before == boot[:4] for file in files):
        raise DamagedAt(missing(Sequence(end + 1), "the file that the last start began is missing"))


def place_behind(disk: Disk, entry: JournalFile, after: Sequence) -> Beginning:
    """Find the offset of group `after` + 1, or of the end, in the file that holds it, from the readable headers.

    JournalDamaged when neither that group's header nor the one before it can be read.
    """
    if after < entry.first_sequence:
        return Beginning(entry.path, PAGE, entry.first_sequence)
    found: dict[Sequence, list[GroupPlace]] = {}
    with closing(disk.open(entry.path, read_only=True)) as file:
        for header in good_headers(file, entry):
            if header.sequence in (after, after + 1):
                found.setdefault(header.sequence, []).append(header)
    for sequence in (after, Sequence(after + 1)):
        if len(headers := found.get(sequence, [])) == 1:  # with two, one is content that looks like a header
            at = headers[0].next_offset if sequence == after else headers[0].offset
            return Beginning(entry.path, at, Sequence(after + 1))
    raise DamagedAt(JournalDamage(entry.path, PAGE, Sequence(after + 1), "it cannot be told where it begins"))


def highest_readable(disk: Disk, entry: JournalFile) -> Sequence:
    """Return the highest sequence of any good group header in the file; 0 when there is none."""
    with closing(disk.open(entry.path, read_only=True)) as file:
        return max((header.sequence for header in good_headers(file, entry)), default=Sequence(0))
