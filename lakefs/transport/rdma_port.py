"""The port of an RDMA adapter that is used, and its address (GID)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lakefs.transport.verbs import GID_ROCE_V2, LINK_LAYER_ETHERNET, PORT_ACTIVE, TRANSPORT_IB, Context
from lakefs.wire.fabric_end import GID_BYTES, INFINIBAND, ROCE

_READS_MAX: Final = 16
_GIDS_MAX: Final = 1024
_LINK_LOCAL: Final = b"\xfe\x80"


@dataclass(frozen=True)
class Port:
    """A port of an adapter, and the address that is used there."""

    number: int
    kind: str
    gid: bytes
    gid_index: int
    lid: int
    mtu: int
    """Counted like in verbs: 1 is 256 bytes, 5 is 4096."""
    reads_max: int


def port_of(context: Context, number: int, gid_index: int | None) -> Port | str:
    """Return the port to use, or why there is none.  VerbsError."""
    if context.transport != TRANSPORT_IB:
        return "iWARP, which is not supported"
    limits = context.limits()
    for candidate in [number] if number else range(1, limits.phys_port_cnt + 1):
        state = context.port(candidate)
        if state.state != PORT_ACTIVE:
            continue
        is_ethernet = state.link_layer == LINK_LAYER_ETHERNET
        index = gid_index if gid_index is not None else _best_gid(context, candidate) if is_ethernet else 0
        if index is None:
            return "the port has no RoCE v2 address (GID): give its network interface an IP address"
        gid = context.gid(candidate, index)
        if not any(gid):
            return f"the port has no address (GID) {index}"
        return Port(
            number=candidate,
            kind=ROCE if is_ethernet else INFINIBAND,
            gid=gid,
            gid_index=index,
            lid=state.lid,
            mtu=state.active_mtu,
            reads_max=min(_READS_MAX, limits.max_qp_rd_atom, limits.max_qp_init_rd_atom),
        )
    return "no port is active"


def _best_gid(context: Context, port: int) -> int | None:
    """Return the index of the address to use; None if the port has none."""
    known = [(_rank(each.gid), each.number) for each in context.gids(port, _GIDS_MAX) if each.kind == GID_ROCE_V2]
    return min(known)[1] if known else None


def _rank(gid: bytes) -> int:
    """Order of addresses: IPv4, then IPv6, then those that only the own link knows."""
    if gid[:12] == bytes(10) + b"\xff\xff":
        return 0
    return 2 if gid.startswith(_LINK_LOCAL) else 1


def gid_text(gid: bytes) -> str:
    """Return an address as the library writes it."""
    return ":".join(gid[at : at + 2].hex() for at in range(0, GID_BYTES, 2))
