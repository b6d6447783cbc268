"""Errors that are planted in a simulated disk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Fault:
    operation: str
    path: str
    error: Exception
    skip: int


class PlantedFaults:
    """Planted faults: each happens once, in the order of planting."""

    def __init__(self) -> None:
        self._waiting: list[_Fault] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def plant(self, operation: str, path: str, error: Exception, skip: int) -> None:
        """Make the operation of that name on a path containing `path` fail, after `skip` good ones."""
        self._waiting.append(_Fault(operation, path, error, skip))

    def meet(self, operation: str, path: str) -> None:
        """Raise what was planted for this operation, if it is its turn."""
        for fault in self._waiting:
            if fault.operation == operation and fault.path in path:
                fault.skip -= 1
                if fault.skip < 0:
                    self._waiting.remove(fault)
                    raise fault.error
