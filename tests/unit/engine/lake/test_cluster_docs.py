"""docs/cluster.md quotes the very messages that are printed, and the very commands."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import click
import pytest
from grpc import StatusCode

from cli.operate.cluster import cluster
from cli.operate.lake_lines import lake_lines, names_outlive, outlives, replica_lines
from cli.operate.replacing import check_room, smaller_by
from cli.operate.rescue import WHAT_A_CHECKPOINT_LACKS, WHAT_IS_LOST, checkpoint_lines, rescue_lines
from cli.serve.serve import serve
from engine.coordinator.moving import refuse_unless_in_charge
from engine.coordinator.reads_only_coordinator import MOVED
from engine.coordinator.records import (
    Charge,
    ChargeRecord,
    MemberRecord,
    NamesCheckpoint,
    RepeatedRecord,
    RepeatedReplica,
)
from engine.etcd.etcd_link import EtcdAccess, EtcdLink
from engine.etcd.etcd_messages import RangeResponse
from engine.etcd.etcd_status import Status, error_of
from engine.format.group_parts import FIRST_SHARD
from engine.group_log.reports import REMOVED
from engine.head import names_link
from engine.host.clock import SystemClock
from engine.host.local_disk import LocalDisk
from engine.lake.beside_names import WAITING_FOR_NAMES
from engine.lake.etcd_place import EtcdPlace
from engine.lake.folders import check_devices, look_at_folders
from engine.lake.joining import add_folder
from engine.lake.lake_etcd import WAITING_FOR_ETCD
from engine.lake.lake_members import ADD_IT, HOLDS_NOTHING
from engine.lake.machine import made, new_machine, write_machine
from engine.lake.names_here import TABLE
from engine.lake.plan import refuse_other_protection
from engine.lake.reads_only import READS_ONLY
from engine.lake.rescue import NamesFound, ReplicaHere, why_not_from_here
from engine.lake_upkeep import names_replicas
from engine.superblock.store_role import refuse_other_role
from engine.superblock.superblock import NO_CLUSTER, open_store, read_superblock
from engine.walker import membership
from engine.walker.member_openings import CAME_BACK_OLD
from lakefs.cluster.protection import Protection
from lakefs.errors import LakeError, StoreLocked
from lakefs.ids import EMPTY_BLOB, MemberId, NamesShard, ReplicaId, Sequence
from lakefs.limits import GIB, MIB
from lakefs.ports import DiskLock
from lakefs.transport.address import parse_address
from lakefs.transport.sockets import connect_error
from tests.style.source_tree import ROOT

TEXT = (ROOT / "docs" / "cluster.md").read_text()
QUOTED = " ".join(TEXT.split())
TIB: Final = 1024 * GIB
LAKE, OTHER = bytes(range(16)), bytes(range(16))[::-1]


def is_quoted(message: str) -> bool:
    """Return True if the page has a message, with ID for each id."""
    return " ".join(re.sub(r"\b[0-9a-f]{32}\b", "ID", message).split()) in QUOTED


def make_store(disk: LocalDisk, lake: bytes) -> None:
    open_store(disk, SystemClock(), create=True, cluster_id=lake).lock.close()


def refusal(folders: list[Path]) -> str:
    """Return the message of a start with these folders, without the folder's name."""
    with pytest.raises(LakeError) as refused:
        look_at_folders(folders)
    return refused.value.message.partition(": ")[2]


def test_refusals_of_folders_are_quoted(tmp_path: Path) -> None:
    mine, other, engine = (tmp_path / name for name in ("mine", "other", "engine"))
    for folder, lake in ((mine, LAKE), (other, OTHER), (engine, NO_CLUSTER)):
        folder.mkdir()
        make_store(LocalDisk(folder), lake)
    assert is_quoted(refusal([mine, other]))
    assert is_quoted(refusal([mine, engine]))
    write_machine(mine, made(new_machine(LAKE), Protection(2, 1)))
    with pytest.raises(LakeError) as used:
        add_folder([mine], make_used(tmp_path / "used"))
    assert is_quoted(used.value.message.replace(str(tmp_path / "used"), "/disk/3"))


def make_used(folder: Path) -> Path:
    folder.mkdir()
    make_store(LocalDisk(folder), LAKE)
    return folder


def test_refusals_of_a_member_s_store_are_quoted(tmp_path: Path) -> None:
    member, copy = tmp_path / "member", tmp_path / "copy"
    make_used(member)
    with pytest.raises(LakeError) as alone:
        refuse_other_role(read_superblock(LocalDisk(member)), NO_CLUSTER)
    assert is_quoted(alone.value.message)
    shutil.copytree(member, copy)
    with pytest.raises(LakeError) as copied:
        open_store(LocalDisk(copy), SystemClock(), create=False, cluster_id=LAKE)
    assert is_quoted(copied.value.message)


