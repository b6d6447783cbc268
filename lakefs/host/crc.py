"""CRC32C (Castagnoli), from the extension module of the package `crc32c`.

Importing the package reads installed metadata to learn its version, which takes a fifth of a command's start-up time.
So this module loads the extension alone, under the name that the package would use.  If the package is laid out
differently, it is imported as a whole.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crc32c import crc32c

__all__ = ["crc32c"]

_EXTENSION = "crc32c._crc32c"


def _load_extension() -> bool:
    """Return True if the extension is now in `sys.modules` under its own name."""
    if _EXTENSION in sys.modules:
        return True
    package = find_spec("crc32c")
    found = PathFinder.find_spec(_EXTENSION, package.submodule_search_locations) if package else None
    if found is None or found.loader is None:
        return False
    module = module_from_spec(found)
    found.loader.exec_module(module)
    sys.modules[_EXTENSION] = module
    return True


if not TYPE_CHECKING:
    if _load_extension():
        crc32c = sys.modules[_EXTENSION].crc32c
    else:
        from crc32c import crc32c
