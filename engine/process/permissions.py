"""Finds places of an engine (folders, files of secrets) that are more open than the engine makes them.

Rules kept here:
- A place belongs to the engine's user or to root, because its owner can open it to all.
- Only its owner may use the data folder, and the files of secrets in it.
- Only its owner may use the socket's folder: a user that writes there can replace the engine's socket by another.  The
  engine's own group may read it, as a service manager makes it (mode 0750).  A sticky folder (/tmp) may be open: only a
  file's owner removes it there.
- Members of `socket_group` may read both folders, to reach the socket through them.  They may write to neither.

Only the places themselves are checked, not the folders above them.  Blocks.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

import structlog

from engine.superblock.secret_files import FIRST_KEY_FILE, TOKEN_FILE
from lakefs.config.settings import Config
from lakefs.errors import ConfigError

_ALL: Final = 0o777
_OWNER: Final = 0o700
_GROUP_READS: Final = 0o050
_OTHERS: Final = 0o007
_log: Final = structlog.get_logger()


def judge_permissions(config: Config, socket_group: int | None) -> None:
    """Log a warning for each open place; with `strict_permissions` raise ConfigError naming all of them."""
    found = open_places(config.data, config.socket, socket_group)
    if found and config.strict_permissions:
        raise ConfigError(f"strict_permissions: {', and '.join(found)}", subject="strict_permissions")
    for sentence in found:
        _log.warning(sentence)


def open_places(data: Path, socket: Path, socket_group: int | None) -> list[str]:
    """Return a sentence for each open place, with what to do.  Skips places that do not exist or cannot be read."""
    readers = {socket_group}
    found = [_opened("the data folder", data, readers)]
    found += [_opened("the file", data / name, set()) for name in (TOKEN_FILE, FIRST_KEY_FILE)]
    if socket.parent != data:
        found.append(_opened("the socket's folder", socket.parent, readers | {os.getegid()}, may_be_sticky=True))
    return [sentence for sentence in found if sentence]


def _opened(what: str, path: Path, readers: set[int | None], *, may_be_sticky: bool = False) -> str:
    try:
        status = path.stat()
    except OSError:
        return ""
    us = os.geteuid()
    if status.st_uid not in (us, 0):
        return f"{what} {path} belongs to user {status.st_uid}; run: chown {us} {path}"
    mode = stat.S_IMODE(status.st_mode)
    allowed = _OWNER | (_GROUP_READS if status.st_gid in readers else 0)
    if not mode & _ALL & ~allowed or (may_be_sticky and mode & stat.S_ISVTX):
        return ""
    whom = "others" if mode & _OTHERS else "its group"
    return f"{what} {path} is open to {whom} (mode {mode:04o}); run: chmod {mode & allowed:o} {path}"
