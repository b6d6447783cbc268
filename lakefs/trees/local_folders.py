"""Local files that a get writes: a name in a folder, reached through descriptors.

The folder that the user named is used as written, links included.  The folders that a lake name adds below it must be
real: a symbolic link among them would let bytes land elsewhere.  Each folder is opened from the descriptor of the one
above it, following no link, so nothing can be exchanged between a check and its use.

Everything here blocks; operations call it as `Work`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from lakefs.errors import LocalFileError
from lakefs.put.sources import FileSource

_FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True)
class LocalTarget:
    """The file `name` in the folder `root/below`.  With `follow`, links to folders are followed below `root` too."""

    root: str
    below: tuple[str, ...]
    name: str
    follow: bool = False

    @classmethod
    def at(cls, path: str) -> LocalTarget:
        """Return the target for a path that the user named."""
        root, name = os.path.split(path)
        return cls(root, (), name)

    @property
    def path(self) -> str:
        """The path, as messages show it."""
        return os.path.join(self.root, *self.below, self.name)

    @contextlib.contextmanager
    def folder(self, *, make: bool = False) -> Iterator[int]:
        """Context manager: a descriptor of the folder, opened as by `open_folder`, closed at the end of the block."""
        descriptor = self.open_folder(make=make)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def exists(self) -> bool:
        """Return True if anything has the name.  LocalFileError."""
        with self.folder() as folder:
            return has_name(self.name, folder)

    def open_file(self) -> FileSource:
        """Open the file, which must not be a link.  LocalFileError."""
        with self.folder() as folder:
            return FileSource(self.path, follow_symlinks=False, folder=folder)

    def open_folder(self, *, make: bool = False) -> int:
        """Return a descriptor of the folder; with `make`, create its missing parts below `root`.  LocalFileError."""
        try:
            folder = os.open(self.root or ".", _FOLDER_FLAGS)
        except OSError as error:
            raise LocalFileError(f"{self.root}: {error.strerror}", subject=self.root) from error
        for index, name in enumerate(self.below):
            try:
                inner = _open_inner(folder, name, self.follow, make)
            except OSError as error:
                reason = _reason(os.path.join(self.root, *self.below[: index + 1]), folder, name, error)
                raise LocalFileError(f"{self.path}: {reason}", subject=self.path) from error
            finally:
                os.close(folder)
            folder = inner
        return folder


def has_name(name: str, folder: int) -> bool:
    """Return True if a folder contains anything of that name."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True


def _open_inner(folder: int, name: str, follow: bool, make: bool) -> int:
    flags = _FOLDER_FLAGS | (0 if follow else os.O_NOFOLLOW)
    try:
        return os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):  # another process created it since
        os.mkdir(name, dir_fd=folder)
    return os.open(name, flags, dir_fd=folder)


def _reason(path: str, folder: int, name: str, error: OSError) -> str:
    """Return the reason why a folder cannot be opened."""
    with contextlib.suppress(OSError):
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return f"{path} is a symbolic link and is not written through; give --follow to write where it points to"
    return f"{path}: {error.strerror}"
