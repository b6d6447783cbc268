"""Who may import whom: the contracts of pyproject.toml, and proof that they bite."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("lakefs/errors.py", "import engine.format.layouts", "cli > gateway | fuse | engine > lakefs"),
        ("gateway/__init__.py", "import lmdb", "lmdb is imported only in engine"),
    ],
)
def test_a_planted_violation_is_caught(tmp_path: Path, module: str, line: str, contract: str) -> None:
    for package in PRODUCT_PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    clean = _lint_imports(tmp_path)
    assert clean.returncode == 0, clean.stdout + clean.stderr

    planted = tmp_path / module
    planted.write_text(f"{planted.read_text()}\n{line}\n")
    caught = _lint_imports(tmp_path)
    assert caught.returncode != 0
    assert f"{contract} BROKEN" in caught.stdout
