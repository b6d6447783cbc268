"""The servers that the S3 scenarios measure: ours, openlaked, and nginx over static files as the upper limit of a
GET.

All listen on loopback and have their data on the bench's disk.  Each lives as long as its block.  Openlaked runs in
the smallest configuration that serves S3 (`bench.peers.s3_stores`).  A missing peer is `StoreUnavailable`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.harness.cpu import cpu_s, process_tree, resident_bytes
from bench.harness.process import ROOT, EngineProcess, clean_environment, lake_command
from bench.harness.s3_load import ask
from bench.harness.s3_requests import BUCKET, Endpoint, Request, Signer
from bench.peers.packages import last_line
from bench.peers.s3_stores import OPENLAKED, StoreUnavailable, free_port, peer_environment, running

READY_S: Final = 30.0
POLL_S: Final = 0.02
NGINX_WORKERS: Final = 2


@dataclass(frozen=True)
class Server:
    """A running server, with the bucket BUCKET.  `pid`: the root of its process tree.

    `files`: the folder whose files it serves, if it accepts no PUT.  `behind`: the engine's process, if the server is
    only its gateway.  `engine`: the address of its engine for the native protocol, if it has one.
    """

    name: str
    endpoint: Endpoint
    pid: int
    files: Path | None = None
    behind: int | None = None
    engine: str = ""

    def cpu_s(self) -> float:
        """Return the CPU time so far of all its processes, and of the one behind it."""
        return cpu_s(self.pids())

    def pids(self) -> list[int]:
        """Return all its processes, and the one behind it."""
        return process_tree(self.pid) + ([] if self.behind is None else [self.behind])

    def resident_bytes(self) -> int:
        """Return the resident memory of all its processes."""
        return resident_bytes(process_tree(self.pid))

    def put(self, key: str, content: bytes) -> None:
        """Store one object, or one file."""
        if self.files is not None:
            path = self.files / BUCKET / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            return
        request = Signer(self.endpoint).request(
            "PUT", f"/{BUCKET}/{key}", body=content, payload_hash="UNSIGNED-PAYLOAD"
        )
        self.must(request)

    def must(self, request: Request) -> bytes:
        """Return the body of the answer; StoreUnavailable if the status is not the expected one."""
        status, body = ask(self.endpoint, request)
        if status != request.status:
            raise StoreUnavailable(f"{self.name} answered {status}: {body[:300]!r}")
        return body


@contextmanager
def ours(folder: Path, *flags: str) -> Iterator[Server]:
    """Context manager: `lake serve --s3`, with a new store, and the access key of its first start."""
    folder.mkdir(exist_ok=True)
    with EngineProcess(folder, "--s3", "127.0.0.1:0", *flags) as engine:
        url, access_key, secret_key = engine.s3()
        endpoint = Endpoint(int(url.rpartition(":")[2]), access_key, secret_key)
        server = Server("ours", endpoint, engine.pid, engine=engine.address)
        _make_bucket(server)
        yield server


@dataclass(frozen=True)
class Engine:
    """An engine without an S3 face, and an access key of its store."""

    process: EngineProcess
    access_key: str
    secret_key: str


@contextmanager
def engine_alone(folder: Path) -> Iterator[Engine]:
    """Context manager: `lake serve --s3 off`, with a new store, as the backend of gateways."""
    folder.mkdir(exist_ok=True)
    with EngineProcess(folder) as process, process.connect() as lake:
        key = lake.create_access_key()
        yield Engine(process, key.access_key, key.secret_key)


@contextmanager
def gateway(engine: Engine, *, processes: int) -> Iterator[Server]:
    """Context manager: `lake gateway` in front of an engine."""
    command = [*lake_command(), "--server", engine.process.address, "gateway", "--s3", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--processes", str(processes), "--admin", "off", "--log-level", "error"],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        ports = [int(line.split()[1].rpartition(":")[2]) for line in _said_first(process.stdout) if line[:3] == "s3 "]
        endpoint = Endpoint(ports[0], engine.access_key, engine.secret_key)
        server = Server(f"{processes} of lake gateway", endpoint, process.pid, behind=engine.process.pid)
        _make_bucket(server)
        yield server
    finally:
        process.terminate()
        process.stdout.close()
        process.wait()


def _said_first(stdout: Iterable[str]) -> Iterator[str]:
    """Yield the lines that the gateway prints before it serves."""
    for line in stdout:
        if line == "ready\n":
            return
        yield line
    raise StoreUnavailable("lake gateway ended before it served")


@contextmanager
def openlaked(folder: Path, *, fetch: bool) -> Iterator[Server]:
    """Context manager: openlaked, with a new store."""
    folder.mkdir(exist_ok=True)
    with running(OPENLAKED, folder, fetch=fetch) as process:
        endpoint = Endpoint(process.port, OPENLAKED.access_key, OPENLAKED.secret_key)
        server = Server("openlaked", endpoint, process.pid)
        _make_bucket(server)
        yield server


def _make_bucket(server: Server) -> None:
    """Create the bucket, once the server answers."""
    until = time.monotonic() + READY_S
    while True:
        try:
            server.must(Signer(server.endpoint).request("PUT", f"/{BUCKET}"))
            return
        except (OSError, StoreUnavailable):
            if time.monotonic() > until:
                raise
            time.sleep(POLL_S)


@contextmanager
def nginx(folder: Path) -> Iterator[Server]:
    """Context manager: nginx over a folder of files: sendfile, descriptors kept open, no log."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise StoreUnavailable("nginx is not installed: apt-get install nginx-light")
    files = folder / "files"
    (files / BUCKET).mkdir(parents=True)
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(_nginx_config(folder, files, port))
    with (folder / "nginx.log").open("wb") as log:
        process = subprocess.Popen(
            [program, "-p", str(folder), "-c", str(config), "-e", "stderr"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=peer_environment(),
        )
    try:
        _wait_for(port, process, folder / "nginx.log")
        yield Server("nginx", Endpoint(port), process.pid, files)
    finally:
        process.terminate()
        process.wait()


def _nginx_config(folder: Path, files: Path, port: int) -> str:
    kept = "\n".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.getuid() == 0 else ""
    return f"""{user}
daemon off;
worker_processes {NGINX_WORKERS};
pid {folder}/nginx.pid;
worker_rlimit_nofile 8192;
events {{ worker_connections 4096; }}
http {{
    {kept}
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_requests 1000000000;
    keepalive_timeout 600;
    open_file_cache max=10000 inactive=600s;
    open_file_cache_valid 600s;
    default_type application/octet-stream;
    server {{ listen 127.0.0.1:{port} backlog=4096; root {files}; }}
}}
"""


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + READY_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=READY_S).close()
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > until:
                raise StoreUnavailable(
                    f"nginx does not serve: {last_line(log.read_text(errors='replace')) or error}"
                ) from error
            time.sleep(POLL_S)
