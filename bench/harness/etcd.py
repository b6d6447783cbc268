"""Real etcds on loopback ports, each node a process with a folder of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.harness.hosts import Host

_STARTED_WITHIN_S: Final = 30.0
_TRIES: Final = 3
"""Times that a cluster is started: another process may take a port between its choice and its use."""


@dataclass
class EtcdNode:
    """One process of an etcd."""

    name: str
    url: str
    peer_url: str
    folder: Path
    options: Sequence[str] = ()
    command: Sequence[str] = ()
    """Goes before the command, as that of a host (`bench.harness.hosts`) does."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, cluster: str) -> None:
        """Start the process; it answers a while later."""
        log = (self.folder.parent / f"{self.name}.log").open("ab")
        with log:
            self.process = subprocess.Popen(
                [
                    *self.command,
                    *("etcd", "--name", self.name, "--data-dir", str(self.folder), "--logger=zap"),
                    *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
                    *("--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url),
                    *("--initial-cluster", cluster, "--log-level=error"),
                    *self.options,
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self.process is not None, "it was started"
        self.process.send_signal(number)

    def kill(self) -> None:
        """End the process at once."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait()
            self.process = None


@dataclass
class EtcdCluster:
    """The nodes of an etcd."""

    nodes: list[EtcdNode]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(node.url for node in self.nodes)

    @property
    def names(self) -> str:
        """The names and addresses of all nodes, as each is given them."""
        return ",".join(f"{node.name}={node.peer_url}" for node in self.nodes)

    def leader(self) -> EtcdNode:
        """Return the node that leads the others."""
        for node in self.nodes:
            shown = etcdctl([node.url], "endpoint", "status", "--write-out=fields")
            fields = dict(line.split(" : ", 1) for line in shown.splitlines() if " : " in line)
            if fields['"MemberID"'] == fields['"Leader"']:
                return node
        raise AssertionError("no node leads")


def etcdctl(urls: Sequence[str], *command: str, user: str = "") -> str:
    """Run a command of etcdctl, and return its output."""
    arguments = ["etcdctl", f"--endpoints={','.join(urls)}", *([f"--user={user}"] if user else []), *command]
    done = subprocess.run(arguments, env={**os.environ, "ETCDCTL_API": "3"}, check=True, capture_output=True)
    return done.stdout.decode()


@contextmanager
def running_etcd(
    folder: Path, count: int = 1, *, scheme: str = "http", options: Sequence[str] = (), at: Sequence[Host] = ()
) -> Iterator[EtcdCluster]:
    """Run an etcd of so many nodes in a folder, which is not there yet; or of one at each of these hosts."""
    for turn in range(_TRIES):
        cluster = _made_at(folder / str(turn), at) if at else _made(folder / str(turn), count, scheme, options)
        try:
            for node in cluster.nodes:
                node.start(cluster.names)
            if all(_answers(node) for node in cluster.nodes):
                yield cluster
                return
        finally:
            for node in cluster.nodes:
                node.kill()
    raise AssertionError(f"etcd did not start: see the logs in {folder}")


def _made(folder: Path, count: int, scheme: str, options: Sequence[str]) -> EtcdCluster:
    folder.mkdir(parents=True)
    ports = free_ports(2 * count)
    return EtcdCluster(
        [
            EtcdNode(
                f"n{number}",
                f"{scheme}://127.0.0.1:{ports[2 * number]}",
                f"http://127.0.0.1:{ports[2 * number + 1]}",
                folder / f"n{number}",
                options,
            )
            for number in range(count)
        ]
    )


def _made_at(folder: Path, at: Sequence[Host]) -> EtcdCluster:
    folder.mkdir(parents=True)
    return EtcdCluster(
        [
            EtcdNode(
                *(f"n{number}", f"http://{host.address}:2379", f"http://{host.address}:2380", folder / f"n{number}"),
                command=host.command,
            )
            for number, host in enumerate(at, 1)
        ]
    )


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody uses now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(server.getsockname()[1]) for server in sockets]
    finally:
        for server in sockets:
            server.close()


def _answers(node: EtcdNode) -> bool:
    """Return True when a node listens, and, where that can be asked without TLS, knows a leader."""
    until = time.monotonic() + _STARTED_WITHIN_S
    while time.monotonic() < until:
        assert node.process is not None, "it was started"
        if node.process.poll() is not None:
            return False
        with suppress(OSError):
            if node.url.startswith("https"):
                socket.create_connection(("127.0.0.1", int(node.url.rsplit(":", 1)[1])), 1).close()
                return True
            with urllib.request.urlopen(f"{node.url}/health", timeout=1) as answer:
                if b"true" in answer.read():
                    return True
        time.sleep(0.05)
    return False
