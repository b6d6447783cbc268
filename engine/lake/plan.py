"""The plan of one start of a lake on this machine: its folders, the member of each, and the operator's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.format.group_parts import FIRST_SHARD
from engine.lake.folders import holds_any_names, holds_member, is_wanted, names_folder
from engine.lake.machine import MachineRecord
from engine.lake.member_processes import MemberPlan
from lakefs.cluster.protection import Protection
from lakefs.config.settings import Address, parse_address
from lakefs.errors import ConfigError
from lakefs.ids import CopyId, NamesShard

UNIX: Final = "unix:"
_TCP: Final = "tcp://"
_PORT_MAX: Final = 65535
MEMBERS_MAX: Final = 255
"""Members of one machine: they listen at the ports behind that of the names, and names shards at those behind them."""


@dataclass(frozen=True)
class TierPlan:
    """The DRAM tier of the head, and its shared index: settings as those of one engine (`hot_index`)."""

    size_bytes: int = 0
    hot_index: str = "auto"
    hot_index_entries: int = 0


@dataclass(frozen=True)
class LakePlan:
    """A lake to open on this machine.

    `is_new`: no folder holds anything.  `protection` is that of a new lake.  `is_chosen`: somebody asked for it, so
    another one that is recorded is refused.  `new_devices`: of a lake that was made, folders without a member get one.
    `token` is the lake's; empty for a machine that is alone.  `without` and `restored` are of the names' copies
    (`open_local_names`).
    """

    machine: MachineRecord
    token: str
    is_new: bool
    members: Sequence[MemberPlan]
    protection: Protection
    is_chosen: bool
    accept_loss: bool
    new_devices: bool
    upload_expiry_s: float = 0.0
    names_checkpoint_s: float = 0.0
    """From one checkpoint of the names in the lake to the next; 0: there is none."""
    without: frozenset[CopyId] = frozenset()
    restored: bool = False
    tier: TierPlan = TierPlan()
    is_head: bool = False
    """One more head of a machine: it has neither members nor names."""
    names_listen: tuple[str, ...] = ()
    """Addresses at which this machine's names are found, where it has them: those of the first shard."""
    names_socket: str = ""
    """Address of the names for one more head of the machine that has them; empty for all others."""

    @property
    def names_at(self) -> str:
        """Address of the names where another process has them; empty where this one has."""
        return self.names_socket or (self.machine.names_at and f"tcp://{self.machine.names_at}")

    @property
    def lake_id(self) -> bytes:
        """The lake's id."""
        return bytes.fromhex(self.machine.lake)

    @property
    def folders(self) -> list[Path]:
        """The members' folders."""
        return [member.folder for member in self.members]

    def is_wanted(self, folder: Path) -> bool:
        """Return True if a folder has a member, or gets one at this start.  Blocks."""
        return self.is_new or self.new_devices or is_wanted(folder)

    def may_have_names(self, folder: Path) -> bool:
        """Return True if names may be copied to a folder now: not to an empty one, whose disk was taken away.  Blocks.

        Names are made before the members of a new lake.
        """
        if is_wanted(folder) or holds_any_names(folder):
            return True
        return self.is_new and not any(map(holds_member, self.folders))

    def names_folders(self, shard: NamesShard) -> list[Path]:
        """Return the folders in which names of a shard may lie: not those that hold nothing of a lake.  Blocks."""
        usable = [folder for folder in self.folders if self.is_wanted(folder) or holds_any_names(folder)]
        return [names_folder(folder, shard) for folder in usable]

    def names_addresses(self, shard: NamesShard) -> tuple[str, ...]:
        """Return the addresses at which this machine's names of a shard are found.  ConfigError: it has no port."""
        return tuple(shard_address(address, shard) for address in self.names_listen)


def shard_address(address: str, shard: NamesShard) -> str:
    """Return the address of a shard's names, where those of the first one have `address`.  ConfigError: no such port.

    Members have the ports between the two.
    """
    if shard == FIRST_SHARD:
        return address
    if address.startswith(UNIX):
        return f"{address}.{shard}"
    listen = parse_address(address.removeprefix(_TCP))
    return f"{_TCP}{numbered_port(listen, MEMBERS_MAX + 1 + shard)}"


def numbered_port(listen: Address, number: int) -> Address:
    """Return the address that many ports behind that at which a machine listens.  ConfigError if there is none."""
    if listen.port + number > _PORT_MAX:
        raise ConfigError(
            f"this machine listens at {listen}, and needs port {listen.port + number}, which there is not: give it a "
            "lower port with: lake cluster init or join --listen HOST:PORT",
            subject=str(listen),
        )
    return Address(listen.host, listen.port + number)


def refuse_other_protection(made: Protection, asked: Protection) -> None:
    """Raise ConfigError if a lake that was made with one protection is to be started with another one."""
    if made != asked:
        raise ConfigError(
            f"this lake was made with protection {made}, which stays, and {asked} is asked for; start it without "
            "--protect, or without protect in its settings",
            subject="protect",
        )
