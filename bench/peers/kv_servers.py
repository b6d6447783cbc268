"""Servers for the clients of the key-value scenarios: our engine, openlaked, a Mooncake store, or a folder.

Each lives as long as its block and leaves nothing behind.  All listen on loopback or a Unix socket of this machine.
OpenLake and Mooncake store in memory, ours on the measured disk.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from bench.harness.cpu import cpu_s
from bench.harness.process import ROOT, EngineProcess
from bench.peers.packages import MOONCAKE, OPENLAKED, PeerUnavailable, last_line
from bench.peers.s3_stores import free_port, peer_environment

READY_S: Final = 30.0
END_S: Final = 10.0
POLL_S: Final = 0.02
MEMORY_FOLDER: Final = Path("/dev/shm")
STORE_BYTES: Final = 1 << 30
"""Memory of a store that keeps its blocks in memory."""


@dataclass(frozen=True)
class KvServer:
    """A server's address and processes.  `package`: the folder that its client is imported from."""

    address: str
    pids: tuple[int, ...] = ()
    package: str = ""

    def cpu_s(self) -> float:
        """Return the CPU time of all its processes, so far."""
        return cpu_s(self.pids)


@contextmanager
def engine(folder: Path, *, fetch: bool) -> Iterator[KvServer]:
    """Context manager: `lake serve` on the measured disk."""
    with EngineProcess(folder) as process:
        yield KvServer(process.address, (process.pid,))


@contextmanager
def no_server(folder: Path, *, fetch: bool) -> Iterator[KvServer]:
    """Context manager: a folder of the measured disk, without a server."""
    yield KvServer(str(folder))


@contextmanager
def memory_engine(folder: Path, *, fetch: bool) -> Iterator[KvServer]:
    """Context manager: `lake serve` on a folder in memory.  PeerUnavailable."""
    with _in_memory() as name, EngineProcess(Path(name)) as process:
        yield KvServer(process.address, (process.pid,))


@contextmanager
def memory_folder(folder: Path, *, fetch: bool) -> Iterator[KvServer]:
    """Context manager: a folder in memory, without a server.  PeerUnavailable."""
    with _in_memory() as name:
        yield KvServer(name)


@contextmanager
def _in_memory() -> Iterator[str]:
    if not MEMORY_FOLDER.is_dir():
        raise PeerUnavailable(f"there is no {MEMORY_FOLDER}")
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as name:
        yield name


@contextmanager
def openlaked(folder: Path, *, fetch: bool) -> Iterator[KvServer]:
    """Context manager: one node in its KV mode, configured as its own example for one machine, logging errors
    only."""
    package = OPENLAKED.folder(fetch=fetch)
    port = free_port(neighbours=2)
    config = folder / "kv.toml"
    config.write_text(_openlaked_config(f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}"))
    command = [str(package / "openlake_client" / "openlaked"), "--config", str(config)]
    with _running(command, folder / "openlaked.log", RUST_LOG="error") as process:
        _wait_for_port(process, port, folder / "openlaked.log")
        # The next port belongs to its agent, which tells clients about the shared memory.
        _wait_for_port(process, port + 1, folder / "openlaked.log")
        try:
            yield KvServer(f"127.0.0.1:{port}", (process.pid,), str(package))
        finally:
            _end(process)
            for left in Path("/dev/shm").glob(f"openlake_kv_{process.pid}_*"):
                left.unlink(missing_ok=True)


def _openlaked_config(inner: str, s3: str) -> str:
    return f"""self_id = 0
mode = "kv"
transport = "h2"
rpc_addr = "{inner}"
kv_agents = ["{inner}"]
s3_addr = "{s3}"
region = "us-east-1"
data_dirs = []
set_drive_count = 1
default_parity_count = 1

[[credentials]]
access_key = "bench"
secret_key = "bench"

[[nodes]]
id = 0
rpc_addr = "{inner}"
disk_count = 0

[kv_slab]
capacity_gb = {STORE_BYTES >> 30}
reserve_ttl_secs = 60
"""


@contextmanager
def mooncake(folder: Path, *, fetch: bool) -> Iterator[KvServer]:
    """Context manager: a master, and a process that gives the memory; clients reach it over TCP."""
    with mooncake_master(folder, fetch=fetch) as master:
        own = f"127.0.0.1:{free_port()}"
        command = [
            sys.executable, "-m", "bench.peers.mooncake_member", master.package, own,
            master.address.split()[0], str(STORE_BYTES),
        ]  # fmt: skip
        with _running(command, folder / "member.log", GLOG_minloglevel="2", stdout=subprocess.PIPE) as member:
            assert member.stdout is not None
            if member.stdout.readline() != b"ready\n":
                raise PeerUnavailable(f"mooncake does not serve: {_said(folder / 'member.log')}")
            yield KvServer(master.address, (*master.pids, member.pid), master.package)


@contextmanager
def mooncake_master(folder: Path, *, fetch: bool) -> Iterator[KvServer]:
    """Context manager: a master alone; the client gives the memory itself, and reads it without a network."""
    package = MOONCAKE.folder(fetch=fetch)
    port, metrics = free_port(), free_port()
    command = [
        str(package / "mooncake" / "mooncake_master"), "--rpc_address", "127.0.0.1", "--rpc_port", str(port),
        "--metrics_host", "127.0.0.1", "--metrics_port", str(metrics), "--enable_metric_reporting=false",
    ]  # fmt: skip
    with _running(command, folder / "master.log", GLOG_minloglevel="2") as process:
        _wait_for_port(process, port, folder / "master.log")
        address = f"127.0.0.1:{port} 127.0.0.1:{free_port()}"
        yield KvServer(address, (process.pid,), str(package))


@contextmanager
def _running(
    command: Sequence[str], log: Path, *, stdout: int | IO[bytes] | None = None, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output if stdout is None else stdout,
                stderr=output,
                env=peer_environment() | environment,
            )
        except OSError as error:
            raise PeerUnavailable(f"{command[0]} cannot be executed: {error.strerror}") from error
    try:
        yield process
    finally:
        _end(process)
        if process.stdout is not None:
            process.stdout.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_S)


def _wait_for_port(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until the port is listened on; does not connect, because some servers would count that as a client."""
    until = time.monotonic() + READY_S
    while not _listened(port):
        if process.poll() is not None or time.monotonic() > until:
            raise PeerUnavailable(f"it does not serve: {_said(log) or f'exit code {process.returncode}'}")
        time.sleep(POLL_S)


def _listened(port: int) -> bool:
    """Return True if the kernel's table has a socket that listens on the port of any address."""
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                return True
    return False


def _said(log: Path) -> str:
    return last_line(log.read_text(errors="replace"))


SERVERS: Final[dict[str, Callable[..., AbstractContextManager[KvServer]]]] = {
    "engine": engine,
    "folder": no_server,
    "memory-engine": memory_engine,
    "memory-folder": memory_folder,
    "openlaked": openlaked,
    "mooncake": mooncake,
    "mooncake-master": mooncake_master,
}
"""Servers by name, as sides refer to them."""
