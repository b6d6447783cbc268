"""Makes the folders of an engine, for its store and its socket, when they are missing.

Rules kept here:
- Only its owner may enter the data folder (0700).  The socket's folder has the socket's permissions: its owner only, or
  also members of the configured group (0750), like the unit's RuntimeDirectory.  It is never open wider, not even for
  an instant.  A folder that exists is left as it is.
- Folders that this start made, and that are empty at its end, are removed: the socket's after every stop, the data
  folder after a start that failed.
"""

from __future__ import annotations

import grp
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import structlog

from engine.host.local_disk import make_folders
from lakefs.config.settings import Config
from lakefs.errors import ConfigError, LocalFileError

_SOCKET_FOLDER: Final = "socket folder"
_log: Final = structlog.get_logger(__name__)


@contextmanager
def places_made(config: Config) -> Iterator[None]:
    """Make the folders that are missing, for the block.  LocalFileError, ConfigError."""
    made: list[Path] = []
    try:
        group = group_id(config.socket_group)
        folder = config.socket.parent
        places = [(folder, _SOCKET_FOLDER), (config.data, "data folder")]
        if folder.is_relative_to(config.data):
            places.reverse()  # only the owner enters the data folder, even with the socket in it
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
        raise LocalFileError(f"{what} {folder}: {error.strerror}", subject=str(folder)) from error


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
