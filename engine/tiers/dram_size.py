"""The size of the DRAM tier, as a share of this process's memory (`engine.host.memory_limits`)."""

from __future__ import annotations

from lakefs.errors import ConfigError
from lakefs.grants.dram_slabs import SLAB_BYTES
from lakefs.limits import DRAM_BYTES_AUTO_MAX, DRAM_BYTES_AUTO_MIN, DRAM_SHARE, DRAM_SHARE_MOST, MIB


def tier_bytes(asked: int | None, memory: int) -> tuple[int, str]:
    """Return the tier's size in bytes, in whole slabs, and a warning or "".  `asked` None means a small share.

    ConfigError for less than a slab.  More than three quarters of the memory is cut to that, with the warning.
    """
    if asked is None:
        share = min(memory // DRAM_SHARE, DRAM_BYTES_AUTO_MAX)
        return (_whole(share) if share >= DRAM_BYTES_AUTO_MIN else 0), ""
    if not asked:
        return 0, ""
    if asked < SLAB_BYTES:
        raise ConfigError(
            f"dram_tier_bytes: {asked} bytes are less than one slab; give {SLAB_BYTES >> 20}M or more, or 0 for none",
            subject="dram_tier_bytes",
        )
    most = _whole(int(memory * DRAM_SHARE_MOST))
    if memory and asked > most:
        return most, (
            f"dram_tier_bytes: {asked // MIB} MiB were asked for, and this machine or its control group has "
            f"{memory // MIB} MiB; the tier takes at most {most // MIB} MiB"
        )
    return _whole(asked), ""


def _whole(size: int) -> int:
    return size // SLAB_BYTES * SLAB_BYTES
