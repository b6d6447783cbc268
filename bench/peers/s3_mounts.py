"""Our mount, s3fs and `rclone mount`, each on its own store on this machine, as sides that do the same work.

A side has its content before it is mounted.  Each peer is mounted with the options that its documentation recommends
for speed; options that rely on being the store's only client (time-outs, caches that no other client can make stale)
are set too, and the read-ahead is that of our mount.  `OPTIONS` is the list.

A peer that refuses or fails raises `CouldNotRun` with the plain reason; a peer that hangs is killed, so that the work
on it fails.  No mount and no process remains.
"""

from __future__ import annotations

import filecmp
import http.client
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lakefs
from bench.harness.contest import CouldNotRun
from bench.harness.mounts import MountProcess, forget_pages_below, lake_mounted, mounting
from bench.harness.process import EngineProcess
from bench.peers.packages import last_line
from bench.peers.s3_stores import BUCKET, REGION, REMOTE, Store, StoreKind, StoreUnavailable, free_port, serving
from fuse.kernel.attach import READ_AHEAD_FOLDER, MountOptions

OURS: Final = "lake mount"
WORK_S: Final = 60.0
"""Longer than any row takes on a side that works; after this a peer is killed."""
COMMAND_S: Final = 90.0
STORED_S: Final = 60.0
POLL_S: Final = 0.005
TIMEOUT_S: Final = MountOptions.attribute_timeout_s
READ_AHEAD_KIB: Final = MountOptions.read_ahead_kib
SMALL_BYTES: Final = 1 << 20


class Side:
    """A mount with a bucket behind it.

    `folder`: the bucket, as a folder.  `memory_bytes`: RssAnon of the process that serves the mount.
    """

    def __init__(self, name: str, folder: Path, mount: MountProcess) -> None:
        self.name = name
        self.folder = folder
        self._mount = mount

    def memory_bytes(self) -> int:
        """Return RssAnon of the process that serves the mount."""
        return self._mount.memory_bytes()

    def wait_stored(self, path: Path) -> float:
        """Wait until a file, or all files below a folder, of the mount are in the store; return the wait in seconds.

        0 for sides whose `close` stores.  Counting the files on the mount is not timed.
        """
        return 0.0

    def fetch(self, name: str, target: Path) -> None:
        """Copy a file or folder of the bucket from the store itself, as other clients see it; without folders
        `.git`."""
        raise NotImplementedError

    def cool(self) -> None:
        """Make the kernel drop the pages of the store's files."""
        raise NotImplementedError

    @contextmanager
    def working(self) -> Iterator[None]:
        """Context manager around work on this side; ours has no time limit, and its errors are not translated."""
        yield


class LakeSide(Side):
    """Our side."""

    def __init__(self, engine: EngineProcess, lake: lakefs.Lake, mount: MountProcess) -> None:
        super().__init__(OURS, mount.folder / BUCKET, mount)
        self._engine = engine
        self._lake = lake

    def fetch(self, name: str, target: Path) -> None:
        keys = [entry.key for entry in self._lake.ls(f"{BUCKET}/{name}")]
        for key in (key for key in keys if not key.endswith("/") and "/.git/" not in key):
            path = target / key[len(name) :].lstrip("/") if key != name else target
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lake.get_file(f"{BUCKET}/{key}", path)

    def cool(self) -> None:
        os.sync()
        forget_pages_below(self._engine.data)


class PeerSide(Side):
    """A peer on an S3 store."""

    def __init__(self, name: str, store: Store, mount: MountProcess) -> None:
        super().__init__(name, mount.folder, mount)
        self._store = store
        self._killed = False

    def fetch(self, name: str, target: Path) -> None:
        if (self.folder / name).is_dir():
            self._store.rclone("copy", "--exclude", ".git/**", f"{REMOTE}/{name}", target)
        else:
            self._store.rclone("copyto", f"{REMOTE}/{name}", target)

    def cool(self) -> None:
        os.sync()
        forget_pages_below(self._store.data)

    @contextmanager
    def working(self) -> Iterator[None]:
        watchdog = threading.Timer(WORK_S, self._kill)
        watchdog.start()
        try:
            yield
        except (OSError, subprocess.SubprocessError, StoreUnavailable) as error:
            if self._killed:
                raise CouldNotRun(f"did not end within {WORK_S:.0f} s") from error
            raise CouldNotRun(_reason(error, self.folder)) from error
        finally:
            watchdog.cancel()

    def _kill(self) -> None:
        self._killed = True
        self._mount.process.kill()


