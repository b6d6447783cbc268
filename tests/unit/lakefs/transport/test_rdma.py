"""RDMA without an adapter: each thing that may be missing is a reason, and the address is chosen by rules.

libibverbs is replaced by one that has the devices of the test; over the real one the tests of `tests/lab/test_rdma.py`
run.
"""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cli.operate import doctor
from lakefs.errors import FabricFailed
from lakefs.transport import queue_pair, rdma, verbs
from lakefs.transport.fabric import Remote
from lakefs.transport.verbs import Gid, VerbsError

IPV4 = "0000:0000:0000:0000:0000:ffff:0a09:0001"
IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0001"
NEAR = "fe80:0000:0000:0000:9011:41ff:fe5b:5d81"
ETHERNET, OTHER = 2, 1
V1, V2 = 1, 2


@dataclass
class FakePort:
    """A port of a device; `gids` are (text, type)."""

    gids: list[tuple[str, int]] = field(default_factory=list)
    state: int = 4
    link_layer: int = ETHERNET
    lid: int = 0
    active_mtu: int = 5


@dataclass
class FakeDevice:
    """A device, and the context that is opened of it."""

    name: str
    ports: list[FakePort]
    transport: int = 0
    refuses: str = ""
    closed: bool = False
    max_qp_rd_atom: int = 128
    max_qp_init_rd_atom: int = 4

    @property
    def phys_port_cnt(self) -> int:
        return len(self.ports)

    def limits(self) -> FakeDevice:
        return self

    def port(self, number: int) -> FakePort:
        if not 0 < number <= len(self.ports):
            raise VerbsError("ibv_query_port: Invalid argument")
        return self.ports[number - 1]

    def gids(self, number: int, _: int) -> list[Gid]:
        return [Gid(index, kind, gid(text)) for index, (text, kind) in enumerate(self.ports[number - 1].gids)]

    def gid(self, number: int, index: int) -> bytes:
        return gid(self.ports[number - 1].gids[index][0])

    def domain(self) -> FakeDevice:
        return self

    def close(self) -> None:
        self.closed = True


class FakeVerbs:
    """The part of the library that `open_fabric` uses."""

    def __init__(self, *devices: FakeDevice) -> None:
        self._devices = devices

    def devices(self) -> list[str]:
        return [device.name for device in self._devices]

    def open(self, name: str) -> FakeDevice:
        found = next(device for device in self._devices if device.name == name)
        if found.refuses:
            raise VerbsError(found.refuses)
        return found


def with_devices(patch: pytest.MonkeyPatch, *devices: FakeDevice) -> None:
    """Replace the library by one that has these devices."""
    patch.setattr(rdma, "load_verbs", lambda: FakeVerbs(*devices))


def chosen(device: FakeDevice, patch: pytest.MonkeyPatch, name: str = "") -> tuple[int, bytes] | str:
    """Return port and address that are chosen, or the reason."""
    with_devices(patch, device)
    found = rdma.open_fabric(name)
    if isinstance(found, str):
        return found
    return found.port.number, found.port.gid


