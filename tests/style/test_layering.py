"""Checks the import contracts of pyproject.toml, and that each one notices when it is broken."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.style.source_tree import PRODUCT_PACKAGES, ROOT


def _lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the product's packages, clean."""
    folder = tmp_path_factory.mktemp("layering")
    for package in PRODUCT_PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    clean = _lint_imports(folder)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    return folder


ONLY_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import "


PLANTED = [
    ("lakefs/errors.py", "import engine.format.layouts", "cli > gateway | fuse | engine > lakefs"),
    ("gateway/__init__.py", "import lmdb", "lmdb is imported only in engine"),
    ("engine/format/layouts.py", "import engine.store.store", "floors of engine"),
    ("engine/fsck/check.py", "import engine.upkeep.gc", "floors of engine"),
    ("engine/server/listener.py", "import engine.store.store", "floors of engine"),
    ("engine/tables/views.py", ONLY_TYPES + "engine.metadata.recovery", "floors of engine"),
    ("lakefs/wire/frames.py", "import lakefs.transport.streams", "floors of lakefs"),
    ("lakefs/ids.py", ONLY_TYPES + "lakefs.ports", "floors of lakefs"),
    ("gateway/__init__.py", "import fsspec", "plug-ins, and what they plug into, are imported by nothing else"),
    ("lakefs/get/ranges.py", "import lakefs.plugins.fsspec.entries", "floors of lakefs"),
    ("cli/terminal/target.py", "import cli.serve.serve", "floors of cli"),
    ("fuse/kernel/attach.py", "import fuse.staging.folder", "floors of fuse"),
    ("gateway/http/head.py", "import gateway.admin.metrics", "floors of gateway"),
    ("gateway/s3/protocol/xml.py", "import gateway.s3.dispatch", "floors of gateway.s3"),
]


@pytest.fixture(scope="module")
def broken(copied: Path) -> dict[str, str]:
    """The report of each contract when all violations are planted at once."""
    before = {module: (copied / module).read_text() for module, _, _ in PLANTED}
    for module, line, _ in PLANTED:
        with (copied / module).open("a") as planted:
            planted.write(f"\n{line}\n")
    try:
        caught = _lint_imports(copied)
    finally:
        for module, text in before.items():
            (copied / module).write_text(text)
    assert caught.returncode != 0
    reported = re.split(r"^(.*)\n-+\n", caught.stdout, flags=re.MULTILINE)
    assert all(f"{contract} BROKEN" in caught.stdout for _, _, contract in PLANTED)
    return dict(zip(reported[1::2], reported[2::2], strict=True))


@pytest.mark.parametrize(("module", "line", "contract"), PLANTED)
def test_a_planted_violation_is_caught(broken: dict[str, str], module: str, line: str, contract: str) -> None:
    importer = ".".join(Path(module).with_suffix("").parts).removesuffix(".__init__")
    imported = line.rpartition("import ")[2]
    assert re.search(rf"{re.escape(importer)} -> {re.escape(imported)}\b", broken[contract])


def test_a_new_room_without_a_floor_is_caught(copied: Path) -> None:
    room = copied / "engine" / "attic"
    room.mkdir()
    (room / "__init__.py").write_text("")
    try:
        caught = _lint_imports(copied)
    finally:
        shutil.rmtree(room)
    assert caught.returncode != 0
    assert "attic" in caught.stdout


def _imports(packages: tuple[str, ...]) -> dict[str, set[str]]:
    """Return the imports of each module; those only for types count, a package's import of itself does not."""
    graph = grimp.build_graph(*packages, cache_dir=None)
    return {name: graph.find_modules_directly_imported_by(name) - set(packages) for name in graph.modules}


def test_no_modules_import_each_other_in_a_circle() -> None:
    imports = _imports(PRODUCT_PACKAGES)
    TopologicalSorter(imports).prepare()

    imports["engine.format.records"].add("engine.format.layouts")
    imports["engine.format.layouts"].add("engine.format.records")
    with pytest.raises(CycleError):
        TopologicalSorter(imports).prepare()