class RcloneSide(PeerSide):
    """rclone, which stores after `close`, in the background: its writes count once the store lists all of them.

    Its delay before that is set to a tenth of a second instead of five, and is part of the figure.
    """

    def __init__(self, name: str, store: Store, mount: MountProcess, control_port: int) -> None:
        super().__init__(name, store, mount)
        self._control_port = control_port

    def wait_stored(self, path: Path) -> float:
        wanted = _count_and_bytes(path)
        begin = time.monotonic()
        name = str(path.relative_to(self.folder))
        while (found := self._stored(name, path.is_file())) != wanted:
            if time.monotonic() - begin > STORED_S:
                raise CouldNotRun(f"{found} objects and bytes of {wanted} stored after {STORED_S:.0f} s")
            time.sleep(POLL_S)
        return time.monotonic() - begin

    def _stored(self, name: str, is_file: bool) -> tuple[int, int]:
        """Return objects and bytes of that name, as the store lists them."""
        if is_file:
            entry = self._ask("operations/stat", {"fs": REMOTE, "remote": name}).get("item")
            return (1, entry["Size"]) if entry else (0, 0)
        answer = self._ask("operations/size", {"fs": f"{REMOTE}/{name}"})
        return answer.get("count", 0), answer.get("bytes", 0)

    def _ask(self, question: str, parameters: dict[str, str]) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._control_port, timeout=STORED_S)
        try:
            connection.request("POST", f"/{question}", json.dumps(parameters), {"Content-Type": "application/json"})
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return answer


def _count_and_bytes(path: Path) -> tuple[int, int]:
    files = [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
    return len(files), sum(found.stat().st_size for found in files)


@contextmanager
def lake_side(folder: Path, content: Path | None) -> Iterator[LakeSide]:
    """Context manager: our engine and mount, with the files below `content` in the bucket."""
    with EngineProcess(folder) as engine, engine.connect() as lake:
        if content is not None:
            _put_tree(lake, content)
        with lake_mounted(engine, folder) as mount:
            yield LakeSide(engine, lake, mount)


def _put_tree(lake: lakefs.Lake, content: Path) -> None:
    small: list[tuple[str, bytes]] = []
    for path in sorted(content.rglob("*")):
        name = f"{BUCKET}/{path.relative_to(content)}"
        if path.is_file() and path.stat().st_size > SMALL_BYTES:
            lake.put(name, path)
        elif path.is_file():
            small.append((name, path.read_bytes()))
    for start in range(0, len(small), 5000):
        lake.put_many(small[start : start + 5000])


@dataclass(frozen=True)
class Tool:
    """A program that mounts a bucket.  `command`: for a store, a mount point, a folder for its caches, a port."""

    name: str
    command: Callable[[Store, Path, Path, int], list[str]]
    rclone: bool = False


def _s3fs_command(store: Store, point: Path, folder: Path, _: int) -> list[str]:
    secret = folder / "s3fs.secret"
    secret.touch(mode=0o600)
    secret.write_text(f"{store.kind.access_key}:{store.kind.secret_key}\n")
    temporary = folder / "temporary"
    temporary.mkdir()
    where = [f"url={store.url}", "use_path_request_style", f"endpoint={REGION}", f"passwd_file={secret}"]
    places = [f"use_cache={folder / 'cache'}", f"tmpdir={temporary}"]
    return ["s3fs", BUCKET, str(point), "-f", "-o", ",".join([*where, *places, *OPTIONS["s3fs"]])]


def _rclone_command(_: Store, point: Path, folder: Path, port: int) -> list[str]:
    control = ["--rc", "--rc-no-auth", "--rc-addr", f"127.0.0.1:{port}"]
    places = ["--cache-dir", str(folder / "cache")]
    return ["rclone", "mount", REMOTE, str(point), *control, *places, *OPTIONS["rclone"]]


# Not 0: that stores a closed file while it may still be renamed, as a git clone does.
OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "s3fs": (
        "parallel_count=20",
        "multipart_size=16",
        "enable_noobj_cache",
        "kernel_cache",
        f"attr_timeout={TIMEOUT_S:.0f}",
        f"entry_timeout={TIMEOUT_S:.0f}",
        "stat_cache_expire=3600",
    ),
    "rclone": (
        "--vfs-cache-mode=full",
        "--vfs-read-ahead=128M",
        "--vfs-fast-fingerprint",
        "--no-modtime",
        "--vfs-write-back=100ms",
        "--transfers=16",
        f"--attr-timeout={TIMEOUT_S:.0f}s",
        "--dir-cache-time=1h",
        "--poll-interval=0",
        f"--max-read-ahead={READ_AHEAD_KIB}K",
    ),
}
"""Mount options of each peer, in addition to the places of its store, caches and mount point."""

