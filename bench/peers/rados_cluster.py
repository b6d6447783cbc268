"""A RADOS cluster on loopback, with its data in files of one folder: one monitor, six OSDs, an erasure-coded pool.

Debian's ceph 16, as plain processes in the foreground, without cephx and without a manager (which a pool does not need;
states are asked of the OSDs).  Tuned: tcmalloc preloaded, since Debian links ceph-osd without it; no debug logging; no
pause between steps of a recovery, and four at a time.  The pool is 4+2 by ISA-L, cauchy.  What is not named in
`configuration` is as shipped.  The cluster lives as long as its block, and leaves nothing behind.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from bench.harness.process import ROOT, clean_environment
from bench.peers.packages import PeerUnavailable, last_line
from bench.peers.rados_gateway import POOL, GatewayClient, RadosError, load_rados
from bench.peers.s3_stores import free_port

PROGRAMS: Final = ("ceph-mon", "ceph-osd", "monmaptool")
PACKAGES: Final = "ceph-mon ceph-osd python3-rados libgoogle-perftools4"
TCMALLOC: Final = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4")
OSDS: Final = 6
PLACEMENT_GROUPS: Final = 32
BLOCK_BYTES: Final = 8 << 30
"""Length of an OSD's sparse file."""
OSD_MEMORY_BYTES: Final = 1 << 30
WAIT_S: Final = 300.0
END_S: Final = 20.0
NO_OSD: Final = (1 << 31) - 1
_SILENT: Final = (
    "asok async auth bdev bluefs bluestore buffer compressor context crush crypto filer finisher heartbeatmap journal "
    "lockdep memdb mgrc mon monc ms none objclass objecter optracker osd paxos perfcounter prioritycache rados "
    "reserver rocksdb throttle timer tp"
)


