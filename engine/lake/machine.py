"""The record of a machine of a lake, `machine.json`, which lies in each of the machine's data folders.

It says which lake the folder is of, where this machine listens for the others, and where the names are.  So a folder
says for itself what it belongs to, wherever its disk is mounted, and an empty folder that has a record is wanted as a
new member.  Beside it lies the lake's token (`engine.superblock.secret_files`).

Rules kept here:
- A machine is known by an id that was made on it, not by its name.  When disks come from another machine, the id that
  most folders have stays this machine's.
- The record with the highest number is the newest.  All folders get it; one that cannot be written to keeps the others
  from nothing.
- The token of this machine's clients lies in each of its folders, too, so it outlives any device and any order of them.
- Files are replaced as a whole, durable on return; they belong to the owner of their folder, with mode 0600.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec
import structlog

from engine.host.local_disk import LocalDisk
from engine.host.small_file import replace_small_file
from engine.lake.etcd_place import EtcdPlace
from engine.superblock.secret_files import CLUSTER_TOKEN_FILE, TOKEN_FILE, keep_token, new_token, read_token
from lakefs.cluster.protection import Protection
from lakefs.errors import LakeError, StoreUnusable
from lakefs.ids import new_id16

MACHINE_FILE: Final = "machine.json"
REPLACES_FILE: Final = "machine.replaces"
"""In the folder of a member that was added in place of another: the id of that one, in hex."""
RECORD_BYTES_MAX: Final = 16 << 10
"""Names of hosts and domains: a record has some hundred bytes."""
_VERSION: Final = 1
_VERSION_WITH_ETCD: Final = 2
"""A release that knows no etcd must not take such a lake's table of the names for its coordinator."""
_log: Final = structlog.get_logger(__name__)


class MachineRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A machine of a lake; ids are hex.

    `number` grows with each change.  `listen`: HOST:PORT for other machines; empty: there are none.  `names_at`:
    HOST:PORT of the machine with the names; empty: that is this one.  `is_made`: the lake has had its first table, and
    is never made anew.  `protect` is its protection.  `accept_loss` is for making it.  `etcd`: the lake's coordinator;
    None: it is a table of the names.  `left`: an etcd that was given up for lost, and has not said so itself yet.
    `reads_only`: the next start serves reads of the names here, without the etcd.
    """

    machine: str
    lake: str
    number: int = 1
    name: str = ""
    listen: str = ""
    names_at: str = ""
    rack: str = ""
    zone: str = ""
    is_made: bool = False
    protect: str = ""
    accept_loss: bool = False
    version: int = _VERSION
    etcd: EtcdPlace | None = None
    left: EtcdPlace | None = None
    reads_only: bool = False


def new_machine(lake_id: bytes) -> MachineRecord:
    """Return the record of a machine that has none."""
    return MachineRecord(new_id16().hex(), lake_id.hex())


def made(record: MachineRecord, protection: Protection) -> MachineRecord:
    """Return the record of a machine whose lake has its first table, with that protection."""
    return _numbered(record, msgspec.structs.replace(record, is_made=True, protect=str(protection)))


def without_left(record: MachineRecord) -> MachineRecord:
    """Return the record of a machine whose former etcd has said that it is not the lake's any more."""
    return _numbered(record, msgspec.structs.replace(record, left=None))


def for_reads(record: MachineRecord, *, reads_only: bool) -> MachineRecord:
    """Return the record of a machine whose next start serves reads alone, or all again."""
    return _numbered(record, msgspec.structs.replace(record, reads_only=reads_only))


def _numbered(before: MachineRecord, found: MachineRecord) -> MachineRecord:
    return found if found == before else msgspec.structs.replace(found, number=before.number + 1)


def with_etcd(record: MachineRecord, etcd: EtcdPlace | None) -> MachineRecord:
    """Return the record with another etcd, or with none."""
    version = _VERSION if etcd is None else _VERSION_WITH_ETCD
    found = msgspec.structs.replace(record, etcd=etcd, version=version)
    return _numbered(record, found)


def rescued(record: MachineRecord, turn: int) -> MachineRecord:
    """Return the record of a machine with the names of a lake that has given up its etcd in that turn."""
    if record.etcd is None:
        return record
    left = msgspec.structs.replace(record.etcd, left_turn=turn)
    return with_etcd(msgspec.structs.replace(record, names_at="", left=left), None)


