"""A machine becomes part of a lake of several: it opens its lake to others, joins another one's, or gets a new device.

Each of these writes the record of the machine, and the lake's token, into its folders; the process that serves the lake
acts on them at its next start, and on a new device's within some seconds.  All are safe to repeat.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import trio

from engine.coordinator.lake_state import LakeState
from engine.coordinator.records import EtcdRecord, LakeRecord
from engine.coordinator.remote_coordinator import open_remote_coordinator
from engine.host.local_disk import make_folders
from engine.lake.etcd_place import EtcdPlace, joined_place, place_in
from engine.lake.folders import check_devices, holds_member, holds_names, look_at_folders, records_in
from engine.lake.lake_etcd import check_etcd
from engine.lake.machine import (
    MachineRecord,
    machine_of,
    made,
    new_machine,
    replaced_in,
    token_in,
    with_etcd,
    write_machine,
    write_replaced,
)
from engine.superblock.secret_files import new_token
from lakefs.cluster.protection import Protection
from lakefs.config.settings import Config, parse_address
from lakefs.errors import AlreadyExists, EngineUnreachable, InvalidArgument, PreconditionFailed, StoreUnusable

CONNECT_TRIES: Final = 3
CONNECT_PAUSE_S: Final = 1.0
_PORT_MAX: Final = 65_535


class Place(NamedTuple):
    """A machine as its lake sees it: where it listens for the others, the domains that it is in, and the etcd.

    `etcd` is the operator's; None: that which the record or the lake has.  Its name may be empty: then it is the lake's
    id.  `no_etcd`: the lake is to have none.
    """

    listen: str
    rack: str = ""
    zone: str = ""
    etcd: EtcdPlace | None = None
    no_etcd: bool = False


def open_to_machines(
    folders: Sequence[Path],
    name: str,
    place: Place,
    *,
    protect: str = "",
    accept_loss: bool = False,
    check_etcd: Callable[[EtcdPlace, bytes], None] = lambda place, lake: None,
) -> MachineRecord:
    """Let the lake of these folders have a name, and listen for other machines; folders that hold nothing become one.

    `protect` and `accept_loss` are for a lake that is yet to be made.  `check_etcd` refuses the etcd that an operator
    gives for this lake, before anything is written.  InvalidArgument for an address that others
    cannot use, or fewer devices than the protection needs; PreconditionFailed on a machine that has joined a lake, for
    `protect` of a lake that was made, and for another name at etcd than it has.  Errors of `look_at_folders` and
    `write_machine`.  Blocks.
    """
    _check_listen(place.listen, len(folders))
    for folder in folders:
        make_folders(folder)
    machine, is_new = look_at_folders(folders)
    if machine.names_at:
        raise PreconditionFailed(f"this machine has joined a lake, whose names are at {machine.names_at}")
    if is_new:
        check_devices(folders, Protection.parse(protect or Config.protect), accept_loss=accept_loss)
    elif protect:
        raise PreconditionFailed("this lake was made already, and its protection stays", subject="protect")
    wanted = msgspec.structs.replace(
        machine,
        name=name,
        listen=place.listen,
        rack=place.rack,
        zone=place.zone,
        protect=protect or machine.protect,
        accept_loss=accept_loss or machine.accept_loss,
    )
    wanted = with_etcd(wanted, _etcd_of(machine, place))
    if place.etcd is not None and wanted.etcd is not None:
        check_etcd(wanted.etcd, bytes.fromhex(machine.lake))
    used = [folder for folder in folders if is_new or holds_member(folder)]
    return _written(used, machine, wanted, token_in(folders) or new_token())


async def join(folders: Sequence[Path], names_at: str, token: str, place: Place) -> MachineRecord:
    """Let this machine's folders become members of the lake whose names listen at an address.

    EngineUnreachable, PermissionDenied, UnsupportedVersion when there are no names, or the token is another one's.
    InvalidArgument for an address that others cannot use; PreconditionFailed where the names are on this machine;
    StoreUnusable for folders of another lake or of one engine.  Errors of `check_etcd` for the lake's etcd.
    Cancelled, some folders may be prepared.
    """
    _check_listen(place.listen, len(folders))
    parse_address(names_at)
    lake, etcd = await _lake_at(names_at, token)
    if lake is None:
        raise PreconditionFailed(f"the lake at {names_at} has not been made yet", subject=names_at)
    if place.etcd is not None and etcd is None:
        raise PreconditionFailed(f"the lake at {names_at} has no etcd", subject=names_at)
    own = None if place.etcd is None else msgspec.structs.replace(place.etcd, is_own=True)
    joined_etcd = None if etcd is None else joined_place(place_in(etcd), own)
    if joined_etcd is not None:
        await check_etcd(joined_etcd, lake.lake)
    for folder in folders:
        make_folders(folder)
    machine = _machine_for(folders, lake.lake)
    wanted = msgspec.structs.replace(
        machine, name=lake.name, listen=place.listen, names_at=names_at, rack=place.rack, zone=place.zone
    )
    wanted = with_etcd(wanted, joined_etcd)
    wanted = made(wanted, Protection(lake.data_shards, lake.parity_shards))
    return _written(folders, machine, wanted, token)


def add_folder(folders: Sequence[Path], new: Path, *, replaces: str = "") -> MachineRecord:
    """Let an empty folder become a member of the lake that lies in this machine's folders.

    `replaces`: in place of the member with this id, in hex; that may be repeated when it has become one.
    PreconditionFailed where no folder is of a lake, or the lake was not made; AlreadyExists when the folder holds a
    member that was not added in that one's place.  Errors of `look_at_folders` and `write_machine`.  Blocks.
    """
    others = [folder for folder in folders if folder != new]
    machine = machine_of(records_in(others))
    if machine is None or not machine.is_made:
        raise PreconditionFailed("the folders of `data` have no lake that was made", subject=str(new))
    make_folders(new)
    look_at_folders([*others, new])
    if holds_member(new):
        replaced = replaced_in(new)
        if replaces and replaced == replaces:
            return machine
        added = f", which was added in place of {replaced}" if replaced else ""
        raise AlreadyExists(f"{new} holds a member of the lake already{added}; give an empty folder", subject=str(new))
    if replaces:
        write_replaced(new, replaces)
    write_machine(new, machine, token_in(others))
    return machine


async def _lake_at(names_at: str, token: str) -> tuple[LakeRecord | None, EtcdRecord | None]:
    """Return the lake whose names listen there, None before it was made, and its etcd.  Errors as of `join`."""
    async with open_remote_coordinator(f"tcp://{names_at}", token=token) as coordinator:
        for tries_left in range(CONNECT_TRIES)[::-1]:
            try:
                await coordinator.connect()
                state = LakeState(coordinator)
                return await state.lake(), await state.etcd()
            except EngineUnreachable:  # names that have just made a table, on a busy machine, may answer late
                if not tries_left:
                    raise
                await trio.sleep(CONNECT_PAUSE_S)
    raise AssertionError("the last try returns or raises")


def _etcd_of(machine: MachineRecord, place: Place) -> EtcdPlace | None:
    """Return the etcd that the lake is to have: at its next start it moves there, or back.  PreconditionFailed."""
    known, wanted = machine.etcd, place.etcd
    if place.no_etcd:
        return None if known is None else msgspec.structs.replace(known, leaves=True)
    if wanted is None:
        return known
    if not wanted.name:
        wanted = msgspec.structs.replace(wanted, name=machine.lake if known is None else known.name)
    if known is None:
        return wanted
    if known.incarnation and known.name != wanted.name:
        raise PreconditionFailed(
            f"this lake is at etcd under the name {known.name}; let it come back first, with --no-etcd and a start",
            subject=wanted.name,
        )
    # One that was on its way back is settled by a move.
    return msgspec.structs.replace(wanted, cluster=known.cluster, incarnation="" if known.leaves else known.incarnation)


def _machine_for(folders: Sequence[Path], lake_id: bytes) -> MachineRecord:
    """Return the record of this machine in a lake.  StoreUnusable, PreconditionFailed as for `join`."""
    for folder in folders:
        if holds_names(folder) and not any(map(_has_replica, records_in([folder]))):
            raise PreconditionFailed(f"{folder} holds names: this machine is the one to join", subject=str(folder))
    found = look_at_folders(folders)
    if found.lake_id == lake_id:
        return found.machine
    if not found.is_new or records_in(folders):
        raise StoreUnusable(
            f"the folders are of another lake, {found.lake_id.hex()}, not of {lake_id.hex()}", subject=str(folders[0])
        )
    return new_machine(lake_id)


def _has_replica(record: MachineRecord) -> bool:
    """Return True if the names on a machine with this record are one replica of several."""
    return bool(record.names_at) or (record.etcd is not None and record.etcd.is_settled)


def _written(folders: Sequence[Path], before: MachineRecord, wanted: MachineRecord, token: str) -> MachineRecord:
    """Write a record with the next number if it changes anything; return it."""
    if wanted != before:
        wanted = msgspec.structs.replace(wanted, number=before.number + 1)
    for folder in folders:
        write_machine(folder, wanted, token)
    return wanted


def _check_listen(listen: str, members: int) -> None:
    """Refuse an address at which other machines cannot find this one.  InvalidArgument."""
    address = parse_address(listen)
    with suppress(ValueError):  # a name
        if ipaddress.ip_address(address.host).is_unspecified:
            raise InvalidArgument(
                f"other machines find this one at {listen}, so give an address of its own", subject=listen
            )
    if not 0 < address.port <= _PORT_MAX - members:
        raise InvalidArgument(
            f"members listen at the ports behind {address.port}, one each; give one from 1 to {_PORT_MAX - members}",
            subject=listen,
        )
