"""The part of a lake that is on this machine, served until SIGTERM or SIGINT (`engine.process.running`).

`run_lake` is the parent of all: it starts a process for each member, and serves a head itself, and the names where they
are this machine's.  The head's socket is where clients find an engine; members' sockets lie beside it, `SOCKET.1` and
on.  With `heads` above 1 as many processes serve clients, each of them `run_head`.  Where other machines belong to the
lake, the names listen for them at the machine's address, and members at the ports behind it, PORT + 1 and on; all ask
for the lake's token.

Rules kept here:
- A signal ends a start that is not finished, also one that waits for a member.
- Several folders are one lake's, whatever their order and wherever they are mounted.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import structlog
import trio

from engine.head.head_figures import OTHER_HEADS, figures_of
from engine.head.local_keys import LOCAL_KEYS_DESCRIPTORS
from engine.host.local_disk import LocalDisk
from engine.lake.children import open_parent
from engine.lake.folders import check_devices, is_wanted, look_at_folders
from engine.lake.head_processes import HeadCommand, HeadProcesses, names_socket
from engine.lake.lake_members import about_machine, take_new_folders
from engine.lake.machine import MachineRecord, clients_token, token_in
from engine.lake.member_processes import MemberPlan
from engine.lake.parts import LakeParts, open_lake
from engine.lake.plan import MEMBERS_MAX, LakePlan, TierPlan, numbered_port, refuse_other_protection, shard_address
from engine.lake.reads_only import READS_ONLY
from engine.process.places import group_id, judge_permissions, places_made
from engine.process.rdma_device import rdma_device, rdma_of_heads
from engine.process.running import (
    DESCRIPTORS_PER_SLAB,
    Face,
    Running,
    connections_limit,
    serve_until_signal,
    tier_size_of,
)
from engine.server.listener import Server
from engine.superblock.secret_files import new_token
from lakefs.cluster.protection import Protection
from lakefs.config.settings import Address, Config, parse_address
from lakefs.errors import ConfigError, InvalidArgument
from lakefs.fabric.devices import OpenFabric, open_device
from lakefs.grants.dram_slabs import SLAB_BYTES
from lakefs.ids import CopyId
from lakefs.limits import STRANGERS_MAX
from lakefs.transport.address import UnixAddress, parse_address as parse_transport
from lakefs.transport.streams import TrioNetwork

MemberCommand = Callable[[Path, Path, bytes, Address | None], Sequence[str]]
"""Returns the command of a member's process (see `MemberPlan`): of its folder, its socket, the lake's id, and the
address for other machines, None for none."""
_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class LakeOptions:
    """The operator's words for one start.

    `accept_loss`: a lake is made although one device's loss harms it.  `new_devices`: folders that hold nothing become
    new members of a lake that exists.  `without`: ids of copies of the names that are given up, in hex.  `restored`:
    the folders were put back from a backup.
    """

    accept_loss: bool = False
    new_devices: bool = False
    without: Sequence[str] = ()
    restored: bool = False

    def lost_copies(self) -> frozenset[CopyId]:
        """Return the ids in `without`.  InvalidArgument for text that is none."""
        try:
            return frozenset(CopyId(bytes.fromhex(text)) for text in self.without)
        except ValueError as error:
            raise InvalidArgument(f"--without takes the id of a copy, as the refusal shows it: {error}") from error


@dataclass(kw_only=True)
class RunningLake(Running):
    """A lake on several devices."""

    parts: LakeParts
    network: TrioNetwork
    heads: HeadProcesses | None = None
    """Serve the native protocol in this process's place."""

    @property
    def is_untouched(self) -> bool:
        """True if this start made the lake."""
        return self.parts.is_made_now

    def read_only_because(self) -> str:
        """See `Running`."""
        names = self.parts.names
        if self.parts.reads_only:
            return READS_ONLY
        because = [] if names is None else [local.store.read_only_because for local in names.stores.values()]
        return next(filter(None, because), "")

    async def listen(self, nursery: trio.Nursery) -> None:
        """See `Running`."""
        if self.heads is None:
            await super().listen(nursery)
            return
        names = ""
        if self.parts.names is not None:
            names = names_socket(self.config.socket)
            for shard, service in self.parts.names.services.items():
                server = Server(service, TrioNetwork(), token=None, of_the_lake=True)
                await nursery.start(server.listen_and_serve, shard_address(names, shard))
        elif self.parts.replicas is not None:
            names = names_socket(self.config.socket)
        await nursery.start(self.heads.run, self.native_addresses(), self.network, names)
        self.addresses += self.heads.addresses
        self.drains.append(self.heads.drain)


