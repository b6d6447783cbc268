"""The superblock: created once, replaced as a whole, and refused by name when it is not understood."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from crc32c import crc32c

from engine.format.features import (
    FEATURE_NOTES,
    FEATURE_TEXT_AT,
    FEATURE_TEXT_HEADER,
    KNOWN_READ_ONLY,
    Feature,
    ReadOnlyFeature,
)
from engine.format.layouts import PAGE, SUPERBLOCK
from engine.host.local_disk import LocalDisk
from engine.journal.writer import start_journal
from engine.superblock.superblock import (
    COPY_PATH,
    LOCK_PATH,
    SUPERBLOCK_PATH,
    Superblock,
    open_store,
    parse_superblock,
    read_head,
    read_superblock,
    write_one,
    write_superblock,
)
from lakefs.errors import StoreDamaged, StoreLocked, StoreUnusable
from lakefs.findings import Finding
from lakefs.ids import Sequence, new_id16
from tests.sim.world.clock import SIM_EPOCH_NS, SimClock
from tests.sim.world.disk import SimCrashed, SimDisk


class FixedClock(SimClock):
    def wall_ns(self) -> int:
        return SIM_EPOCH_NS


CLOCK = FixedClock()


def created(disk: SimDisk) -> Superblock:
    store = open_store(disk, CLOCK, create=True)
    store.lock.close()
    return store.superblock


def rewrite(disk: SimDisk, superblock: Superblock) -> None:
    write_superblock(disk, superblock)


def test_a_superblock_reads_back_as_it_was_written() -> None:
    disk = SimDisk(1)
    superblock = created(disk)
    assert read_superblock(disk) == superblock
    assert superblock.clean_sequence == 0
    assert superblock.created_ns == SIM_EPOCH_NS
    assert superblock.identity_inode == disk.stat(LOCK_PATH).inode
    changed = replace(superblock, clean_sequence=None, domains=(*superblock.domains, new_id16()))
    rewrite(disk, changed)
    assert read_superblock(disk) == changed


def test_opening_gives_a_new_boot_id_and_keeps_the_store() -> None:
    disk = SimDisk(2)
    first = created(disk)
    store = open_store(disk, CLOCK, create=True)
    assert not store.created
    assert store.superblock.store_id == first.store_id
    assert store.superblock.engine_id == first.engine_id
    assert store.superblock.boot_id != first.boot_id
    assert store.superblock.identity.boot_tag == store.superblock.boot_id[:8]


def test_of_two_starts_the_one_with_the_lock_goes_on() -> None:
    disk = SimDisk(3)
    first = open_store(disk, CLOCK, create=True)
    with pytest.raises(StoreLocked):
        open_store(disk, CLOCK, create=True)
    first.lock.close()
    second = open_store(disk, CLOCK, create=True)
    assert second.superblock.store_id == first.superblock.store_id


def test_a_store_is_not_created_unless_asked() -> None:
    disk = SimDisk(4)
    with pytest.raises(StoreUnusable, match="no store"):
        open_store(disk, CLOCK, create=False)
    assert disk.list_folder("") == []


OFFSETS = [0, 9, 20, 130, 1100, 1161]


@pytest.mark.parametrize("offset", OFFSETS)
def test_a_bit_flip_anywhere_opens_the_store_from_the_copy_and_says_so(offset: int) -> None:
    disk = SimDisk(5)
    first = created(disk)
    disk.flip_bit(SUPERBLOCK_PATH, offset, 2)
    store = open_store(disk, CLOCK, create=True)
    (warning,) = store.warnings
    assert "opened from superblock.copy" in warning
    assert not store.created
    assert (store.superblock.store_id, store.superblock.engine_id) == (first.store_id, first.engine_id)
    rewrite(disk, store.superblock)
    store.lock.close()
    again = open_store(disk, CLOCK, create=False)
    assert again.warnings == ()
    assert again.superblock.boot_before == store.superblock.boot_id


@pytest.mark.parametrize("offset", OFFSETS)
def test_a_bit_flip_in_both_is_refused_the_lock_given_up_and_nothing_changed(offset: int) -> None:
    disk = SimDisk(5)
    created(disk)
    for path in (SUPERBLOCK_PATH, COPY_PATH):
        disk.flip_bit(path, offset, 2)
    before = read_head(disk, SUPERBLOCK_PATH)
    for _ in range(2):
        with pytest.raises(StoreDamaged, match="put one of them back") as refused:
            open_store(disk, CLOCK, create=True)
        assert refused.value.finding is Finding.SUPERBLOCKS_LOST
    assert read_head(disk, SUPERBLOCK_PATH) == before


def test_the_copy_of_another_store_is_not_used() -> None:
    disk = SimDisk(5)
    identity = created(disk).identity
    start_journal(disk, identity, CLOCK, end_sequence=Sequence(0), carried=None, files=()).close()
    write_one(disk, COPY_PATH, created(SimDisk(6)).pack())
    open_store(disk, CLOCK, create=True).lock.close()  # the superblock is good: the copy does not matter
    disk.flip_bit(SUPERBLOCK_PATH, 130, 2)
    with pytest.raises(StoreDamaged, match="not the one of the journal") as refused:
        open_store(disk, CLOCK, create=True)
    assert refused.value.finding is Finding.STORE_MIXED


def test_the_copy_that_a_later_release_wrote_is_refused_by_its_version() -> None:
    disk = SimDisk(5)
    page = bytearray(created(disk).pack())
    page[8:12] = (7).to_bytes(4, "little")
    page[1160:1164] = crc32c(bytes(page[:1160])).to_bytes(4, "little")
    write_one(disk, COPY_PATH, bytes(page))
    disk.flip_bit(SUPERBLOCK_PATH, 130, 2)
    with pytest.raises(StoreUnusable, match="version 7"):
        open_store(disk, CLOCK, create=True)


def test_a_short_superblock_is_damage() -> None:
    for length in (0, 8, SUPERBLOCK.size - 1):
        with pytest.raises(StoreDamaged):
            parse_superblock(b"LAKESUPR".ljust(length, b"\0")[:length])


def test_another_format_version_is_refused_by_number() -> None:
    page = bytearray(created(SimDisk(6)).pack())
    page[8:12] = (7).to_bytes(4, "little")
    page[1160:1164] = crc32c(bytes(page[:1160])).to_bytes(4, "little")
    with pytest.raises(StoreUnusable, match="version 7"):
        parse_superblock(bytes(page))


@pytest.mark.parametrize(
    ("bits", "names"),
    [(Feature.ENCRYPTION, "encryption"), (Feature.MORE_DOMAINS | 1 << 40, "more_domains, bit 40"), (1 << 63, "bit 63")],
)
def test_an_unknown_incompatible_feature_is_refused_by_name(bits: int, names: str) -> None:
    disk = SimDisk(7)
    rewrite(disk, replace(created(disk), incompat_features=int(bits)))
    with pytest.raises(StoreUnusable, match=names):
        open_store(disk, CLOCK, create=True)


def test_an_unknown_read_only_feature_opens_for_reading_and_a_compatible_one_is_ignored() -> None:
    disk = SimDisk(8)
    rewrite(disk, replace(created(disk), read_only_features=1 << 5, compat_features=1 << 9))
    store = open_store(disk, CLOCK, create=True)
    assert "bit 5" in store.read_only
    assert store.superblock.compat_features == 1 << 9


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_feature_of_a_later_release_is_refused_in_the_words_that_it_left(is_whole: bool) -> None:
    disk = SimDisk(8)
    page = replace(created(disk), read_only_features=1 << 5 | 1).pack()
    text = "0 multipart uploads, known from release 0.1.0 on\n5 objects in two places, known from release 0.7.0 on\n"
    noted = FEATURE_TEXT_HEADER.pack(len(text), crc32c(text.encode())) + text.encode()
    if not is_whole:
        noted = noted.replace(b"0.7.0", b"0.8.0")
    for path in (COPY_PATH, SUPERBLOCK_PATH):
        write_one(disk, path, (page[:FEATURE_TEXT_AT] + noted).ljust(PAGE, b"\0"))
    store = open_store(disk, CLOCK, create=True)
    named = "objects in two places, known from release 0.7.0 on" if is_whole else "bit 5"
    assert store.read_only == (
        f"the store uses features that this release does not know: {named}; open it with a newer release"
    )


def test_the_text_of_features_is_of_those_that_are_set_and_is_not_needed() -> None:
    disk = SimDisk(8)
    rewrite(disk, replace(created(disk), read_only_features=KNOWN_READ_ONLY, next_space=77))
    found = read_superblock(disk)
    assert found.next_space == 77
    assert sorted(found.feature_text) == [0, 1, 2, 3]
    assert all("known from release 0.1.0 on" in said for said in found.feature_text.values())
    page = read_head(disk, SUPERBLOCK_PATH)
    assert parse_superblock(page[:FEATURE_TEXT_AT].ljust(PAGE, b"\0")) == found
    assert len(FEATURE_NOTES) == len(ReadOnlyFeature)


def test_a_copy_gets_a_new_engine_id_with_a_warning() -> None:
    disk = SimDisk(9)
    original = created(disk)
    rewrite(disk, replace(original, identity_inode=original.identity_inode + 1))
    store = open_store(disk, CLOCK, create=True)
    assert store.warnings
    assert store.superblock.engine_id != original.engine_id
    assert store.superblock.identity_inode == original.identity_inode


def test_a_copy_of_a_cluster_member_is_refused() -> None:
    disk = SimDisk(10)
    original = created(disk)
    rewrite(disk, replace(original, identity_inode=99_999, cluster_id=new_id16()))
    with pytest.raises(StoreUnusable, match="is a copy of a member of the lake"):
        open_store(disk, CLOCK, create=True)


def test_a_superblock_is_never_created_beside_the_files_of_a_store() -> None:
    disk = SimDisk(11)
    created(disk)
    disk.open("journal/0000000000000001.journal", create=True).close()
    disk.unlink(SUPERBLOCK_PATH)
    with pytest.raises(StoreDamaged, match="superblock is missing"):
        open_store(disk, CLOCK, create=True)


@pytest.mark.parametrize("seed", range(8))
def test_a_first_start_cut_short_anywhere_is_begun_again(seed: int) -> None:
    for crash_at in range(1, 12):
        disk = SimDisk(seed, crash_at=crash_at)
        with pytest.raises(SimCrashed):
            open_store(disk, CLOCK, create=True)
            raise SimCrashed
        disk = disk.crash()
        created(disk)
        read_superblock(disk)
        assert disk.exists("journal")


@pytest.mark.parametrize("seed", range(8))
def test_a_superblock_that_a_killed_process_did_not_make_durable_is_so_before_anything_rests_on_it(seed: int) -> None:
    for crash_at in range(6, 12):
        disk = SimDisk(seed, crash_at=crash_at)
        with suppress(SimCrashed):
            open_store(disk, CLOCK, create=True)
        disk = disk.kill()
        superblock = created(disk)
        assert read_superblock(disk.crash()).store_id == superblock.store_id


@pytest.mark.parametrize("seed", range(8))
def test_a_replacement_cut_short_leaves_the_old_or_the_new_one(seed: int) -> None:
    for crash_at in range(1, 7):
        disk = SimDisk(seed)
        old = created(disk)
        new = replace(old, clean_sequence=77)
        disk.crash_at = disk.operation_count + crash_at
        with suppress(SimCrashed):
            write_superblock(disk, new)
        assert read_superblock(disk.crash()) in (old, new)


def test_a_disk_of_unknown_size_is_refused_before_anything_is_made_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalDisk, "total_bytes", lambda _: 0)
    with pytest.raises(StoreUnusable, match=f"the file system of {tmp_path} does not say how large it is"):
        open_store(LocalDisk(tmp_path), CLOCK, create=True)
    assert list(tmp_path.iterdir()) == []
