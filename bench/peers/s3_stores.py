"""S3 stores that run on this machine, for programs that mount a bucket: on loopback, with their data on the bench's
disk.

None is part of the product.  A store's program is the one that an environment variable names, else one in .peers/,
where the bench installs it once, without its dependencies.  `StoreUnavailable` gives the reason if there is none.  A
store lives as long as its block, with its bucket, and leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.harness.process import clean_environment
from bench.peers.packages import KEPT, OPENLAKED_VERSION, PeerUnavailable, install, last_line, pip_install

BUCKET: Final = "bench"
REMOTE: Final = f"store:{BUCKET}"
REGION: Final = "us-east-1"
READY_S: Final = 30.0
COMMAND_S: Final = 120.0
END_S: Final = 10.0
POLL_S: Final = 0.02


StoreUnavailable = PeerUnavailable
"""The store is not installed here, or did not start; the text says why."""


@dataclass(frozen=True)
class StoreKind:
    """A program that serves S3, and how to install and start it.

    `variable`: the environment variable that may name the program.  `install`: returns the command that installs it
    below a folder, where it is `place`.  `command`: returns the arguments for a data folder and an address.
    """

    name: str
    version: str
    variable: str
    install: Callable[[Path], list[str]]
    place: Path
    command: Callable[[Path, str], list[str]]
    access_key: str
    secret_key: str

    def program(self, *, fetch: bool) -> Path:
        """Return the executable; installs it if it is missing and `fetch` is True."""
        named = os.environ.get(self.variable)
        if named is not None:
            if not os.access(named, os.X_OK):
                raise StoreUnavailable(f"{self.variable} names {named!r}, which cannot be executed")
            return Path(named)
        target = KEPT / f"{self.name}-{self.version}"
        if not (target / self.place).exists():
            if not fetch:
                raise StoreUnavailable(
                    f"{self.name} is not here; name its program in {self.variable}, or run the bench once"
                    " without --quick"
                )
            install(self.name, self.version, self.install, target)
            (target / self.place).chmod(0o755)
        return target / self.place


def _npm_install(folder: Path) -> list[str]:
    npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"]
    return [*npm, "--prefix", str(folder), f"s3rver@{S3RVER_VERSION}"]


def _openlaked_arguments(data: Path, address: str) -> list[str]:
    """Write its smallest configuration that serves S3: one node, two folders, one of them for parity."""
    folders = [str(data / f"disk{number}") for number in range(2)]
    for folder in folders:
        Path(folder).mkdir()
    inner = f"127.0.0.1:{free_port(neighbours=2)}"
    config = data / "openlaked.toml"
    config.write_text(
        f"""self_id = 0
mode = "storage"
transport = "h2"
rpc_addr = "{inner}"
s3_addr = "{address}"
region = "{REGION}"
data_dirs = {json.dumps(folders)}
set_drive_count = 2
default_parity_count = 1

[[credentials]]
access_key = "{OPENLAKED.access_key}"
secret_key = "{OPENLAKED.secret_key}"

