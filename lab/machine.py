"""Boots the guest and runs a command in it.

The guest is QEMU's emulation of a PC (no KVM), with Debian's kernel and this machine's root: read-only, below memory
that takes what is written.  So the command finds the checkout and its .venv at the paths they have here.  It has no
network.

    python -m lab.machine --rdma -- .venv/bin/python -m pytest tests/lab/test_rdma.py

Time in the guest means nothing but in comparison with other times of the same boot.

Rules kept here:
- The guest ends with this process, however that ends; its images and folders are removed unless it was killed.
- What the command prints is given back byte for byte.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

CHECKOUT: Final = Path(__file__).resolve().parent.parent
MADE: Final = CHECKOUT / ".lab"
QEMU: Final = "qemu-system-x86_64"
NO_CODE: Final = 125
"""The exit code when the guest gave none back: it did not boot, it ended early, or it ran out of time."""
SECONDS: Final = 240.0
DEVICES: Final = ("cxl", "numa", "nvdimm", "nvme", "rdma")
_PROCESSORS: Final = 2
_MEMORY_MIB: Final = 2048
_DEVICE_MIB: Final = 256
_CONSOLE_SHOWN: Final = 3_000
_NODE_MIB: Final = 512
_SET_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_libc: Final = ctypes.CDLL(None)


@dataclass(frozen=True)
class Outcome:
    """What came of a command: `printed` is what it printed, `console` what the guest's kernel did."""

    code: int
    printed: bytes
    console: str
    booted_s: float | None
    """Seconds of the guest's clock until the command began; None if it did not begin."""

    @property
    def output(self) -> str:
        """What the command printed, as text."""
        return self.printed.decode(errors="replace")


@dataclass
class _Command:
    """The parts of QEMU's command line that depend on the devices."""

    machine: str = "q35"
    memory: str = f"{_MEMORY_MIB}M"
    more: list[str] = field(default_factory=list)

    def backed(self, name: str, mib: int, folder: Path) -> str:
        """Add memory that a new file in the folder holds; returns its name."""
        path = folder / name
        self.more += ["-object", f"memory-backend-file,id={name},share=on,mem-path={_escaped(path)},size={mib}M"]
        return name


def run(command: str, devices: Sequence[str] = (), *, seconds: float = SECONDS, folder: Path | None = None) -> Outcome:
    """Boot a guest with these of `DEVICES`, run a command of its shell in the checkout's root, and wait for the end.

    `folder`, which is new and empty, is /run/lab in the guest: what the command writes there stays.  Exit code: the
    command's, or NO_CODE.  FileNotFoundError: there is no QEMU, or `lab/setup` has not run.  OSError: there is no room.
    """
    if not (MADE / "vmlinuz").exists():
        raise FileNotFoundError(f"{MADE} is not made; run lab/setup")
    if shutil.which(QEMU) is None:
        raise FileNotFoundError(f"there is no {QEMU}; run lab/setup")
    if any(map(str.isspace, str(CHECKOUT))):
        raise OSError(f"the guest's kernel cannot be told a path with spaces: {CHECKOUT}")
    with ExitStack() as stack:
        shared = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-")))
        images = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-images-")))
        (shared / "command").write_text(command + "\n")
        (shared / "devices").write_text(" ".join(devices) + "\n")
        console = images / "console"
        line = _command_line(devices, shared, images, console)
        process = stack.enter_context(
            subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - nothing but a system call
            )
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += f"\nlab: ended after {seconds:.0f} s\n".encode()
        except BaseException:
            process.kill()
            raise
        code, booted = shared / "code", shared / "booted"
        return Outcome(
            int(code.read_text()) if code.exists() and code.read_text().strip() else NO_CODE,
            output,
            console.read_text(errors="replace") if console.exists() else "",
            float(booted.read_text()) if booted.exists() and booted.read_text().strip() else None,
        )


def _end_with_parent() -> None:
    _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def _command_line(devices: Sequence[str], shared: Path, images: Path, console: Path) -> list[str]:
    qemu = _Command()
    for device in sorted(set(devices)):
        _ADD[device](qemu, images)
    # Without no_timer_check the kernel counts ticks at its start, and panics when a busy machine gave it too few.
    kernel = "console=ttyS0 panic=-1 quiet mitigations=off audit=0 random.trust_cpu=on net.ifnames=0 no_timer_check"
    return [
        QEMU, "-machine", qemu.machine, "-accel", "tcg,thread=multi", "-cpu", "max",
        "-m", qemu.memory, "-smp", str(_PROCESSORS), "-nic", "none", "-display", "none", "-no-reboot",
        "-kernel", str(MADE / "vmlinuz"), "-initrd", str(MADE / "first-root"),
        "-append", f"{kernel} lab.checkout={CHECKOUT}",
        "-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=root,mount_tag=root",
        "-fsdev", f"local,id=lab,path={_escaped(shared)},security_model=none",
        "-device", "virtio-9p-pci,fsdev=lab,mount_tag=lab",
        "-serial", f"file:{_escaped(console)}", "-serial", "stdio", "-monitor", "none",
        *qemu.more,
    ]  # fmt: skip


