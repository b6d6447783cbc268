"""Cases about names: open, mkdir, rmdir, unlink, rename, symlink, link, mknod, and the limits of names."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Final

from tests.mount.posix import GROUP, Call, Case, alice, bob, case, root

KINDS: Final = ("nothing", "file", "folder", "full", "link", "folder link", "dangling", "loop")
NAMES_MAX: Final = "n" * 255
_RENAME_NOREPLACE: Final = 1
_RENAME_EXCHANGE: Final = 2
_RENAME_WHITEOUT: Final = 4
_FLAGS: Final = {
    "O_RDONLY": os.O_RDONLY, "O_WRONLY": os.O_WRONLY, "O_RDWR": os.O_RDWR, "O_CREAT": os.O_CREAT,
    "O_EXCL": os.O_EXCL, "O_TRUNC": os.O_TRUNC, "O_APPEND": os.O_APPEND, "O_DIRECTORY": os.O_DIRECTORY,
    "O_NOFOLLOW": os.O_NOFOLLOW, "O_PATH": os.O_PATH, "O_NOATIME": os.O_NOATIME, "O_SYNC": os.O_SYNC,
}  # fmt: skip
_OPENS: Final = (
    "O_RDONLY", "O_WRONLY", "O_RDWR", "O_RDWR O_APPEND", "O_WRONLY O_TRUNC", "O_RDONLY O_TRUNC",
    "O_RDONLY O_DIRECTORY",
    "O_RDWR O_DIRECTORY", "O_RDONLY O_NOFOLLOW", "O_RDONLY O_NOFOLLOW O_DIRECTORY", "O_RDONLY O_CREAT",
    "O_RDWR O_CREAT", "O_RDWR O_CREAT O_EXCL", "O_WRONLY O_CREAT O_TRUNC", "O_RDONLY O_CREAT O_DIRECTORY",
    "O_WRONLY O_CREAT O_NOFOLLOW", "O_PATH", "O_PATH O_NOFOLLOW", "O_RDWR O_SYNC", "O_RDONLY O_NOATIME",
)  # fmt: skip


def made(kind: str, name: str) -> tuple[Call, ...]:
    """Return the calls that make a thing of that kind under a name."""
    return {
        "nothing": (),
        "file": (root.make(name, b"content of " + name.encode()),),
        "folder": (root.mkdir(name, 0o755),),
        "full": (root.mkdir(name, 0o755), root.make(f"{name}/inner", b"1")),
        "link": (root.make(f"{name} aim", b"aim"), root.symlink(f"{name} aim", name)),
        "folder link": (root.mkdir(f"{name} aim", 0o755), root.symlink(f"{name} aim", name)),
        "dangling": (root.symlink("nowhere", name),),
        "loop": (root.symlink(name, name),),
    }[kind]


def opening() -> Iterator[Case]:
    """open, creat."""
    for kind in KINDS:
        for names in _OPENS:
            flags = 0
            for name in names.split():
                flags |= _FLAGS[name]
            yield case(
                f"open {kind} {names}", *made(kind, "x"), root.open("a", "x", flags, 0o640),
                root.fstat("a"), root.close("a"), root.listdir("."),
            )  # fmt: skip
    for name in ("", "x/", "x/y", "d/", "d/.", "d/..", "nowhere/x", "nowhere/", NAMES_MAX, NAMES_MAX + "n"):
        for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
            yield case(
                f"open name {name[:9]!r} {len(name)} {flags}", root.make("x"), root.mkdir("d", 0o755),
                root.open("a", name, flags, 0o600),
            )  # fmt: skip
    yield from _opening_as_others()
    yield from _creating()
    yield case(
        "open a busy program",
        root.copy_in("sleep", "/bin/sleep"), root.start("p", "./sleep", "20"), root.open("a", "sleep", os.O_WRONLY),
        root.open("a", "sleep", os.O_RDONLY | os.O_TRUNC), root.truncate("sleep", 3), root.unlink("sleep"),
    )  # fmt: skip
    yield case(
        "run a program that is being written",
        root.copy_in("true", "/bin/true"), root.run("./true"), root.open("a", "true", os.O_WRONLY),
        root.start("p", "./true"),
    )  # fmt: skip
    yield case("open O_TMPFILE", root.open("a", ".", os.O_TMPFILE | os.O_RDWR, 0o600), root.fstat("a"))
    yield case("open O_TMPFILE read only", root.open("a", ".", os.O_TMPFILE, 0o600))
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        yield case(
            f"read and write by {flags}", root.make("x", b"1234"), root.open("a", "x", flags), root.read("a", 2),
            root.write("a", b"5"), root.ftruncate("a", 1), root.fsync("a"), root.close("a"), root.content("x"),
        )  # fmt: skip


def _opening_as_others() -> Iterator[Case]:
    for mode in (0o000, 0o400, 0o200, 0o600, 0o040, 0o020, 0o004, 0o002, 0o066, 0o606):
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
            yield case(
                f"open mode {mode:o} flags {flags}", alice.make("x", b"1"), alice.chown("x", -1, GROUP),
                alice.chmod("x", mode), alice.open("a", "x", flags), bob.open("a", "x", flags),
                root.open("a", "x", flags),
            )  # fmt: skip
    for mode in (0o700, 0o600, 0o100, 0o300, 0o500, 0o777, 0o711, 0o722, 0o733):
        yield case(
            f"in a folder of mode {mode:o}", alice.mkdir("d", 0o777), alice.make("d/x"), alice.chmod("d", mode),
            bob.stat("d/x"), bob.open("a", "d/x", os.O_RDONLY), bob.make("d/y"), bob.listdir("d"),
            bob.mkdir("d/z", 0o755), bob.symlink("x", "d/s"), bob.unlink("d/x"), bob.rename("d/y", "y"),
            bob.rmdir("d/z"),
        )  # fmt: skip


def _creating() -> Iterator[Case]:
    for umask in (0o000, 0o022, 0o077, 0o777, 0o027):
        for mode in (0o777, 0o666, 0o1777, 0o2755, 0o4755, 0o6777):
            yield case(
                f"create umask {umask:o} mode {mode:o}", alice.umask(umask),
                alice.open("a", "x", os.O_CREAT | os.O_RDWR, mode), alice.mkdir("d", mode),
                alice.mknod("n", stat.S_IFREG | mode), alice.symlink("x", "s"),
                alice.open("b", "y", os.O_CREAT | os.O_RDWR | os.O_EXCL, mode), alice.write("a", b"1"),
                alice.close("a"), alice.lstat("x"),
            )  # fmt: skip
    for group in (GROUP, 41002, 0):
        for mode in (0o755, 0o2755, 0o2777):
            yield case(
                f"in a set-group-id folder of {group}, mode {mode:o}", root.mkdir("d", 0o777),
                root.chown("d", 0, group), root.chmod("d", 0o2777), alice.make("d/x", b"", mode),
                alice.mkdir("d/y", mode), alice.symlink("x", "d/z"), alice.mkdir("d/y/w", mode),
                alice.mknod("d/n", stat.S_IFREG | mode), alice.open("a", "d/o", os.O_CREAT | os.O_WRONLY, mode),
                alice.write("a", b"1"), alice.close("a"), root.make("d/r", b"1", mode), root.mkdir("d/rd", mode),
            )  # fmt: skip


def folders() -> Iterator[Case]:
    """mkdir, rmdir."""
    for kind in KINDS:
        yield case(f"mkdir over {kind}", *made(kind, "x"), root.mkdir("x", 0o755))
        yield case(f"rmdir of {kind}", *made(kind, "x"), root.rmdir("x"), root.listdir("."))
        yield case(f"rmdir of {kind} with a slash", *made(kind, "x"), root.rmdir("x/"))
        yield case(f"mkdir over {kind} with a slash", *made(kind, "x"), root.mkdir("x/", 0o755))
        yield case(f"mkdir in {kind}", *made(kind, "x"), root.mkdir("x/y", 0o755), root.rmdir("x/y"))
    for name in ("", ".", "..", "d/.", "d/..", "d/e/..", "/", "nowhere", "d/nowhere"):
        yield case(f"rmdir name {name!r}", root.mkdir("d", 0o755), root.mkdir("d/e", 0o755), root.rmdir(name))
        yield case(f"mkdir name {name!r}", root.mkdir("d", 0o755), root.mkdir(name, 0o755), root.listdir("."))
    yield case(
        "a removed folder that is current", root.mkdir("d", 0o755), root.chdir("d"), root.rmdir("../d"),
        root.make("x"), root.mkdir("y", 0o755), root.listdir("."), root.stat("."), root.stat(".."),
        root.symlink("a", "b"), root.rename("../d", "e"),
    )  # fmt: skip
    yield case(
        "a removed folder that is open", root.mkdir("d", 0o755), root.open("a", "d", os.O_RDONLY), root.rmdir("d"),
        root.fstat("a"), root.fsync("a"), root.mkdir("d", 0o755), root.fstat("a"),
    )  # fmt: skip
    yield case(
        "folders in folders", root.mkdir("a", 0o755), root.mkdir("a/b", 0o755), root.mkdir("a/b/c", 0o755),
        root.rmdir("a/b"), root.rmdir("a/b/c"), root.rmdir("a/b"), root.rmdir("a"), root.rmdir("a"),
    )  # fmt: skip


def removing() -> Iterator[Case]:
    """unlink, and rmdir in sticky folders."""
    for kind in KINDS:
        yield case(f"unlink of {kind}", *made(kind, "x"), root.unlink("x"), root.listdir("."))
        yield case(f"unlink of {kind} with a slash", *made(kind, "x"), root.unlink("x/"))
        yield case(f"unlink of {kind} by another user", *made(kind, "x"), alice.unlink("x"))
    for name in ("", ".", "..", "f/x", "nowhere/x"):
        yield case(f"unlink name {name!r}", root.make("f"), root.unlink(name))
    for owner in (0, 41001, 41002):
        yield case(
            f"a sticky folder of {owner}", root.mkdir("d", 0o777), root.chown("d", owner, owner),
            root.chmod("d", 0o1777), alice.make("d/a"), bob.make("d/b"), alice.mkdir("d/ad", 0o777),
            bob.mkdir("d/bd", 0o777), alice.symlink("a", "d/as"), bob.symlink("a", "d/bs"), alice.make("d/a2"),
            bob.unlink("d/a"), bob.rmdir("d/ad"), bob.unlink("d/as"), bob.rename("d/b", "d/a2"),
            bob.rename("d/a2", "d/moved"), bob.rename("d/ad", "d/bd"), bob.rename("d/bd", "d/ad"),
            alice.unlink("d/b"), alice.rename("d/b", "d/c"), alice.rmdir("d/bd"), root.unlink("d/b"),
        )  # fmt: skip
    yield case(
        "unlink of what is open", root.make("x", b"content"), root.open("a", "x", os.O_RDWR), root.unlink("x"),
        root.listdir("."), root.fstat("a"), root.read("a", 10), root.pwrite("a", b"more", 7), root.fstat("a"),
        root.fsync("a"), root.ftruncate("a", 3), root.fchmod("a", 0o600), root.fchown("a", 41001, 41001),
        root.fstat("a"), root.pread("a", 10, 0), root.make("x", b"other"), root.fstat("a"), root.pread("a", 10, 0),
        root.close("a"), root.content("x"), root.listdir("."),
    )  # fmt: skip
    yield case(
        "unlink of what is new and open", root.open("a", "x", os.O_RDWR | os.O_CREAT), root.write("a", b"12"),
        root.unlink("x"), root.fstat("a"), root.pread("a", 9, 0), root.futimens("a", 10**18, 10**18), root.fstat("a"),
        root.open("b", "x", os.O_RDONLY), root.close("a"), root.listdir("."), root.stat("x"), root.make("z"),
    )  # fmt: skip
    yield case(
        "replace what is open", root.make("x", b"old"), root.make("y", b"new"), root.open("a", "x", os.O_RDWR),
        root.rename("y", "x"), root.fstat("a"), root.pread("a", 9, 0), root.write("a", b"OLD"), root.close("a"),
        root.content("x"), root.listdir("."),
    )  # fmt: skip


def renaming() -> Iterator[Case]:
    """rename, renameat2."""
    for old in KINDS:
        for new in KINDS:
            for flags in (0, _RENAME_NOREPLACE, _RENAME_EXCHANGE):
                move = root.rename2("x", "y", flags) if flags else root.rename("x", "y")
                yield case(
                    f"rename {old} to {new} flags {flags}", *made(old, "x"), *made(new, "y"), move, root.listdir("."),
                    root.lstat("y"),
                )  # fmt: skip
        yield case(f"rename {old} onto itself", *made(old, "x"), root.rename("x", "x"), root.listdir("."))
        for target in ("y/", "x/y", "d/x", "d/", "nowhere/y", ".", "..", "d/.", "", "x/"):
            yield case(
                f"rename {old} to name {target!r}", *made(old, "x"), root.mkdir("d", 0o755), root.rename("x", target),
                root.listdir("."),
            )  # fmt: skip
        yield case(f"rename {old} with a slash", *made(old, "x"), root.rename("x/", "y"), root.listdir("."))
        yield case(
            f"rename {old} to another folder", *made(old, "x"), root.mkdir("d", 0o755), root.rename("x", "d/y"),
            root.listdir("d"), root.lstat("d/y"), root.rename("d/y", "x"),
        )  # fmt: skip
    for flags in (_RENAME_WHITEOUT, _RENAME_NOREPLACE | _RENAME_EXCHANGE, 8, 1 << 31):
        yield case(f"rename flags {flags}", root.make("x"), root.rename2("x", "y", flags - (flags >> 31 << 32)))
    yield case(
        "rename below itself", root.mkdir("a", 0o755), root.mkdir("a/b", 0o755), root.mkdir("a/b/c", 0o755),
        root.rename("a", "a/b"), root.rename("a", "a/b/c/d"), root.rename("a/b/c", "a"), root.rename("a/b", "a"),
        root.rename("a/b/c", "c"), root.rename("a", "c/a"), root.listdir("c/a"), root.rename("c", "c/a/b/x"),
    )  # fmt: skip
    yield case("rename of .", root.mkdir("d", 0o755), root.rename(".", "d"), root.rename("d/..", "e"))
    yield case(
        "rename a folder of another user", alice.mkdir("d", 0o755), alice.mkdir("e", 0o777), bob.rename("d", "f"),
        bob.rename("f", "e/f"), alice.chmod("e", 0o1777), alice.rename("e/f", "e/g"), bob.rename("e/g", "e/h"),
    )  # fmt: skip
    yield case(
        "rename without write permission", root.mkdir("d", 0o755), root.make("d/x"), root.mkdir("d/e", 0o777),
        alice.rename("d/x", "x"), alice.make("y"), alice.rename("y", "d/y"), alice.rename("d/x", "d/y"),
        alice.rename("d/e", "e"), root.chown("d", 41001, 41001), alice.rename("d/e", "e"), alice.rename("e", "d/e"),
    )  # fmt: skip
    yield case(
        "a folder of another that cannot be written moves not to another parent", root.mkdir("d", 0o777),
        root.chmod("d", 0o777), root.mkdir("d/e", 0o755), alice.mkdir("f", 0o755), alice.rename("d/e", "f/e"),
        alice.rename("d/e", "d/g"), root.make("d/h"), alice.rename("d/h", "f/h"),
    )  # fmt: skip
    yield case(
        "rename what is open and written", root.open("a", "x", os.O_RDWR | os.O_CREAT), root.write("a", b"1"),
        root.rename("x", "y"), root.write("a", b"2"), root.fstat("a"), root.close("a"), root.content("y"),
        root.listdir("."),
    )  # fmt: skip


def links() -> Iterator[Case]:
    """symlink, readlink, link, mknod, mkfifo, sockets."""
    for length in (1, 100, 255, 256, 1023, 4094, 4095, 4096):
        yield case(
            f"symlink of {length} bytes", root.symlink("t" * length, "s"), root.lstat("s"), root.readlink("s"),
            root.stat("s"), root.unlink("s"),
        )  # fmt: skip
    yield case("symlink without target", root.symlink("", "s"))
    for kind in KINDS:
        yield case(f"symlink over {kind}", *made(kind, "x"), root.symlink("aim", "x"))
        yield case(f"readlink of {kind}", *made(kind, "x"), root.readlink("x"))
        yield case(f"link of {kind}", *made(kind, "x"), root.linkat("x", "y", 0), root.listdir("."))
        yield case(f"link over {kind}", root.make("f"), *made(kind, "x"), root.linkat("f", "x", 0))
        yield case(f"mkfifo over {kind}", *made(kind, "x"), root.mkfifo("x", 0o644))
        yield case(f"mknod of a file over {kind}", *made(kind, "x"), root.mknod("x", stat.S_IFREG | 0o640))
        yield case(f"bind over {kind}", *made(kind, "x"), root.bind("x"))
        yield case(f"through {kind}", *made(kind, "x"), root.stat("x"), root.stat("x/"), root.stat("x/y"),
                   root.lstat("x/"), root.chmod("x", 0o700), root.truncate("x", 1))  # fmt: skip
    yield case("mknod of a device", root.mknod("n", stat.S_IFCHR | 0o600, os.makedev(1, 3)))
    yield case("mknod of a block device", root.mknod("n", stat.S_IFBLK | 0o600, os.makedev(1, 3)))
    yield case("mknod of a device by a user", alice.mknod("n", stat.S_IFCHR | 0o600, os.makedev(1, 3)))
    yield case("mknod of a folder", root.mknod("n", stat.S_IFDIR | 0o600))
    yield case("mknod without type", root.mknod("n", 0o600), root.lstat("n"))
    yield case(
        "symlinks in a chain", root.make("f", b"1"), *(root.symlink("f" if not n else f"s{n - 1}", f"s{n}")
                                                       for n in range(42)),
        root.stat("s39"), root.stat("s40"), root.content("s5"), root.open("a", "s41", os.O_RDONLY),
    )  # fmt: skip
    yield case("a symlink's own attributes", root.symlink("x", "s"), root.lchown("s", 41001, 41001),
               root.lstat("s"), alice.unlink("s"))  # fmt: skip


def limits() -> Iterator[Case]:
    """Lengths of names and paths."""
    for length in (1, 254, 255, 256, 300):
        name = "n" * length
        yield case(
            f"a name of {length} bytes", root.make(name), root.mkdir(name + "d"[: 255 - length], 0o755),
            root.symlink("x", "s" * length), root.make("x"), root.rename("x", "m" * length), root.stat(name),
            root.unlink(name), root.rmdir("q" * length), root.unlink("m" * length),
        )  # fmt: skip
        yield case(f"folders of {length} bytes", root.mkdir(name, 0o755), root.make(f"{name}/x"),
                   root.listdir(name), root.rmdir(name), root.unlink(f"{name}/x"), root.rmdir(name))  # fmt: skip
    for length in (1000, 4094, 4095, 4096, 5000):
        path = "./" * (length // 2 - 1) + ("x" if length % 2 else "xx")
        path = path + "x" * (length - len(path))
        yield case(f"a path of {length} bytes", root.make(path, b"1"), root.stat(path), root.rename(path, "y"),
                   root.symlink("a", path), root.mkdir(path, 0o755), root.unlink(path))  # fmt: skip
    deep = tuple(root.mkdir("/".join(["d" * 100] * n), 0o755) for n in range(1, 15))
    yield case("folders in folders over 1,024 bytes", *deep)
    yield case("a path of 3 names of 255", root.mkdir(NAMES_MAX, 0o755), root.mkdir(f"{NAMES_MAX}/{NAMES_MAX}", 0o755),
               root.make(f"{NAMES_MAX}/{NAMES_MAX}/{NAMES_MAX}", b"1"), root.listdir(f"{NAMES_MAX}/{NAMES_MAX}"),
               root.content(f"{NAMES_MAX}/{NAMES_MAX}/{NAMES_MAX}"))  # fmt: skip
    yield case("statvfs", root.name_max("."))
    for name in ("a\nb", "ü", " ", "~", "\\", "a\x01", "\x7f", "*", "-", "...", ".hidden", "a:b", "😀", "\udcff"):
        yield case(f"the name {name!r}", root.make(name, b"1"), root.listdir("."), root.content(name),
                   root.rename(name, "x"), root.rename("x", name), root.unlink(name))  # fmt: skip