def test_the_refusal_of_too_few_devices_is_quoted(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(6)]
    for folder in folders:
        folder.mkdir()
    with pytest.raises(LakeError) as refused:
        check_devices(folders, Protection(4, 2), accept_loss=False)
    assert is_quoted(f"lake: {refused.value.message}")


def test_lines_of_the_status_are_quoted() -> None:
    walker = {"dirty_partitions": 0}
    for devices, machines, names in ((2, 0, 3), (2, 1, 2)):
        losses = {"devices": devices, "machines": machines}
        assert is_quoted(outlives({"outlives": losses, "names": {"devices": names}, "walker": walker}))
    folder = {"folder": "/disk/3", "member": "ab", "serves": False}
    folder["reason"] = "cannot lock lock: the file system is read-only; remount it"
    lines = lake_lines({"reason": "", **_lake()}, [folder])
    assert is_quoted(next(line for line in lines if line.startswith("folder"))[len("folder /disk/3") :])


def test_a_member_from_an_earlier_time_is_said_as_quoted() -> None:
    assert is_quoted(CAME_BACK_OLD)
    member = {"id": "ab", "state": "up", "up": True, "reason": "", "addresses": [], "places": 1, "is_old": True}
    figures = dict.fromkeys(("used_bytes", "free_bytes", "damaged_chunks"))
    lines = lake_lines({"reason": "", **_lake(), "members": [{**member, **figures}]})
    assert is_quoted(lines[1].split("up, ")[1])


