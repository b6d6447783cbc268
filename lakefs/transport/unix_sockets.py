"""Checks of Unix sockets by path: does a server listen, and why can a user not connect.

Imports no trio, so that commands start quickly.  Nothing here waits or changes anything.
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
"""Errors of connect(2) that mean that this user may not connect."""
_TABLE: Final = Path("/proc/net/unix")
_LISTENS: Final = 0x10000  # linux/net.h: __SO_ACCEPTCON


def connect_code(path: str) -> int:
    """Return the result of connect(2) at a path: 0 when something listens there, else an errno."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(path)
    return 0 if code == errno.EAGAIN else code  # EAGAIN: its backlog is full


def listens(path: str) -> bool:
    """Return True if something listens at a path, also if this user may not connect."""
    code = connect_code(path)
    return _is_in_table(path) if code in REFUSED else code == 0


def why_not(path: str, code: int) -> str:
    """Return the meaning of an errno of connect(2) at a path: `is not there`, `has nothing that listens`, etc."""
    if code == errno.ENOENT:
        return "is not there"
    if code == errno.ECONNREFUSED:
        return "has nothing that listens"
    if code in REFUSED:
        return f"may not be used by this user: {who_may(path)}"
    return f"cannot be used: {os.strerror(code)}"


def who_may(path: str) -> str:
    """Return the remedy for a refused user, such as the group to join, from the first folder or socket that refuses."""
    closed = _closed(path)
    if closed is None:
        return "run as the engine's user or in its group"
    found, by_group = closed
    return remedy_of(found.st_gid if found.st_mode & by_group else None, _owners(found.st_uid))


def remedy_of(group: int | None, owners: str = "its user and root") -> str:
    """Return the remedy for a refused user: join the group, if one is let in, else restart the engine with a group."""
    if group is not None:
        return f"join the group {_group_name(group)}"
    return f"only {owners} may; start the engine with a socket_group, and join that group"


def _closed(path: str) -> tuple[os.stat_result, int] | None:
    """Return the stat of the first folder or socket that refuses, and the mode bit that would let its group pass.

    None when none refuses, or one cannot be looked at.
    """
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
    """Return True if the kernel's table of sockets has a listener with that path, or cannot be read."""
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
    """Return the users who may use a file that only its owner may use."""
    if not uid:
        return "root"
    try:
        return f"{pwd.getpwuid(uid).pw_name} and root"
    except KeyError:
        return f"user {uid} and root"
