"""The first access key of a store, kept for the user who started it: DATA/s3-first-key, mode 0600.

Written once, when there is no terminal to show the secret on: other output ends in a journal or log, which keeps it for
longer and for more people than the secret is meant for.  The user reads the file and removes it; the engine never reads
it.  It has the format in which S3 clients read credentials: AWS_SHARED_CREDENTIALS_FILE may name it.
"""

from __future__ import annotations

from typing import Final

from lakefs.errors import AlreadyExists
from lakefs.ports import Disk

FIRST_KEY_FILE: Final = "s3-first-key"
_ROOT: Final = ""


def keep_first_key(disk: Disk, access_key: str, secret_key: str) -> str:
    """Write the file and return its path.  Durable on return.  Blocks.  The caller holds the store's lock.

    AlreadyExists leaves the existing file as it is; DiskFailed and StoreFull leave no file.
    """
    path = disk.local_path(FIRST_KEY_FILE)
    try:
        file = disk.open(FIRST_KEY_FILE, create=True)
    except FileExistsError as error:
        raise AlreadyExists(f"{path} exists and is never overwritten", subject=path) from error
    text = f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {secret_key}\n"
    try:
        try:
            file.pwrite(text.encode(), 0)
            file.sync_data()
        finally:
            file.close()
        disk.sync_folder(_ROOT)
    except BaseException:
        disk.unlink(FIRST_KEY_FILE)
        raise
    return path
