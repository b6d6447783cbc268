"""RDMA over rxe0: the contract of the port, real deaths, links that go down, and what is missing."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from cli.operate import doctor
from lakefs.errors import DeadlineExceeded, FabricFailed
from lakefs.transport.fabric import ACCESS_REFUSED, NO_ANSWER, Fabric, Link, Piece, Region, Remote
from lakefs.transport.fabric_mover import Mover
from lakefs.transport.rdma import open_fabric
from tests.contract.fabric_moves import *
from tests.contract.fabric_sides import *
from tests.contract.fabric_suite import *
from tests.lab.hardware import shell, wait_for
from tests.lab.rdma_peer import FAILED, OWN, Peer

pytestmark = [pytest.mark.slow, pytest.mark.lab("rdma")]
MIB: Final = 1 << 20
LONG: Final = 16 * MIB
"""So much takes about a second there: something can happen in the middle."""


class RdmaRig:
    """Fabrics on rxe0."""

    def __init__(self) -> None:
        self.opened: list[Fabric] = []

    def open(self) -> Fabric:
        """Open one more fabric."""
        fabric = open_fabric("rxe0")
        assert not isinstance(fabric, str), fabric
        self.opened.append(fabric)
        return fabric


@pytest.fixture
def rig() -> Iterator[RdmaRig]:
    made = RdmaRig()
    yield made
    for fabric in made.opened:
        fabric.close()


def offered(fabric: Fabric, size: int) -> tuple[mmap.mmap, Region, Link]:
    """Return memory filled with MARK, its region, and a link."""
    memory = mmap.mmap(-1, size)
    memory[:] = bytes([MARK]) * size
    return memory, fabric.register(memory, BOTH), fabric.open_link(BOTH)


def reads_of_a_new_peer(fabric: Fabric) -> None:
    """Check that the fabric reads from another process, through a new link."""
    memory, region, link = offered(fabric, MIB)
    with Peer(MIB) as peer:
        peer.join(link, region)
        Mover(link).move([peer.piece(region)], WAIT_S)
        assert memory[:] == bytes([OWN]) * MIB
        peer.command("fill 34")
        Mover(link).move([peer.piece(region)], WAIT_S)
        assert memory[:] == bytes([34]) * MIB
        link.close()
        region.close()


def test_another_process_is_read_and_written(rig: RdmaRig) -> None:
    fabric = rig.open()
    reads_of_a_new_peer(fabric)
    memory, region, link = offered(fabric, MIB)
    with Peer(MIB) as peer:
        peer.join(link, region)
        Mover(link).move([peer.piece(region)._replace(is_write=True)], WAIT_S)
        memory[:] = bytes(MIB)
        Mover(link).move([peer.piece(region)], WAIT_S)
        assert memory[:] == bytes([MARK]) * MIB


def changes_of(memory: mmap.mmap, byte: int) -> None:
    """Wait until the first bytes of the memory are those."""
    wait_for(lambda: memory[0] == byte, "nothing was moved")


@pytest.mark.parametrize("is_write", [False, True])
def test_a_peer_that_is_killed_in_the_middle_of_a_move_fails_it(rig: RdmaRig, is_write: bool) -> None:
    fabric = rig.open()
    memory, region, link = offered(fabric, LONG)
    with Peer(LONG) as peer:
        peer.join(link, region)
        killer = threading.Timer(0.2, lambda: os.kill(peer.process, signal.SIGKILL))
        killer.start()
        with pytest.raises(FabricFailed, match=NO_ANSWER):
            while True:
                Mover(link).move([peer.piece(region)._replace(is_write=is_write)], WAIT_S)
        killer.join()
    assert link.is_broken
    region.close()
    with untouched(memory):
        assert has_only(memory, MARK, *([] if is_write else [OWN]))
        reads_of_a_new_peer(fabric)


def test_memory_that_a_killed_peer_was_writing_is_left_alone_when_its_region_is_closed(rig: RdmaRig) -> None:
    memory, region, link = offered(rig.open(), LONG)
    with Peer(LONG) as peer:
        peer.join(link, region)
        peer.command("write")
        changes_of(memory, OWN)
    link.close()
    region.close()
    assert has_only(memory, MARK, OWN)
    memory[:] = bytes(LONG)
    with untouched(memory):
        time.sleep(0.5)


def test_a_region_that_is_closed_while_a_peer_writes_to_it_is_written_no_more(rig: RdmaRig) -> None:
    """The peer lives, and its WRITEs fail."""
    memory, region, _ = offered(rig.open(), LONG)
    link = rig.opened[0].open_link(BOTH)
    with Peer(LONG) as peer:
        peer.join(link, region)
        peer.command("write")
        changes_of(memory, OWN)
        region.close()
        memory[:] = bytes(LONG)
        with untouched(memory):
            assert peer.wait() == FAILED


def test_a_peer_that_gives_up_its_memory_refuses_what_comes_then(rig: RdmaRig) -> None:
    memory, region, link = offered(rig.open(), MIB)
    with Peer(MIB) as peer:
        peer.join(link, region)
        peer.command("close")
        with untouched(memory), pytest.raises(FabricFailed, match=ACCESS_REFUSED):
            Mover(link).move([peer.piece(region)], WAIT_S)


@contextmanager
def link_down() -> Iterator[None]:
    """Take the adapter's network interface down for the block, and wait until it is up and has its address again."""
    shell("ip link set v0 down")
    try:
        yield
    finally:
        shell("ip link set v0 up")
        wait_for(lambda: not isinstance(open_fabric("rxe0"), str), "rxe0 has not come back")


