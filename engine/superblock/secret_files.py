"""Files with a secret of a store, each with mode 0600: tokens for those on TCP, and the first access key.

The token of clients, DATA/native.token, is made at the first start that needs it.  It is durable before it is used.  It
is never changed; to get another one, remove the file and restart.

The token of a lake, DATA/cluster.token, lies in each folder of each of its machines.  Who shows it is believed to be
one of the lake's own processes.

The first access key, DATA/s3-first-key, is kept for the user who started the store.  It is written once, when there is
no terminal to show the secret on: other output ends in a journal or log, which keeps it for longer and for more people
than the secret is meant for.  The user reads the file and removes it; the engine never reads it.  It has the format in
which S3 clients read credentials: AWS_SHARED_CREDENTIALS_FILE may name it.
"""

from __future__ import annotations

import secrets
from contextlib import closing
from typing import Final

from engine.host.small_file import replace_small_file
from lakefs.errors import AlreadyExists, ConfigError
from lakefs.ports import Disk, DiskFile

FIRST_KEY_FILE: Final = "s3-first-key"
TOKEN_FILE: Final = "native.token"  # noqa: S105 - a file name
CLUSTER_TOKEN_FILE: Final = "cluster.token"  # noqa: S105 - a file name
_ROOT: Final = ""
_TOKEN_BYTES: Final = 32
_READ_BYTES: Final = 4096


def native_token(disk: Disk) -> str:
    """Return the store's token, made if there is none; durable on return.  The caller holds the store's lock.

    ConfigError when the file is empty.  DiskFailed, StoreFull.
    """
    if disk.exists(TOKEN_FILE):
        return read_token(disk, TOKEN_FILE)
    token = new_token()
    keep_token(disk, TOKEN_FILE, token)
    return token


def new_token() -> str:
    """Return a secret that nobody has."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


def keep_token(disk: Disk, name: str, token: str) -> None:
    """Write a token's file, in place of one that is there; durable on return.  Blocks.  DiskFailed, StoreFull."""
    replace_small_file(disk, name, f"{token}\n".encode(), points="token")


def read_token(disk: Disk, name: str) -> str:
    """Return the token in a file that exists.  ConfigError when it is empty.  DiskFailed.  Blocks."""
    with closing(disk.open(name, read_only=True)) as file:
        content = bytearray(min(file.size(), _READ_BYTES))
        file.pread_into(memoryview(content), 0)
    token = content.decode(errors="replace").strip()
    if not token:
        path = disk.local_path(name)
        raise ConfigError(f"{path} is empty; remove it, and the next start makes a token", subject=path)
    return token


def keep_first_key(disk: Disk, access_key: str, secret_key: str) -> str:
    """Write the file and return its path.  Durable on return.  Blocks.  The caller holds the store's lock.

    AlreadyExists leaves the existing file as it is; DiskFailed and StoreFull leave no file.
    """
    path = disk.local_path(FIRST_KEY_FILE)
    try:
        file = disk.open(FIRST_KEY_FILE, create=True)
    except FileExistsError as error:
        raise AlreadyExists(f"{path} exists and is never overwritten", subject=path) from error
    try:
        _fill(file, f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {secret_key}\n")
        disk.sync_folder(_ROOT)
    except BaseException:
        disk.unlink(FIRST_KEY_FILE)
        raise
    return path


def _fill(new: DiskFile, text: str) -> None:
    """Write a new file, sync it and close it."""
    with closing(new) as file:
        file.pwrite(text.encode(), 0)
        file.sync_data()
