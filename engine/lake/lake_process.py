"""A lake on several devices of this machine, served until SIGTERM or SIGINT (`engine.process.running`).

`run_lake` is the parent of all: it starts a process for each member, and serves names and a head itself.  The head's
socket is where clients find an engine; members' sockets lie beside it, `SOCKET.1` and on.

Rules kept here:
- The folder of a lake that was made is not made a member when it holds nothing, unless the operator says so: most
  likely its disk is not mounted.  The lake serves without it.
- A signal ends a start that is not finished, also one that waits for a member.
- Several folders are one lake's, whatever their order and wherever they are mounted.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
import trio

from engine.host.local_disk import LocalDisk
from engine.lake.folders import check_devices, look_at_folders
from engine.lake.member_processes import MemberPlan
from engine.lake.parts import LakeParts, LakePlan, TierPlan, open_lake
from engine.process.places import group_id, judge_permissions, places_made
from engine.process.running import (
    DESCRIPTORS_PER_SLAB,
    Face,
    Running,
    connections_limit,
    serve_until_signal,
    tier_size_of,
)
from engine.server.listener import Server
from engine.superblock.secret_files import native_token
from lakefs.cluster.protection import Protection
from lakefs.config.settings import Config
from lakefs.grants.dram_slabs import SLAB_BYTES
from lakefs.limits import STRANGERS_MAX
from lakefs.transport.streams import TrioNetwork

MemberCommand = Callable[[Path, Path, bytes], Sequence[str]]
"""Returns the command of a member's process, from its folder, its socket and the lake's id (see `MemberPlan`)."""
_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class LakeOptions:
    """The operator's words for one start.

    `accept_loss`: a lake is made although one device's loss harms it.  `new_devices`: folders that hold nothing become
    new members of a lake that exists.
    """

    accept_loss: bool = False
    new_devices: bool = False


@dataclass(kw_only=True)
class RunningLake(Running):
    """A lake on several devices."""

    parts: LakeParts

    @property
    def is_untouched(self) -> bool:
        """True if this start made the lake."""
        return self.parts.is_made_now

    def read_only_because(self) -> str:
        """See `Running`."""
        return self.parts.names.store.read_only_because


async def run_lake(
    config: Config,
    *,
    printer: Callable[[str], None],
    member_command: MemberCommand,
    faces: Sequence[Face] = (),
    options: LakeOptions | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.  Raises the errors of `open_lake`, and of binding the addresses."""
    group = group_id(config.socket_group)
    with places_made(config):
        judge_permissions(config, group)
        plan = plan_lake(config, member_command, options or LakeOptions())
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as opening:
                opened = await opening.start(_cancel_on_signal, signals, opening.cancel_scope)
                async with open_lake(plan) as lake, trio.open_nursery() as nursery:
                    opened.cancel()
                    nursery.start_soon(lake.upkeep.run)
                    running = _running(config, lake, group, plan.tier.size_bytes // SLAB_BYTES)
                    await serve_until_signal(running, nursery, signals, printer, faces)
                    nursery.cancel_scope.cancel()
    printer("stopped")


async def _cancel_on_signal(
    signals: AsyncIterator[int], scope: trio.CancelScope, *, task_status: trio.TaskStatus[trio.CancelScope]
) -> None:
    """Cancel a scope at the first signal, until the scope that this task starts with is cancelled."""
    with trio.CancelScope() as waiting:
        task_status.started(waiting)
        await anext(signals)
        scope.cancel()


def plan_lake(config: Config, member_command: MemberCommand, options: LakeOptions) -> LakePlan:
    """Return the lake that lies in the folders, or is to be made of them.  Errors of `lake_folders`.  Blocks."""
    protection = Protection.parse(config.protect)
    found = look_at_folders(config.devices)
    if found.is_new:
        check_devices(config.devices, protection, accept_loss=options.accept_loss)
    members: list[MemberPlan] = []
    for number, folder in enumerate(config.devices, 1):
        socket = config.socket.with_name(f"{config.socket.name}.{number}")
        members.append(MemberPlan(folder, socket, member_command(folder, socket, found.lake_id)))
    return LakePlan(
        found.lake_id,
        found.is_new,
        members,
        protection,
        is_chosen=config.origins["protect"] != "default",
        accept_loss=options.accept_loss,
        new_devices=options.new_devices,
        upload_expiry_s=config.upload_expiry,
        tier=TierPlan(tier_size_of(config), config.hot_index, config.hot_index_entries),
    )


def _running(config: Config, lake: LakeParts, group: int | None, slabs: int) -> RunningLake:
    """`slabs`: most slabs of the DRAM tier."""
    disk = LocalDisk(config.data)
    token = native_token(disk) if config.native else None
    connections = connections_limit(DESCRIPTORS_PER_SLAB * slabs + (STRANGERS_MAX if config.native else 0))
    lake_id = lake.names.store.superblock.cluster_id.hex()
    return RunningLake(
        config=config,
        service=lake.head,
        server=Server(lake.head, TrioNetwork(group=group), token=token, connections_max=connections),
        offload=lake.offload,
        disk=disk,
        title=f"lake    {lake_id}  ({len(lake.processes.members)} members, protection {lake.protection})",
        parts=lake,
    )
