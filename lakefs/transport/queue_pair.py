"""Queue pairs of libibverbs, each with a completion queue and channel of its own.

`lakefs.transport.rdma` is the only user; it calls one method of a queue pair at a time, and none after `close`.

libibverbs has no symbols for posting and polling: they are pointers in the context, called here as its header does.

Rules kept here:
- `post` gives the library a chain of work requests in one call, without the interpreter's lock; the library has copied
  them when it returns.
- `poll` keeps the lock: it reads memory.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from ctypes import c_int, c_uint32, c_void_p
from typing import Final, NamedTuple

from lakefs.errors import FabricFailed
from lakefs.transport.fabric import ACCESS_REFUSED, FLUSHED, LOCAL_REFUSED, NO_ANSWER
from lakefs.transport.verbs import Domain, VerbsError, fields

WRITE: Final = 0
READ: Final = 4
_SIGNALED: Final = 2
_RELIABLE: Final = 2
_TO_INIT: Final = (1, 0x39)
"""A state, and the attributes that are set with it: of the port and its rights."""
_TO_RECEIVE: Final = (2, 0x129181)
"""The peer and the way to it."""
_TO_SEND: Final = (3, 0x12E01)
"""Patience with the peer."""

# Places in structures of which nothing else is read.
OP_POLL: Final = 96
OP_NOTIFY: Final = 104
OP_POST: Final = 208
CHANNEL_DESCRIPTOR: Final = 8
PAIR_NUMBER: Final = 52

WORK: Final = struct.Struct("=QQQiIIIQI76x")
"""struct ibv_send_wr: id, next, pieces, their count, operation, flags, -, remote address, remote key."""
PIECE: Final = struct.Struct("=QII")
"""struct ibv_sge: address, length, local key."""
COMPLETION: Final = struct.Struct("=QI36x")
"""struct ibv_wc: id, status."""

FAILURES: Final = {4: LOCAL_REFUSED, 5: FLUSHED, 9: ACCESS_REFUSED, 10: ACCESS_REFUSED, 12: NO_ANSWER}
"""Texts of the statuses of completions that are known."""


class PairRequest(ctypes.Structure):
    """struct ibv_qp_init_attr."""

    _fields_ = fields(
        "ptr:qp_context,send_cq,recv_cq,srq u32:max_send_wr,max_recv_wr,max_send_sge,max_recv_sge,max_inline_data"
        " u32:qp_type i32:sq_sig_all"
    )


class PairAttributes(ctypes.Structure):
    """struct ibv_qp_attr, with the parts of its first path (struct ibv_ah_attr) among its own."""

    _fields_ = [
        *fields(
            "u32:qp_state,cur_qp_state,path_mtu,path_mig_state,qkey,rq_psn,sq_psn,dest_qp_num,qp_access_flags"
            ",max_send_wr,max_recv_wr,max_send_sge,max_recv_sge,max_inline_data"
            " gid:dgid u32:flow_label u8:sgid_index,hop_limit,traffic_class u16:dlid"
            " u8:sl,src_path_bits,static_rate,is_global,path_port_num"
        ),
        ("alternative_path", ctypes.c_uint64 * 4),
        *fields(
            "u16:pkey_index,alt_pkey_index u8:en_sqd_async_notify,sq_draining,max_rd_atomic,max_dest_rd_atomic,"
            "min_rnr_timer,port_num,timeout,retry_cnt,rnr_retry,alt_port_num,alt_timeout u32:rate_limit"
        ),
    ]


class Request(NamedTuple):
    """One READ or WRITE (`operation`), whose completion has the ticket."""

    ticket: int
    operation: int
    address: int
    length: int
    local_key: int
    remote_address: int
    remote_key: int


class QueuePair:
    """A reliable queue pair, for READs and WRITEs of this side."""

    def __init__(self, domain: Domain, window: int) -> None:
        """`window`: requests in flight at most.  VerbsError."""
        context = domain.context
        self._verbs = verbs = context.verbs
        self._window = window
        self._post = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p)(_pointer(context.address + OP_POST))
        self._notify = ctypes.CFUNCTYPE(c_int, c_void_p, c_int)(_pointer(context.address + OP_NOTIFY))
        self._poll = ctypes.PYFUNCTYPE(c_int, c_void_p, c_int, c_void_p)(_pointer(context.address + OP_POLL))
        self._pair = self._queue = 0
        self._channel = verbs.made("ibv_create_comp_channel", context.address)
        self.descriptor: Final = c_int.from_address(self._channel + CHANNEL_DESCRIPTOR).value
        try:
            os.set_blocking(self.descriptor, False)
            os.set_inheritable(self.descriptor, False)
            self._queue = verbs.made("ibv_create_cq", context.address, 2 * window, None, self._channel, 0)
            wanted = PairRequest(
                send_cq=self._queue, recv_cq=self._queue, max_send_wr=window, max_recv_wr=1, max_send_sge=1,
                max_recv_sge=1, qp_type=_RELIABLE,
            )  # fmt: skip
            self._pair = verbs.made("ibv_create_qp", domain.address, ctypes.byref(wanted))
        except BaseException:
            self.close()
            raise
        self.number: Final = c_uint32.from_address(self._pair + PAIR_NUMBER).value
        self._works = ctypes.create_string_buffer(window * WORK.size)
        self._pieces = ctypes.create_string_buffer(window * PIECE.size)
        self._found = ctypes.create_string_buffer(window * COMPLETION.size)
        self._refused = c_void_p()

    def connect(self, attributes: PairAttributes) -> None:
        """Join it to its peer.  VerbsError."""
        for state, names in (_TO_INIT, _TO_RECEIVE, _TO_SEND):
            attributes.qp_state = state
            self._verbs.done("ibv_modify_qp", self._pair, ctypes.byref(attributes), names)

    def post(self, requests: Sequence[Request]) -> tuple[int, str]:
        """Begin requests, in their order; return how many were begun, and why no more were."""
        assert 0 < len(requests) <= self._window, "the window is the caller's"
        works, pieces = ctypes.addressof(self._works), ctypes.addressof(self._pieces)
        for index, wanted in enumerate(requests):
            piece = index * PIECE.size
            PIECE.pack_into(self._pieces, piece, wanted.address, wanted.length, wanted.local_key)
            following = works + (index + 1) * WORK.size if index + 1 < len(requests) else 0
            WORK.pack_into(
                self._works, index * WORK.size, wanted.ticket, following, pieces + piece, 1, wanted.operation,
                _SIGNALED, 0, wanted.remote_address, wanted.remote_key,
            )  # fmt: skip
        code = self._post(self._pair, works, ctypes.byref(self._refused))
        if not code:
            return len(requests), ""
        return ((self._refused.value or works) - works) // WORK.size, os.strerror(abs(code))

    def poll(self) -> list[tuple[int, int]]:
        """Return (ticket, status) of the completions that came.  VerbsError."""
        count = self._poll(self._queue, self._window, ctypes.addressof(self._found))
        if count < 0:
            raise VerbsError(f"ibv_poll_cq: {os.strerror(-count)}")
        return [COMPLETION.unpack_from(self._found, index * COMPLETION.size) for index in range(count)]

    def arm(self) -> None:
        """Have the next completion make the descriptor readable.  VerbsError."""
        code = self._notify(self._queue, 0)
        if code:
            raise VerbsError(f"ibv_req_notify_cq: {os.strerror(abs(code))}")

    def take_events(self) -> None:
        """Take what made the descriptor readable, without waiting.  VerbsError."""
        queue, own = c_void_p(), c_void_p()
        while True:
            try:
                self._verbs.done("ibv_get_cq_event", self._channel, ctypes.byref(queue), ctypes.byref(own))
            except VerbsError:
                if ctypes.get_errno() == errno.EAGAIN:
                    return
                raise
            self._verbs.library.ibv_ack_cq_events(self._queue, 1)

    def close(self) -> None:
        """End it: on return nothing that was posted touches memory any more."""
        for name, address in (
            ("ibv_destroy_qp", self._pair), ("ibv_destroy_cq", self._queue),
            ("ibv_destroy_comp_channel", self._channel),
        ):  # fmt: skip
            if address:
                self._verbs.ended(name, address)


def _pointer(place: int) -> int:
    """Return the function that a context has in that place.  FabricFailed if it has none."""
    found = c_void_p.from_address(place).value
    if not found:
        raise FabricFailed("the adapter's library has no function to post, poll or wait")
    return found