def test_what_a_replacement_lacks_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=TIB, free=TIB))
    lost = {"id": "ab", "up": False, "state": "up", "used_bytes": 2 * TIB, "places": 1, "room_bytes": 4 * TIB}
    other = {"id": "cd", "up": True, "state": "up", "used_bytes": TIB, "free_bytes": TIB // 2, "places": 1}
    assert is_quoted(smaller_by(Path("/disk/3"), [lost], "ab"))
    with pytest.raises(LakeError) as refused:
        check_room(Path("/disk/3"), [lost, other], "ab")
    assert is_quoted(refused.value.message)


def test_refusals_of_a_second_start_are_quoted(tmp_path: Path) -> None:
    with pytest.raises(LakeError) as refused:
        refuse_other_protection(Protection(4, 2), Protection(2, 1))
    assert is_quoted(refused.value.message)
    held = make_held(tmp_path)
    with pytest.raises(StoreLocked, match="is open in another process") as locked:
        open_store(LocalDisk(tmp_path), SystemClock(), create=False, cluster_id=LAKE)
    held.close()
    assert f"exit code {locked.value.exit_code}, `is open in another process`" in QUOTED


def make_held(folder: Path) -> DiskLock:
    return open_store(LocalDisk(folder), SystemClock(), create=True, cluster_id=LAKE).lock


def _lake() -> dict[str, object]:
    walker = {"healed": True, "dirty_partitions": 0, "position": 0, "last_pass": {"ended_ns": 0}}
    return {
        "name": "prod",
        "id": "",
        "protection": "4+2",
        "ring_epoch": 1,
        "ring_epochs": 1,
        "members": [],
        "gc": {"last": None},
        "gc_generation": 1,
        "outlives": {"devices": 2, "machines": 0},
        "walker": walker,
        "names": {"devices": 3, "copies": []},
    }


def test_what_is_logged_and_refused_while_a_lake_serves_is_quoted() -> None:
    assert is_quoted(f"{HOLDS_NOTHING} The lake is served without it; {ADD_IT}")
    assert is_quoted(WAITING_FOR_NAMES)
    refused = connect_error(parse_address("tcp://10.0.0.4:9100"), ConnectionRefusedError(111, "Connection refused"))
    assert is_quoted(names_link._unreachable(refused).message)
    said = " ".join(_constants(Path(membership.__file__)))
    for phrase in ("drain it, and wait until that is done", "add another one first"):
        assert phrase in said
        assert f"`{phrase}`" in QUOTED


def test_refusals_of_an_etcd_are_quoted() -> None:
    place = EtcdPlace(("http://10.0.0.4:2379",), "prod")
    left = ChargeRecord(LAKE, Charge.LEFT, 1, LAKE, place.words)
    for found, where in ((None, place.words), (left, TABLE)):
        with pytest.raises(LakeError) as refused:
            refuse_unless_in_charge(found, LAKE, where)
        assert is_quoted(refused.value.message)
    link = EtcdLink(EtcdAccess(place.endpoints, cluster=0x1F))
    with pytest.raises(LakeError) as other:
        link._check_cluster(link.endpoint, RangeResponse(header={"cluster_id": 0x2E}))
    link.close()
    assert is_quoted(other.value.message)
    assert is_quoted(MOVED)
    full = error_of(Status(StatusCode.RESOURCE_EXHAUSTED, "database space exceeded"), "10.0.0.4:2379")
    assert f"`{full.message.partition('; ')[2]}`" in QUOTED
    assert f"`{WAITING_FOR_ETCD}`" in QUOTED


def test_the_line_of_an_etcd_is_quoted() -> None:
    urls = ["http://10.0.0.4:2379", "http://10.0.0.5:2379"]
    etcd = {"endpoints": urls, "name": "prod", "cluster": "1f", "reachable": False, "reason": "etcd at ..."}
    assert is_quoted(lake_lines({**_lake(), "etcd": etcd})[-1])
    assert is_quoted(lake_lines({"reason": "", "etcd": etcd})[-1]), "also when the coordinator cannot be asked"


def test_lines_of_the_replicas_of_names_are_quoted() -> None:
    said_ns = 1_796_029_964 * 10**9
    replicas = [
        {"id": "5f1c7a...", "machine": "m4", "state": "leads", "groups_behind": 0, "said_ns": said_ns},
        {"id": "81d0e2...", "machine": "m5", "state": "follows", "groups_behind": 0, "said_ns": said_ns},
        {"id": "c3390b...", "machine": "m6", "state": "silent", "groups_behind": 5213, "said_ns": said_ns},
    ]
    names = {"replicas": replicas, "tail": {"groups": 5213, "bytes": 1_363_149}, "outlives_machines": 1}
    members = [{"machine": f"m{number}", "addresses": [f"tcp://10.0.0.{number}:9101"]} for number in (4, 5, 6)]
    for line in replica_lines({"members": members, "names": names}):
        assert is_quoted(line)
    second = {"shard": 1, "replicas": replicas[:1], "tail": {"groups": 12, "bytes": 3_174}, "outlives_machines": 0}
    both = {**names, "shards": [second]}
    lines = replica_lines({"members": members, "names": both})
    assert lines[0].split()[:2] == ["names", "0"]
    assert all(is_quoted(line) for line in lines[-2:])
    assert names_outlive(both) == 0
    walker = {"dirty_partitions": 0}
    said = outlives({"outlives": {"devices": 2, "machines": 1}, "names": names, "walker": walker})
    assert said == "outlives 2 more devices, 1 machine; names: 1 of 3 machines"
    assert is_quoted(f"`{said.partition('; ')[2]}`")
    assert is_quoted(REMOVED)
    assert "`stop lake serve on its machine first`" in QUOTED
    assert "stop lake serve on its machine first" in " ".join(_constants(Path(names_replicas.__file__)))


def test_what_a_rescue_shows_is_quoted() -> None:
    here, there = ReplicaId(b"a" * 16), ReplicaId(b"b" * 16)
    said_ns = 1_796_029_964 * 10**9
    repeated = RepeatedRecord(said_ns, (RepeatedReplica(there, "m4", Sequence(52101), said_ns),))
    member = MemberRecord(MemberId(here), ("tcp://10.0.0.4:9101",), 1, ("device", "m4", "", ""))
    replica = ReplicaHere(FIRST_SHARD, here, Sequence(52130))
    for line in rescue_lines(NamesFound("m3", (replica,), 1, repeated, (member,)), ""):
        assert is_quoted(line.replace(here.hex(), "81d0e2...").replace(there.hex(), "5f1c7a...")), line
    known = RepeatedReplica(there, "m4", Sequence(7133), said_ns, NamesShard(1))
    found = NamesFound("m3", (replica,), 2, RepeatedRecord(said_ns, (known,)), (member,))
    assert found.missing == [1]
    for line in rescue_lines(found, "")[-2:]:
        assert is_quoted(line.replace(there.hex(), "5f1c7a...")), line
    assert is_quoted(why_not_from_here(found).partition("; that had group 7133")[0])
    assert is_quoted(WHAT_IS_LOST[1:])
    assert is_quoted(READS_ONLY)
    made = NamesCheckpoint(EMPTY_BLOB, Sequence(51877), 412 * MIB, 1_796_029_212 * 10**9)
    [line, second] = checkpoint_lines({FIRST_SHARD: [made], NamesShard(1): [made]}, "")
    assert second.startswith("checkpoint of names 1 in the lake ")
    assert "`checkpoint of names 1 in the lake`" in TEXT
    assert is_quoted(line)
    assert is_quoted(WHAT_A_CHECKPOINT_LACKS[1:])


def _constants(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_commands_on_the_page_are_ones_that_there_are() -> None:
    commands = [line.strip() for line in TEXT.splitlines() if line.startswith("    lake ")]
    checked = 0
    for line in commands:
        _, name, *words = shlex.split(line, comments=True)
        if name not in ("serve", "cluster"):
            continue
        command: click.Command = serve
        if name == "cluster":
            found = cluster.get_command(click.Context(cluster), words[0])
            assert found is not None, line
            command = found
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line
        checked += 1
    assert checked >= 8
