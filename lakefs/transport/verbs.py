"""libibverbs, loaded when it is needed: adapters, protection domains, registered memory.

It is called by ctypes, which needs no headers and no building, and lets the interpreter's other threads run during a
call: a software adapter moves the bytes inside `ibv_post_send`.  (pyverbs, rdma-core's own binding, keeps the lock.)

The structures are those of the library's stable interface, IBVERBS_1.1, which others copy for the same reason; a test
compares them with the header where that is installed.  `lakefs.transport.queue_pair` has those of queue pairs.  Every
address in them comes from the library; bounds are its callers' (`check_post`).

In a forked child nothing of the parent's may be closed: it would end the parent's objects in the kernel.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_size_t, c_ssize_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

import structlog

from lakefs.host.forks import NO_FORK
from lakefs.wire.fabric_end import GID_BYTES

T = TypeVar("T")
_log: Final = structlog.get_logger(__name__)

LIBRARY: Final = "libibverbs.so.1"
ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, ACCESS_REMOTE_READ = 1, 2, 4
"""Rights on memory, and on what comes through a queue pair."""
LINK_LAYER_ETHERNET: Final = 2
TRANSPORT_IB: Final = 0
PORT_ACTIVE: Final = 4
GID_ROCE_V2: Final = 2

# Places in structures of which nothing else is read.
DEVICE_TRANSPORT: Final = 20
REGION_LOCAL_KEY: Final = 36
REGION_REMOTE_KEY: Final = 40

_FUNCTIONS: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "ibv_get_device_list": (c_void_p, (c_void_p,)),
    "ibv_free_device_list": (None, (c_void_p,)),
    "ibv_get_device_name": (c_char_p, (c_void_p,)),
    "ibv_open_device": (c_void_p, (c_void_p,)),
    "ibv_close_device": (c_int, (c_void_p,)),
    "ibv_query_device": (c_int, (c_void_p, c_void_p)),
    "ibv_query_port": (c_int, (c_void_p, c_uint8, c_void_p)),
    "ibv_query_gid": (c_int, (c_void_p, c_uint8, c_int, c_void_p)),
    "_ibv_query_gid_table": (c_ssize_t, (c_void_p, c_void_p, c_size_t, c_uint32, c_size_t)),
    "ibv_alloc_pd": (c_void_p, (c_void_p,)),
    "ibv_dealloc_pd": (c_int, (c_void_p,)),
    "ibv_reg_mr": (c_void_p, (c_void_p, c_void_p, c_size_t, c_int)),
    "ibv_dereg_mr": (c_int, (c_void_p,)),
    "ibv_create_comp_channel": (c_void_p, (c_void_p,)),
    "ibv_destroy_comp_channel": (c_int, (c_void_p,)),
    "ibv_create_cq": (c_void_p, (c_void_p, c_int, c_void_p, c_void_p, c_int)),
    "ibv_destroy_cq": (c_int, (c_void_p,)),
    "ibv_get_cq_event": (c_int, (c_void_p, c_void_p, c_void_p)),
    "ibv_ack_cq_events": (None, (c_void_p, c_uint32)),
    "ibv_create_qp": (c_void_p, (c_void_p, c_void_p)),
    "ibv_modify_qp": (c_int, (c_void_p, c_void_p, c_int)),
    "ibv_destroy_qp": (c_int, (c_void_p,)),
}
"""Results and arguments of the functions that are used."""


class VerbsError(Exception):
    """A call of the library failed; its text has the call and the reason."""


def fields(described: str) -> list[tuple[str, Any]]:
    """Return the fields of a structure from a text like `u32:a,b u8:c`; `gid` is aligned to 8 bytes."""
    kinds = {"u8": c_uint8, "u16": c_uint16, "u32": c_uint32, "i32": c_int, "u64": c_uint64, "ptr": c_void_p}
    kinds |= {"gid": c_uint64 * 2}
    return [(name, kinds[kind]) for kind, _, names in (part.partition(":") for part in described.split())
            for name in names.split(",")]  # fmt: skip


class DeviceAttributes(ctypes.Structure):
    """struct ibv_device_attr."""

    _fields_ = [
        ("fw_ver", ctypes.c_char * 64),
        *fields(
            "u64:node_guid,sys_image_guid,max_mr_size,page_size_cap u32:vendor_id,vendor_part_id,hw_ver"
            " i32:max_qp,max_qp_wr,device_cap_flags,max_sge,max_sge_rd,max_cq,max_cqe,max_mr,max_pd,max_qp_rd_atom,"
            "max_ee_rd_atom,max_res_rd_atom,max_qp_init_rd_atom,max_ee_init_rd_atom,atomic_cap,max_ee,max_rdd,max_mw,"
            "max_raw_ipv6_qp,max_raw_ethy_qp,max_mcast_grp,max_mcast_qp_attach,max_total_mcast_qp_attach,max_ah,"
            "max_fmr,max_map_per_fmr,max_srq,max_srq_wr,max_srq_sge u16:max_pkeys u8:local_ca_ack_delay,phys_port_cnt"
        ),
    ]


class PortAttributes(ctypes.Structure):
    """struct ibv_port_attr, with room for what later releases append."""

    _fields_ = [
        *fields(
            "u32:state,max_mtu,active_mtu i32:gid_tbl_len u32:port_cap_flags,max_msg_sz,bad_pkey_cntr,qkey_viol_cntr"
            " u16:pkey_tbl_len,lid,sm_lid u8:lmc,max_vl_num,sm_sl,subnet_timeout,init_type_reply,active_width,"
            "active_speed,phys_state,link_layer,flags u16:port_cap_flags2"
        ),
        ("later", c_uint8 * 76),
    ]


class GidEntry(ctypes.Structure):
    """struct ibv_gid_entry."""

    _fields_ = fields("gid:gid u32:gid_index,port_num,gid_type,ndev_ifindex")


class Gid(NamedTuple):
    """An address of a port: its number there, and its kind (GID_ROCE_V2 or another)."""

    number: int
    kind: int
    gid: bytes


class Verbs:
    """The library.  All its methods may be called by any thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """AttributeError: it is too old."""
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.library = library

    def devices(self) -> list[str]:
        """Return the names of the adapters that the library knows."""

        def names(listed: list[int]) -> list[str]:
            return [self._name(device) for device in listed]

        return self._with_devices(names)

    def open(self, name: str) -> Context:
        """Open the adapter of that name.  VerbsError."""

        def opened(listed: list[int]) -> Context:
            for device in listed:
                if self._name(device) == name:
                    made = self.made("ibv_open_device", device)
                    return Context(self, made, c_int.from_address(device + DEVICE_TRANSPORT).value)
            raise VerbsError(f"there is no device {name}")

        return self._with_devices(opened)

    def _with_devices(self, call: Callable[[list[int]], T]) -> T:
        with NO_FORK:  # a child would wait for ever for the library's lock
            return self._with_devices_listed(call)

    def _with_devices_listed(self, call: Callable[[list[int]], T]) -> T:
        count = c_int()
        listed = self.library.ibv_get_device_list(ctypes.byref(count))
        if not listed:  # the kernel has no RDMA at all
            return call([])
        try:
            return call(list((c_uint64 * count.value).from_address(listed)))
        finally:
            self.library.ibv_free_device_list(listed)

    def _name(self, device: int) -> str:
        return str(self.library.ibv_get_device_name(device).decode())

    def made(self, name: str, *arguments: Any) -> int:
        """Call a function that makes an object; return its address.  VerbsError."""
        ctypes.set_errno(0)
        found: int | None = getattr(self.library, name)(*arguments)
        if not found:
            raise VerbsError(f"{name}: {os.strerror(ctypes.get_errno())}")
        return found

    def done(self, name: str, *arguments: Any) -> None:
        """Call a function that returns 0, or the reason of its failure.  VerbsError."""
        ctypes.set_errno(0)
        code = getattr(self.library, name)(*arguments)
        if code:
            raise VerbsError(f"{name}: {os.strerror(ctypes.get_errno() or abs(code))}")

    def ended(self, name: str, address: int) -> None:
        """End an object; a failure is logged."""
        try:
            self.done(name, address)
        except VerbsError as error:
            _log.warning("an object of RDMA cannot be ended", reason=str(error))


