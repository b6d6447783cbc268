"""The journal: what is appended is read back, and a torn write is not confused with damage."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from engine.format.layouts import GROUP_HEADER, PAGE, RECORD_HEADER, Mutation, Op, StoreIdentity, Table
from engine.format.sizes import MetadataSizes
from engine.journal.reader import (
    DamagedAt,
    Group,
    JournalEnd,
    decode_records,
    find_end,
    journal_path,
    list_journal,
    read_groups,
)
from engine.journal.writer import Journal, start_journal
from lakefs.errors import DiskFailed, JournalDamaged, LakeError, StoreFull, StoreReadOnly, StoreUnusable
from lakefs.ids import BootId, Sequence
from lakefs.limits import JOURNAL_FILL_BYTES
from tests.sim.world.clock import SIM_EPOCH_NS, SimClock
from tests.sim.world.disk import SimDisk

STORE = b"s" * 16
IDENTITY = StoreIdentity(STORE, BootId(b"b" * 16))
SMALL_FILES = MetadataSizes(journal_file=32 << 10, journal_fill=16 << 10)


class FixedClock(SimClock):
    def wall_ns(self) -> int:
        return SIM_EPOCH_NS


def new_disk(seed: int = 0) -> SimDisk:
    disk = SimDisk(seed)
    disk.make_folder("journal")
    disk.sync_folder("")
    return disk


def start(disk: SimDisk, *, unclean: bool = False, sizes: MetadataSizes = SMALL_FILES) -> tuple[Journal, JournalEnd]:
    """Open the journal as recovery does."""
    end = find_end(disk, list_journal(disk, STORE), Sequence(0))
    journal = start_journal(
        disk,
        IDENTITY,
        FixedClock(),
        end_sequence=end.sequence,
        carried=end.last if unclean else None,
        files=end.files,
        sizes=sizes,
    )
    return journal, end


def body(number: int, padding: int = 0) -> bytes:
    key, value = b"key %d" % number, b"v" * padding
    return RECORD_HEADER.pack(Table.NAMES, Op.PUT, len(key), len(value)) + key + value


def append(journal: Journal, first: int, last: int, padding: int = 0) -> None:
    for number in range(first, last + 1):
        journal.append_blocking(Sequence(number), body(number, padding), 1)


def groups(disk: SimDisk, after: int = 0) -> list[Group]:
    files = list_journal(disk, STORE)
    end = find_end(disk, files, Sequence(0))
    return list(read_groups(disk, files, Sequence(after), end.sequence))


def test_groups_are_read_back_in_order_over_rotated_files() -> None:
    disk = new_disk()
    journal, _ = start(disk)
    append(journal, 1, 40, padding=3000)
    journal.close()
    assert len(list_journal(disk, STORE)) > 3
    found = groups(disk)
    assert [group.sequence for group in found] == list(range(1, 41))
    assert all(group.body == body(group.sequence, 3000) for group in found)
    assert all(group.offset % PAGE == 0 for group in found)
    assert {group.time_ns for group in found} == {SIM_EPOCH_NS}
    assert [group.sequence for group in groups(disk, after=33)] == list(range(34, 41))


def test_an_open_journal_is_zero_filled_ahead_and_a_closed_one_is_cut() -> None:
    disk = new_disk()
    journal, _ = start(disk, sizes=MetadataSizes())
    append(journal, 1, 1)
    file = disk.open(journal_path(Sequence(1)), read_only=True)
    assert file.size() == file.allocated_bytes() == JOURNAL_FILL_BYTES
    append(journal, 2, 3)
    assert file.size() == JOURNAL_FILL_BYTES
    journal.close()
    assert file.size() == 4 * PAGE


@pytest.mark.parametrize("how", ["a later file", "another file in its place", "its file is gone", "no lock file"])
def test_a_journal_that_another_process_writes_to_takes_nothing_more(how: str) -> None:
    disk = new_disk()
    lock = disk.lock("lock")
    journal, _ = start(disk)
    append(journal, 1, 3)
    path = journal_path(Sequence(1))
    if how == "no lock file":
        disk.unlink("lock")
        append(journal, 4, 4)  # the folder is locked still, and the file can be continued
        append_fails(journal, 5, "lock was removed", padding=SMALL_FILES.journal_file)
    elif how == "a later file":
        start_journal(disk, IDENTITY, FixedClock(), end_sequence=Sequence(3), carried=None, files=()).close()
        append_fails(journal, 4, "another process has begun journal/0000000000000004")
    else:
        disk.unlink(path)
        if how == "another file in its place":
            start_journal(disk, IDENTITY, FixedClock(), end_sequence=Sequence(0), carried=None, files=()).close()
        append_fails(journal, 4, "taken .*away")
    append_fails(journal, 6, "an earlier write")
    lock.close()


def append_fails(journal: Journal, number: int, why: str, padding: int = 0) -> None:
    with pytest.raises(StoreReadOnly, match=why):
        append(journal, number, number, padding)


def test_groups_that_a_later_file_supersedes_never_happened() -> None:
    disk = new_disk()
    journal, _ = start(disk)
    append(journal, 1, 5)
    journal.close()
    other = start_journal(disk, IDENTITY, FixedClock(), end_sequence=Sequence(3), carried=None, files=())
    other.append_blocking(Sequence(4), body(400), 1)
    other.close()
    assert [group.body for group in groups(disk)] == [body(1), body(2), body(3), body(400)]


def test_an_unclean_start_carries_the_last_group_into_the_new_file() -> None:
    disk = new_disk()
    journal, _ = start(disk)
    append(journal, 1, 3)
    journal, end = start(disk, unclean=True)
    assert end.sequence == 3
    append(journal, 4, 4)
    found = groups(disk)
    assert [group.sequence for group in found] == [1, 2, 3, 4]
    assert [group.path for group in found[2:]] == [journal_path(Sequence(3))] * 2
    assert found[2].body == body(3)


def test_a_crash_loop_keeps_the_last_group_and_the_number_of_files() -> None:
    disk = new_disk()
    journal, _ = start(disk)
    append(journal, 1, 3)
    for _ in range(4):
        start(disk, unclean=True)
        assert [group.sequence for group in groups(disk)] == [1, 2, 3]
    assert len(list_journal(disk, STORE)) == 2


def test_empty_files_behind_the_end_are_removed() -> None:
    disk = new_disk()
    journal, _ = start(disk)
    append(journal, 1, 2)
    journal.begin_file(Sequence(3))  # power lost right after a rotation
    journal, end = start(disk, unclean=True)
    assert end.last is not None
    assert end.last.sequence == 2
    assert [file.first_sequence for file in list_journal(disk, STORE)] == [1, 2]
    append(journal, 3, 3)
    assert [group.sequence for group in groups(disk)] == [1, 2, 3]


def test_a_torn_last_group_is_told_from_damage_by_what_follows() -> None:
    disk = new_disk()
    journal, _ = start(disk)
    append(journal, 1, 4)
    files = list_journal(disk, STORE)
    place = groups(disk)[2].offset
    last = groups(disk)[3].offset
    for bit in (0, 1, 2):
        disk.flip_bit(files[0].path, last + GROUP_HEADER.size, bit)
    end = find_end(disk, files, Sequence(0))
    assert (end.sequence, end.torn) == (3, True)
    with pytest.raises(JournalDamaged, match="group 4 was durable"):
        find_end(disk, files, Sequence(4))
    for bit in (0, 1, 2):
        disk.flip_bit(files[0].path, last + GROUP_HEADER.size, bit)
    disk.flip_bit(files[0].path, place, 0)
    with pytest.raises(DamagedAt) as caught:
        find_end(disk, files, Sequence(0))
    damage = caught.value.damage
    assert (damage.path, damage.offset, damage.sequence) == (files[0].path, place, 3)


@pytest.mark.parametrize("at", [0, 9, 20, GROUP_HEADER.size - 1, GROUP_HEADER.size, GROUP_HEADER.size + 12])
def test_one_flipped_bit_of_the_last_group_is_damage_and_no_torn_write(at: int) -> None:
    disk = new_disk()
    journal, _ = start(disk)
    append(journal, 1, 4)
    files = list_journal(disk, STORE)
    disk.flip_bit(files[0].path, groups(disk)[3].offset + at, 5)
    with pytest.raises(DamagedAt, match="a bit of the group") as caught:
        find_end(disk, files, Sequence(0))
    assert caught.value.damage.sequence == 4


def _with_one_byte_in_its_last_sector(last: bytes) -> tuple[SimDisk, str, int]:
    """Make a journal whose last group is a sector long, and this byte; return its file and the group's offset, too."""
    disk = new_disk()
    journal, _ = start(disk)
    append(journal, 1, 3)
    key = b"key"
    value = b"v" * (512 - GROUP_HEADER.size - RECORD_HEADER.size - len(key)) + last
    record = RECORD_HEADER.pack(Table.NAMES, Op.PUT, len(key), len(value)) + key + value
    journal.append_blocking(Sequence(4), record, 1)
    [file] = list_journal(disk, STORE)
    return disk, file.path, groups(disk)[3].offset


