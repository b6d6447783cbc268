"""The mount's native layer with planted bugs: its sources with some lines changed, built anew, in the module's place.

python -m tests.mount.planted_layer MODULE --server ADDRESS mount ... : `lake` with that module.

One module has all bugs.  Each asks at each turn whether it is wanted: whether the folder `wanted` beside the module has
a file of its name.  So one mount shows that a check passes without a bug, and fails with it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

NAME: Final = "fuse.native._layer"
NOT_BUILT: Final = "not-built"
"""In the place of a module: `lake` as where it was not built."""
_ROOT: Final = Path(__file__).parents[2]
_LAYER: Final = Path("fuse/native")
_SOURCES: Final = (*(_LAYER / name for name in ("_layer.pyx", "appends.h", "content.h", "layer.h")),
                   *(Path("lakefs/granules") / name for name in ("extent.h", "granules.h", "place.h")),
                   *(Path("lakefs/host") / name for name in ("crc32c.h", "page_cache.h")))  # fmt: skip
_ASKING: Final = r"""
#ifndef PLANTED_H
#define PLANTED_H
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static int planted(const char *bug)
{
    char path[4096];
    const char *wanted = getenv("PLANTED_BUGS");
    return wanted && snprintf(path, sizeof path, "%s/%s", wanted, bug) < (int)sizeof path && !access(path, F_OK);
}
#endif
"""


class Change(NamedTuple):
    """A piece of a source as it is, and as it is with the bug where PLANTED is true."""

    source: str
    right: str
    wrong: str


def _left_out(source: str, statement: str) -> Change:
    return Change(source, statement, f"if (!PLANTED) {statement}")


def _unchecked(where: str) -> Change:
    compared = "memcmp(found, crcs + at / LAKE_GRANULE,"
    return Change("extent.h", compared, f"!(PLANTED && {where}) && {compared}")


BUGS: Final[dict[str, tuple[Change, ...]]] = {
    # More than a granule read at once is not compared with its checksums.
    "four-granules-unchecked": (_unchecked("step > LAKE_GRANULE"),),
    # Nor is a granule that is read whole.
    "granule-unchecked": (_unchecked("step == LAKE_GRANULE"),),
    # Nor one that is read for the sums of its pages.
    "summed-granule-unchecked": (
        Change(
            "content.h",
            "lake_extent_granules(&known->where, granule, stop, known->crcs, into)",
            "PLANTED ? (lake_reading)lake_extent_copy(&known->where, granule, stop - granule, into)"
            " : lake_extent_granules(&known->where, granule, stop, known->crcs, into)",
        ),
    ),
    # Pages are not compared with their sums.
    "pages-unchecked": (_left_out("content.h", "if (memcmp(found, sums->of_page"),),
    # Reads go on from a content that has ended.
    "content-not-ended": (_left_out("content.h", "content->ended = 1;"),),
    # Native threads write what is neither the next bytes nor within the limit.
    "append-unbounded": (
        Change(
            "appends.h",
            "offset != found->end || size > found->limit - found->end",
            "(!PLANTED && (offset != found->end || size > found->limit - found->end))",
        ),
    ),
    # The end of a file does not move with what native threads write.
    "append-not-counted": (_left_out("appends.h", "append->end += written;"),),
    # libfuse is as before 3.13, which is no bug but a machine that a test does not have.
    "older-libfuse": (
        Change(
            "layer.h",
            "void *library = dlopen(",
            'void *library = PLANTED && strstr(name, "custom_io") ? NULL : dlopen(',
        ),
    ),
}


class PlantedLayer:
    """The module with all bugs, built in a folder.  CalledProcessError if it does not build."""

    def __init__(self, folder: Path) -> None:
        for source in _SOURCES:
            (folder / source).parent.mkdir(parents=True, exist_ok=True)
            (folder / source).write_text(_changed(source.name, (_ROOT / source).read_text()))
        self._module = folder / "_layer.so"
        self._wanted = folder / "wanted"
        self._wanted.mkdir()
        self._compile(folder)

    def _compile(self, folder: Path) -> None:
        source, written = (str(folder / _LAYER / f"_layer.{kind}") for kind in ("pyx", "c"))
        include, module = sysconfig.get_path("include"), str(self._module)
        cython = [sys.executable, "-m", "cython", "-3", "--module-name", NAME, source, "-o", written]
        compiler = ["gcc", "-shared", "-fPIC", "-O0", "-w", f"-I{include}", written, "-lpthread", "-ldl", "-o", module]
        for command in (cython, compiler):
            subprocess.run(command, check=True, capture_output=True)

    @property
    def program(self) -> list[str]:
        """The command `lake` with this module."""
        return lake_with(str(self._module))

    @contextmanager
    def planted(self, bug: str) -> Iterator[None]:
        """Plant a bug for the block, in all processes with this module."""
        assert bug in BUGS
        (self._wanted / bug).touch()
        try:
            yield
        finally:
            (self._wanted / bug).unlink()


def lake_with(module: str) -> list[str]:
    """Return the command `lake` with a module in the place of the native layer's."""
    return [sys.executable, "-m", "tests.mount.planted_layer", module]


def _changed(name: str, text: str) -> str:
    """Return a source with all bugs of it planted."""
    for bug, changes in BUGS.items():
        for source, right, wrong in changes:
            if source == name:
                assert text.count(right) == 1, f"{bug}: this piece of {name} is gone: {right}"
                text = text.replace(right, wrong.replace("PLANTED", f'planted("{bug}")'))
    return _ASKING + text if name.endswith(".h") else text


def _load(module: str) -> None:
    """Put a module in the place of the native layer's, before anything imports that."""
    if module == NOT_BUILT:
        sys.modules[NAME] = None  # type: ignore[assignment]  # an import of it fails
        return
    os.environ["PLANTED_BUGS"] = str(Path(module).with_name("wanted"))
    spec = importlib.util.spec_from_file_location(NAME, module)
    assert spec is not None
    assert spec.loader is not None
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[NAME])
    finally:
        sys.setdlopenflags(flags)


def main() -> None:
    """Load the module that the first argument names, and run `lake` with the others."""
    _load(sys.argv.pop(1))
    importlib.import_module("cli.main").main()


if __name__ == "__main__":
    main()