def require_ceph() -> None:
    """Raise PeerUnavailable, with the packages to install, if something is missing."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    missing += [] if TCMALLOC.exists() else [TCMALLOC.name]
    try:
        load_rados()
    except ImportError as error:
        missing.append(f"python3-rados ({error})")
    if missing:
        raise PeerUnavailable(
            f"not installed: {', '.join(missing)}; apt-get install --no-install-recommends {PACKAGES}"
        )


class RadosCluster:
    """The cluster, and a client of a gateway in front of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._configured = folder / "ceph.conf"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._clients = ExitStack()
        self.gateway: GatewayClient
        self.gateway_pid = 0
        self._control: GatewayClient

    def __enter__(self) -> RadosCluster:
        self._folder.mkdir()
        try:
            self._start_monitor()
            self._control, _ = self._client("control")
            for number in range(OSDS):
                self._make_osd(number)
            _wait(lambda: self._osds_up() == OSDS, "OSDs do not start")
            self._make_pool()
            self.wait_whole()
            self.gateway, self.gateway_pid = self._client("gateway")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pids(self) -> list[int]:
        """The processes that serve: monitor and OSDs."""
        return [process.pid for process in self._processes.values()]

    def stored_bytes(self) -> int:
        """Return the room that objects take on all OSDs; what RocksDB takes for their records is not in it."""
        return sum(self._perf(number)["bluestore"]["bluestore_allocated"] for number in range(OSDS))

    def lose(self, number: int) -> None:
        """Kill an OSD, with all that it has."""
        process = self._processes.pop(f"osd.{number}")
        process.send_signal(signal.SIGKILL)
        process.wait()
        shutil.rmtree(self._data(number))

    def replace(self, number: int) -> None:
        """Put an empty OSD in the place of a lost one."""
        self._control.command(prefix="osd down", ids=[str(number)])
        self._control.command(prefix="osd destroy-actual", id=number, yes_i_really_mean_it=True)
        self._make_osd(number)

    def wait_whole(self) -> None:
        """Return when every placement group has all its OSDs, and all that each of them should have."""
        [pool] = [each["pool_id"] for each in self._control.command(prefix="osd pool ls", detail="detail")]
        for number in range(PLACEMENT_GROUPS):
            group = f"{pool}.{number:x}"
            _wait(partial(self._is_whole, group), f"placement group {group} does not become clean")

    def _is_whole(self, group: str) -> bool:
        try:
            found = self._control.command(prefix="query", pgid=group)
        except RadosError:
            return False  # its first OSD does not know it yet
        return found["state"] == "active+clean" and NO_OSD not in found["acting"]

    # --- making it ---------------------------------------------------------------------------------------

    def _start_monitor(self) -> None:
        address = f"v2:127.0.0.1:{free_port()}"
        cluster = str(uuid.uuid4())
        self._configured.write_text(configuration(self._folder, cluster, address))
        monitors = str(self._folder / "monmap")
        self._run("monmaptool", "--create", "--fsid", cluster, "--addv", "a", f"[{address}]", monitors)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors, "-c", str(self._configured))
        self._start("mon.a", "ceph-mon", "a")

    def _make_osd(self, number: int) -> None:
        own = str(uuid.uuid4())
        again = {"id": number} if number in self._control.command(prefix="osd ls") else {}
        made = self._control.command(prefix="osd new", uuid=own, **again)
        assert made["osdid"] == number, made
        self._data(number).mkdir()
        self._run("ceph-osd", "--mkfs", "-i", str(number), "--osd-uuid", own, "-c", str(self._configured))
        self._start(f"osd.{number}", "ceph-osd", str(number))

    def _make_pool(self) -> None:
        profile = ["plugin=isa", "technique=cauchy", "k=4", "m=2", "crush-failure-domain=osd"]
        self._control.command(prefix="osd erasure-code-profile set", name="bench", profile=profile)
        self._control.command(
            prefix="osd pool create",
            pool=POOL,
            pg_num=PLACEMENT_GROUPS,
            pool_type="erasure",
            erasure_code_profile="bench",
        )

    def _osds_up(self) -> int:
        found: int = self._control.command(prefix="osd stat")["num_up_osds"]
        return found

    def _data(self, number: int) -> Path:
        return self._folder / f"osd.{number}"

    # --- processes ---------------------------------------------------------------------------------------

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=_environment(), check=False)
        if done.returncode:
            raise PeerUnavailable(f"{command[0]}: {last_line(done.stderr) or done.returncode}")

    def _start(self, name: str, program: str, identity: str) -> None:
        with (self._folder / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", program, "-f", "-i", identity, "-c", str(self._configured)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
            )

    def _client(self, name: str) -> tuple[GatewayClient, int]:
        """Start a gateway; return its client, and its process's id."""
        path = self._folder / name
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.peers.rados_gateway", str(self._configured), str(path)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=_environment(),
        )
        self._clients.callback(_end_process, process)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise PeerUnavailable("the gateway does not reach the monitor")
        client = GatewayClient(path)
        self._clients.callback(client.close)
        return client, process.pid

    def _perf(self, number: int) -> Any:
        """Return an OSD's counters, from its administrators' socket: JSON and a zero byte, answered behind a length."""
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(str(self._folder / f"osd.{number}.asok"))
            asked.sendall(json.dumps({"prefix": "perf dump"}).encode() + b"\0")
            received = b"".join(iter(lambda: asked.recv(1 << 16), b""))
        return json.loads(received[4:])

    def _end(self) -> None:
        for process in self._processes.values():
            process.kill()  # its files are removed, so nothing is to be written back
        for process in self._processes.values():
            process.wait(END_S)
        self._processes.clear()
        self._clients.close()
        shutil.rmtree(self._folder)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(END_S)
    assert process.stdout is not None
    process.stdout.close()


def _environment() -> dict[str, str]:
    return clean_environment() | {"LD_PRELOAD": str(TCMALLOC)}


def _wait(happens: Callable[[], bool], failure: str) -> None:
    end = time.monotonic() + WAIT_S
    while not happens():
        if time.monotonic() > end:
            raise PeerUnavailable(f"{failure} within {WAIT_S:g} s")
        time.sleep(0.2)


def configuration(folder: Path, cluster: str, address: str) -> str:
    """Return ceph.conf of a cluster with its data below a folder, and its monitor at an address."""
    silent = "".join(f"debug_{subsystem} = 0/0\n" for subsystem in _SILENT.split())
    modes = "".join(
        f"ms_{whose}_mode = crc\n"
        for whose in ("cluster", "service", "client", "mon_cluster", "mon_service", "mon_client")
    )
    return f"""[global]
fsid = {cluster}
mon_host = [{address}]
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
{modes}public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
run_dir = {folder}
crash_dir = {folder}
admin_socket = {folder}/$name.asok
log_file = {folder}/$name.log
log_to_syslog = false
mon_data = {folder}/$name
osd_data = {folder}/$name
{silent}
[mon]
mon_cluster_log_to_file = false
mon_data_avail_crit = 1
mon_osd_reporter_subtree_level = osd
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0

[osd]
osd_objectstore = bluestore
bluestore_block_size = {BLOCK_BYTES}
osd_memory_target = {OSD_MEMORY_BYTES}
osd_recovery_sleep = 0
osd_recovery_sleep_hdd = 0
osd_recovery_sleep_ssd = 0
osd_recovery_sleep_hybrid = 0
osd_max_backfills = 4
osd_recovery_max_active = 4

[client]
admin_socket =
log_file =
"""
