"""`lake doctor`: checks that this machine, and the store on it, are fit to serve.

Each check prints one line: ok, warn (works, but could be better) or fail; the first failure is repeated at the end.  If
no engine serves, the checks of a first `lake serve` are run, too.  Nothing is changed: the trials write to a file
without a name in the data folder, or in the nearest folder above it that exists, and bind ports for an instant.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.terminal.output import escaped, human_bytes, json_option, write_json, write_line
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.errors import EngineUnreachable, LakeError

if TYPE_CHECKING:
    from engine.superblock.superblock import Superblock
    from lakefs.config.settings import Config

EXIT_UNFIT = 78
FREE_BYTES_WARN = 1 << 30
FREE_BYTES_FAIL = 128 << 20
DESCRIPTORS_WARN = 4096
KERNEL_MIN = (5, 10)
RDMA_BYTES = 64 << 20
PYTHON_MIN = (3, 11)
DEBIAN_PACKAGES = ("fuse3",)
PYTHON_PACKAGES = (
    "awscrt", "blake3", "click", "crc32c", "h11", "httptools", "isal", "lmdb", "msgspec",
    "prometheus-client", "pyfuse3", "rich", "sortedcontainers", "structlog", "trio",
)  # fmt: skip
SPARED_PACKAGES = ("pyfuse3",)
NEEDED_MODULES = ("engine.format._granules", "engine.tables._frequency", "lakefs.shared_index._table")
"""Native modules without a substitute: `engine` refuses to be imported without them."""
SPARED_MODULES = {
    "engine.host._io_uring": "threads read the disk",
    "engine.memory._cache_lines": "no DAX device can be used",
    "lakefs.shared_index._keys": "clients ask the engine for keys",
    "lakefs.stamps._stamps": "clients ask the engine for names each time, and S3 has no door",
    "lakefs.known._known": "clients ask the engine for names each time",
    "lakefs.grants._batch_plan": "clients ask the engine for chunks by id and key",
    "gateway.http._door": "S3 has no door",
    "gateway.s3.door._repeater": "S3 has no door",
    "lakefs.cluster._erasure": "no erasure code, which one engine does not use",
    "fuse.native._layer": "a mount answers each read in Python, and has no hot files",
}
"""Native modules with a substitute, and what follows without each."""
NATIVE_MODULES = (*NEEDED_MODULES, *SPARED_MODULES)


@dataclass(frozen=True)
class Finding:
    """One line: the check, its verdict, and the reason."""

    verdict: str
    what: str
    detail: str


@click.command()
@click.option("--config", "file", type=click.Path(), metavar="FILE", help="Instead of /etc/lake/lake.toml.")
@json_option
@engine_options
@pass_target
def doctor(where: Target, file: str | None, as_json: bool) -> int:
    """Check this machine and the store on it; exits with 78 when something fails."""
    findings: list[Finding] = []
    for finding in _findings(where, file):
        findings.append(finding)
        if not as_json:
            write_line(f"{finding.verdict:<5} {finding.what:<16} {escaped(finding.detail)}")
    failed = next((finding for finding in findings if finding.verdict == "fail"), None)
    if as_json:
        first = _as_json(failed) if failed else None
        write_json({"checks": [_as_json(finding) for finding in findings], "first_failure": first})
    elif failed:
        write_line(f"first failure: {failed.what}: {escaped(failed.detail)}")
    return EXIT_UNFIT if failed else 0


def _as_json(finding: Finding) -> dict[str, str]:
    return {"verdict": finding.verdict, "check": finding.what, "detail": finding.detail}


def _findings(where: Target, file: str | None) -> Iterator[Finding]:
    from lakefs.config.settings import load

    yield _python()
    yield _kernel()
    yield from _python_packages()
    native = _native_modules()
    yield native
    engine_runs = native.verdict != "fail"
    yield from _debian_packages()
    yield _descriptors()
    if engine_runs:
        yield _address_space()
    yield _rdma()
    try:
        config = load(file=file, flags={"data": str(where.data) if where.data else None})
    except LakeError as error:
        yield Finding("fail", "configuration", error.message)
        return
    yield Finding("ok", "configuration", f"data {', '.join(map(str, config.folders))}, socket {config.socket}")
    for folder in config.folders:
        yield from _disk(folder)
        if engine_runs:
            yield from _store(folder)
    engine = list(_engine(where))
    yield from engine
    if engine_runs and not any(finding.verdict == "ok" for finding in engine):
        yield from _start(config)


def _python() -> Finding:
    found = f"{platform.python_implementation()} {platform.python_version()}"
    good = sys.version_info >= PYTHON_MIN
    return Finding("ok" if good else "fail", "python", found)


def _kernel() -> Finding:
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    detail = f"Linux {release}"
    if numbers >= KERNEL_MIN:
        return Finding("ok", "kernel", detail)
    return Finding("warn", "kernel", f"{detail}; tried from {'.'.join(map(str, KERNEL_MIN))} on")


def _python_packages() -> Iterator[Finding]:
    found: list[str] = []
    for package in PYTHON_PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            effect = ", so there is no lake mount" if package in SPARED_PACKAGES else ""
            verdict = "warn" if effect else "fail"
            yield Finding(verdict, "packages", f"{package} is not installed{effect}; run: make setup")
    yield Finding("ok", "packages", ", ".join(found))


def _native_modules() -> Finding:
    """Check the native modules: without one of three the engine does not start, the others have a substitute."""
    absent = [name for name in NATIVE_MODULES if not _is_built(name)]
    if not absent:
        return Finding("ok", "native modules", "built")
    effects = [f"{name}: not built, {SPARED_MODULES.get(name, 'the engine does not start')}" for name in absent]
    return Finding(
        "fail" if set(absent) & set(NEEDED_MODULES) else "warn",
        "native modules",
        f"{'; '.join(effects)}; install a C compiler, Python's headers and libraries (gcc, python3-dev, libssl-dev, "
        "libisal-dev), then install the package again",
    )


def _is_built(name: str) -> bool:
    """Return True if the module's file exists.  Imports nothing: `engine` raises where a module that it needs lacks."""
    package, *rooms, module = name.split(".")
    if sys.modules.get(name, sys) is None:
        return False
    found = find_spec(package)
    folders = found.submodule_search_locations if found else None
    paths = [str(Path(folder, *rooms)) for folder in folders or ()]
    return PathFinder.find_spec(module, paths) is not None