def test_a_last_sector_with_a_single_bit_that_was_not_written_is_a_torn_write() -> None:
    disk, path, offset = _with_one_byte_in_its_last_sector(b"\x20")
    disk.flip_bit(path, offset + 512, 5)  # like the zeros that were there before
    end = find_end(disk, list_journal(disk, STORE), Sequence(0))
    assert (end.sequence, end.torn) == (3, True)


@pytest.mark.parametrize(("last", "at"), [(b"\x21", 512), (b"\x20", 200), (b"\0", 200), (b"\0", 512)])
def test_a_flipped_bit_in_a_group_with_a_short_last_sector_is_damage(last: bytes, at: int) -> None:
    disk, path, offset = _with_one_byte_in_its_last_sector(last)
    disk.flip_bit(path, offset + at, 5)
    with pytest.raises(JournalDamaged, match="a bit of the group"):
        find_end(disk, list_journal(disk, STORE), Sequence(0))


def test_the_end_of_a_zero_filled_file_is_not_torn() -> None:
    disk = new_disk()
    journal, _ = start(disk)
    append(journal, 1, 4)
    assert not find_end(disk, list_journal(disk, STORE), Sequence(0)).torn


def test_a_body_flip_in_the_middle_is_found_when_the_group_is_read() -> None:
    disk = new_disk()
    journal, _ = start(disk)
    append(journal, 1, 4, padding=9000)
    group = groups(disk)[1]
    disk.flip_bit(group.path, group.offset + 5000, 7)
    assert [g.sequence for g in groups(disk, after=2)] == [3, 4]
    with pytest.raises(JournalDamaged, match="group 2: the group does not match its checksum"):
        groups(disk)