@dataclass(kw_only=True)
class RunningHead(RunningLake):
    """One of several heads of a machine, which accepts at sockets that it inherited."""

    sockets: Sequence[int]

    async def listen(self, nursery: trio.Nursery) -> None:
        """See `Running`."""
        for socket in self.sockets:
            listener = self.network.inherited(socket)
            trusted = isinstance(parse_transport(listener.address), UnixAddress)
            serving = partial(self.server.serve, listener, trusted=trusted)
            self.addresses.append(await nursery.start(serving))


async def run_lake(
    config: Config,
    *,
    printer: Callable[[str], None],
    member_command: MemberCommand,
    head_command: HeadCommand | None = None,
    faces: Sequence[Face] = (),
    options: LakeOptions | None = None,
    open_fabric: OpenFabric = open_device,
) -> None:
    """Serve until SIGTERM or SIGINT.  Raises the errors of `open_lake`, and of binding the addresses.

    `open_fabric` opens the RDMA device.
    """
    group = group_id(config.socket_group)
    with places_made(config):
        judge_permissions(config, group)
        plan = plan_lake(config, member_command, options or LakeOptions())
        head_command = head_command if config.heads > 1 and not plan.machine.reads_only else None
        device = rdma_device if head_command is None else rdma_of_heads
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as opening:
                opened = await opening.start(_cancel_on_signal, signals, opening.cancel_scope)
                async with (
                    device(config, open_fabric) as fabric,
                    open_lake(plan, fabric=fabric) as lake,
                    trio.open_nursery() as nursery,
                ):
                    opened.cancel()
                    local_names = {} if lake.names is None else lake.names.stores
                    nursery.start_soon(take_new_folders, lake.plan, lake.processes, local_names)
                    if lake.names is not None:
                        nursery.start_soon(lake.names.upkeep.run)
                    running = _running(RunningLake, config, lake, group)
                    if head_command is not None:
                        about = partial(about_machine, lake.plan, lake.processes)
                        figures = partial(figures_of, lake.head.parts.references)
                        running.heads = HeadProcesses(config.heads, head_command, about, figures)
                    await serve_until_signal(running, nursery, signals, printer, (_serve_machines, *faces))
                    nursery.cancel_scope.cancel()
    printer("stopped")


async def run_head(
    config: Config, *, names: str, sockets: Sequence[int], parent: int, open_fabric: OpenFabric = open_device
) -> None:
    """Serve one of several heads of a machine until SIGTERM or SIGINT, or the end of its parent.

    `names`: their address on this machine; empty where another machine has them.  `sockets` are inherited, listening.
    """
    told: dict[str, Any] = {}

    def heard(line: bytes) -> None:
        told.clear()
        told.update(msgspec.json.decode(line))

    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with open_parent(parent, heard) as process, trio.open_nursery() as opening:
            opened = await opening.start(_cancel_on_signal, signals, opening.cancel_scope)
            about = partial(_with_other_heads, told)
            async with (
                rdma_device(config, open_fabric) as fabric,
                open_lake(plan_head(config, names), about, fabric) as lake,
                trio.open_nursery() as nursery,
            ):
                opened.cancel()
                running = _running(partial(RunningHead, sockets=sockets), config, lake, group_id(config.socket_group))
                figures = partial(figures_of, lake.head.parts.references)
                nursery.start_soon(process.keep_telling, figures)
                await serve_until_signal(running, nursery, signals, lambda line: None, (process.report,))
                nursery.cancel_scope.cancel()


def _with_other_heads(told: dict[str, Any]) -> dict[str, Any]:
    """Return what this machine has of the lake, as the parent has said it (`HeadProcesses`)."""
    heads = told.get("heads", [])
    others = [head for head in heads if head["pid"] != os.getpid()]
    return {name: value for name, value in told.items() if name != "heads"} | {OTHER_HEADS: others}


async def _cancel_on_signal(
    signals: AsyncIterator[int], scope: trio.CancelScope, *, task_status: trio.TaskStatus[trio.CancelScope]
) -> None:
    """Cancel a scope at the first signal, until the scope that this task starts with is cancelled."""
    with trio.CancelScope() as waiting:
        task_status.started(waiting)
        await anext(signals)
        scope.cancel()


