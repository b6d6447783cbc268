"""An engine with RDMA over rxe0, and its clients, as processes."""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from cli.main import main
from cli.serve.serve import member_command
from engine.lake.lake_process import LakeOptions, run_lake
from engine.process.engine_process import run_engine
from lakefs.client.blocking.engine import connect_blocking
from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.config.settings import Config, load
from lakefs.content.verify import Check
from lakefs.ids import data_chunk_id
from lakefs.transport.fabric import Remote
from lakefs.transport.rdma import open_fabric
from lakefs.wire import messages as m
from lakefs.wire.fabric_messages import FabricMemory
from tests.e2e.test_lake_on_devices import processes
from tests.lab.hardware import wait_for

MIB = 1 << 20
PORT = 7777
_NAP_S = 0.002


def forked(body: Callable[[], object]) -> int:
    """Run a body in a child of this process, which has all modules imported; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        body()
        code = 0
    except SystemExit as done:
        code = int(done.code or 0)
    finally:  # it never returns to the tests of its parent
        if code:
            traceback.print_exc()
        os._exit(code)


def ended(pid: int) -> int:
    """Wait for a child; return its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def command(*arguments: str) -> None:
    """Run the command line in this process."""
    sys.argv = ["lake", *arguments]
    main()


class Served:
    """An engine with RDMA, in a process of its own.  `prepare` is called there first."""

    devices = 1
    """Folders that are served: of more than one, a lake."""

    def __init__(self, folder: Path, port: int = PORT, prepare: Callable[[], object] = lambda: None) -> None:
        self.port = port
        self._prepare = prepare
        self._pause = mmap.mmap(-1, mmap.PAGESIZE)
        self.folders = [folder / f"store{number or ''}" for number in range(self.devices)]
        self.data = self.folders[0]
        self.socket = folder / "s"
        self.server = f"unix:{self.socket}"
        self._pid = 0
        self.start()

    def start(self) -> None:
        """Start the engine and wait until it serves."""
        config = load(file="/dev/null", environ={}, flags=self._flags())
        ready, told = os.pipe()

        def say(line: str) -> None:
            os.write(told, f"{line}\n".encode())

        def serve() -> None:
            self._prepare()
            trio.run(_serve, partial(self._run, config, say), self._pause)

        self._pid = forked(serve)
        os.close(told)
        with os.fdopen(ready) as lines:
            assert any(line == "ready\n" for line in lines), "the engine did not start"

    def _flags(self) -> dict[str, str | tuple[str, ...]]:
        places = {"socket": str(self.socket), "native": f"127.0.0.1:{self.port}"}
        options = {"s3": "off", "admin": "off", "rdma": "rxe0", "dram_tier_bytes": "128M"}
        return {"data": tuple(map(str, self.folders)), **places, **options}

    async def _run(self, config: Config, say: Callable[[str], None]) -> None:
        await run_engine(config, printer=say)

    def longest_pause_s(self) -> float:
        """Return the longest time that the engine's loop was late since the last call."""
        (found,) = struct.unpack_from("d", self._pause)
        struct.pack_into("d", self._pause, 0, 0.0)
        return float(found)

    def end(self, number: int) -> int:
        """Send a signal; return how the engine ended."""
        os.kill(self._pid, number)
        return ended(self._pid)


class ServedLake(Served):
    """A lake on three devices, at 2+1: its head has RDMA, and its members are processes of their own."""

    devices = 3

    def _flags(self) -> dict[str, str | tuple[str, ...]]:
        return {**super()._flags(), "protect": "2+1"}

    async def _run(self, config: Config, say: Callable[[str], None]) -> None:
        command = partial(member_command, config)
        await run_lake(config, printer=say, member_command=command, options=LakeOptions(accept_loss=True))

    def members(self) -> list[int]:
        """Return the members' processes."""
        sockets = {f"{self.socket}.{number}" for number in range(1, self.devices + 1)}
        return [pid for pid, arguments in processes() if sockets & set(arguments)]


async def _serve(run: Callable[[], Awaitable[None]], pause: mmap.mmap) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_note_pauses, pause)
        await run()
        nursery.cancel_scope.cancel()


async def _note_pauses(pause: mmap.mmap) -> None:
    """Keep the longest time that this task was woken too late."""
    while True:
        before = time.perf_counter()
        await trio.sleep(_NAP_S)
        late = time.perf_counter() - before - _NAP_S
        if late > struct.unpack_from("d", pause)[0]:
            struct.pack_into("d", pause, 0, late)


@dataclass
class Rig:
    """An engine with RDMA on the loop address, its token, and clients."""

    served: Served

    @property
    def address(self) -> str:
        """The engine's address over TCP."""
        return f"tcp://127.0.0.1:{self.served.port}"

    @property
    def token(self) -> str:
        """The engine's token."""
        return (self.served.data / "native.token").read_text().strip()

    @contextmanager
    def lake(self, *, rdma: bool = True, check: Check = Check.BLAKE3) -> Iterator[Lake]:
        """Connect a client over TCP."""
        with connect(self.address, token=self.token, rdma=rdma, check=check) as found:
            yield found

    def rdma(self) -> dict[str, Any]:
        """Return what `lake status` says of RDMA."""
        with connect(self.served.server) as local:
            found: dict[str, Any] = local.status()["rdma"]
        return found

    def warm(self, name: str, content: bytes) -> None:
        """Store content, and read it over TCP until the DRAM tier has it."""
        with self.lake(rdma=False) as client:
            client.put(name, content, create_bucket=True)
            chunks = [data_chunk_id(content[at : at + 4 * MIB]) for at in range(0, len(content), 4 * MIB)]
            fills = client.status()["dram"]["fills"] + len(chunks)

            def is_filled() -> bool:
                assert client.get(name) == content
                return bool(client.status()["dram"]["fills"] >= fills)

            wait_for(is_filled, "the tier does not fill")


class Raw:
    """A client that makes its own requests, with memory of 4 MiB."""

    def __init__(self, rig: Rig) -> None:
        self.engine = connect_blocking(rig.address, token=rig.token)
        fabric = open_fabric("rxe0")
        assert not isinstance(fabric, str), fabric
        self.fabric = fabric
        self.memory = bytearray(4 * MIB)
        self.region = fabric.register(self.memory, Remote.READ | Remote.WRITE)
        self.connect()

    def connect(self) -> None:
        """Make a queue pair, in place of the one before."""
        self.link = link = self.fabric.open_link(Remote.READ | Remote.WRITE)
        opened = self.engine.call(m.FabricOpen(link.end)).message
        assert isinstance(opened, m.FabricOpened)
        link.connect(opened.end)

    def load(self, chunk: bytes, key: int, address: int) -> m.SlotsLoaded:
        """Load a chunk to memory of that key and address."""
        request = m.LoadSlots(0, [chunk], [0], fabric=FabricMemory(key, address, 4 * MIB))
        loaded = self.engine.call(request).message
        assert isinstance(loaded, m.SlotsLoaded)
        return loaded

    def close(self) -> None:
        """End it."""
        self.engine.close()
        self.fabric.close()
