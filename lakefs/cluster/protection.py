"""Protection: data and parity shards of each stripe.  Chosen once, when a lake is made.

A stripe of k data and m parity shards outlives the loss of any m of them, so no failure domain should hold more
than m.  `data` and `parity` are k and m everywhere in this room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lakefs.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Protection:
    """k data shards and m parity shards, as in `4+2`; InvalidArgument for a pair that is not offered."""

    data: int
    parity: int

    def __post_init__(self) -> None:
        if (self.data, self.parity) not in _OFFERED:
            raise _refused(str(self))

    @classmethod
    def parse(cls, text: str) -> Protection:
        """Return the protection that `text` names, such as `4+2`; InvalidArgument lists those that are offered."""
        found = _BY_TEXT.get(text)
        if found is None:
            raise _refused(text)
        return cls(*found)

    def __str__(self) -> str:
        return f"{self.data}+{self.parity}"

    @property
    def width(self) -> int:
        """Shards of a stripe, and homes of a row: k+m."""
        return self.data + self.parity

    @property
    def members_min(self) -> int:
        """Fewest domains of a level over which no domain needs more than m shards: ceil((k+m)/m); 1 without parity."""
        return -(-self.width // self.parity) if self.parity else 1


def _refused(text: str) -> InvalidArgument:
    return InvalidArgument(f'protection "{text}" is not offered; choose one of {", ".join(_BY_TEXT)}')


_OFFERED: Final = ((1, 0), (1, 1), (2, 1), (4, 2), (8, 2))
_BY_TEXT: Final = {f"{data}+{parity}": (data, parity) for data, parity in _OFFERED}
PROTECTIONS: Final = tuple(Protection(data, parity) for data, parity in _OFFERED)
"""All that are offered, the weakest first."""
WIDTH_MAX: Final = max(protection.width for protection in PROTECTIONS)