def gid(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


@pytest.mark.parametrize(
    ("gids", "best"),
    [
        ([(NEAR, V2), (IPV4, V2)], IPV4),
        ([(NEAR, V2), (IPV6, V2), (IPV4, V2)], IPV4),
        ([(NEAR, V2), (IPV6, V2)], IPV6),
        ([(NEAR, V2)], NEAR),
        ([(IPV4, V1), (NEAR, V2)], NEAR),
    ],
)
def test_the_address_that_reaches_farthest_is_used(
    gids: list[tuple[str, int]], best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(FakeDevice("a", [FakePort(gids)]), monkeypatch) == (1, gid(best))


def test_ports_that_are_down_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice("a", [FakePort([(IPV4, V2)], state=1), FakePort([(IPV6, V2)])])
    assert chosen(device, monkeypatch) == (2, gid(IPV6))
    assert chosen(device, monkeypatch, "a:2:0") == (2, gid(IPV6))
    assert chosen(device, monkeypatch, "a:1") == "a: no port is active"
    assert device.closed
    assert chosen(device, monkeypatch, "a:3") == "a: ibv_query_port: Invalid argument"


@pytest.mark.parametrize("gids", [[], [(IPV4, V1)]])
def test_a_port_without_a_usable_address_is_a_reason(
    gids: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = chosen(FakeDevice("a", [FakePort(gids)]), monkeypatch)
    assert reason == "a: the port has no RoCE v2 address (GID): give its network interface an IP address"


def test_an_index_without_an_address_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice("a", [FakePort([(IPV4, V2), (":".join(["0000"] * 8), V2)])])
    assert chosen(device, monkeypatch, "a:1:1") == "a: the port has no address (GID) 1"


def test_infiniband_uses_the_first_address_and_its_lid(monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch, FakeDevice("a", [FakePort([(NEAR, 0)], link_layer=OTHER, lid=7)]))
    fabric = rdma.open_fabric()
    assert not isinstance(fabric, str)
    assert (fabric.kind, fabric.port.lid, fabric.port.gid) == ("infiniband", 7, gid(NEAR))
    assert fabric.port.reads_max == 4


def test_the_first_device_that_can_be_used_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = FakeDevice("a", [], refuses="ibv_open_device: Permission denied")
    iwarp = FakeDevice("b", [FakePort([(IPV4, V2)])], transport=1)
    good = FakeDevice("c", [FakePort([(IPV4, V2)])])
    with_devices(monkeypatch, refused, iwarp, good)
    fabric = rdma.open_fabric()
    assert not isinstance(fabric, str)
    assert fabric.device == "c"
    with_devices(monkeypatch, refused, iwarp)
    assert rdma.open_fabric() == ("a: ibv_open_device: Permission denied; b: iWARP, which is not supported")
    assert rdma.open_fabric("c") == "there is no RDMA device c"


def test_no_device_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch)
    assert rdma.open_fabric() == "there is no RDMA device"


@pytest.mark.parametrize("name", ["a:x", "a:1:x", "a::-1", "a:1:2:3"])
def test_a_name_that_is_none_is_a_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch, FakeDevice("a", [FakePort([(IPV4, V2)])]))
    assert rdma.open_fabric(name) == f"{name} is no name of an RDMA device: NAME, NAME:PORT or NAME:PORT:GID"


def test_without_the_library_there_is_a_reason_and_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "LIBRARY", "libnowhere.so.1")
    monkeypatch.setattr(rdma, "load_verbs", verbs.load_verbs.__wrapped__)
    assert rdma.open_fabric() == "libibverbs.so.1 is not installed; install libibverbs1 and ibverbs-providers"


def test_a_library_that_is_too_old_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "LIBRARY", None)  # of this process: it has none of the functions
    monkeypatch.setattr(rdma, "load_verbs", verbs.load_verbs.__wrapped__)
    reason = rdma.open_fabric()
    assert isinstance(reason, str)
    assert reason.startswith("libibverbs.so.1 is too old (")


HEADER = Path("/usr/include/infiniband/verbs.h")
# fmt: off
STRUCTURES: dict[str, tuple[int, dict[str, int]]] = {
    "ibv_device": (0, {"transport_type": verbs.DEVICE_TRANSPORT}),
    "ibv_mr": (0, {"lkey": verbs.REGION_LOCAL_KEY, "rkey": verbs.REGION_REMOTE_KEY}),
    "ibv_comp_channel": (0, {"fd": queue_pair.CHANNEL_DESCRIPTOR}),
    "ibv_qp": (0, {"qp_num": queue_pair.PAIR_NUMBER}),
    "ibv_context": (
        0,
        {
            "ops.poll_cq": queue_pair.OP_POLL,
            "ops.req_notify_cq": queue_pair.OP_NOTIFY,
            "ops.post_send": queue_pair.OP_POST,
        },
    ),
    "ibv_send_wr": (
        queue_pair.WORK.size,
        {"next": 8, "sg_list": 16, "num_sge": 24, "opcode": 28, "send_flags": 32, "wr.rdma.remote_addr": 40,
         "wr.rdma.rkey": 48},
    ),
    "ibv_sge": (queue_pair.PIECE.size, {"length": 8, "lkey": 12}),
    "ibv_wc": (queue_pair.COMPLETION.size, {"wr_id": 0, "status": 8}),
}
# fmt: on


def places(structure: type[ctypes.Structure], *renamed: str) -> dict[str, int]:
    """Return the places of a structure's fields, by their names in the header."""
    names = dict(zip(renamed[::2], renamed[1::2], strict=True))
    found = {name: getattr(structure, name).offset for name, *_ in structure._fields_}
    return {names.get(name, name): at for name, at in found.items() if names.get(name, name)}