TOOLS: Final = (Tool("s3fs", _s3fs_command), Tool("rclone", _rclone_command, rclone=True))


@contextmanager
def peer_side(tool: Tool, kind: StoreKind, folder: Path, content: Path | None, *, fetch: bool) -> Iterator[PeerSide]:
    """Context manager: a peer on a store of that kind, with the files below `content` in the bucket.  CouldNotRun."""
    if shutil.which(tool.name) is None:
        raise CouldNotRun(f"{tool.name} is not installed: apt-get install {tool.name}")
    folder.mkdir()
    with ExitStack() as stack:
        try:
            store = stack.enter_context(serving(kind, folder, fetch=fetch))
            if content is not None:
                store.rclone("copy", "--transfers", "16", content, REMOTE)
            port = free_port()
            point = folder / "mount"
            command = tool.command(store, point, folder, port)
            mount = stack.enter_context(
                mounting(command, point, folder / "mount.log", store.environment, says_ready=False)
            )
        except (StoreUnavailable, RuntimeError) as error:
            raise CouldNotRun(_reason(error, folder)) from error
        _raise_read_ahead(point)
        name = f"{tool.name} on {kind.name}"
        yield RcloneSide(name, store, mount, port) if tool.rclone else PeerSide(name, store, mount)


def _raise_read_ahead(point: Path) -> None:
    """Set the peer's read-ahead to that of our mount; without root the kernel's own stays."""
    device = os.stat(point).st_dev
    setting = READ_AHEAD_FOLDER / f"{os.major(device)}:{os.minor(device)}" / "read_ahead_kb"
    if os.access(setting, os.W_OK):
        setting.write_text(f"{READ_AHEAD_KIB}\n")


def command(*arguments: str | Path) -> None:
    """Run a program that works on a mount; CalledProcessError, with its output, if it fails."""
    subprocess.run(
        list(map(str, arguments)),
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=COMMAND_S,
    )


def check_same(wanted: Path, found: Path) -> None:
    """Raise CouldNotRun unless two files, or two folders with all below, have the same bytes."""
    for path in [wanted] if wanted.is_file() else sorted(wanted.rglob("*")):
        if path.is_file() and not path.is_symlink():
            other = found / path.relative_to(wanted) if path != wanted else found
            if not other.is_file() or not filecmp.cmp(path, other, shallow=False):
                raise CouldNotRun(f"what was read back for {path.name} is not what was written")


def _reason(error: BaseException, folder: Path) -> str:
    """Return the reason in one line, without this run's paths."""
    if isinstance(error, subprocess.CalledProcessError):
        program = Path(str(error.args[1][0])).name
        said = last_line(error.stderr or "") or f"exit code {error.returncode}"
        text = said if said.startswith(f"{program}:") else f"{program}: {said}"
    elif isinstance(error, subprocess.TimeoutExpired):
        text = f"{error.cmd[0]} did not end within {COMMAND_S:.0f} s"
    elif isinstance(error, OSError):
        text = f"{error.strerror or error} ({type(error).__name__})"
    else:
        text = str(error)
    return last_line(text.replace(f"{folder}/", "").replace(str(folder), "."))
