"""The examples of docs/python.md about `lake://`: each is a program of its own, run as it stands there."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from lakefs.plugins.fsspec.file_system import LakeFileSystem
from tests.e2e.served import ROOT
from tests.plugins.fsspec.test_libraries import run

SECTION = "## `lake://` for pandas, torch and others\n"
BUCKETS = ("tables", "models")
LIBRARIES = {"pandas", "pyarrow", "datasets", "torch", "transformers", "safetensors", "zarr", "polars"}


def examples() -> list[str]:
    """Return the programs of the section, in order."""
    page = (ROOT / "docs/python.md").read_text()
    section = page.partition(SECTION)[2].partition("\n## ")[0]
    blocks = re.findall(r"(?:^(?: {4}.*)?\n)+", section, flags=re.MULTILINE)
    programs = [textwrap.dedent(block).strip() + "\n" for block in blocks]
    return [program for program in programs if program.startswith("import ")]


def test_the_page_has_an_example_for_each_library() -> None:
    imported = " ".join(program.partition("\n")[0] for program in examples())
    assert {name for name in LIBRARIES if name in imported} == LIBRARIES
    for program in examples():
        compile(program, "docs/python.md", "exec")


@pytest.mark.plugins
def test_each_example_runs_as_it_is_written(fs: LakeFileSystem, tmp_path: Path) -> None:
    for bucket in BUCKETS:
        fs.mkdir(bucket)
    for program in examples():
        run(fs, program, tmp_path)
    for left in (
        "tables/2026/a.parquet",
        "tables/n.parquet",
        "models/run1/step100/.metadata",
        "models/a.pt",
        "tables/polars.parquet",
    ):
        assert fs.size(left) > 0
    assert fs.cat("models/tiny/config.json") == (tmp_path / "fetched/config.json").read_bytes()