@pytest.mark.skipif(not HEADER.exists(), reason="libibverbs-dev is not installed")
def test_structures_are_laid_out_as_the_header_has_them(tmp_path: Path) -> None:
    caps = [part for name in ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data")
            for part in (name, f"cap.{name}")]  # fmt: skip
    route = [part for name in ("dgid", "flow_label", "sgid_index", "hop_limit", "traffic_class")
             for part in (name, f"ah_attr.grh.{name}")]  # fmt: skip
    path = [part for name in ("dlid", "sl", "src_path_bits", "static_rate", "is_global")
            for part in (name, f"ah_attr.{name}")]  # fmt: skip
    known = STRUCTURES | {
        "ibv_device_attr": (ctypes.sizeof(verbs.DeviceAttributes), places(verbs.DeviceAttributes)),
        "ibv_port_attr": (0, places(verbs.PortAttributes, "later", "")),
        "ibv_gid_entry": (ctypes.sizeof(verbs.GidEntry), places(verbs.GidEntry)),
        "ibv_qp_init_attr": (ctypes.sizeof(queue_pair.PairRequest), places(queue_pair.PairRequest, *caps)),
        "ibv_qp_attr": (
            ctypes.sizeof(queue_pair.PairAttributes),
            places(
                queue_pair.PairAttributes, *caps, *route, *path, "path_port_num", "ah_attr.port_num",
                "alternative_path", "alt_ah_attr",
            ),
        ),
    }  # fmt: skip
    checks = []
    for structure, (size, fields) in known.items():
        if size:
            checks.append(f'_Static_assert(sizeof(struct {structure}) == {size}, "{structure}");')
        checks += [f'_Static_assert(offsetof(struct {structure}, {name}) == {at}, "{structure}.{name}");'
                   for name, at in fields.items()]  # fmt: skip
    numbers = {
        "IBV_WR_RDMA_READ": queue_pair.READ, "IBV_WR_RDMA_WRITE": queue_pair.WRITE, "IBV_SEND_SIGNALED": 2,
        "IBV_QPT_RC": 2, "IBV_ACCESS_LOCAL_WRITE": verbs.ACCESS_LOCAL_WRITE,
        "IBV_ACCESS_REMOTE_WRITE": verbs.ACCESS_REMOTE_WRITE, "IBV_ACCESS_REMOTE_READ": verbs.ACCESS_REMOTE_READ,
        "IBV_LINK_LAYER_ETHERNET": verbs.LINK_LAYER_ETHERNET, "IBV_TRANSPORT_IB": verbs.TRANSPORT_IB,
        "IBV_PORT_ACTIVE": verbs.PORT_ACTIVE, "IBV_GID_TYPE_ROCE_V2": verbs.GID_ROCE_V2,
        "IBV_WC_LOC_PROT_ERR": 4, "IBV_WC_WR_FLUSH_ERR": 5, "IBV_WC_REM_INV_REQ_ERR": 9, "IBV_WC_REM_ACCESS_ERR": 10,
        "IBV_WC_RETRY_EXC_ERR": 12,
    }  # fmt: skip
    checks += [f'_Static_assert({name} == {number}, "{name}");' for name, number in numbers.items()]
    assert set(queue_pair.FAILURES) == {4, 5, 9, 10, 12}
    source = tmp_path / "layout.c"
    source.write_text("#include <infiniband/verbs.h>\n#include <stddef.h>\n" + "\n".join(checks) + "\n")
    done = subprocess.run(["gcc", "-fsyntax-only", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_doctor_says_that_there_is_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "_ADAPTERS", "/nowhere")
    found = doctor._rdma()
    assert (found.verdict, found.detail) == ("ok", "no adapter; payload goes over TCP")


def test_the_doctor_says_why_an_adapter_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "adapters", lambda: ["a"])
    with_devices(monkeypatch, FakeDevice("a", [FakePort(state=1)]))
    found = doctor._rdma()
    assert (found.verdict, found.detail) == ("warn", "not used: a: no port is active; payload goes over TCP")
    with_devices(monkeypatch, FakeDevice("a", [FakePort([(IPV4, V2)])]))

    def refused(*_: object) -> None:
        raise FabricFailed("no memory may be locked")

    monkeypatch.setattr(rdma.RdmaFabric, "register", refused)
    found = doctor._rdma()
    assert (found.verdict, found.detail) == ("warn", "not used: no memory may be locked; payload goes over TCP")


def test_the_doctor_names_an_adapter_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "adapters", lambda: ["a"])
    with_devices(monkeypatch, FakeDevice("a", [FakePort([(IPV4, V2)])]))
    asked: list[Remote] = []

    class Registered:
        def close(self) -> None:
            return None

    def register(self: object, memory: object, remote: Remote) -> Registered:
        asked.append(remote)
        return Registered()

    monkeypatch.setattr(rdma.RdmaFabric, "register", register)
    found = doctor._rdma()
    assert (found.verdict, found.detail) == ("ok", "a: roce, and 64.0 MiB may be locked")
    assert asked == [Remote.NONE]
