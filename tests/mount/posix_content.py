"""Cases about content: reading, writing, lengths, mappings, locks, reading folders, running programs, notices."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from typing import Final

from tests.mount.posix import Case, alice, bob, case, root
from tests.mount.posix_names import KINDS, made

_RW: Final = os.O_RDWR | os.O_CREAT


def writing() -> Iterator[Case]:
    """read, write and their kin."""
    yield case(
        "positions", root.open("a", "x", _RW), root.write("a", b"12345"), root.lseek("a", 0, os.SEEK_CUR),
        root.pwrite("a", b"ab", 1), root.lseek("a", 0, os.SEEK_CUR), root.pread("a", 3, 0),
        root.lseek("a", -2, os.SEEK_END),
        root.read("a", 10), root.read("a", 10), root.lseek("a", 100, os.SEEK_SET), root.read("a", 1),
        root.write("a", b"z"), root.fstat("a"), root.pread("a", 200, 0), root.lseek("a", -1, os.SEEK_SET),
        root.lseek("a", -200, os.SEEK_END), root.pread("a", 1, -1), root.pwrite("a", b"1", -1), root.lseek("a", 0, 99),
        root.close("a"), root.stat("x"),
    )  # fmt: skip
    yield case(
        "vectors", root.open("a", "x", _RW), root.writev("a", b"12", b"", b"345"), root.lseek("a", 0, os.SEEK_SET),
        root.readv("a", 1, 3, 5), root.readv("a", 1), root.writev("a", b""), root.writev("a"), root.close("a"),
        root.content("x"),
    )  # fmt: skip
    yield case(
        "appending", root.open("a", "x", _RW | os.O_APPEND), root.open("b", "x", os.O_WRONLY | os.O_APPEND),
        root.write("a", b"1"), root.write("b", b"2"), root.lseek("a", 0, os.SEEK_SET), root.write("a", b"3"),
        root.pwrite("a", b"4", 0), root.lseek("a", 0, os.SEEK_CUR), root.fstat("b"), root.ftruncate("a", 1),
        root.write("b", b"5"), root.close("a"), root.close("b"), root.content("x"),
    )  # fmt: skip
    yield case("nothing written", root.open("a", "x", _RW), root.write("a", b""), root.fstat("a"), root.close("a"),
               root.stat("x"))  # fmt: skip
    yield case(
        "two handles", root.open("a", "x", _RW), root.write("a", b"12345"), root.open("b", "x", os.O_RDWR),
        root.pread("b", 9, 0), root.pwrite("b", b"z", 2), root.pread("a", 9, 0), root.close("a"),
        root.pread("b", 9, 0),
        root.ftruncate("b", 2), root.stat("x"), root.close("b"), root.content("x"),
    )  # fmt: skip
    yield case("sync", root.open("a", "x", _RW), root.write("a", b"1"), root.fsync("a"), root.fdatasync("a"),
               root.syncfs("a"), root.open("d", ".", os.O_RDONLY), root.fsync("d"), root.fdatasync("d"),
               root.stat("x"))  # fmt: skip
    yield case("a folder as a file", root.open("d", ".", os.O_RDONLY), root.read("d", 1), root.write("d", b"1"),
               root.ftruncate("d", 0), root.pread("d", 1, 0), root.lseek("d", 0, os.SEEK_SET), root.flock("d", 2),
               root.fallocate("d", 0, 0, 1), root.map("d", 4096, False))  # fmt: skip
    yield case("a write that is too far", root.open("a", "x", _RW), root.pwrite("a", b"1", (1 << 63) - 1),
               root.pwrite("a", b"1", (1 << 63) - 4096), root.fstat("a"))  # fmt: skip


def lengths() -> Iterator[Case]:
    """truncate, ftruncate, fallocate, holes."""
    for kind in KINDS:
        yield case(f"truncate of {kind}", *made(kind, "x"), root.truncate("x", 3), root.lstat("x"))
    for size in (-1, 0, 5, 7, 100, 4097, 1 << 20, (1 << 63) - 1):
        yield case(f"truncate to {size}", root.make("x", b"content"), root.truncate("x", size), root.stat("x"),
                   root.open("a", "x", os.O_RDWR), root.ftruncate("a", size), root.fstat("a"))  # fmt: skip
        yield case(f"ftruncate to {size}", root.make("x", b"content"), root.open("a", "x", os.O_RDWR),
                   root.ftruncate("a", size), root.fstat("a"), root.pread("a", 20, 0), root.close("a"))  # fmt: skip
    yield case("truncate by others", alice.make("x", b"1"), bob.truncate("x", 0), alice.chmod("x", 0o444),
               alice.truncate("x", 0), root.truncate("x", 0), alice.open("a", "x", os.O_RDONLY),
               alice.ftruncate("a", 1))  # fmt: skip
    yield case("truncate names", root.make("x"), root.truncate("x/y", 0), root.truncate("", 0),
               root.truncate("n" * 256, 0),
               root.truncate("nowhere", 0), root.truncate("x/", 0))  # fmt: skip
    for mode in (0, 1, 2, 3, 8, 16, 17, 32, 64):
        yield case(
            f"fallocate {mode}", root.make("x", b"content"), root.open("a", "x", os.O_RDWR),
            root.fallocate("a", mode, 0, 4096),
            root.fstat("a"), root.pread("a", 9, 0), root.fallocate("a", mode, -1, 1), root.fallocate("a", mode, 0, 0),
            root.open("b", "x", os.O_RDONLY), root.fallocate("b", mode, 0, 1),
        )  # fmt: skip
    holes = (root.lseek("a", place, whence) for whence in (os.SEEK_DATA, os.SEEK_HOLE) for place in (0, 4096, 9, -1))
    yield case("holes", root.make("x", b"content" * 1000), root.open("a", "x", os.O_RDONLY), *holes,
               root.lseek("a", 7000, os.SEEK_DATA), root.lseek("a", 7000, os.SEEK_HOLE),
               root.lseek("a", 6999, os.SEEK_HOLE), root.lseek("a", 9999, os.SEEK_HOLE))  # fmt: skip
    yield case("a real hole", root.open("a", "x", _RW), root.pwrite("a", b"1", 1 << 20), root.fsync("a"),
               root.lseek("a", 0, os.SEEK_DATA), root.lseek("a", 0, os.SEEK_HOLE), root.pread("a", 4, 5))  # fmt: skip
    for size in (0, 3, 100):
        yield case(
            f"copy_file_range {size}", root.make("x", b"0123456789"), root.open("a", "x", os.O_RDONLY),
            root.open("b", "y", _RW),
            root.copy_range("a", "b", size), root.lseek("a", 0, os.SEEK_CUR), root.copy_range("a", "b", size, 2, 20),
            root.fstat("b"), root.pread("b", 99, 0), root.copy_range("b", "a", 1), root.copy_range("a", "b", size, 10),
        )  # fmt: skip
    yield case("copy_file_range in one file", root.make("x", b"0123456789"), root.open("a", "x", os.O_RDWR),
               root.copy_range("a", "a", 3, 0, 5), root.pread("a", 20, 0), root.copy_range("a", "a", 5, 0, 2),
               root.open("d", ".", os.O_RDONLY), root.copy_range("d", "a", 5, 0, 2),
               root.open("p", "x", os.O_WRONLY | os.O_APPEND), root.copy_range("a", "p", 2, 0, 0))  # fmt: skip


def mappings() -> Iterator[Case]:
    """mmap."""
    yield case(
        "a shared mapping", root.make("x", b"content"), root.open("a", "x", os.O_RDWR), root.map("a", 7, True),
        root.map_read("a", 0, 7), root.map_write("a", 2, b"ZZ"), root.pread("a", 9, 0), root.map_sync("a"),
        root.fstat("a"), root.close("a"), root.map_write("a", 0, b"Y"), root.map_end("a"), root.content("x"),
        with_times=False,
    )  # fmt: skip
    yield case(
        "behind the end of a mapped file", root.make("x", b"c" * 100), root.open("a", "x", os.O_RDWR),
        root.map("a", 100, True),
        root.ftruncate("a", 50), root.map_read("a", 0, 100), root.ftruncate("a", 100), root.pread("a", 100, 0),
        root.map_write("a", 60, b"later"), root.map_sync("a"), root.pread("a", 100, 0), root.map_end("a"),
        root.close("a"), root.content("x"), with_times=False,
    )  # fmt: skip
    yield case("a private mapping", root.make("x", b"content"), root.open("a", "x", os.O_RDONLY),
               root.map("a", 7, True, False), root.map_write("a", 0, b"Z"), root.map_read("a", 0, 7),
               root.map_end("a"), root.content("x"))  # fmt: skip
    yield case("a mapping that may not be", root.make("x", b"content"), root.open("a", "x", os.O_RDONLY),
               root.map("a", 7, True), root.open("b", "x", os.O_WRONLY), root.map("b", 7, False))  # fmt: skip
    yield case("write and map", root.make("x", b"content"), root.open("a", "x", os.O_RDWR), root.map("a", 7, True),
               root.pwrite("a", b"W", 3), root.map_read("a", 0, 7), root.map_write("a", 4, b"M"),
               root.pread("a", 9, 0),
               root.unlink("x"), root.map_write("a", 5, b"M"), root.map_read("a", 0, 7), root.map_end("a"),
               root.pread("a", 9, 0), with_times=False)  # fmt: skip


def locks() -> Iterator[Case]:
    """flock, fcntl."""
    yield case(
        "flock", root.make("x", b"", 0o666), root.chmod("x", 0o666), root.open("a", "x", os.O_RDONLY),
        alice.open("a", "x", os.O_RDWR),
        root.flock("a", fcntl.LOCK_SH | fcntl.LOCK_NB), alice.flock("a", fcntl.LOCK_SH | fcntl.LOCK_NB),
        alice.flock("a", fcntl.LOCK_EX | fcntl.LOCK_NB), root.flock("a", fcntl.LOCK_UN),
        alice.flock("a", fcntl.LOCK_EX | fcntl.LOCK_NB), root.flock("a", fcntl.LOCK_SH | fcntl.LOCK_NB),
        alice.close("a"),
        root.flock("a", fcntl.LOCK_EX | fcntl.LOCK_NB), root.flock("a", 99),
    )  # fmt: skip
    yield case(
        "records", root.make("x", b"", 0o666), root.chmod("x", 0o666), root.open("a", "x", os.O_RDWR),
        alice.open("a", "x", os.O_RDWR),
        root.set_lock("a", fcntl.F_WRLCK, 0, 10), alice.set_lock("a", fcntl.F_WRLCK, 5, 10),
        alice.get_lock("a", fcntl.F_WRLCK, 5, 10), alice.set_lock("a", fcntl.F_WRLCK, 10, 10),
        root.set_lock("a", fcntl.F_RDLCK, 0, 0), root.set_lock("a", fcntl.F_UNLCK, 0, 0),
        alice.set_lock("a", fcntl.F_RDLCK, 0, 0), root.get_lock("a", fcntl.F_RDLCK, 0, 0), alice.close("a"),
        root.set_lock("a", fcntl.F_WRLCK, 0, 0), root.open("b", "x", os.O_RDONLY),
        root.set_lock("b", fcntl.F_WRLCK, 0, 1),
    )  # fmt: skip


def folder_reading() -> Iterator[Case]:
    """readdir, telldir, seekdir, rewinddir."""
    for count in (0, 1, 50, 300):
        yield case(
            f"read a folder of {count}", root.mkdir("d", 0o755), root.make_many("d", count), root.opendir("a", "d"),
            root.count_names("a", count // 2), root.telldir("a"), root.count_names("a", 1000), root.next_names("a", 1),
            root.seekdir("a", 0), root.count_names("a", 1000), root.rewinddir("a"), root.next_names("a", 1000),
            root.listdir("d"),
        )  # fmt: skip
    yield case(
        "a folder that changes", root.mkdir("d", 0o755), root.make_many("d", 100), root.opendir("a", "d"),
        root.count_names("a", 0), root.make("d/new"), root.unlink("d/0001"), root.rewinddir("a"),
        root.next_names("a", 1000),
    )  # fmt: skip
    yield case(
        "removed while it is read", root.mkdir("d", 0o755), root.make_many("d", 200), root.remove_while_reading("d"),
        root.rmdir("d"),
    )  # fmt: skip
    yield case("hidden names", root.make("x", b"1"), root.open("a", "x", os.O_RDWR), root.unlink("x"),
               root.listdir("."),
               root.mkdir("d", 0o755), root.make("d/x", b"1"), root.open("b", "d/x", os.O_RDONLY), root.unlink("d/x"),
               root.listdir("d"), root.rmdir("d"), root.pread("b", 9, 0))  # fmt: skip
    yield case("opendir of what is none", root.make("x"), root.opendir("a", "x"), root.opendir("a", "nowhere"),
               root.mkdir("d", 0o700), alice.opendir("a", "d"))  # fmt: skip


def notices() -> Iterator[Case]:
    """inotify of what is done on the mount itself."""
    yield case(
        "inotify", root.mkdir("d", 0o755), root.watch("i", "d"), root.make("d/x", b"1"), root.notices("i"),
        root.chmod("d/x", 0o600),
        root.rename("d/x", "d/y"), root.notices("i"), root.truncate("d/y", 0), root.unlink("d/y"), root.notices("i"),
        root.mkdir("d/e", 0o755), root.rmdir("d/e"), root.notices("i"), root.symlink("a", "d/s"), root.notices("i"),
        root.rename("d/s", "s"), root.rename("s", "d/s"), root.notices("i"), root.utimens("d/s", 1, 1, 0x100),
        root.notices("i"), root.unlink("d/s"), root.rmdir("d"), root.notices("i"),
    )  # fmt: skip
    yield case("inotify of a file", root.make("x", b"1"), root.watch("i", "x"), root.open("a", "x", os.O_RDWR),
               root.read("a", 1), root.write("a", b"2"), root.close("a"), root.notices("i"), root.unlink("x"),
               root.notices("i"))  # fmt: skip
