"""The engine: the only code that touches a store's disk.

Its native modules have no substitute: importing the engine without them raises StoreUnusable with what to do.
"""

from importlib import import_module

from lakefs.errors import StoreUnusable

NATIVE_MODULES = ("engine.tables._frequency", "engine.format._granules", "lakefs.shared_index._table")

for _name in NATIVE_MODULES:
    try:
        import_module(_name)
    except ImportError as error:
        raise StoreUnusable(
            f"the native module {_name} is not built ({error}), and the engine does not run without it; install a C "
            "compiler and Python's headers (gcc, python3-dev), then install the package again",
            subject=_name,
        ) from error