def _debian_packages() -> Iterator[Finding]:
    query = shutil.which("dpkg-query")
    if query is None:
        yield Finding("warn", "debian", "not a Debian system; what packages bring is not checked")
        return
    for package in DEBIAN_PACKAGES:
        call = [query, "-W", "-f", "${db:Status-Status} ${Version}", package]
        answer = subprocess.run(call, capture_output=True, text=True, check=False).stdout
        state, _, number = answer.partition(" ")
        if state == "installed":
            yield Finding("ok", "debian", f"{package} {number}")
        else:
            yield Finding("warn", "debian", f"{package} is not installed; install it with: apt-get install {package}")


def _descriptors() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < DESCRIPTORS_WARN:
        return Finding("warn", "descriptors", f"at most {hard} open files; raise LimitNOFILE or ulimit -n")
    return Finding("ok", "descriptors", f"{soft} open files, at most {hard}")


def _address_space() -> Finding:
    from engine.host.memory_limits import refuse_little_address_space

    try:
        refuse_little_address_space()
    except LakeError as error:
        return Finding("fail", "address space", error.message)
    return Finding("ok", "address space", "not limited")


def _rdma() -> Finding:
    """Check if an RDMA adapter can be used: payload goes over TCP without."""
    from lakefs.transport.fabric import Remote
    from lakefs.transport.rdma import adapters, open_fabric

    if not adapters():
        return Finding("ok", "rdma", "no adapter; payload goes over TCP")
    fabric = open_fabric()
    if isinstance(fabric, str):
        return Finding("warn", "rdma", f"not used: {fabric}; payload goes over TCP")
    try:
        with mmap.mmap(-1, RDMA_BYTES) as memory:
            fabric.register(memory, Remote.NONE).close()
    except LakeError as error:
        return Finding("warn", "rdma", f"not used: {error.message}; payload goes over TCP")
    finally:
        fabric.close()
    return Finding("ok", "rdma", f"{fabric.device}: {fabric.kind}, and {human_bytes(RDMA_BYTES)} may be locked")


def _disk(data: Path) -> Iterator[Finding]:
    """Check the file system of the data folder: room, and supported operations."""
    folder = data
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if not status.f_blocks:
        yield Finding("fail", "room", f"the file system of {folder} does not say how large it is: 0 blocks")
        return
    verdict = "fail" if free < FREE_BYTES_FAIL else "warn" if free < FREE_BYTES_WARN else "ok"
    yield Finding(verdict, "room", f"{human_bytes(free)} free at {folder}")
    if status.f_favail and status.f_favail < 1000:
        yield Finding("warn", "inodes", f"only {status.f_favail} files can still be made at {folder}")
    for what, attempt, without in (
        ("O_DIRECT", _try_direct, "large chunks go through the page cache"),
        ("fallocate", _try_fallocate, "segments are not preallocated"),
        ("hole punching", _try_punch, "freed room comes back only with whole segments"),
    ):
        yield _attempted(what, attempt, without, folder)


