"""Hosts on this machine: network namespaces, each with an Ethernet device and an address, all at one bridge.

    with hosts("m1", "m2") as found:
        subprocess.Popen([*found["m1"].command, "lake", "serve", ...])     # runs at that host
        found["m1"].cut()                                                  # it hears and says nothing any more
        found["m1"].join()

What is cut off is silent: no connection is refused or reset, as when a cable is pulled.  This process reaches each host
by the bridge, and Unix sockets are in the file system of all.  It takes root, and `ip` (iproute2).
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

_NOBODY: Final = "02:00:00:00:00:01"
"""An Ethernet address that no device has."""
_DEVICE: Final = "eth0"
_TRIES: Final = 5


@dataclass(frozen=True)
class Host:
    """One host.  Its device at the bridge has the namespace's name."""

    namespace: str
    address: str
    bridge: str

    @property
    def command(self) -> list[str]:
        """Goes before a command that runs at this host."""
        return ["ip", "netns", "exec", self.namespace]

    def cut(self) -> None:
        """Take it from the network, as if its cable was pulled."""
        _ip("link", "set", self.namespace, "nomaster")

    def join(self) -> None:
        """Bring it back to the network."""
        _ip("link", "set", self.namespace, "master", self.bridge)

    def lose_way_to(self, *others: Host) -> None:
        """Let nothing that it sends arrive at others; what they send arrives here."""
        for other in others:
            self._neighbour("replace", other, "lladdr", _NOBODY, "nud", "permanent")

    def find_way_to(self, *others: Host) -> None:
        """Let what it sends to others arrive again."""
        for other in others:
            self._neighbour("del", other)

    def _neighbour(self, what: str, other: Host, *how: str) -> None:
        _ip("-n", self.namespace, "neigh", what, other.address, *how, "dev", _DEVICE)


def hosts_can_be_made() -> bool:
    """Return True if this process may make network namespaces, and has the command for it."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    name = f"lake{os.getpid()}"
    if subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True, check=False).returncode:
        return False
    _ip("link", "del", name)
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        _ip("netns", "del", name)
    return made


@contextmanager
def hosts(*names: str) -> Iterator[Mapping[str, Host]]:
    """Make hosts, by name; they end with the block, and so must what runs there."""
    with ExitStack() as stack:
        bridge, net = _made_bridge(stack)
        found = {}
        for number, name in enumerate(names, 1):
            found[name] = Host(f"{bridge}{name}", f"{net}.{number}", bridge)
            _make(stack, found[name])
        yield found


def _made_bridge(stack: ExitStack) -> tuple[str, str]:
    """Make a bridge with an address in a network of its own; returns its name, and what addresses begin with."""
    for turn in range(_TRIES):
        name = f"lk{random.randrange(16**5):05x}"  # a device's name has at most 15 characters
        net = f"198.{random.choice([18, 19])}.{random.randrange(256)}"  # networks for tests of devices: RFC 2544
        if _is_used(net) and turn + 1 < _TRIES:
            continue
        _ip("link", "add", name, "type", "bridge")
        stack.callback(_ip, "link", "del", name)
        _ip("address", "add", f"{net}.254/24", "dev", name)
        _ip("link", "set", name, "up")
        return name, net
    raise RuntimeError("no network of tests is free")


def _is_used(net: str) -> bool:
    return f" {net}." in subprocess.run(["ip", "-4", "address"], capture_output=True, text=True, check=True).stdout


def _make(stack: ExitStack, host: Host) -> None:
    _ip("netns", "add", host.namespace)
    stack.callback(_ip, "netns", "del", host.namespace)
    peer = ("peer", "name", _DEVICE, "netns", host.namespace)
    _ip("link", "add", host.namespace, "type", "veth", *peer)
    _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", _DEVICE)
    for device in ("lo", _DEVICE):
        _ip("-n", host.namespace, "link", "set", device, "up")
    _ip("link", "set", host.namespace, "up")
    host.join()


def _ip(*arguments: str) -> None:
    """Run `ip`; RuntimeError with what it says if it fails."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
