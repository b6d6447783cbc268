"""Unix sockets by their paths: whether something listens there, and why a user cannot connect.

Imports no trio, so that commands start quickly.  Nothing here waits, and nothing is changed.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket
import stat
from pathlib import Path
from typing import Final

REFUSED: Final = frozenset((errno.EACCES, errno.EPERM))
"""Errors of connect(2) that say: not this user."""
_TABLE: Final = Path("/proc/net/unix")
_LISTENS: Final = 0x10000  # linux/net.h: __SO_ACCEPTCON


def connect_code(path: str) -> int:
    """What connect(2) answers at a path: 0 when something listens there, else an errno."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(path)
    return 0 if code == errno.EAGAIN else code  # EAGAIN: its backlog is full


def listens(path: str) -> bool:
    """Whether something listens at a path, also where this user may not connect."""
    code = connect_code(path)
    return _is_in_table(path) if code in REFUSED else code == 0


def why_not(path: str, code: int) -> str:
    """What an errno of connect(2) means at a path: `is not there`, `has nothing that listens`, and so on."""
    if code == errno.ENOENT:
        return "is not there"
    if code == errno.ECONNREFUSED:
        return "has nothing that listens"
    if code in REFUSED:
        return f"may not be used by this user: {who_may(path)}"
    return f"cannot be used: {os.strerror(code)}"


def who_may(path: str) -> str:
    """Which group a user has to join for a socket, judged by what is in the way: a folder above it, or itself."""
    closed = _closed(path)
    if closed is None:
        return "run as the engine's user or in its group"
    found, by_group = closed
    return remedy_of(found.st_gid if found.st_mode & by_group else None, _owners(found.st_uid))


def remedy_of(group: int | None, owners: str = "its user and root") -> str:
    """What a user has to do who is not let in, where a group is let in, or none."""
    if group is not None:
        return f"join the group {_group_name(group)}"
    return f"only {owners} may; start the engine with a socket_group, and join that group"


def _closed(path: str) -> tuple[os.stat_result, int] | None:
    """What is in the way first, and the bits of a mode that would let its group past it; None: nothing is seen."""
    wanted = [(str(folder), os.X_OK, stat.S_IXGRP) for folder in reversed(Path(path).parents)]
    for place, access, by_group in (*wanted, (path, os.W_OK, stat.S_IWGRP)):
        try:
            found = os.stat(place)
        except OSError:
            return None
        if not os.access(place, access, effective_ids=True):
            return found, by_group
    return None


def _is_in_table(path: str) -> bool:
    """Whether the kernel's table of sockets has a listener of that path; True where the table cannot be read."""
    try:
        lines = _TABLE.read_bytes().splitlines()
    except OSError:
        return True
    wanted = os.fsencode(path)
    for line in lines[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[7] == wanted and int(fields[3], 16) & _LISTENS:
            return True
    return False


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _owners(uid: int) -> str:
    """Whom a thing is open to that is its owner's alone."""
    if not uid:
        return "root"
    try:
        return f"{pwd.getpwuid(uid).pw_name} and root"
    except KeyError:
        return f"user {uid} and root"