def test_a_gap_between_files_is_damage() -> None:
    disk = new_disk()
    journal, _ = start(disk)
    append(journal, 1, 40, padding=3000)
    files = list_journal(disk, STORE)
    disk.unlink(files[1].path)
    with pytest.raises(JournalDamaged, match="no group where one was written"):
        groups(disk)
    disk.unlink(files[0].path)
    with pytest.raises(JournalDamaged, match="are in no file"):
        groups(disk)


@pytest.mark.parametrize(
    ("offset", "error"), [(0, JournalDamaged), (16, JournalDamaged), (24, JournalDamaged), (62, JournalDamaged)]
)
def test_a_damaged_file_header_is_never_a_torn_write(offset: int, error: type[LakeError]) -> None:
    disk = new_disk()
    start(disk)
    disk.flip_bit(journal_path(Sequence(1)), offset, 1)
    with pytest.raises(error):
        list_journal(disk, STORE)


def test_files_of_another_store_and_renamed_files_are_refused() -> None:
    disk = new_disk()
    start(disk)
    with pytest.raises(StoreUnusable, match="another store"):
        list_journal(disk, b"o" * 16)
    disk.rename(journal_path(Sequence(1)), journal_path(Sequence(9)))
    with pytest.raises(StoreUnusable, match="renamed"):
        list_journal(disk, STORE)


def test_after_a_failed_sync_nothing_is_appended_any_more() -> None:
    disk = new_disk()
    journal, _ = start(disk)
    append(journal, 1, 1)
    disk.fail_next("sync_data", DiskFailed("the device failed"))
    with pytest.raises(DiskFailed):
        append(journal, 2, 2)
    syncs = disk.operation_count
    with pytest.raises(StoreReadOnly, match="the device failed"):
        append(journal, 3, 3)
    assert disk.operation_count == syncs
    journal.close()