def _escaped(path: Path) -> str:
    """Return a path as part of an option of QEMU, which commas end."""
    return str(path).replace(",", ",,")


def _add_rdma(_: _Command, __: Path) -> None:
    """The guest makes rxe0 itself (`lab/guest`): RoCE over a pair of virtual Ethernet devices."""


def _add_nvme(qemu: _Command, images: Path) -> None:
    image = images / "nvme"
    with image.open("wb") as file:
        os.truncate(file.fileno(), 1 << 30)
    qemu.more += [
        "-drive", f"file={_escaped(image)},if=none,id=disk,format=raw,cache=none,aio=threads,discard=unmap",
        "-device", "pcie-root-port,id=port0,chassis=9,slot=9",
        "-device", "nvme,serial=lab,drive=disk,bus=port0,logical_block_size=4096,physical_block_size=4096",
    ]  # fmt: skip


def _add_nvdimm(qemu: _Command, images: Path) -> None:
    """Two devices: the guest makes a file system on one, and uses the other as it is."""
    qemu.machine += ",nvdimm=on"
    qemu.memory += ",slots=4,maxmem=8G"
    for number in range(2):
        memory = qemu.backed(f"nvdimm{number}", _DEVICE_MIB, images)
        qemu.more += ["-device", f"nvdimm,memdev={memory},id=dimm{number}"]


def _add_cxl(qemu: _Command, images: Path) -> None:
    qemu.machine += ",cxl=on,cxl-fmw.0.targets.0=cxl.1,cxl-fmw.0.size=4G"
    memory, labels = qemu.backed("cxl0", _DEVICE_MIB, images), qemu.backed("labels0", _DEVICE_MIB, images)
    qemu.more += [
        "-device", "pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl.1",
        "-device", "cxl-rp,port=0,bus=cxl.1,id=cxlport0,chassis=0,slot=2",
        # With one port alone Linux leaves the bridge's decoder as it is, and QEMU drops what is written.
        "-device", "cxl-rp,port=1,bus=cxl.1,id=cxlport1,chassis=0,slot=3",
        "-device", f"cxl-type3,bus=cxlport0,memdev={memory},lsa={labels},id=cxlmem0",
    ]  # fmt: skip


def _add_numa(qemu: _Command, _: Path) -> None:
    """A second node of memory without processors, as CXL memory is when the system uses it as such."""
    near = _MEMORY_MIB - _NODE_MIB
    qemu.more += [
        "-object", f"memory-backend-ram,id=near,size={near}M",
        "-object", f"memory-backend-ram,id=far,size={_NODE_MIB}M",
        "-numa", f"node,nodeid=0,cpus=0-{_PROCESSORS - 1},memdev=near",
        "-numa", "node,nodeid=1,memdev=far",
    ]  # fmt: skip


_ADD: Final = {"cxl": _add_cxl, "numa": _add_numa, "nvdimm": _add_nvdimm, "nvme": _add_nvme, "rdma": _add_rdma}


def main() -> int:
    """Run the command of the command line; returns its exit code, or NO_CODE with the end of the console."""
    parser = argparse.ArgumentParser(prog="lab/run", description="Run a command in the guest.")
    for device in DEVICES:
        parser.add_argument(f"--{device}", action="store_true")
    parser.add_argument("--seconds", type=_seconds, default=SECONDS, help="end the guest after so long (%(default)s)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not words:
        parser.error("a command is needed")
    command = words[0] if len(words) == 1 else shlex.join(words)
    signal.signal(signal.SIGTERM, _ended)
    devices = [name for name in DEVICES if getattr(arguments, name)]
    try:
        outcome = run(command, devices, seconds=arguments.seconds)
    except OSError as error:
        sys.stderr.write(f"lab: {error}\n")
        return NO_CODE
    except KeyboardInterrupt:
        _ended(signal.SIGINT, None)
    sys.stdout.buffer.write(outcome.printed)
    sys.stdout.buffer.flush()
    if outcome.booted_s is None or outcome.code == NO_CODE:
        sys.stderr.write(f"lab: no exit code came back; the end of the console:\n{outcome.console[-_CONSOLE_SHOWN:]}\n")
    return outcome.code


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time")
    return seconds


def _ended(number: int, _: FrameType | None) -> NoReturn:
    """End behind a signal, with the exit code of shells for it; the guest is ended on the way."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    raise SystemExit(main())
