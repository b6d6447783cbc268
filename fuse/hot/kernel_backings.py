"""Backing files by way of the mount's native layer (`fuse.native.layer`), which sets what pyfuse3 has no field for."""

from __future__ import annotations

from fuse.native import layer


class KernelBackings:
    """`fuse.hot.backings.Backings` of this process's mount."""

    def open_backing(self, descriptor: int) -> int:
        """Register an open file; return its id.  OSError."""
        return layer.open_backing(descriptor)

    def close_backing(self, backing_id: int) -> None:
        """Give an id back.  OSError."""
        layer.close_backing(backing_id)

    def pass_through(self, handle: int, backing_id: int, *, direct: bool) -> None:
        """Have the answer of the open that is being handled make this handle pass through.  OSError ENOSPC."""
        flags = layer.FOPEN_PASSTHROUGH | (layer.FOPEN_DIRECT_IO if direct else 0)
        without = layer.FOPEN_KEEP_CACHE | (0 if direct else layer.FOPEN_DIRECT_IO)
        layer.answer_open(handle, backing=backing_id, flags=flags, without=without)


def why_not() -> str:
    """Return why the kernel takes no backing files of a mount that wanted to pass through; empty if it may."""
    if found := layer.why_not():
        return f"there is no native layer ({found})"
    if layer.has_passthrough():
        return ""
    return "the kernel offers no passthrough: it needs Linux 6.9 with CONFIG_FUSE_PASSTHROUGH"
