"""RDMA without an adapter: each thing that may be missing is a reason, and the address is chosen by rules.

pyverbs is replaced by one that has the devices of the test; over a real one the tests of `tests/lab/test_rdma.py` run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib import machinery
from typing import Any

import pytest

from cli.operate import doctor
from lakefs.errors import FabricFailed
from lakefs.transport import rdma, verbs
from lakefs.transport.fabric import Remote

IPV4 = "0000:0000:0000:0000:0000:ffff:0a09:0001"
IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0001"
NEAR = "fe80:0000:0000:0000:9011:41ff:fe5b:5d81"
ETHERNET, OTHER = 2, 1


class FakeError(Exception):
    """Raised by the replaced library."""


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

    name: bytes
    ports: list[FakePort]
    transport_type: int = 0
    refuses: str = ""
    closed: bool = False
    max_qp_rd_atom: int = 128
    max_qp_init_rd_atom: int = 4

    @property
    def phys_port_cnt(self) -> int:
        return len(self.ports)

    def query_device(self) -> FakeDevice:
        return self

    def query_port(self, number: int) -> FakePort:
        if not 0 < number <= len(self.ports):
            raise FakeError("Failed to query port. Errno: 22, Invalid argument")
        return self.ports[number - 1]

    def query_gid_table(self, _: int) -> list[Any]:
        return [
            type("Entry", (), {"port_num": number, "gid_index": index})
            for number, port in enumerate(self.ports, 1)
            for index in range(len(port.gids))
        ]

    def query_gid_type(self, number: int, index: int) -> int:
        return self.ports[number - 1].gids[index][1]

    def query_gid(self, number: int, index: int) -> Any:
        return type("Gid", (), {"gid": self.ports[number - 1].gids[index][0]})

    def close(self) -> None:
        self.closed = True


class FakeModule:
    """The part of pyverbs that `open_fabric` uses."""

    IBV_LINK_LAYER_ETHERNET = ETHERNET

    def __init__(self, *devices: FakeDevice) -> None:
        self.devices = devices

    def get_device_list(self) -> tuple[FakeDevice, ...]:
        return self.devices

    def Context(self, name: str) -> FakeDevice:  # noqa: N802
        found = next(device for device in self.devices if device.name.decode() == name)
        if found.refuses:
            raise FakeError(found.refuses)
        return found

    def PD(self, _: object) -> FakeDevice:  # noqa: N802
        return FakeDevice(b"", [])


def with_devices(patch: pytest.MonkeyPatch, *devices: FakeDevice) -> None:
    """Replace pyverbs by one that has these devices."""
    module: Any = FakeModule(*devices)
    parts: dict[str, Any] = dict.fromkeys(("memory", "queue", "pair", "address", "work"), module)
    numbers: dict[str, Any] = {"read": 1, "write": 2, "signaled": 4, "failures": {}}
    known = verbs.Verbs(error=FakeError, numbers=module, device=module, domain=module, **parts, **numbers)
    patch.setattr(rdma, "load_verbs", lambda: known)


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
        ([(NEAR, 1), (IPV4, 1)], IPV4),
        ([(NEAR, 1), (IPV6, 1), (IPV4, 1)], IPV4),
        ([(NEAR, 1), (IPV6, 1)], IPV6),
        ([(NEAR, 1)], NEAR),
        ([(IPV4, 0), (NEAR, 1)], NEAR),
    ],
)
def test_the_address_that_reaches_farthest_is_used(
    gids: list[tuple[str, int]], best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(FakeDevice(b"a", [FakePort(gids)]), monkeypatch) == (1, gid(best))


def test_ports_that_are_down_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(b"a", [FakePort([(IPV4, 1)], state=1), FakePort([(IPV6, 1)])])
    assert chosen(device, monkeypatch) == (2, gid(IPV6))
    assert chosen(device, monkeypatch, "a:2:0") == (2, gid(IPV6))
    assert chosen(device, monkeypatch, "a:1") == "a: no port is active"
    assert device.closed
    assert chosen(device, monkeypatch, "a:3") == "a: Failed to query port. Errno: 22, Invalid argument"


@pytest.mark.parametrize("gids", [[], [(IPV4, 0)]])
def test_a_port_without_a_usable_address_is_a_reason(
    gids: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = chosen(FakeDevice(b"a", [FakePort(gids)]), monkeypatch)
    assert reason == "a: the port has no RoCE v2 address (GID): give its network interface an IP address"


def test_an_index_without_an_address_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(b"a", [FakePort([(IPV4, 1), (":".join(["0000"] * 8), 1)])])
    assert chosen(device, monkeypatch, "a:1:1") == "a: the port has no address (GID) 1"


def test_infiniband_uses_the_first_address_and_its_lid(monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch, FakeDevice(b"a", [FakePort([(NEAR, 0)], link_layer=OTHER, lid=7)]))
    fabric = rdma.open_fabric()
    assert not isinstance(fabric, str)
    assert (fabric.kind, fabric.port.lid, fabric.port.gid) == ("infiniband", 7, gid(NEAR))
    assert fabric.port.reads_max == 4


def test_the_first_device_that_can_be_used_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = FakeDevice(b"a", [], refuses="Failed to open device. Errno: 13, Permission denied")
    iwarp = FakeDevice(b"b", [FakePort([(IPV4, 1)])], transport_type=1)
    good = FakeDevice(b"c", [FakePort([(IPV4, 1)])])
    with_devices(monkeypatch, refused, iwarp, good)
    fabric = rdma.open_fabric()
    assert not isinstance(fabric, str)
    assert fabric.device == "c"
    with_devices(monkeypatch, refused, iwarp)
    assert rdma.open_fabric() == (
        "a: Failed to open device. Errno: 13, Permission denied; b: iWARP, which is not supported"
    )
    assert rdma.open_fabric("c") == "there is no RDMA device c"


def test_no_device_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch)
    assert rdma.open_fabric() == "there is no RDMA device"


@pytest.mark.parametrize("name", ["a:x", "a:1:x", "a::-1", "a:1:2:3"])
def test_a_name_that_is_none_is_a_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch, FakeDevice(b"a", [FakePort([(IPV4, 1)])]))
    assert rdma.open_fabric(name) == f"{name} is no name of an RDMA device: NAME, NAME:PORT or NAME:PORT:GID"


def test_without_pyverbs_there_is_a_reason_and_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "SYSTEM_PACKAGES", "/nowhere")
    monkeypatch.delitem(sys.modules, "pyverbs", raising=False)
    monkeypatch.setattr(rdma, "load_verbs", verbs.load_verbs.__wrapped__)
    assert rdma.open_fabric() == "pyverbs cannot be used (it is not installed); install python3-pyverbs"


def test_the_system_s_other_packages_stay_out_of_reach() -> None:
    rdma.open_fabric()
    assert verbs.SYSTEM_PACKAGES not in sys.path
    assert machinery.PathFinder.find_spec("apt_pkg") is None


def test_the_doctor_says_that_there_is_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "_ADAPTERS", "/nowhere")
    found = doctor._rdma()
    assert (found.verdict, found.detail) == ("ok", "no adapter; payload goes over TCP")


def test_the_doctor_says_why_an_adapter_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "adapters", lambda: ["a"])
    with_devices(monkeypatch, FakeDevice(b"a", [FakePort(state=1)]))
    found = doctor._rdma()
    assert (found.verdict, found.detail) == ("warn", "not used: a: no port is active; payload goes over TCP")
    with_devices(monkeypatch, FakeDevice(b"a", [FakePort([(IPV4, 1)])]))

    def refused(*_: object) -> None:
        raise FabricFailed("no memory may be locked")

    monkeypatch.setattr(rdma.RdmaFabric, "register", refused)
    found = doctor._rdma()
    assert (found.verdict, found.detail) == ("warn", "not used: no memory may be locked; payload goes over TCP")


def test_the_doctor_names_an_adapter_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "adapters", lambda: ["a"])
    with_devices(monkeypatch, FakeDevice(b"a", [FakePort([(IPV4, 1)])]))
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
