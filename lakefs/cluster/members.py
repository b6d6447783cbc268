"""Members as the table sees them: identity, room, failure domains, and whether they get places.

Rules kept here:
- Failure domains are nested: a member is on one device, a device in one machine, a machine in one rack, a rack in one
  zone.  Members that say otherwise are refused.  Racks of one name in two zones are two racks.
- An empty name means that the domain is not known.  All members of a domain whose own domain is not known count as
  being in one: nobody knows that they are apart.  Only a device without a name is its member's alone.
- Members are checked once, by `checked_members`; what accepted it may rely on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from lakefs.cluster.protection import Protection
from lakefs.errors import InvalidArgument
from lakefs.ids import MEMBER_ID_BYTES, MemberId, id_text
from lakefs.limits import CLUSTER_MEMBERS_MAX, DOMAIN_NAME_BYTES_MAX, MEMBER_ROOM_BYTES_MAX


class Level(IntEnum):
    """Levels of failure domains, the narrowest first."""

    MEMBER = 0
    DEVICE = 1
    MACHINE = 2
    RACK = 3
    ZONE = 4


class Standing(IntEnum):
    """Standing of a member in a table.  Only members that are IN get places."""

    IN = 1
    DRAINING = 2
    """Answers, and gives its places to others; the operator wants it away."""
    OUT = 3
    """Silent for so long that others get its places."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member: an engine on a device.  `room_bytes` is its weight; empty domains are not known.

    `device` is a name only where members share one, within their machine.
    """

    id: MemberId
    room_bytes: int
    machine: str = ""
    rack: str = ""
    zone: str = ""
    state: Standing = Standing.IN
    device: str = ""


DomainKey = tuple[str, ...] | MemberId
"""Name of a domain within its level."""


def domain_key(member: Member, level: Level) -> DomainKey:
    """Return the domain of `member` on that level.  A machine's name is enough, a rack's needs its zone."""
    if level is Level.MEMBER:
        return member.id
    if level is Level.DEVICE:
        return (*_machine_key(member), member.device) if member.device else (member.id.hex(),)
    if level is Level.MACHINE:
        return _machine_key(member)
    return (member.rack, member.zone) if level is Level.RACK else (member.zone,)


def _machine_key(member: Member) -> tuple[str, ...]:
    return (member.machine,) if member.machine else ("", member.rack, member.zone)


def checked_members(
    protection: Protection, members: Iterable[Member], *, accept_loss: bool = False
) -> tuple[Member, ...]:
    """Return the members in the order of their ids; InvalidArgument for a list that no table can have.

    Fewer members that get places than `protection.members_min` are refused unless `accept_loss`: losing one of them
    may lose content.
    """
    ordered = tuple(sorted(members, key=_by_id))
    if len(ordered) > CLUSTER_MEMBERS_MAX:
        raise InvalidArgument(f"a lake has at most {CLUSTER_MEMBERS_MAX} members, not {len(ordered)}")
    parents: dict[tuple[Level, DomainKey], tuple[DomainKey, Member]] = {}
    before: Member | None = None
    for member in ordered:
        _check_member(member)
        if before is not None and before.id == member.id:
            raise InvalidArgument("a member is listed twice", subject=id_text(member.id))
        _check_nesting(member, parents)
        before = member
    placing = sum(member.state is Standing.IN for member in ordered)
    if placing < (1 if accept_loss else protection.members_min):
        raise InvalidArgument(
            f"protection {protection} needs {protection.members_min} members and has {placing}: add members, "
            "or accept that content is lost with one of them"
        )
    return ordered


def _by_id(member: Member) -> MemberId:
    return member.id


def _check_member(member: Member) -> None:
    if len(member.id) != MEMBER_ID_BYTES:
        raise InvalidArgument(f"a member's id has {MEMBER_ID_BYTES} bytes", subject=id_text(member.id))
    if not 1 <= member.room_bytes <= MEMBER_ROOM_BYTES_MAX:
        raise InvalidArgument(
            f"a member has room for 1 to {MEMBER_ROOM_BYTES_MAX} bytes, not {member.room_bytes}",
            subject=id_text(member.id),
        )
    for name in (member.device, member.machine, member.rack, member.zone):
        if len(name.encode(errors="surrogatepass")) > DOMAIN_NAME_BYTES_MAX or not name.isprintable():
            raise InvalidArgument(
                f"a domain's name has at most {DOMAIN_NAME_BYTES_MAX} bytes, all printable: {name!r}",
                subject=id_text(member.id),
            )


def _check_nesting(member: Member, parents: dict[tuple[Level, DomainKey], tuple[DomainKey, Member]]) -> None:
    """Refuse a machine in two racks; a rack's key has its zone, so it cannot be in two."""
    domain = (Level.MACHINE, domain_key(member, Level.MACHINE))
    parent, first = parents.setdefault(domain, (domain_key(member, Level.RACK), member))
    if parent != domain_key(member, Level.RACK):
        raise InvalidArgument(
            f'machine "{member.machine}" is in rack "{first.rack}" of zone "{first.zone}" and in rack "{member.rack}" '
            f'of zone "{member.zone}"; give all its members one rack and zone',
            subject=id_text(member.id),
        )


LEVELS: Final = tuple(Level)
