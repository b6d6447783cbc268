"""The token that clients on TCP present: DATA/native.token, mode 0600, made at the first start that needs it.

It is durable before it is used.  It is never changed; to get another one, remove the file and restart.
"""

from __future__ import annotations

import secrets
from typing import Final

from engine.host.failpoints import reached
from lakefs.errors import ConfigError
from lakefs.ports import Disk

TOKEN_FILE: Final = "native.token"  # noqa: S105 - a file name
_TEMPORARY: Final = f"{TOKEN_FILE}.new"
_ROOT: Final = ""
_TOKEN_BYTES: Final = 32
_READ_BYTES: Final = 4096


def native_token(disk: Disk) -> str:
    """Return the store's token, made if there is none; durable on return.  The caller holds the store's lock.

    ConfigError when the file is empty.  DiskFailed, StoreFull.
    """
    if disk.exists(TOKEN_FILE):
        return _read(disk)
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    if disk.exists(_TEMPORARY):
        disk.unlink(_TEMPORARY)
    file = disk.open(_TEMPORARY, create=True)
    try:
        file.pwrite(f"{token}\n".encode(), 0)
        file.sync_data()
    finally:
        file.close()
    reached("token.synced")
    disk.rename(_TEMPORARY, TOKEN_FILE)
    reached("token.renamed")
    disk.sync_folder(_ROOT)
    return token


def _read(disk: Disk) -> str:
    file = disk.open(TOKEN_FILE, read_only=True)
    try:
        content = bytearray(min(file.size(), _READ_BYTES))
        file.pread_into(memoryview(content), 0)
    finally:
        file.close()
    token = content.decode(errors="replace").strip()
    if not token:
        path = disk.local_path(TOKEN_FILE)
        raise ConfigError(f"{path} is empty; remove it, and the next start makes a token", subject=path)
    return token
