"""The memory that hot files may take.

`--hot-memory` is a wish, 10% of the memory without it.  Beside it hot files take at most half of what is available, and
at most half of the limit of each control group.  When less than 10% of the memory is available, of the machine's or of
a group's, all hot files go that are not in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from lakefs.host.memory_limits import Available, available_bytes, memory_bytes

DEFAULT_SHARE: Final = 10
"""A tenth of the memory."""
_SCARCE_SHARE: Final = 10


class Budget:
    """The bytes that hot files may take.  `wanted_bytes` None: the default; 0: none."""

    def __init__(
        self,
        wanted_bytes: int | None,
        memory: Callable[[], int] = memory_bytes,
        available: Callable[[], Sequence[Available]] = available_bytes,
    ) -> None:
        self._available = available
        memory_now = memory()
        wanted = memory_now // DEFAULT_SHARE if wanted_bytes is None else wanted_bytes
        self.limit_bytes = min(wanted, memory_now // 2)
        """The most that hot files ever take."""

    def room_bytes(self, used_bytes: int) -> int:
        """Return how much more they may take now, when they take `used_bytes`; what they take counts as available."""
        room = self.limit_bytes - used_bytes
        for found in self._available():
            room = min(room, (found.free_bytes + used_bytes) // 2 - used_bytes)
        return max(0, room)

    def is_scarce(self) -> bool:
        """Return True if hot files should give their memory up."""
        return any(found.free_bytes * _SCARCE_SHARE < found.of_bytes for found in self._available())
