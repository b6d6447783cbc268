"""Writes the table of docs/mount.md: the answer of each file system operation on a mount, found by doing it.

    python -m tests.mount.operations        write the table into docs/mount.md

Each probe does one thing in an empty folder of a real mount and returns "works", or the errno.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.mount.mounts import lake
from tests.style.source_tree import ROOT

DOCUMENT: Final = ROOT / "docs" / "mount.md"
BEGIN: Final = "<!-- operations: the table that the tests write -->\n"
END: Final = "<!-- end of operations -->\n"
WORKS: Final = "works"
_RENAME_NOREPLACE: Final = 1
_RENAME_EXCHANGE: Final = 2
_AT_FDCWD: Final = -100
_libc = ctypes.CDLL(None, use_errno=True)


def table() -> str:
    """Return the table, from a mount of a new store."""
    with TemporaryDirectory(prefix="lake-") as folder, lake(Path(folder)) as mounts:
        return "".join(_rows(mounts.folders[0]))


def documented() -> str:
    """Return the table that the document has."""
    return DOCUMENT.read_text().split(BEGIN)[1].split(END)[0]


def _rows(here: Path) -> Iterator[str]:
    yield "| operation | answer | |\n|---|---|---|\n"
    for number, (name, note, probe) in enumerate(PROBES):
        place = here / str(number)
        place.mkdir()
        yield f"| {name} | {_answer(probe, place)} | {note} |\n"


def _answer(probe: Callable[[Path], object], place: Path) -> str:
    try:
        probe(place)
    except OSError as error:
        return f"`{errno.errorcode[error.errno or 0]}`"
    return WORKS


def _create(place: Path, flags: int = 0, content: bytes = b"content") -> Path:
    descriptor = os.open(place / "file", os.O_RDWR | os.O_CREAT | flags, 0o644)
    assert os.write(descriptor, content) == len(content)
    os.close(descriptor)
    return place / "file"


def _opened(place: Path, flags: int = 0, content: bytes = b"content") -> int:
    return os.open(_create(place, content=content), os.O_RDWR | flags)


def _exclusive(place: Path) -> None:
    _create(place, os.O_EXCL)
    try:
        os.open(place / "file", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return
    raise AssertionError("a second O_EXCL made it again")


def _append(place: Path) -> None:
    descriptor = _opened(place, os.O_APPEND)
    os.write(descriptor, b"more")
    os.close(descriptor)
    assert (place / "file").read_bytes() == b"contentmore"


def _sparse(place: Path) -> None:
    descriptor = _opened(place)
    os.pwrite(descriptor, b"x", 10 << 20)
    os.close(descriptor)
    assert (place / "file").read_bytes() == b"content".ljust(10 << 20, b"\0") + b"x"


def _truncate(place: Path) -> None:
    os.truncate(_create(place), 3)
    os.truncate(place / "file", 5)
    assert (place / "file").read_bytes() == b"con\0\0"


def _map_shared(place: Path) -> None:
    descriptor = _opened(place)
    with mmap.mmap(descriptor, 7) as mapping:
        mapping[0:3] = b"CON"
        mapping.flush()
    os.close(descriptor)
    assert (place / "file").read_bytes() == b"CONtent"


def _unlink_open(place: Path) -> None:
    descriptor = _opened(place)
    os.unlink(place / "file")
    assert os.pread(descriptor, 10, 0) == b"content"
    os.close(descriptor)


def _rename_over(place: Path) -> None:
    (place / "other").write_bytes(b"other")
    os.rename(place / "other", _create(place))
    assert os.listdir(place) == ["file"]


def _rename_folder(place: Path) -> None:
    (place / "a" / "b").mkdir(parents=True)
    os.rename(place / "a", place / "c")
    assert (place / "c" / "b").is_dir()


def _rename_flags(flags: int) -> Callable[[Path], None]:
    def probe(place: Path) -> None:
        (place / "other").write_bytes(b"other")
        old, new = os.fsencode(place / "other"), os.fsencode(_create(place))
        if _libc.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, flags):
            raise OSError(ctypes.get_errno(), "renameat2")

    return probe


def _times(place: Path) -> None:
    os.utime(_create(place), ns=(1, 981_173_106_123_456_789))
    assert os.stat(place / "file").st_mtime_ns == 981_173_106_123_456_789


def _access_time(place: Path) -> None:
    os.utime(_create(place), ns=(5_000_000_000, 981_173_106_123_456_789))
    if os.stat(place / "file").st_atime_ns != 5_000_000_000:
        raise OSError(errno.ENOTSUP, "not kept")


def _xattr(name: str) -> Callable[[Path], None]:
    def probe(place: Path) -> None:
        os.setxattr(_create(place), name, b"value")
        assert os.getxattr(place / "file", name) == b"value"

    return probe


def _link_count(place: Path) -> None:
    os.link(_create(place), place / "other")


def _socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(place)  # a socket's path is short
        try:
            listener.bind("s")
        finally:
            os.chdir("/")


def _fallocate(place: Path) -> None:
    os.posix_fallocate(_opened(place), 0, 1 << 20)


def _punch(place: Path) -> None:
    if _libc.fallocate(_opened(place), 3, ctypes.c_long(0), ctypes.c_long(4096)):
        raise OSError(ctypes.get_errno(), "fallocate")


def _copy_range(place: Path) -> None:
    target = os.open(place / "copy", os.O_WRONLY | os.O_CREAT)
    assert os.copy_file_range(_opened(place), target, 7) == 7
    os.close(target)
    assert (place / "copy").read_bytes() == b"content"


def _lock_record(place: Path) -> None:
    fcntl.fcntl(_opened(place), fcntl.F_SETLK, struct.pack("hhllhh", fcntl.F_WRLCK, 0, 0, 0, 0, 0))


def _holes(place: Path) -> None:
    assert os.lseek(_opened(place), 0, os.SEEK_HOLE) == len(b"content")


def _direct(place: Path) -> None:
    descriptor = _opened(place, os.O_DIRECT, bytes(8192))
    assert os.preadv(descriptor, [mmap.mmap(-1, 4096)], 4096) == 4096


def _owner(place: Path) -> None:
    os.chown(_create(place), 12, 34)
    assert (os.stat(place / "file").st_uid, os.stat(place / "file").st_gid) == (12, 34)


def _mode(place: Path) -> None:
    os.chmod(_create(place), 0o640)
    assert os.stat(place / "file").st_mode & 0o7777 == 0o640


def _symlink(place: Path) -> None:
    os.symlink("file", place / "link")
    assert os.readlink(place / "link") == "file"


def _name(name: bytes) -> Callable[[Path], object]:
    return lambda place: os.mkdir(os.fsencode(place) + b"/" + name)


PROBES: Final[tuple[tuple[str, str, Callable[[Path], object]], ...]] = (
    ("open, create, write, read, close", "visible to others, whole, at close", _create),
    ("`O_EXCL`", "one of all mounts makes it", _exclusive),
    ("`O_APPEND`", "behind the content that is there at close", _append),
    ("`O_DIRECT`", "the kernel's cache is left out", _direct),
    ("`O_TMPFILE`", "", lambda place: os.open(place, os.O_TMPFILE | os.O_RDWR)),
    ("write behind the end", "zeros between", _sparse),
    ("truncate, ftruncate", "", _truncate),
    ("fsync, fdatasync", "stored and durable on return", lambda place: os.fsync(_opened(place))),
    ("mmap, shared and written", "stored at close, or at the end of the mapping", _map_shared),
    ("fallocate", "posix_fallocate writes zeros itself", _fallocate),
    ("fallocate: punch a hole", "", _punch),
    ("copy_file_range", "the bytes are copied", _copy_range),
    ("lseek `SEEK_HOLE`", "a file is all data", _holes),
    ("mkdir, rmdir", "in the root: buckets", lambda place: os.rmdir(_made(place))),
    ("unlink while open", "the content stays readable", _unlink_open),
    ("rename over a file", "atomic", _rename_over),
    ("rename a folder", "one record, whatever is below", _rename_folder),
    ("rename `RENAME_NOREPLACE`, target there", "", _rename_flags(_RENAME_NOREPLACE)),
    ("rename `RENAME_EXCHANGE`", "atomic, of any two kinds", _rename_flags(_RENAME_EXCHANGE)),
    ("symlink, readlink", "targets to 4,095 bytes", _symlink),
    ("link", "hard links are not offered", _link_count),
    ("mknod: pipe", "", lambda place: os.mkfifo(place / "pipe")),
    ("mknod: device", "", lambda place: os.mknod(place / "null", 0o20666, os.makedev(1, 3))),
    ("bind a Unix socket", "", _socket),
    ("chmod", "", _mode),
    ("chown", "", _owner),
    ("utimensat: modification time", "in ns", _times),
    ("utimensat: access time", "as it was set; reading does not change it", _access_time),
    ("extended attributes `user.*`", "64 KiB in all", _xattr("user.key")),
    ("extended attributes `trusted.*`, `security.*`", "root's", _xattr("trusted.key")),
    ("flock", "on this mount only", lambda place: fcntl.flock(_opened(place), fcntl.LOCK_EX)),
    ("fcntl locks", "on this mount only", _lock_record),
    ("statvfs", "of the store's disk", os.statvfs),
    ("a name that is not UTF-8", "", _name(b"\xff")),
    ("a name of 256 bytes", "255 a component, 1,024 a key", _name(b"n" * 256)),
)


def _made(place: Path) -> Path:
    (place / "folder").mkdir()
    return place / "folder"


def main() -> None:
    """Write the table into the document."""
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(text.split(BEGIN)[0] + BEGIN + table() + END + text.split(END)[1])


if __name__ == "__main__":
    main()
