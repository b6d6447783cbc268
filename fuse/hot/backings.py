"""Port to the kernel's backing files: a registered file that the kernel reads instead of asking the mount.

The rules of the kernel (Linux 6.9 and later), which callers keep:
- All handles that an inode has open pass through to one backing file, or none does: an open that is answered otherwise
  fails with EIO.  Handles that the page cache serves count; so an inode passes through from an open on before which it
  had no handle.
- The kernel opens the backing file anew, with the handle's flags, however the registered descriptor was opened.  So a
  handle that may write is always `direct`: its reads and writes are sent to the mount, and only mappings pass through.
- A mapping holds the backing file, not the handle: the handle may be closed long before the mapping ends.
"""

from __future__ import annotations

from typing import Protocol


class Backings(Protocol):
    """The backing files of one mount.  None of the calls waits."""

    def open_backing(self, descriptor: int) -> int:
        """Register an open file; return its id, which is not 0.  OSError: EPERM if this user may not."""
        ...

    def close_backing(self, backing_id: int) -> None:
        """Give an id back.  Handles and mappings that use the file keep it.  OSError ENOENT if it is unknown."""
        ...

    def pass_through(self, handle: int, backing_id: int, *, direct: bool) -> None:
        """Have the answer of the open that is being handled make this handle pass through to the file.

        `direct`: reads and writes are sent to the mount all the same.  OSError ENOSPC: too many opens are under way.
        """
        ...