@cache
def load_verbs() -> Verbs:
    """Load the library.  OSError: it is not installed.  AttributeError: it is too old."""
    with NO_FORK:
        return Verbs(ctypes.CDLL(LIBRARY, use_errno=True))


class Context:
    """An opened adapter."""

    def __init__(self, verbs: Verbs, address: int, transport: int) -> None:
        self.verbs = verbs
        self.address = address
        self.transport = transport

    def limits(self) -> DeviceAttributes:
        """Return what the adapter can do.  VerbsError."""
        found = DeviceAttributes()
        self.verbs.done("ibv_query_device", self.address, ctypes.byref(found))
        return found

    def port(self, number: int) -> PortAttributes:
        """Return the state of a port.  VerbsError."""
        found = PortAttributes()
        self.verbs.done("ibv_query_port", self.address, number, ctypes.byref(found))
        return found

    def gid(self, port: int, index: int) -> bytes:
        """Return one address of a port.  VerbsError."""
        found = (c_uint8 * GID_BYTES)()
        self.verbs.done("ibv_query_gid", self.address, port, index, ctypes.byref(found))
        return bytes(found)

    def gids(self, port: int, count_max: int) -> list[Gid]:
        """Return the addresses of a port that are set.  VerbsError."""
        found = (GidEntry * count_max)()
        count = self.verbs.library._ibv_query_gid_table(self.address, found, count_max, 0, ctypes.sizeof(GidEntry))
        if count < 0:
            raise VerbsError(f"ibv_query_gid_table: {os.strerror(-count)}")
        return [Gid(entry.gid_index, entry.gid_type, bytes(entry.gid))
                for entry in found[:count] if entry.port_num == port]  # fmt: skip

    def domain(self) -> Domain:
        """Make a protection domain.  VerbsError."""
        return Domain(self, self.verbs.made("ibv_alloc_pd", self.address))

    def close(self) -> None:
        """Close it, when all that was made with it is ended."""
        self.verbs.ended("ibv_close_device", self.address)


class Domain:
    """A protection domain: memory and queue pairs that belong together."""

    def __init__(self, context: Context, address: int) -> None:
        self.context = context
        self.address = address

    def register(self, address: int, length: int, access: int) -> Registered:
        """Register memory, which the caller keeps.  VerbsError."""
        verbs = self.context.verbs
        return Registered(verbs, verbs.made("ibv_reg_mr", self.address, address, length, access))

    def close(self) -> None:
        """End it, when all that was made in it is ended."""
        self.context.verbs.ended("ibv_dealloc_pd", self.address)


class Registered:
    """Registered memory."""

    def __init__(self, verbs: Verbs, address: int) -> None:
        self._verbs = verbs
        self._address = address
        self.local_key = c_uint32.from_address(address + REGION_LOCAL_KEY).value
        self.remote_key = c_uint32.from_address(address + REGION_REMOTE_KEY).value

    def close(self) -> None:
        """End the registration."""
        self._verbs.ended("ibv_dereg_mr", self._address)