def test_a_link_that_goes_down_fails_moves_and_a_new_one_works_when_it_is_up_again(rig: RdmaRig) -> None:
    fabric = rig.open()
    memory, region, link = offered(fabric, LONG)
    with Peer(LONG) as peer:
        peer.join(link, region)
        with link_down(), pytest.raises((FabricFailed, DeadlineExceeded)):
            while True:
                Mover(link).move([peer.piece(region)], 10.0)
        region.close()
        assert has_only(memory, MARK, OWN)
    reads_of_a_new_peer(fabric)


def test_a_port_that_is_down_is_a_reason() -> None:
    with link_down():
        assert open_fabric() == "rxe0: no port is active"
        assert open_fabric("rxe0") == "rxe0: no port is active"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("rxe9", "there is no RDMA device rxe9"),
        ("rxe0:9", "rxe0: "),
        ("rxe0:1:9", "rxe0: "),
        ("rxe0:1:5000", "rxe0: "),
        ("rxe0:x", "rxe0:x is no name of an RDMA device: NAME, NAME:PORT or NAME:PORT:GID"),
    ],
)
def test_a_device_that_cannot_be_used_is_a_reason(name: str, reason: str) -> None:
    found = open_fabric(name)
    assert isinstance(found, str)
    assert found.startswith(reason)


def test_the_address_of_ipv4_is_used_or_the_one_that_is_named(rig: RdmaRig) -> None:
    by_rank, first, second = rig.open(), open_fabric("rxe0:1:0"), open_fabric("rxe0:1:1")
    assert not isinstance(first, str)
    assert not isinstance(second, str)
    gids = [fabric.open_link(BOTH).end.gid for fabric in (by_rank, first, second)]
    assert gids[0] == gids[2] == bytes(10) + b"\xff\xff" + bytes([10, 9, 0, 1])
    assert gids[1].startswith(b"\xfe\x80")
    first.close()
    second.close()


def in_a_fork(call: Callable[[], str]) -> str:
    """Return what the call returns in a process of its own."""
    source, target = os.pipe()
    if not (process := os.fork()):
        try:
            os.write(target, call().encode())
        finally:
            os._exit(0)
    os.close(target)
    with os.fdopen(source) as answer:
        found = answer.read()
    os.waitpid(process, 0)
    return found


def test_a_forked_child_has_no_fabric_and_leaves_the_parent_s_alone(rig: RdmaRig) -> None:
    memory, region, link = offered(rig.open(), MIB)
    held: list[Any] = [rig.opened.pop(), region, link]
    del region, link

    def attempt() -> str:
        fabric, region, link = held
        with pytest.raises(FabricFailed):
            fabric.open_link(BOTH)
        with pytest.raises(FabricFailed):
            fabric.register(memory, BOTH)
        with pytest.raises(FabricFailed):
            link.post(1, [Piece(region, 0, region.address, region.remote_key, 64)])
        said = f"{link.is_broken} {link.poll()}"
        for part in (link, region, fabric):
            part.close()
        held.clear()
        del fabric, region, link, part
        gc.collect()
        reads_of_a_new_peer(RdmaRig().open())
        return said

    fabric, region, link = held
    with Peer(MIB) as peer:
        peer.join(link, region)
        del fabric, region, link
        assert in_a_fork(attempt) == "True []"
        fabric, region, link = held
        Mover(link).move([peer.piece(region)], WAIT_S)
        assert has_only(memory, OWN)
        reads_of_a_new_peer(fabric)
    fabric.close()


def test_memory_that_may_not_be_locked_is_refused_with_the_remedy() -> None:
    def attempt() -> str:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        fabric = open_fabric("rxe0")
        if isinstance(fabric, str):
            return fabric
        try:
            fabric.register(mmap.mmap(-1, MIB), Remote.READ)
        except FabricFailed as error:
            return error.message
        return "registered"

    reason = in_a_fork(attempt)
    assert reason.startswith(f"{MIB} bytes cannot be registered with rxe0: ")
    assert "ulimit -l" in reason


def test_the_doctor_names_the_adapter() -> None:
    found = doctor._rdma()
    assert (found.verdict, found.detail) == ("ok", "rxe0: roce, and 64.0 MiB may be locked")
    with link_down():
        found = doctor._rdma()
    assert (found.verdict, found.detail) == ("warn", "not used: rxe0: no port is active; payload goes over TCP")


def test_memory_that_is_not_mapped_is_refused(rig: RdmaRig) -> None:
    memory = mmap.mmap(-1, MIB)
    place = rig.open().register(memory, BOTH)
    address = place.address
    place.close()
    memory.close()
    with pytest.raises(FabricFailed):
        rig.opened[0].register((address, MIB), BOTH)


def test_a_fabric_that_was_closed_leaves_no_descriptor_behind(rig: RdmaRig) -> None:
    def descriptors() -> list[str]:
        return sorted(str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())

    reads_of_a_new_peer(rig.open())
    before = descriptors()
    for _ in range(3):
        fabric = open_fabric("rxe0")
        assert not isinstance(fabric, str)
        reads_of_a_new_peer(fabric)
        fabric.close()
    assert descriptors() == before