[[nodes]]
id = 0
rpc_addr = "{inner}"
disk_count = 2
"""
    )
    return ["--config", str(config)]


def _s3rver_arguments(data: Path, address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    where = ["--directory", str(data), "--address", host, "--port", port]
    return [*where, "--silent", "--no-vhost-buckets"]


S3RVER_VERSION: Final = "3.7.1"
OPENLAKED: Final = StoreKind(
    "openlaked",
    OPENLAKED_VERSION,
    "BENCH_OPENLAKED",
    pip_install(f"openlake-vllm=={OPENLAKED_VERSION}"),
    Path("openlake_client", "openlaked"),
    _openlaked_arguments,
    "bench-access",
    "bench-secret",
)
S3RVER: Final = StoreKind(
    "s3rver",
    S3RVER_VERSION,
    "BENCH_S3RVER",
    _npm_install,
    Path("node_modules", ".bin", "s3rver"),
    _s3rver_arguments,
    "S3RVER",
    "S3RVER",
)
STORES: Final = (OPENLAKED, S3RVER)
"""Order in which a mount is tried on them: work that fails on the first is measured on the next."""


@dataclass(frozen=True)
class Store:
    """A running store.  `environment` is that of its clients: without the user's settings, with the remote
    `store:`."""

    kind: StoreKind
    url: str
    data: Path
    environment: Mapping[str, str]

    def rclone(self, *arguments: str | Path) -> str:
        """Run rclone on it, past any mount; return its output.  StoreUnavailable if it failed."""
        try:
            done = subprocess.run(
                ["rclone", *map(str, arguments)],
                env=dict(self.environment),
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise StoreUnavailable(f"rclone {arguments[0]} did not end within {COMMAND_S:.0f} s") from error
        if done.returncode:
            raise StoreUnavailable(f"rclone {arguments[0]}: {last_line(done.stderr)}")
        return done.stdout


@dataclass(frozen=True)
class StoreProcess:
    """A store's process, which may not listen yet."""

    process: subprocess.Popen[bytes]
    port: int
    data: Path
    log: Path

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid


@contextmanager
def running(kind: StoreKind, folder: Path, *, fetch: bool) -> Iterator[StoreProcess]:
    """Context manager: a store's process with no data, for the block."""
    program = kind.program(fetch=fetch)
    data = folder / "data"
    data.mkdir()
    port = free_port()
    log = folder / "store.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(program), *kind.command(data, f"127.0.0.1:{port}")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=peer_environment(),
        )
    try:
        yield StoreProcess(process, port, data, log)
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_S)


@contextmanager
def serving(kind: StoreKind, folder: Path, *, fetch: bool) -> Iterator[Store]:
    """Context manager: a new, empty store with the bucket, for the block; it needs rclone."""
    if shutil.which("rclone") is None:
        raise StoreUnavailable("rclone is not installed: apt-get install rclone")
    with running(kind, folder, fetch=fetch) as started:
        url = f"http://127.0.0.1:{started.port}"
        store = Store(kind, url, started.data, _client_environment(kind, url, folder))
        _wait_ready(store, started.process, started.log)
        yield store


def _wait_ready(store: Store, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + READY_S
    while True:
        try:
            with socket.create_connection(("127.0.0.1", int(store.url.rpartition(":")[2])), timeout=READY_S):
                store.rclone("mkdir", REMOTE, "--retries", "1")
                return
        except (OSError, StoreUnavailable) as error:
            if process.poll() is not None or time.monotonic() > until:
                said = last_line(log.read_text(errors="replace"))
                raise StoreUnavailable(f"{store.kind.name} does not serve: {said or error}") from error
            time.sleep(POLL_S)


def peer_environment() -> dict[str, str]:
    """Return this environment without variables that make a peer contact other hosts, or change its behaviour."""
    left_out = ("AWS_", "RCLONE_")
    return {
        name: value
        for name, value in clean_environment().items()
        if not name.startswith(left_out) and not name.lower().endswith("_proxy")
    }


def _client_environment(kind: StoreKind, url: str, folder: Path) -> dict[str, str]:
    config = folder / "rclone.conf"
    config.touch()
    remote = {
        "TYPE": "s3", "PROVIDER": "Other", "ENDPOINT": url, "REGION": REGION, "FORCE_PATH_STYLE": "true",
        "ACCESS_KEY_ID": kind.access_key, "SECRET_ACCESS_KEY": kind.secret_key,
    }  # fmt: skip
    settings = {f"RCLONE_CONFIG_STORE_{name}": value for name, value in remote.items()}
    return peer_environment() | settings | {"RCLONE_CONFIG": str(config)}


def free_port(neighbours: int = 1) -> int:
    """Return a port of loopback that is free, and so are the next `neighbours` - 1 ports."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                for offset in range(1, neighbours):
                    with socket.socket() as other:
                        other.bind(("127.0.0.1", port + offset))
            except OSError:
                continue
            return port
