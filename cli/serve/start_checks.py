"""Checks before an engine's first start makes anything: run by `lake serve`, shown by `lake doctor`.

Each check raises the error that the start itself would end with, if it can be known beforehand.  Ports are bound for an
instant; no other trial changes anything, so nothing is left behind, even by a kill.

A store that exists is not checked: its start fails or not, and leaves nothing new.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from engine.process.places import group_id
from gateway.admin.server import bind_admin
from gateway.face import certificates_of, listen_s3
from lakefs.config.settings import SYSTEM_DATA, SYSTEM_SOCKET, Config
from lakefs.errors import AddressInUse, InvalidArgument, LocalFileError
from lakefs.transport.sockets import listens
from lakefs.transport.streams import PortUse, TrioNetwork

OFF: Final = "off"
S3_HINT: Final = "--s3 off"


async def check_first_start(config: Config) -> None:
    """Raise the error that keeps an engine from making this store, or lake; does nothing if there is one."""
    if any(map(_is_made, config.folders)):
        return
    for _, check in CHECKS:
        await check(config)


def _is_made(data: Path) -> bool:
    return os.path.exists(data / "superblock")


def is_served(config: Config) -> bool:
    """Return True if an engine listens at the socket of these settings."""
    return listens(str(config.socket))


async def _system(config: Config) -> str:
    """Refuse a second store, by default and for one user, beside the system's engine.  Raises InvalidArgument."""
    is_private = config.origins["data"] == "default" and config.data != SYSTEM_DATA
    if is_private and config.socket != SYSTEM_SOCKET and listens(str(SYSTEM_SOCKET)):
        raise InvalidArgument(
            f"the system's engine serves at unix:{SYSTEM_SOCKET} already, and lake uses it without a setting; "
            f"for a store of your own beside it give its folder: lake serve --data {config.data}",
            subject=str(config.data),
        )
    return "no other engine would be hidden"


async def _group(config: Config) -> str:
    """Raises ConfigError."""
    group_id(config.socket_group)
    return config.socket_group or "none: the socket is for this user and root"


async def _data_folder(config: Config) -> str:
    """Raises LocalFileError."""
    found = [_writable(each, f"data folder {each}", "choose another with --data DIR") for each in config.folders]
    return "; ".join(found)


async def _socket(config: Config) -> str:
    """Raises LocalFileError, AddressInUse."""
    return _listenable(config)


async def _native(config: Config) -> str:
    """Raises AddressInUse, PermissionDenied, InvalidArgument, EngineUnreachable."""
    if config.native is None:
        return OFF
    listener = await TrioNetwork().listen(f"tcp://{config.native}")
    await listener.aclose()
    return f"{config.native} is free"


async def _s3(config: Config) -> str:
    """Raises the same as `_native`."""
    if config.s3 is None:
        return OFF
    listener = await listen_s3(config.s3, PortUse.ALONE, S3_HINT)
    await listener.aclose()
    return f"{config.s3} is free"


async def _certificate(config: Config) -> str:
    """Raises ConfigError."""
    return OFF if certificates_of(config) is None else f"{config.s3_tls_cert} can be used"


async def _access_log(config: Config) -> str:
    """Raises LocalFileError."""
    if config.s3 is None or config.s3_access_log in (OFF, "stderr"):
        return config.s3_access_log
    return _appendable(Path(config.s3_access_log))


async def _admin(config: Config) -> str:
    """Raises AddressInUse, PermissionDenied, ConfigError."""
    if config.admin is None:
        return OFF
    for listener in await bind_admin(config.admin):
        await listener.aclose()
    return f"{config.admin} is free"


CHECKS: Final[tuple[tuple[str, Callable[[Config], Awaitable[str]]], ...]] = (
    ("other engines", _system),
    ("socket group", _group),
    ("data folder", _data_folder),
    ("socket folder", _socket),
    ("native port", _native),
    ("S3 port", _s3),
    ("S3 certificate", _certificate),
    ("S3 access log", _access_log),
    ("admin port", _admin),
)
"""Checks by the names that `lake doctor` shows; each returns a detail for people, or raises."""


def _writable(folder: Path, what: str, otherwise: str) -> str:
    """Check that files, or the folder itself if missing, can be made.  Raises LocalFileError."""
    nearest = folder
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise LocalFileError(f"{what}: {nearest} is no folder; {otherwise}", subject=str(folder))
    _may_write(nearest, what, otherwise)
    return f"{folder} can be written to" if nearest == folder else f"{folder} can be made in {nearest}"


def _listenable(config: Config) -> str:
    if os.path.lexists(config.socket) and not config.socket.is_socket():
        raise AddressInUse(f"{config.socket} exists and is no socket; choose another path", subject=str(config.socket))
    if is_served(config):
        raise AddressInUse(
            f"an engine already serves at unix:{config.socket}; stop it or choose another path with --socket PATH",
            subject=str(config.socket),
        )
    return _writable(config.socket.parent, f"socket {config.socket}", "choose another place with --socket PATH")


def _appendable(log: Path) -> str:
    if not os.path.isdir(log.parent):
        raise LocalFileError(f"access log {log}: its folder does not exist; make it", subject=str(log))
    place = log if os.path.exists(log) else log.parent
    return _may_write(place, f"access log {log}", "choose another with --s3-access-log FILE")


def _may_write(place: Path, what: str, otherwise: str) -> str:
    wanted = os.W_OK | (os.X_OK if place.is_dir() else 0)
    if not os.access(place, wanted, effective_ids=True):
        reason = (
            "is on a read-only file system"
            if os.statvfs(place).f_flag & os.ST_RDONLY
            else "may not be written to by this user"
        )
        raise LocalFileError(f"{what}: {place} {reason}; {otherwise}", subject=str(place))
    return f"{place} can be written to"
