"""The state folder of each mount point, with its lock, its log and its staged files.

It is below `/var/lib/lake-mount` for root, below the folder that the service manager made, or below `lake-mount` in the
user's state folder (XDG specification).  Its name is the one systemd gives the instance of a unit for that path.
"""

from __future__ import annotations

import hashlib
import os
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lakefs.errors import LocalFileError

STATE_NAME: Final = "lake-mount"
SYSTEM_STATE: Final = Path("/var/lib") / STATE_NAME
NAME_CHARACTERS_MAX: Final = 200
"""Most characters of a folder's name; the limit of a path component is 255 bytes."""
_PLAIN: Final = frozenset((string.ascii_letters + string.digits + ":_.").encode())


@dataclass(frozen=True)
class MountPlaces:
    """The files of one mount point."""

    folder: Path

    @property
    def staging(self) -> Path:
        """Folder of files that are written and not stored yet."""
        return self.folder / "staging"

    @property
    def log(self) -> Path:
        """Log of a mount in the background."""
        return self.folder / "log"

    @property
    def lock(self) -> Path:
        """Lock held by the process behind the mount."""
        return self.folder / "lock"

    def make(self) -> None:
        """Make the folder, for this user only.  Raises LocalFileError."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise LocalFileError(
                f"{self.folder}: {error.strerror}; a mount keeps its lock, log and staged writes there",
                subject=str(self.folder),
            ) from error


def places_of(mount_point: Path, environ: Mapping[str, str] | None = None) -> MountPlaces:
    """Return the files of the mount at that real path."""
    environ = os.environ if environ is None else environ
    return MountPlaces(_state_folder(environ) / escaped_path(mount_point))


def staging_of_all(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Return the staging folders of this user's mounts, except those set by --staging."""
    environ = os.environ if environ is None else environ
    return sorted(folder for folder in _state_folder(environ).glob("*/staging") if folder.is_dir())


def escaped_path(path: Path) -> str:
    """Return the path as systemd-escape(1) writes it with --path; a long one is cut and ends with its digest."""
    text = os.fsencode(path).strip(b"/")
    escaped = "".join(
        "-" if byte == ord("/") else chr(byte) if _is_plain(byte, place) else f"\\x{byte:02x}"
        for place, byte in enumerate(text)
    )
    if len(escaped) <= NAME_CHARACTERS_MAX:
        return escaped or "-"
    digest = hashlib.blake2s(text, digest_size=16).hexdigest()
    return f"{escaped[: NAME_CHARACTERS_MAX - 33]}-{digest}"


def _is_plain(byte: int, place: int) -> bool:
    return byte in _PLAIN and not (place == 0 and byte == ord("."))


def _state_folder(environ: Mapping[str, str]) -> Path:
    for folder in environ.get("STATE_DIRECTORY", "").split(":"):
        if folder.startswith("/") and Path(folder).name == STATE_NAME:
            return Path(folder)
    if os.geteuid() == 0:
        return SYSTEM_STATE
    base = environ.get("XDG_STATE_HOME", "")
    # The specification: relative paths are to be ignored.
    home = Path(base) if base.startswith("/") else Path(os.path.expanduser("~")) / ".local" / "state"
    return home / STATE_NAME
