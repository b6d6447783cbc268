"""Cases about attributes: chmod, chown, what clears set-id bits, times, access, extended attributes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from tests.mount.posix import GROUP, Call, Case, alice, bob, case, root
from tests.mount.posix_calls import AT_SYMLINK_NOFOLLOW, UTIME_NOW, UTIME_OMIT
from tests.mount.posix_names import KINDS, made

_SET_ID: Final = (0o4755, 0o2755, 0o6777, 0o2744, 0o6666, 0o7755)
_S: Final = 10**9
_XATTR_CREATE: Final = 1
_XATTR_REPLACE: Final = 2


def modes() -> Iterator[Case]:
    """chmod, fchmod."""
    for kind in KINDS:
        yield case(f"chmod of {kind}", *made(kind, "x"), root.chmod("x", 0o751), root.lstat("x"))
    for mode in (0, 0o1, 0o777, 0o1777, 0o2755, 0o4755, 0o7777, 0o1666):
        yield case(
            f"chmod {mode:o}", alice.make("x"), alice.mkdir("d", 0o755), alice.chmod("x", mode),
            alice.chmod("d", mode),
            alice.stat("x"), bob.chmod("x", 0o777), bob.chmod("d", 0o777), root.chmod("x", mode ^ 0o777),
            alice.open("a", "x", os.O_RDONLY), alice.fchmod("a", mode),
        )  # fmt: skip
        for group in (GROUP, 41002, 0):
            yield case(
                f"chmod {mode:o} of group {group}", alice.make("x"), alice.mkdir("d", 0o755),
                root.chown("x", -1, group),
                root.chown("d", -1, group), alice.chmod("x", mode), alice.chmod("d", mode), alice.stat("x"),
                alice.stat("d"),
            )  # fmt: skip
    yield case("chmod of nothing known", root.chmod("nowhere", 0o644), root.chmod("nowhere/x", 0o644))


def owners() -> Iterator[Case]:
    """chown, fchown, lchown."""
    for kind in KINDS:
        yield case(f"chown of {kind}", *made(kind, "x"), root.chown("x", 41001, GROUP), root.lstat("x"))
        yield case(f"lchown of {kind}", *made(kind, "x"), root.lchown("x", 41001, GROUP), root.lstat("x"))
    yield case(
        "chown back to root", root.make("x"), root.chown("x", 41001, 41002), root.chown("x", 0, 0), root.stat("x"),
        root.mkdir("d", 0o755), root.chown("d", 41001, 41001), root.chown("d", 0, 0), root.stat("d"),
        root.chown("x", 0, 41001), root.chown("x", 41001, 0),
    )  # fmt: skip
    for uid, gid in ((-1, -1), (41001, -1), (-1, GROUP), (-1, 41002), (41002, -1), (0, 0), (-1, 41001), (41001, GROUP)):
        for mode in (0o644, *_SET_ID):
            yield case(
                f"chown {uid} {gid} mode {mode:o}", alice.make("x"), alice.chmod("x", mode),
                alice.chown("x", uid, gid),
                alice.stat("x"), bob.chown("x", uid, gid),
            )  # fmt: skip
            yield case(
                f"chown by root {uid} {gid} mode {mode:o}", alice.make("x"), root.chmod("x", mode),
                root.chown("x", uid, gid), root.stat("x"), alice.mkdir("d", 0o755), root.chmod("d", mode),
                root.chown("d", uid, gid), root.stat("d"),
            )  # fmt: skip
    yield case("chown of a folder by its owner", alice.mkdir("d", 0o755), alice.chmod("d", 0o6755),
               alice.chown("d", -1, GROUP), alice.stat("d"), alice.chown("d", -1, 41002))  # fmt: skip


def set_id_bits() -> Iterator[Case]:
    """Changes of content, and their effect on set-id bits."""
    for mode in _SET_ID:
        for who in (alice, bob, root):
            name = "root" if who is root else "owner" if who is alice else "other"
            start = (alice.make("x", b"12345"), root.chmod("x", mode | 0o222), who.open("a", "x", os.O_RDWR))
            for what in (
                who.write("a", b"1"), who.pwrite("a", b"", 0), who.ftruncate("a", 2), who.ftruncate("a", 5),
                who.fallocate("a", 0, 0, 9000), who.truncate("x", 1), who.open("b", "x", os.O_WRONLY | os.O_TRUNC),
                who.read("a", 3), who.writev("a", b"1", b"2"), who.futimens("a", UTIME_NOW, UTIME_NOW),
                who.setxattr("x", "user.a", b"1"),
            ):  # fmt: skip
                yield case(f"{what.name} of set-id {mode:o} by {name} {what.arguments[1:]}", *start, what,
                           who.fstat("a"), who.close("a"), root.stat("x"))  # fmt: skip
            yield case(
                f"copy_range into set-id {mode:o} by {name}", root.make("y", b"abcdef"), *start,
                who.open("b", "y", os.O_RDONLY), who.copy_range("b", "a", 3), who.fstat("a"), root.stat("x"),
            )  # fmt: skip
            yield case(
                f"map into set-id {mode:o} by {name}", *start, who.map("a", 5, True), who.map_write("a", 0, b"z"),
                who.map_sync("a"), who.map_end("a"), who.close("a"), root.stat("x"),
            )  # fmt: skip
    yield case(
        "set-id bits that come while it is open", alice.make("x", b"1"), alice.open("a", "x", os.O_RDWR),
        alice.write("a", b"2"), alice.fchmod("a", 0o6755), alice.fstat("a"), alice.write("a", b"3"), alice.fstat("a"),
        alice.close("a"), alice.stat("x"),
    )  # fmt: skip


def times() -> Iterator[Case]:
    """utimensat, futimens."""
    moments = (
        0, 1, -1, _S - 1, -_S, 1_234_567_890_123_456_789, (1 << 31) * _S, (1 << 32) * _S + 7, -(1 << 31) * _S,
        UTIME_NOW, UTIME_OMIT,
    )  # fmt: skip
    for atime in moments:
        for mtime in moments:
            shown = () if UTIME_NOW in (atime, mtime) or UTIME_OMIT in (atime, mtime) else (root.times("x"),)
            yield case(f"utimens {atime} {mtime}", root.make("x"), root.utimens("x", atime, mtime), *shown)
    yield case(
        "what is set stays", root.make("x", b"1"), root.utimens("x", 5 * _S, 7 * _S), root.times("x"),
        root.utimens("x", UTIME_OMIT, 9 * _S), root.times("x"), root.utimens("x", 11 * _S, UTIME_OMIT),
        root.times("x"),
        root.chmod("x", 0o600), root.times("x"), root.rename("x", "y"), root.times("y"),
        root.setxattr("y", "user.a", b"1"), root.times("y"), root.chown("y", 41001, -1), root.times("y"),
        root.open("a", "y", os.O_RDWR), root.futimens("a", 13 * _S, 15 * _S), root.times("y"), root.close("a"),
        root.times("y"),
    )  # fmt: skip
    yield case(
        "times of what is being written", root.open("a", "x", os.O_RDWR | os.O_CREAT), root.write("a", b"1"),
        root.futimens("a", 5 * _S, 7 * _S), root.times("x"), root.close("a"), root.times("x"),
    )  # fmt: skip
    for kind in KINDS:
        yield case(f"utimens of {kind}", *made(kind, "x"), root.utimens("x", 5 * _S, 7 * _S + 1), *_times_of(kind))
        yield case(
            f"utimens of {kind} itself", *made(kind, "x"), root.utimens("x", 5 * _S, 7 * _S + 1, AT_SYMLINK_NOFOLLOW),
            *_times_of(kind),
        )  # fmt: skip
        yield case(f"utimens now of {kind}", *made(kind, "x"), root.utimens_now("x"))
    for mode in (0o644, 0o666, 0o444, 0o000):
        for atime, mtime in ((UTIME_NOW, UTIME_NOW), (UTIME_OMIT, UTIME_OMIT), (1, 2), (UTIME_NOW, UTIME_OMIT),
                             (UTIME_OMIT, UTIME_NOW), (1, UTIME_NOW)):  # fmt: skip
            yield case(
                f"utimens {atime} {mtime} by others, mode {mode:o}", alice.make("x"), alice.chmod("x", mode),
                bob.utimens("x", atime, mtime), alice.utimens("x", atime, mtime),
            )  # fmt: skip
        yield case(f"utimens now by others, mode {mode:o}", alice.make("x"), alice.chmod("x", mode),
                   bob.utimens_now("x"), alice.utimens_now("x"))  # fmt: skip
    yield case("utimens with nonsense", root.make("x"), root.utimens("x", 1, 2, 0x8000), root.utimens("nowhere", 1, 2),
               root.utimens("x/", 1, 2), root.utimens("", 1, 2))  # fmt: skip


def _times_of(kind: str) -> tuple[Call, ...]:
    return (root.times("x"),) if kind == "file" else ()  # others' access times change when they are looked at


def access() -> Iterator[Case]:
    """access, faccessat."""
    for mode in (0o000, 0o100, 0o200, 0o400, 0o700, 0o070, 0o007, 0o750, 0o555, 0o644):
        for wanted in (os.F_OK, os.R_OK, os.W_OK, os.X_OK, os.R_OK | os.W_OK | os.X_OK):
            yield case(
                f"access {wanted} mode {mode:o}", alice.make("x"), alice.chown("x", -1, GROUP), alice.chmod("x", mode),
                alice.access("x", wanted), bob.access("x", wanted), root.access("x", wanted), bob.eaccess("x", wanted),
                alice.mkdir("d", 0o755), alice.chmod("d", mode), bob.access("d", wanted), root.access("d", wanted),
                bob.access("d/y", wanted), bob.chdir("d"),
            )  # fmt: skip
    for kind in KINDS:
        yield case(f"access of {kind}", *made(kind, "x"), root.access("x", os.F_OK), root.access("x/", os.F_OK),
                   root.eaccess("x", os.F_OK, AT_SYMLINK_NOFOLLOW), root.access("x", 64))  # fmt: skip


def xattrs() -> Iterator[Case]:
    """Extended attributes."""
    for kind in KINDS:
        yield case(
            f"xattrs of {kind}", *made(kind, "x"), root.setxattr("x", "user.a", b"1"), root.getxattr("x", "user.a"),
            root.listxattr("x"), root.removexattr("x", "user.a"), root.getxattr("x", "user.a"), root.listxattr("x"),
        )  # fmt: skip
    for name in ("user.a", "user.", "user", "a", "", "user." + "n" * 250, "user." + "n" * 251, "trusted.a",
                 "trusted.", "security.a", "system.a", "system.posix_acl_access", "other.a", "user.ü",
                 "security.capability",
                 "security.selinux"):  # fmt: skip
        yield case(
            f"xattr name {name[:20]!r} {len(name)}", alice.make("x"), root.getxattr("x", name),
            root.setxattr("x", name, b"value"), root.getxattr("x", name), root.listxattr("x"), alice.listxattr("x"),
            alice.getxattr("x", name), alice.setxattr("x", name, b"2"), bob.getxattr("x", name),
            bob.setxattr("x", name, b"3"), bob.removexattr("x", name), alice.removexattr("x", name),
            root.removexattr("x", name), root.removexattr("x", name),
        )  # fmt: skip
    for size in (0, 1, 100, 2000, 65536, 65537):
        yield case(f"an xattr of {size} bytes", root.make("x"), root.setxattr("x", "user.a", b"v" * size),
                   root.getxattr("x", "user.a"), root.listxattr("x"))  # fmt: skip
    yield case(
        "xattr flags and sizes", root.make("x"), root.setxattr("x", "user.a", b"1", _XATTR_REPLACE),
        root.setxattr("x", "user.a", b"123", _XATTR_CREATE), root.setxattr("x", "user.a", b"2", _XATTR_CREATE),
        root.setxattr("x", "user.a", b"12345", _XATTR_REPLACE), root.getxattr("x", "user.a", 0),
        root.getxattr("x", "user.a", 4), root.getxattr("x", "user.a", 5), root.listxattr_into("x", 0),
        root.listxattr_into("x", 3), root.listxattr_into("x", 7), root.setxattr("x", "user.a", b"1", 4),
        root.setxattr("x", "user.a", b"1", 3), root.setxattr("x", "user.a", b""),
        root.getxattr("x", "user.a"),
    )  # fmt: skip
    yield case("many xattrs", root.make("x"), *(root.setxattr("x", f"user.{n}", b"v" * 20) for n in range(30)),
               root.listxattr("x"), *(root.removexattr("x", f"user.{n}") for n in range(0, 30, 7)),
               root.listxattr("x"))  # fmt: skip
    yield case("xattrs of what is read-only", alice.make("x"), alice.chmod("x", 0o444),
               alice.setxattr("x", "user.a", b"1"), bob.getxattr("x", "user.a"), alice.chmod("x", 0o200),
               bob.getxattr("x", "user.a"), bob.listxattr("x"), bob.setxattr("x", "user.a", b"1"))  # fmt: skip
    yield case("xattrs of a sticky folder", alice.mkdir("d", 0o777), alice.chmod("d", 0o1777),
               alice.setxattr("d", "user.a", b"1"), bob.setxattr("d", "user.a", b"2"), bob.getxattr("d",
               "user.a"))  # fmt: skip
    yield case("xattrs of what is written", root.open("a", "x", os.O_RDWR | os.O_CREAT), root.write("a", b"1"),
               root.setxattr("x", "user.a", b"1"), root.getxattr("x", "user.a"), root.write("a", b"2"),
               root.close("a"), root.getxattr("x", "user.a"), root.content("x"), root.rename("x", "y"),
               root.getxattr("y", "user.a"))  # fmt: skip
