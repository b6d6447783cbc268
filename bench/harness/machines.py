"""Machines of a lake, each a `lake serve` process with folders and a loopback address of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.harness.hosts import Host
from bench.harness.process import EngineProcess, lake_command, run_lake

PORT: Final = 9100
"""Names listen at it, and members at those behind it."""


class LakeMachine(EngineProcess):
    """One machine: started at the beginning of its block, stopped cleanly at its end."""

    def __init__(self, folder: Path, host: str | Host, devices: int, *flags: str, spares: int = 0) -> None:
        """Prepare a machine with so many devices, each a folder; `flags` are further flags of `lake serve`.

        `host`: an address of loopback, or where it runs.  `spares`: folders more that it serves once they are added.
        """
        super().__init__(folder, *flags)
        self._at = host if isinstance(host, Host) else None
        self.host = host.address if isinstance(host, Host) else host
        self.listen = f"{self.host}:{PORT}"
        self.devices = [folder / f"disk{number}" for number in range(1, devices + 1)]
        self.spares = [folder / f"disk{number}" for number in range(devices + 1, devices + spares + 1)]
        self.data = self.devices[0]
        folder.mkdir(parents=True)

    def serve_command(self) -> list[str]:
        """Return the command that serves this machine."""
        folders = [part for device in (*self.devices, *self.spares) for part in ("--data", str(device))]
        at = self._at.command if self._at is not None else []
        return [*at, *lake_command(), "serve", *folders, "--socket", str(self.socket)]

    def init(self, name: str, *options: str) -> None:
        """Make a lake with the names on this machine."""
        run_lake("cluster", "init", name, "--listen", self.listen, *self.data_options(), *options)

    def join(self, names: LakeMachine) -> None:
        """Join the lake of another machine."""
        token = str(names.devices[0] / "cluster.token")
        run_lake("cluster", "join", names.listen, "--token-file", token, "--listen", self.listen, *self.data_options())

    def add(self, device: Path) -> None:
        """Let a spare folder become a member."""
        run_lake("cluster", "add", str(device), *self.data_options())

    def lake(self, *arguments: str) -> str:
        """Run a command against this machine; return its output."""
        return run_lake("--server", self.address, *arguments)

    def status(self) -> dict[str, Any]:
        """Return the lake's part of the status."""
        found: dict[str, Any] = json.loads(self.lake("cluster", "status", "--json"))
        return found

    def leads_names(self) -> bool:
        """Return True if its replica leads the names, as it shows them itself."""
        found = self.status()
        leads = [each["machine"] for each in found.get("names", {}).get("replicas", []) if each["state"] == "leads"]
        return any(
            each["machine"] in leads and any(f"//{self.host}:" in address for address in each["addresses"])
            for each in found.get("members", [])
        )

    def member_of(self, device: Path) -> str:
        """Return the id of the member in a folder."""
        folders = json.loads(self.lake("status", "--json"))["folders"]
        return str(next(each["member"] for each in folders if each["folder"] == str(device)))

    def lose(self, device: Path) -> str:
        """Kill the member in a folder, with all that it has; return its id."""
        member = self.member_of(device)
        for pid in self.pids_of(device):
            os.kill(pid, signal.SIGKILL)
        lost = device.with_name(f"{device.name}.lost")
        device.rename(lost)
        device.mkdir()
        shutil.rmtree(lost)
        return member

    def pids_of(self, device: Path) -> list[int]:
        """Return the processes of the member in a folder."""
        socket = f"{self.socket}.{self.devices.index(device) + 1}"
        return [pid for pid, arguments in _processes() if socket in arguments]

    def data_options(self) -> list[str]:
        """Return the options that name its devices."""
        return [part for device in self.devices for part in ("--data", str(device))]


def _processes() -> Sequence[tuple[int, list[str]]]:
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                found.append((int(entry.name), Path(entry.path, "cmdline").read_bytes().decode().split("\0")))
            except (OSError, UnicodeDecodeError):
                continue
    return found
