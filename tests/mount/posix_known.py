"""Decided differences of a mount from a local file system, each with the comparisons that show it.

`docs/mount.md` has the same reasons; a test compares the two.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Known(NamedTuple):
    """A difference: `pattern` is matched against "CASE: NUMBER CALL: WHAT"."""

    pattern: str
    reason: str


_NO_LINKS: Final = "Hard links, device nodes, sockets and pipes are refused with `EPERM`."
_REFUSED: Final = "gives ('error', 'EPERM'), locally ('ok', None)"
_MAPPED: Final = (
    "A write through a mapping changes times, and removes set-id bits, when its pages reach the mount:"
    " with `msync`, at `close`, at the end of the mapping."
)
_FALLOCATE: Final = "`fallocate` is refused with `EOPNOTSUPP`; `posix_fallocate` then writes zeros."

KNOWN: Final[tuple[Known, ...]] = (
    Known(f"*.linkat(*: {_REFUSED}", _NO_LINKS),
    Known(f"*.mkfifo(*: {_REFUSED}", _NO_LINKS),
    Known(f"*.mknod(*: {_REFUSED}", _NO_LINKS),
    Known(f"*.bind(*: {_REFUSED}", _NO_LINKS),
    Known(
        "*.rename2(*, 4): gives ('error', 'EINVAL'), locally ('ok', None)",
        "`RENAME_WHITEOUT` is refused with `EINVAL`.",
    ),
    Known("open O_TMPFILE: *'ENOTSUP')*", "`O_TMPFILE` is refused with `EOPNOTSUPP`."),
    Known("*.fallocate(*: gives ('error', 'ENOTSUP')*", _FALLOCATE),
    Known("map into set-id *.map_write(*", _MAPPED),
    Known(
        "open a busy program: *",
        "Opening a running program with `O_RDONLY | O_TRUNC` fails with `ETXTBSY`, but the kernel has had the file"
        " emptied by then.",
    ),
    Known("the name *gives ('error', 'EILSEQ')*", "Names are UTF-8: others are refused with `EILSEQ`."),
    Known(
        "folders in folders over 1,024 bytes: *'ENAMETOOLONG')*",
        "A path below its bucket has at most 1,024 bytes: beyond that `ENAMETOOLONG`.",
    ),
    Known(
        "xattr name 'system.posix_acl_acc'*removexattr*'ENOTSUP')*",
        "ACLs are not offered: no file has one, and setting or removing one is refused with `EOPNOTSUPP`.",
    ),
    Known(
        "an xattr of 65536 bytes: *'E2BIG')*",
        "All extended attributes of a file together have at most 64 KiB: beyond that `E2BIG`.",
    ),
    Known(
        "chown -1 -1 *bob.chown(*",
        "`chown` of a set-id file to -1, -1 changes nothing for a user who does not own it, and succeeds.",
    ),
    Known("a real hole: *.lseek(*", "A file has no holes: `SEEK_DATA` finds data everywhere, `SEEK_HOLE` the end."),
)
