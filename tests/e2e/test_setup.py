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


FAKE_PYTHON = r"""
case "$*" in
    *"sys.version_info"*) exit 0 ;;
    *"print(sys.executable)"*) echo "$0" ;;
    "--version") echo Python 3.11.2 ;;
    "-m venv .venv") [ -e TOOLS/no-venv ] && exit 1; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    *"-m pip"*"-r "*) echo "$*" >> TOOLS/pip.log; cat "${@: -1}" > TOOLS/requirements.log ;;
    *"-m pip"*) echo "$*" >> TOOLS/pip.log ;;
    *sysconfig*) echo -O2 ;;
esac
"""


@pytest.fixture
def without_root(machine: Machine) -> Machine:
    """A machine with an ordinary user, who may not become root; its Python notes what pip is to install."""
    machine.install_tool("id", "echo 1000")
    machine.install_tool("sudo", "exit 1")
    machine.install_tool("pkg-config", "exit 1")
    machine.install_tool("python3", FAKE_PYTHON.replace("TOOLS", str(machine.tools)))
    for folder in ("requirements", "engine", "fuse", "gateway", "lakefs"):
        (machine.checkout / folder).mkdir()
    for name in ("runtime", "demo", "dev"):
        shutil.copy(ROOT / "requirements" / f"{name}.txt", machine.checkout / "requirements")
    shutil.copy(ROOT / "pyproject.toml", machine.checkout)
    return machine


def test_a_user_without_root_gets_what_a_virtual_environment_can_hold(without_root: Machine) -> None:
    done = without_root.setup("demo")
    assert done.returncode == 0, done
    assert without_root.apt_calls == []
    missing = [name for name in _wanted() if name != "gcc"]
    for package, purpose in (("fuse3", "lake mount"), ("libfuse3-dev", "lake mount"), ("python3-dev", "the engine")):
        assert f"setup:   {package}, for {purpose}" in done.stderr
    assert f"run it again: apt-get install {' '.join(missing)}\n" in done.stderr
    installed = (without_root.tools / "requirements.log").read_text()
    assert "pyfuse3" not in installed
    wanted = (ROOT / "requirements" / "demo.txt").read_text()
    assert installed.splitlines() == [line for line in wanted.splitlines() if not line.startswith("pyfuse3")]
    assert any("-e ." in call for call in (without_root.tools / "pip.log").read_text().splitlines())
    assert "as far as it goes without root" in done.stdout
    assert not (without_root.checkout / ".venv" / "stamp-demo").exists(), "it is tried again"


def test_a_machine_without_virtual_environments_says_what_is_missing(without_root: Machine) -> None:
    (without_root.tools / "no-venv").touch()
    done = without_root.setup("demo")
    assert done.returncode != 0
    assert "a .venv needs the package python3-venv" in done.stderr
    assert not (without_root.checkout / ".venv").exists()


def test_a_user_with_sudo_has_the_packages_installed(without_root: Machine) -> None:
    without_root.install_tool("sudo", '[ "$1" = -n ] && exit 0; exec "$@"')
    done = without_root.setup("demo")
    assert done.returncode == 1
    assert "could not be installed" in done.stderr
    assert [call.split()[0] for call in without_root.apt_calls] == ["install", "update"]
