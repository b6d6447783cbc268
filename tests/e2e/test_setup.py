"""`make setup` and the machine's packages, with stand-ins for Debian's tools."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.style.source_tree import ROOT

LISTS = ("debian-packages.txt", "debian-packages-dev.txt")


@dataclass
class Machine:
    """A checkout on a machine whose package tools are scripts of ours."""

    checkout: Path
    tools: Path

    def install_tool(self, name: str, script: str) -> None:
        tool = self.tools / name
        tool.write_text(f"#!/bin/bash\n{script}\n")
        tool.chmod(0o755)

    @property
    def apt_calls(self) -> list[str]:
        log = self.tools / "apt.log"
        return log.read_text().splitlines() if log.exists() else []

    def setup(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the script; it ends after the packages, since this checkout has no project to install."""
        return subprocess.run(
            [str(self.checkout / "scripts" / "setup.sh"), *arguments],
            env={"PATH": f"{self.tools}:{os.environ['PATH']}", "HOME": "/"},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine where only gcc is installed; apt-get and sudo note their calls and fail."""
    checkout, tools = tmp_path / "checkout", tmp_path / "tools"
    (checkout / "scripts").mkdir(parents=True)
    tools.mkdir()
    for name in ("debian.sh", "setup.sh"):
        shutil.copy(ROOT / "scripts" / name, checkout / "scripts")
    for list_of_packages in LISTS:
        shutil.copy(ROOT / list_of_packages, checkout)
    made = Machine(checkout, tools)
    made.install_tool("dpkg-query", '[ "${@: -1}" = gcc ] && echo installed')
    made.install_tool("apt-get", f'echo "$*" >> {tools}/apt.log; exit 100')
    made.install_tool("sudo", 'exec "$@"')
    return made


def _wanted(list_of_packages: str = LISTS[0]) -> list[str]:
    lines = (ROOT / list_of_packages).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_packages_that_cannot_be_installed_are_named(machine: Machine) -> None:
    done = machine.setup()
    assert done.returncode == 1
    missing = [name for name in _wanted() if name != "gcc"]
    assert f"could not be installed: {' '.join(missing)}" in done.stderr
    assert f"apt-get install {' '.join(missing)}" in done.stderr
    assert [call.split()[0] for call in machine.apt_calls] == ["install", "update"]
    assert "gcc" not in machine.apt_calls[0].split()
    assert not (machine.checkout / ".venv").exists()


def test_old_package_lists_are_refreshed_and_the_installation_is_tried_again(machine: Machine) -> None:
    installed = machine.tools / "installed"
    machine.install_tool("dpkg-query", f"[ -e {installed} ] && echo installed")
    machine.install_tool(
        "apt-get",
        f'echo "$*" >> {machine.tools}/apt.log\n'
        f'case "$1" in update) touch {machine.tools}/lists;; '
        f"install) [ -e {machine.tools}/lists ] && touch {installed};; esac",
    )
    assert "could not be installed" not in machine.setup().stderr
    assert [call.split()[0] for call in machine.apt_calls] == ["install", "update", "install"]


def test_a_machine_that_has_all_packages_needs_no_access_to_install_any(machine: Machine) -> None:
    machine.install_tool("dpkg-query", "echo installed")
    assert "could not be installed" not in machine.setup().stderr
    assert machine.apt_calls == []


def test_the_demonstration_needs_no_packages_of_the_tests(machine: Machine) -> None:
    installed = " ".join(_wanted())
    machine.install_tool("dpkg-query", f'[[ " {installed} " == *" ${{@: -1}} "* ]] && echo installed')
    assert "could not be installed" not in machine.setup("demo").stderr
    assert machine.apt_calls == []
    assert f"could not be installed: {' '.join(_wanted(LISTS[1]))}" in machine.setup().stderr


def test_a_set_that_there_is_not_is_refused(machine: Machine) -> None:
    done = machine.setup("all")
    assert done.returncode == 64
    assert "no such set: all; there are demo and dev" in done.stderr


def test_a_system_without_debian_s_tools_is_told_what_it_must_have(machine: Machine) -> None:
    for tool in ("bash", "sed", "awk", "dirname", "env"):
        (machine.tools / tool).symlink_to(shutil.which(tool) or tool)
    (machine.tools / "dpkg-query").unlink()
    done = subprocess.run(
        [str(machine.tools / "bash"), str(machine.checkout / "scripts" / "setup.sh")],
        env={"PATH": str(machine.tools)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"make sure that it has what these packages bring: {' '.join(_wanted())}" in done.stderr
    assert machine.apt_calls == []