def read_machine(folder: Path) -> MachineRecord | None:
    """Return a folder's record; None if it has none.  StoreUnusable for one that cannot be read.  Blocks."""
    path = folder / MACHINE_FILE
    if not os.path.lexists(path):
        return None
    disk = LocalDisk(folder)
    with closing(disk.open(MACHINE_FILE, read_only=True)) as file:
        content = bytearray(min(file.size(), RECORD_BYTES_MAX))
        file.pread_into(memoryview(content), 0)
    try:
        record = msgspec.json.decode(bytes(content), type=MachineRecord)
        bytes.fromhex(record.lake)
    except ValueError as error:  # msgspec's are of that kind
        raise StoreUnusable(
            f"{path} cannot be read; where another folder of this machine has one, remove it: {error}",
            subject=str(path),
        ) from error
    if record.version not in (_VERSION, _VERSION_WITH_ETCD):
        raise StoreUnusable(f"{path} has version {record.version}: it is of a later release", subject=str(path))
    return record


def machine_of(records: Iterable[MachineRecord]) -> MachineRecord | None:
    """Return the record that counts of those in a machine's folders, in their order; None if there is none."""
    found = list(records)
    if not found:
        return None
    by_machine = Counter(record.machine for record in found)
    machine = max(by_machine, key=by_machine.__getitem__)  # of equal ones the first
    return max((record for record in found if record.machine == machine), key=lambda record: record.number)


def keep_machine(folders: Sequence[Path], record: MachineRecord, token: str = "") -> None:
    """Let folders have a record, and the lake's token if it has one; a folder that cannot be written to is logged."""
    for folder in folders:
        try:
            write_machine(folder, record, token)
        except (LakeError, OSError) as error:
            _log.error("the machine's record could not be written", folder=str(folder), reason=str(error))


def write_machine(folder: Path, record: MachineRecord, token: str = "") -> None:
    """Let a folder have a record, and the lake's token unless it is empty; durable on return.  Blocks.

    What it has already is not written.  StoreUnusable for a record that cannot be read, ConfigError for such a token;
    DiskFailed, StoreFull, OSError.
    """
    if read_machine(folder) != record:
        replace_small_file(LocalDisk(folder), MACHINE_FILE, msgspec.json.encode(record) + b"\n")
        give_to_owner(folder, MACHINE_FILE)
    if token and token_in([folder]) != token:
        keep_token(LocalDisk(folder), CLUSTER_TOKEN_FILE, token)
        give_to_owner(folder, CLUSTER_TOKEN_FILE)


def write_replaced(folder: Path, member: str) -> None:
    """Let a folder say which member its own was added in place of; durable on return.  Blocks.  DiskFailed."""
    replace_small_file(LocalDisk(folder), REPLACES_FILE, f"{member}\n".encode())
    give_to_owner(folder, REPLACES_FILE)


def replaced_in(folder: Path) -> str:
    """Return the id of the member that a folder's was added in place of; empty if there is none.  Blocks."""
    disk = LocalDisk(folder)
    if not disk.exists(REPLACES_FILE):
        return ""
    with closing(disk.open(REPLACES_FILE, read_only=True)) as file:
        content = bytearray(min(file.size(), RECORD_BYTES_MAX))
        file.pread_into(memoryview(content), 0)
    return content.decode(errors="replace").strip()


def token_in(folders: Sequence[Path]) -> str:
    """Return the lake's token from the first folder that has it; empty if none has.  Blocks.  ConfigError."""
    for folder in folders:
        if os.path.lexists(folder / CLUSTER_TOKEN_FILE):
            return read_token(LocalDisk(folder), CLUSTER_TOKEN_FILE)
    return ""


def clients_token(folders: Sequence[Path]) -> str:
    """Return the token of this machine's clients over TCP, and let all its folders with a record have it.  Blocks.

    Where several are found, as when a disk comes from another machine, the one that most folders have counts; where
    none is, it is made; a file that is empty or cannot be read counts as none.  DiskFailed, StoreFull, OSError when no
    folder can keep it.
    """
    found = {folder: token for folder in folders if (token := _readable_token(folder))}
    ranked = Counter(found.values()).most_common(1)  # of equal ones the first
    token = ranked[0][0] if ranked else new_token()
    is_kept, failures = token in found.values(), []
    for folder in folders:
        if found.get(folder) == token or not (folder / MACHINE_FILE).exists():
            continue
        try:
            keep_token(LocalDisk(folder), TOKEN_FILE, token)
            is_kept = True
        except (LakeError, OSError) as error:
            failures.append(error)
            _log.error("the token of clients could not be written", folder=str(folder), reason=str(error))
    if failures and not is_kept:
        raise failures[0]
    return token


def _readable_token(folder: Path) -> str:
    try:
        return read_token(LocalDisk(folder), TOKEN_FILE) if (folder / TOKEN_FILE).exists() else ""
    except (LakeError, OSError) as error:
        _log.error("the token of clients could not be read", folder=str(folder), reason=str(error))
        return ""


def give_to_owner(folder: Path, name: str) -> None:
    """Let a file that root has made belong to the user of the service, who owns the folder."""
    owner = folder.stat()
    if os.geteuid() == 0 and owner.st_uid != 0:
        os.chown(folder / name, owner.st_uid, owner.st_gid)