def _attempted(what: str, attempt: Callable[[int], None], without: str, folder: Path) -> Finding:
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except PermissionError:
        return Finding("warn", what, f"cannot be tried: {folder} may not be written by this user")
    except OSError as error:
        return Finding("warn", what, f"cannot be tried at {folder}: {error.strerror}")
    try:
        attempt(descriptor)
    except OSError as error:
        return Finding("warn", what, f"refused at {folder} ({error.strerror}): {without}")
    finally:
        os.close(descriptor)
    return Finding("ok", what, f"works at {folder}")


def _try_direct(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    with mmap.mmap(-1, 4096) as page:
        os.pwrite(descriptor, page, 0)


def _try_fallocate(descriptor: int) -> None:
    _fallocate(descriptor, 0, 0, 1 << 20)


def _try_punch(descriptor: int) -> None:
    os.pwrite(descriptor, bytes(8192), 0)
    keep_size, punch_hole = 1, 2  # linux/falloc.h
    _fallocate(descriptor, keep_size | punch_hole, 0, 4096)


def _fallocate(descriptor: int, mode: int, offset: int, length: int) -> None:
    """Call fallocate(2) itself: the C library's posix_fallocate would fall back to writing."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call(descriptor, mode, offset, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _store(data: Path) -> Iterator[Finding]:
    superblock = data / "superblock"
    try:
        if not superblock.exists():
            yield Finding("ok", "store", f"none at {data} yet; lake serve creates it")
            return
        mode = stat.S_IMODE(data.stat().st_mode)
        if mode & 0o077:
            yield Finding("warn", "store", f"{data} may be read by others (mode {mode:04o}); run: chmod 700 {data}")
        from engine.host.local_disk import LocalDisk
        from engine.superblock.superblock import read_superblock

        found = read_superblock(LocalDisk(data))
        clean = "closed cleanly" if found.clean_sequence is not None else "open, or not closed cleanly"
        yield Finding("ok", "store", f"{found.store_id.hex()} at {data}{_role(found)}: {clean}")
    except PermissionError:
        yield Finding("warn", "store", f"{data} may not be read by this user")
    except LakeError as error:
        yield Finding("fail", "store", error.message)


def _role(found: Superblock) -> str:
    """Return the part of a store in its lake; nothing for the store of one engine."""
    from engine.format.features import Feature
    from engine.superblock.superblock import NO_CLUSTER

    if found.cluster_id == NO_CLUSTER:
        return ""
    part = "a copy of the names" if found.incompat_features & Feature.CLUSTER_NAMES else "a member"
    return f", {part} of the lake {found.cluster_id.hex()}, which is started with all its folders"


def _engine(where: Target) -> Iterator[Finding]:
    """Check that an engine answers at the address that commands use."""
    if where.data is not None:
        return
    is_given = bool(where.server or os.environ.get("LAKE_SERVER"))
    try:
        with where.open() as lake:
            found = lake.status()
    except EngineUnreachable as error:
        yield Finding("fail" if is_given else "warn", "engine", error.message)
    except LakeError as error:
        yield Finding("fail", "engine", error.message)
    else:
        verdict = "ok" if found.get("state") == "serving" else "fail"
        detail = f"{where.address()}: {found.get('state')} {found.get('reason', '')}".rstrip()
        yield Finding(verdict, "engine", f"{detail}, version {found.get('version')}")
        yield from _disk_reads(found)


def _start(config: Config) -> Iterator[Finding]:
    """Check the needs of a first start of `lake serve`, as it does."""
    import trio

    from cli.serve.start_checks import CHECKS, is_served

    if is_served(config):
        yield Finding("ok", "start", f"not tried: an engine serves at unix:{config.socket}")
        return
    for what, check in CHECKS:
        try:
            yield Finding("ok", what, trio.run(check, config))
        except LakeError as error:
            yield Finding("fail", what, error.message)


def _disk_reads(status: dict[str, Any]) -> Iterator[Finding]:
    """Check how the engine reads the disk: for small reads threads take about twice the CPU of io_uring."""
    reads = status.get("reads", {})
    if reads.get("through") == "io_uring":
        yield Finding("ok", "disk reads", "through io_uring")
    elif reads:
        yield Finding("warn", "disk reads", f"through threads: {reads.get('reason')}")
