"""Makes data folders and the socket's folder when they are missing, and finds places with too wide permissions.

Rules for the folders made:
- Only its owner may enter the data folder (0700).  The socket's folder has the socket's permissions: its owner only, or
  also members of the configured group (0750), like the unit's RuntimeDirectory.  It is never open wider, not even for
  an instant.  A folder that exists is left as it is.
- Folders that this start made, and that are empty at its end, are removed: the socket's after every stop, the data
  folder after a start that failed.

Rules for places that exist: both folders, and files of secrets.  One that breaks a rule is logged; with
`strict_permissions` the start fails (ConfigError).  Nothing is changed.
- A place belongs to the engine's user or to root, because its owner can open it to all.
- Only its owner may use the data folder, and the files of secrets in it.
- Only its owner may use the socket's folder: a user that writes there can replace the engine's socket by another.  The
  engine's own group may read it, as a service manager makes it (mode 0750).  A sticky folder (/tmp) may be open: only a
  file's owner removes it there.
- Members of `socket_group` may read both folders, to reach the socket through them.  They may write to neither.

The folders above these places are not checked.  Blocks.
"""

from __future__ import annotations

import grp
import itertools
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import structlog

from engine.host.local_disk import make_folders
from engine.superblock.secret_files import CLUSTER_TOKEN_FILE, FIRST_KEY_FILE, TOKEN_FILE
from lakefs.config.settings import Config
from lakefs.errors import ConfigError, LocalFileError
from lakefs.host.file_systems import lacks_inode

_SOCKET_FOLDER: Final = "socket folder"
_ALL: Final = 0o777
_OWNER: Final = 0o700
_GROUP_READS: Final = 0o050
_OTHERS: Final = 0o007
_log: Final = structlog.get_logger(__name__)


@contextmanager
def places_made(config: Config) -> Iterator[None]:
    """Make the folders that are missing, for the block.  LocalFileError, ConfigError."""
    made: list[Path] = []
    try:
        group = group_id(config.socket_group)
        folder = config.socket.parent
        data = [(place, "data folder") for place in config.folders]
        if any(folder.is_relative_to(place) for place in config.folders):
            places = [*data, (folder, _SOCKET_FOLDER)]  # only the owner enters it, even with the socket in it
        else:
            places = [(folder, _SOCKET_FOLDER), *data]
        for place, what in places:
            new = _made(place, what)
            made += new
            if what == _SOCKET_FOLDER and group is not None:
                _let_in(folder, group, config.socket_group, is_new=bool(new))
        yield
    finally:
        for folder in reversed(made):
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def group_id(name: str) -> int | None:
    """Return the id of the group that may use the socket; None for no name.  ConfigError."""
    if not name:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise ConfigError(f"socket_group: there is no group {name!r}; create it or unset socket_group") from error


def _made(folder: Path, what: str) -> list[Path]:
    try:
        return make_folders(folder)
    except OSError as error:
        reason = "no inode left for it on its file system" if lacks_inode(error, str(folder.parent)) else error.strerror
        raise LocalFileError(f"{what} {folder}: {reason}", subject=str(folder)) from error


def _let_in(folder: Path, group: int, name: str, *, is_new: bool) -> None:
    """Open a new folder to the group; warn if the group cannot reach the socket in an existing one."""
    try:
        if is_new:
            os.chown(folder, -1, group)
            os.chmod(folder, 0o750)  # noqa: S103 - of that group alone
            return
        found = folder.stat()
    except OSError as error:
        raise LocalFileError(
            f"socket folder {folder} cannot be given to the group {name}: {error.strerror}; "
            "start as root or as a member of it",
            subject=str(folder),
        ) from error
    bit = 0o010 if found.st_gid == group else 0o001
    if not found.st_mode & bit:
        _log.warning(
            "the socket's group cannot reach the socket: its folder is closed to the group",
            folder=str(folder),
            group=name,
        )


# --- permissions -------------------------------------------------------------------------------------


def judge_permissions(config: Config, socket_group: int | None) -> None:
    """Log a warning for each open place; with `strict_permissions` raise ConfigError naming all of them."""
    each = (open_places(folder, config.socket, socket_group) for folder in config.folders)
    found = list(dict.fromkeys(itertools.chain.from_iterable(each)))
    if found and config.strict_permissions:
        raise ConfigError(f"strict_permissions: {', and '.join(found)}", subject="strict_permissions")
    for sentence in found:
        _log.warning(sentence)


def open_places(data: Path, socket: Path, socket_group: int | None) -> list[str]:
    """Return a sentence for each open place, with what to do.  Skips places that do not exist or cannot be read."""
    readers = {socket_group}
    found = [_opened("the data folder", data, readers)]
    secrets = (TOKEN_FILE, CLUSTER_TOKEN_FILE, FIRST_KEY_FILE)
    found += [_opened("the file", data / name, set()) for name in secrets]
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
