"""Native modules built with the sanitizers, and fed in a process of their own by `shared_memory_inputs`.

python -m tests.fuzz.sanitized_modules --inputs 100000 --seed 7
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

_ROOT: Final = Path(__file__).parents[2]
TABLE: Final = "lakefs.shared_index._table"
KEYS: Final = "lakefs.shared_index._keys"
KNOWN: Final = "lakefs.known._known"
BATCH_PLAN: Final = "lakefs.grants._batch_plan"
MODULES: Final = {"table": (TABLE, KEYS), "known": (TABLE, KNOWN), "plan": (BATCH_PLAN,)}
"""The native modules of each part that is fed alone."""
_SANITIZERS: Final = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_PREADV2: Final = """
#define _GNU_SOURCE 1
#include <sanitizer/asan_interface.h>
#include <sys/uio.h>

/* The kernel writes where no sanitizer looks: the memory of each read is looked at before. */
static inline ssize_t looked_at_preadv2(int file, const struct iovec *into, int count, off_t offset, int flags)
{
    for (int at = 0; at < count; at++) {
        const volatile char *bad = __asan_region_is_poisoned(into[at].iov_base, into[at].iov_len);
        if (bad)
            (void)*bad;
    }
    return preadv2(file, into, count, offset, flags);
}
#define preadv2 looked_at_preadv2
"""


class Change(NamedTuple):
    """A bug: a piece of a source, which occurs once, what stands there instead, and the function that shows it."""

    source: str
    right: str
    wrong: str
    shown: str


BUGS: Final = {
    # A look-up goes on behind the table's last slot.
    "table": Change(
        "lakefs/shared_index/table.h",
        "distance < LAKE_PROBE_SLOTS; distance++, at++",
        "distance < 4 * LAKE_PROBE_SLOTS; distance++, at++",
        "lake_look",
    ),
    # A chunk is copied that begins in a slab, and ends behind it.
    "known": Change(
        "lakefs/granules/extent.h",
        "begin > from->room || length > from->room - begin",
        "begin > from->room",
        "lake_extent_",
    ),
    # A chunk is read into a target that is shorter.
    "plan": Change(
        "lakefs/grants/_batch_plan.pyx",
        "            if self.targets[number].length < place.stored_bytes:\n"
        "                continue\n"
        "            segment =",
        "            segment =",
        "looked_at_preadv2",
    ),
}
"""A bug for each part, by the part that has to find it."""


def build(folder: Path, part: str, bug: Change | None = None) -> Path:
    """Return a folder with a part's modules, built with the sanitizers.  CalledProcessError if they do not build."""
    tree = folder / "tree"
    for path in sorted((_ROOT / "lakefs").rglob("*")):
        if path.suffix in {".h", ".pxd", ".pyx"} or path.name == "__init__.py":
            copied = tree / path.relative_to(_ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)
    if bug is not None:
        text = (tree / bug.source).read_text()
        assert text.count(bug.right) == 1, f"this piece of {bug.source} is gone: {bug.right}"
        (tree / bug.source).write_text(text.replace(bug.right, bug.wrong))
    looked_at = folder / "preadv2.h"
    looked_at.write_text(_PREADV2)
    with tempfile.TemporaryDirectory() as written:
        programs = []
        for name in MODULES[part]:
            source, c = name.replace(".", "/") + ".pyx", f"{written}/{name}.c"
            cython = [sys.executable, "-m", "cython", "-3", "--module-name", name, source, "-o", c]
            subprocess.run(cython, check=True, capture_output=True, cwd=tree)
            options = ["-std=gnu11", "-O1", "-g1", "-w", "-shared", "-fPIC", *_SANITIZERS, "-include", str(looked_at)]
            places = ["-I.", f"-I{Path(source).parent}", f"-I{sysconfig.get_path('include')}"]
            compiler = ["gcc", *options, *places, c, "-lcrypto", "-lpthread", "-o", str(folder / f"{name}.so")]
            programs.append(subprocess.Popen(compiler, cwd=tree))
        failed = [program.wait() for program in programs]
    if any(failed):
        raise subprocess.CalledProcessError(max(failed), "gcc")
    return folder


def feed(folder: Path, part: str, inputs: int, seed: int) -> str:
    """Return what is wrong with a part that `build` has made in a folder, "" for nothing."""
    library = subprocess.run(["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True).stdout
    environment = {
        **os.environ,
        "LD_PRELOAD": library.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter keeps memory to its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
    arguments = ["--built", str(folder), "--part", part, "--inputs", str(inputs), "--seed", str(seed)]
    program = [sys.executable, "-m", "tests.fuzz.shared_memory_inputs", *arguments]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, cwd=_ROOT)
    if done.returncode:
        return f"it ended with {done.returncode}\n{done.stderr[:6000]}"
    found = int(done.stdout)
    return "" if found >= inputs // 4 else f"of {inputs} inputs only {found} had something to find"


def load(folder: Path, part: str) -> None:
    """Put the modules of a folder in the place of the product's, before anything imports those."""
    for name in MODULES[part]:
        assert name not in sys.modules
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.so")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


def main() -> int:
    """Build and feed each part; the result is the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    wrong = ""
    for part in MODULES:
        with tempfile.TemporaryDirectory() as folder:
            wrong += feed(build(Path(folder), part), part, asked.inputs, asked.seed)
    sys.stdout.write(f"shared memory: {asked.inputs} inputs, seed {asked.seed}: {wrong or 'nothing failed'}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