def plan_lake(config: Config, member_command: MemberCommand, options: LakeOptions) -> LakePlan:
    """Return the lake that lies in the folders, or is to be made of them.

    Errors of `look_at_folders`, `check_devices` and `port_of`.  ConfigError when its token is missing, another
    protection is asked for than the lake was made with, or there are too many folders.  Blocks.
    """
    found = look_at_folders(config.folders)
    machine, lake_id = found.machine, found.lake_id
    is_chosen = config.origins["protect"] != "default"
    protection = Protection.parse(machine.protect if machine.protect and not is_chosen else config.protect)
    if machine.is_made and machine.protect:
        refuse_other_protection(Protection.parse(machine.protect), protection)
    accept_loss = options.accept_loss or machine.accept_loss
    if found.is_new:
        check_devices(config.folders, protection, accept_loss=accept_loss)
    if machine.listen and len(config.folders) > MEMBERS_MAX:
        raise ConfigError(f"a machine has at most {MEMBERS_MAX} members, one a folder", subject="data")
    members: list[MemberPlan] = []
    for number, folder in enumerate(config.folders, 1):
        socket = config.socket.with_name(f"{config.socket.name}.{number}")
        command = member_command(folder, socket, lake_id, port_of(machine, number))
        members.append(MemberPlan(folder, socket, command, partial(is_wanted, folder)))
    return LakePlan(
        machine,
        _token(config, machine),
        found.is_new,
        members,
        protection,
        is_chosen=is_chosen,
        accept_loss=accept_loss,
        new_devices=options.new_devices,
        without=options.lost_copies(),
        restored=options.restored,
        upload_expiry_s=config.upload_expiry,
        names_checkpoint_s=config.names_checkpoint_interval,
        tier=_tier(config, tier_share(config)),
        names_listen=_names_listen(config, machine),
    )


def _names_listen(config: Config, machine: MachineRecord) -> tuple[str, ...]:
    """Return the addresses of this machine's names: for its heads, and for other machines."""
    address = port_of(machine, 0)
    heads = (names_socket(config.socket),) if config.heads > 1 else ()
    return (*heads, f"tcp://{address}") if address is not None else heads


def plan_head(config: Config, names: str) -> LakePlan:
    """Return what one more head opens: no member, and names that another process has.  Errors as `plan_lake`."""
    found = look_at_folders(config.folders)
    return LakePlan(
        found.machine,
        _token(config, found.machine),
        is_new=False,
        members=[],
        protection=Protection.parse(found.machine.protect or config.protect),
        is_chosen=False,
        accept_loss=True,
        new_devices=False,
        tier=_tier(config, tier_size_of(config)),  # it is the head's share
        names_socket=names,
        is_head=True,
    )


def _tier(config: Config, size_bytes: int) -> TierPlan:
    return TierPlan(size_bytes, config.hot_index, config.hot_index_entries)


def tier_share(config: Config) -> int:
    """Return the bytes of the DRAM tier that a process gets, in whole slabs: the same for this one and each head."""
    shares = config.heads + 1 if config.heads > 1 else 1
    return tier_size_of(config) // shares // SLAB_BYTES * SLAB_BYTES


def port_of(machine: MachineRecord, number: int) -> Address | None:
    """Return the address for other machines of this machine's names (`number` 0) or a member; None if it has none.

    ConfigError for ports that there are not.
    """
    if not machine.listen:
        return None
    return numbered_port(parse_address(machine.listen), number)


def _token(config: Config, machine: MachineRecord) -> str:
    """Return the lake's token, empty for a machine that is alone.  ConfigError when it is lost.  Blocks."""
    if not machine.listen:
        return ""
    token = token_in(config.folders)
    if token:
        return token
    if machine.names_at:
        raise ConfigError("the lake's token is in none of the folders; run lake cluster join again", subject="data")
    return new_token()


R = TypeVar("R", bound=RunningLake)


def _running(kind: Callable[..., R], config: Config, lake: LakeParts, group: int | None) -> R:
    disk = LocalDisk(config.data)
    token = clients_token(config.folders) if config.native else None
    slabs = lake.plan.tier.size_bytes // SLAB_BYTES
    connections = connections_limit(
        DESCRIPTORS_PER_SLAB * slabs + LOCAL_KEYS_DESCRIPTORS + (STRANGERS_MAX if config.native else 0)
    )
    machine = lake.plan.machine
    title = f"lake    {machine.name or machine.lake}  ({len(lake.processes.all)} members"
    title += (
        f", protection {lake.protection}"
        + (", only read" if lake.reads_only else "")
        + (f", names at {machine.names_at})" if machine.names_at else ")")
    )
    network = TrioNetwork(group=group)
    return kind(
        config=config,
        service=lake.head,
        server=Server(lake.head, network, token=token, connections_max=connections),
        offload=lake.offload,
        disk=disk,
        title=title,
        parts=lake,
        network=network,
    )


async def _serve_machines(
    running: Running, *, task_status: trio.TaskStatus[str | None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve the names to other machines, if the lake has any and the names are here."""
    assert isinstance(running, RunningLake), "the face of a lake"
    parts = running.parts
    address = port_of(parts.plan.machine, 0)
    if address is None or parts.names is None:
        task_status.started(None)
        return
    connections = connections_limit(STRANGERS_MAX)
    bound: list[str] = []
    async with trio.open_nursery() as nursery:
        for shard, service in parts.names.services.items():
            server = Server(
                service, TrioNetwork(), token=parts.plan.token, connections_max=connections, of_the_lake=True
            )
            running.drains.append(server.drain)
            bound.append(await nursery.start(server.listen_and_serve, shard_address(f"tcp://{address}", shard)))
        task_status.started(f"cluster {bound[0]}")
