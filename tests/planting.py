"""A planted bug: a name of the product's that means something else in one process."""

from __future__ import annotations

import inspect
from typing import Final

_NOTHING: Final = object()


def plant(owner: object, name: str, instead: object) -> None:
    """Change what `owner.name` is.  AssertionError if there is no such name any more: the bug would not be planted."""
    where = getattr(owner, "__name__", repr(owner))
    assert inspect.getattr_static(owner, name, _NOTHING) is not _NOTHING, f"{where} has no {name} any more"
    setattr(owner, name, instead)
