"""Records of machines, and how a machine opens its lake to others, joins one, and gets a new device."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from engine.host.clock import SystemClock
from engine.host.local_disk import LocalDisk
from engine.lake.folders import check_devices, look_at_folders
from engine.lake.joining import Place, add_folder, open_to_machines
from engine.lake.machine import (
    MACHINE_FILE,
    MachineRecord,
    clients_token,
    keep_machine,
    machine_of,
    made,
    new_machine,
    read_machine,
    token_in,
    write_machine,
)
from engine.lake.member_processes import MemberPlan
from engine.lake.plan import LakePlan
from engine.superblock.secret_files import CLUSTER_TOKEN_FILE, TOKEN_FILE
from engine.superblock.superblock import open_store
from lakefs.cluster.protection import Protection
from lakefs.errors import AlreadyExists, InvalidArgument, LakeError, PreconditionFailed, StoreUnusable

LAKE = bytes(range(16))
TWO = Protection(2, 1)
HERE = Place("10.0.0.4:9100")


def make_member(folder: Path, lake: bytes = LAKE) -> None:
    """Make the store of a member, without opening it."""
    opened = open_store(LocalDisk(folder), SystemClock(), create=True, cluster_id=lake)
    opened.lock.close()


def folders_in(place: Path, *names: str) -> list[Path]:
    for name in names:
        (place / name).mkdir()
    return [place / name for name in names]


# --- records -----------------------------------------------------------------------------------------


def test_a_record_and_a_token_are_kept_private_and_only_written_when_they_differ(tmp_path: Path) -> None:
    record = new_machine(LAKE)
    write_machine(tmp_path, record, "secret")
    before = {name: os.stat(tmp_path / name).st_ino for name in (MACHINE_FILE, CLUSTER_TOKEN_FILE)}
    assert (read_machine(tmp_path), token_in([tmp_path / "none", tmp_path])) == (record, "secret")
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in before} == {0o600}
    write_machine(tmp_path, record, "secret")
    assert {name: os.stat(tmp_path / name).st_ino for name in before} == before
    write_machine(tmp_path, made(record, TWO), "another")
    assert read_machine(tmp_path) == made(record, TWO)
    assert token_in([tmp_path]) == "another"


def test_the_token_of_clients_outlives_devices_and_is_that_of_most_folders(tmp_path: Path) -> None:
    first, second, third, empty = folders = folders_in(tmp_path, "first", "second", "third", "empty")
    for folder in (first, second, third):
        write_machine(folder, new_machine(LAKE))
    token = clients_token(folders)
    assert [(folder / TOKEN_FILE).read_text().strip() for folder in (first, second, third)] == [token] * 3
    assert (third / TOKEN_FILE).stat().st_mode & 0o777 == 0o600
    assert not list(empty.iterdir()), "the disk of that folder may not be mounted"
    (first / TOKEN_FILE).unlink()
    assert clients_token([empty, first, third, second]) == token, "a new device, in another place"
    for content in ("of another machine\n", ""):
        (first / TOKEN_FILE).write_text(content)
        assert clients_token(folders) == token
        assert (first / TOKEN_FILE).read_text().strip() == token


def test_a_folder_that_cannot_be_written_to_keeps_the_others_from_nothing(tmp_path: Path) -> None:
    [good] = folders_in(tmp_path, "good")
    record = new_machine(LAKE)
    keep_machine([tmp_path / "missing", good], record)
    assert read_machine(good) == record


@pytest.mark.parametrize("content", [b"", b"{", b'{"machine": 1}', b'{"machine":"a","lake":"zz"}', b"\xff" * 100])
def test_a_record_that_cannot_be_read_is_refused_by_name_and_others_are_used(tmp_path: Path, content: bytes) -> None:
    damaged, good = folders_in(tmp_path, "damaged", "good")
    (damaged / MACHINE_FILE).write_bytes(content)
    with pytest.raises(StoreUnusable, match="cannot be read"):
        read_machine(damaged)
    record = made(new_machine(LAKE), TWO)
    write_machine(good, record)
    make_member(good)
    assert look_at_folders([damaged, good]).machine == record


def test_a_record_of_a_later_release_is_refused(tmp_path: Path) -> None:
    (tmp_path / MACHINE_FILE).write_bytes(msgspec.json.encode(MachineRecord("aa", LAKE.hex(), version=3)))
    with pytest.raises(StoreUnusable, match="later release"):
        read_machine(tmp_path)


def test_what_a_later_release_adds_to_a_record_is_passed_over(tmp_path: Path) -> None:
    record = made(new_machine(LAKE), TWO)
    fields = msgspec.json.decode(msgspec.json.encode(record))
    (tmp_path / MACHINE_FILE).write_bytes(msgspec.json.encode({**fields, "later": [1]}))
    assert read_machine(tmp_path) == record


def test_disks_of_another_machine_are_taken_over_by_the_one_that_most_folders_have() -> None:
    mine = MachineRecord("mine", LAKE.hex(), number=2)
    newer = msgspec.structs.replace(mine, number=3, listen="10.0.0.5:9100")
    other = MachineRecord("other", LAKE.hex(), number=9)
    assert machine_of([]) is None
    assert machine_of([other, mine, newer]) == newer
    assert machine_of([mine, other]) == mine
    assert machine_of([other, mine]) == other


# --- folders -----------------------------------------------------------------------------------------


def test_a_lake_that_was_made_is_never_made_anew(tmp_path: Path) -> None:
    write_machine(tmp_path, new_machine(LAKE))
    assert look_at_folders([tmp_path]).is_new
    write_machine(tmp_path, made(new_machine(LAKE), TWO))
    with pytest.raises(StoreUnusable, match="none of them holds anything of it"):
        look_at_folders([tmp_path])


def test_records_of_two_lakes_are_refused(tmp_path: Path) -> None:
    one, two = folders_in(tmp_path, "one", "two")
    write_machine(one, new_machine(LAKE))
    write_machine(two, new_machine(LAKE[::-1]))
    with pytest.raises(StoreUnusable, match="another lake"):
        look_at_folders([one, two])
    make_member(one)
    with pytest.raises(StoreUnusable, match="another lake"):
        look_at_folders([one, two])


# --- init --------------------------------------------------------------------------------------------


def test_a_lake_is_opened_to_other_machines_and_that_is_safe_to_repeat(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    first = open_to_machines(folders, "prod", HERE, protect="2+1", accept_loss=True)
    token = token_in(folders)
    again = open_to_machines(folders, "prod", HERE, protect="2+1", accept_loss=True)
    assert again == first == read_machine(folders[0]) == read_machine(folders[1])
    assert token == token_in(folders[1:]) != ""
    moved = open_to_machines(folders, "prod", Place("10.0.0.9:9100", "r1"), accept_loss=True, protect="2+1")
    assert (moved.number, moved.listen, moved.rack) == (first.number + 1, "10.0.0.9:9100", "r1")
    assert token_in(folders) == token
    assert look_at_folders(folders).is_new


def test_a_lake_that_serves_alone_is_opened_to_others_and_keeps_its_machine(tmp_path: Path) -> None:
    member, empty = folders_in(tmp_path, "member", "empty")
    make_member(member)
    before = made(new_machine(LAKE), TWO)
    write_machine(member, before)
    record = open_to_machines([member, empty], "prod", HERE)
    assert (record.machine, record.is_made) == (before.machine, True)
    assert read_machine(empty) is None, "the disk of a folder that holds nothing may be away"
    with pytest.raises(PreconditionFailed, match="its protection stays"):
        open_to_machines([member], "prod", HERE, protect="2+1")


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ("0.0.0.0:9100", "an address of its own"),
        ("[::]:9100", "an address of its own"),
        ("10.0.0.4:0", "ports behind 0"),
        ("10.0.0.4:65535", "ports behind 65535"),
        ("10.0.0.4", "not an address"),
    ],
)
def test_an_address_that_others_cannot_use_is_refused(tmp_path: Path, listen: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        open_to_machines([tmp_path / "a"], "prod", Place(listen), accept_loss=True)
    assert list(tmp_path.iterdir()) == []


def test_too_few_devices_are_refused_unless_that_is_accepted(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"4\+2 needs 3 devices"):
        open_to_machines([tmp_path / "a"], "prod", HERE)
    assert read_machine(tmp_path / "a") is None


# --- add ---------------------------------------------------------------------------------------------


def joined(folder: Path) -> MachineRecord:
    record = msgspec.structs.replace(made(new_machine(LAKE), TWO), listen="10.0.0.5:9100", names_at="10.0.0.4:9100")
    write_machine(folder, record, "secret")
    make_member(folder)
    return record


def test_folders_on_one_file_system_are_named_in_the_log(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with capture_logs() as logged:
        check_devices(folders, Protection(1, 1), accept_loss=True)
    [line] = logged
    assert line["event"] == "folders on one file system are lost together"
    assert line["folders"] == list(map(str, folders))


def test_an_empty_folder_is_prepared_and_that_is_safe_to_repeat(tmp_path: Path) -> None:
    [used] = folders_in(tmp_path, "used")
    record, new = joined(used), tmp_path / "new"
    for _ in range(2):
        add_folder([used, new], new)
        assert read_machine(new) == record
        assert token_in([new]) == "secret"
    make_member(new)
    with pytest.raises(AlreadyExists, match="holds a member"):
        add_folder([used], new)


def test_a_folder_that_takes_a_members_place_may_be_given_again_for_that_one_alone(tmp_path: Path) -> None:
    used, other = folders_in(tmp_path, "used", "other")
    record, new = joined(used), tmp_path / "new"
    lost, another = "ab" * 16, "cd" * 16
    add_folder([used], new, replaces=another)
    for _ in range(2):
        assert add_folder([used], new, replaces=lost) == record == read_machine(new)
        make_member(new)  # the one that serves has taken it
    for wrong in (another, ""):
        with pytest.raises(AlreadyExists, match=f"added in place of {lost}"):
            add_folder([used], new, replaces=wrong)
    make_member(other)
    with pytest.raises(AlreadyExists, match="holds a member of the lake already; give an empty folder"):
        add_folder([used], other, replaces=lost)


def _engine(folder: Path) -> None:
    make_member(folder, bytes(16))


def _other_lake(folder: Path) -> None:
    make_member(folder, LAKE[::-1])


@pytest.mark.parametrize(("make", "message"), [(_engine, "store of one engine"), (_other_lake, "another lake")])
def test_a_folder_that_belongs_elsewhere_is_not_added(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    used, other = folders_in(tmp_path, "used", "other")
    joined(used)
    make(other)
    with pytest.raises(StoreUnusable, match=message):
        add_folder([used], other)
    assert read_machine(other) is None


def test_nothing_is_added_where_there_is_no_lake(tmp_path: Path) -> None:
    used, new = folders_in(tmp_path, "used", "new")
    with pytest.raises(PreconditionFailed, match="no lake that was made"):
        add_folder([used], new)
    write_machine(used, new_machine(LAKE))
    with pytest.raises(LakeError):
        add_folder([used], new)


# --- folders of a start ------------------------------------------------------------------------------


def plan_of(folders: list[Path], *, is_new: bool) -> LakePlan:
    members = [MemberPlan(folder, folder / "s", []) for folder in folders]
    return LakePlan(new_machine(LAKE), "", is_new, members, TWO, is_chosen=False, accept_loss=True, new_devices=False)


def test_names_of_a_new_lake_may_lie_anywhere_and_later_only_where_the_lake_is(tmp_path: Path) -> None:
    member, prepared, _, new = folders = folders_in(tmp_path, "member", "prepared", "empty", "new")
    plan = plan_of(folders, is_new=True)
    assert all(map(plan.may_have_names, folders))
    make_member(member)
    write_machine(prepared, new_machine(LAKE))
    (new / "names").mkdir()
    for later in (plan, plan_of(folders, is_new=False)):
        assert [later.may_have_names(folder) for folder in folders] == [True, True, False, False]
