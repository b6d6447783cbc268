"""The port of an RDMA adapter that is used, and its address (GID)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from lakefs.transport.verbs import Verbs
from lakefs.wire.fabric_end import GID_BYTES, INFINIBAND, ROCE

_READS_MAX: Final = 16
_GIDS_MAX: Final = 1024
_IB_TRANSPORT: Final = 0
_ACTIVE: Final = 4
_GID_ROCE_V2: Final = 1
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


def port_of(verbs: Verbs, context: Any, device: str, number: int, gid_index: int | None) -> Port | str:
    """Return the port to use, or why there is none."""
    entry = next(entry for entry in verbs.device.get_device_list() if entry.name.decode() == device)
    if entry.transport_type != _IB_TRANSPORT:
        return "iWARP, which is not supported"
    limits = context.query_device()
    for candidate in [number] if number else range(1, limits.phys_port_cnt + 1):
        state = context.query_port(candidate)
        if state.state != _ACTIVE:
            continue
        is_ethernet = state.link_layer == verbs.numbers.IBV_LINK_LAYER_ETHERNET
        index = gid_index if gid_index is not None else _best_gid(context, candidate) if is_ethernet else 0
        if index is None:
            return "the port has no RoCE v2 address (GID): give its network interface an IP address"
        gid = _gid_bytes(context, candidate, index)
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


def _best_gid(context: Any, port: int) -> int | None:
    """Return the index of the address to use; None if the port has none."""
    known = [
        (_rank(_gid_bytes(context, port, entry.gid_index)), entry.gid_index)
        for entry in context.query_gid_table(_GIDS_MAX)
        if entry.port_num == port and context.query_gid_type(port, entry.gid_index) == _GID_ROCE_V2
    ]
    return min(known)[1] if known else None


def _rank(gid: bytes) -> int:
    """Order of addresses: IPv4, then IPv6, then those that only the own link knows."""
    if gid[:12] == bytes(10) + b"\xff\xff":
        return 0
    return 2 if gid.startswith(_LINK_LOCAL) else 1


def _gid_bytes(context: Any, port: int, index: int) -> bytes:
    gid = bytes.fromhex(str(context.query_gid(port, index).gid).replace(":", ""))
    assert len(gid) == GID_BYTES, gid
    return gid


def gid_text(gid: bytes) -> str:
    """Return an address as the library writes it."""
    return ":".join(gid[at : at + 2].hex() for at in range(0, GID_BYTES, 2))