def test_a_full_disk_is_met_by_the_reserve() -> None:
    disk = new_disk()
    released: list[int] = []

    def release() -> bool:
        released.append(1)
        return True

    files = start_journal(
        disk,
        IDENTITY,
        FixedClock(),
        end_sequence=Sequence(0),
        carried=None,
        files=(),
        release_reserve=release,
        sizes=SMALL_FILES,
    )
    for operation in ("allocate", "pwrite"):
        # Neither a whole step of zeros nor the group alone has room; then the reserve makes some.
        disk.fail_next(operation, StoreFull("no room"), path="journal")
        disk.fail_next(operation, StoreFull("no room"), path="journal")
        append(files, len(released) * 10 + 1, len(released) * 10 + 10)
    assert len(released) == 2
    assert [group.sequence for group in groups(disk)] == list(range(1, 21))


def test_a_full_disk_without_reserve_breaks_the_journal_for_good() -> None:
    disk = new_disk()
    journal, _ = start(disk)
    disk.fail_next("allocate", StoreFull("no room"), path="journal")
    append(journal, 1, 1)
    disk.fail_next("allocate", StoreFull("no room"), path="journal")
    disk.fail_next("allocate", StoreFull("no room"), path="journal")
    with pytest.raises(StoreFull):
        append(journal, 2, 2)
    with pytest.raises(StoreReadOnly):
        append(journal, 1, 1)


@pytest.mark.parametrize("seed", range(60))
def test_a_power_loss_at_any_operation_leaves_a_prefix_with_everything_acknowledged(seed: int) -> None:
    disk = new_disk(seed)
    acknowledged = 0
    for _ in range(6):
        disk.crash_at = disk.operation_count + disk.rng.randrange(1, 40)
        try:
            journal, end = start(disk, unclean=True)
            assert end.sequence >= acknowledged
            for number in range(end.sequence + 1, end.sequence + 30):
                append(journal, number, number, padding=disk.rng.choice((0, 700, 9000)))
                acknowledged = number
        except BaseException as error:
            if type(error).__name__ != "SimCrashed":
                raise
        disk = disk.crash() if disk.rng.randrange(4) else disk.kill()
    found = groups(disk)
    assert [group.sequence for group in found] == list(range(1, len(found) + 1))
    assert len(found) >= acknowledged


MUTATIONS = st.lists(
    st.tuples(st.sampled_from(list(Op)), st.sampled_from(list(Table)), st.binary(max_size=40), st.binary(max_size=90)),
    max_size=30,
)


def encoded(mutations: list[Mutation]) -> bytes:
    return b"".join(
        RECORD_HEADER.pack(table, op, len(key), len(value)) + key + value for op, table, key, value in mutations
    )


@given(MUTATIONS)
def test_records_decode_to_what_was_encoded(mutations: list[Mutation]) -> None:
    assert decode_records(encoded(mutations), len(mutations)) == mutations


@given(MUTATIONS, st.data())
def test_records_that_are_cut_or_miscounted_are_damage(mutations: list[Mutation], data: st.DataObject) -> None:
    whole = encoded(mutations)
    with pytest.raises(JournalDamaged):
        decode_records(whole, len(mutations) + 1)
    if whole:
        with pytest.raises(JournalDamaged):
            decode_records(whole[: data.draw(st.integers(0, len(whole) - 1))], len(mutations))


@pytest.mark.parametrize("head", [bytes([200, 1]), bytes([4, 9])])
def test_an_unknown_table_or_op_is_refused_by_number(head: bytes) -> None:
    with pytest.raises(StoreUnusable, match=r"200|op 9"):
        decode_records(head + bytes(6), 1)


def test_a_disk_without_room_for_another_file_lets_the_journal_go_on_in_its_own() -> None:
    disk = new_disk()
    journal, _ = start(disk)
    append(journal, 1, 3)
    disk.fail_next("open", StoreFull("planted"), path="journal/")
    append(journal, 4, 40)
    assert [group.sequence for group in groups(disk)] == list(range(1, 41))
