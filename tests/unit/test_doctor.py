"""`lake doctor` looks for all that a release needs, and says what is done without."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec

import pytest

from cli.doctor import NATIVE_MODULES, PYTHON_PACKAGES, _native_modules
from tests.style.source_tree import ROOT


def test_it_looks_for_every_dependency_and_every_native_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [re.split("[<>=]", requirement)[0] for requirement in project["project"]["dependencies"]]
    assert sorted(PYTHON_PACKAGES) == sorted(wanted)
    modules = [module["name"] for module in project["tool"]["setuptools"]["ext-modules"]]
    assert sorted(NATIVE_MODULES) == sorted(modules)


def test_a_native_module_that_was_not_built_is_a_warning_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> object:
        return None if name == "lakefs._plain_reads" else find_spec("sys")

    monkeypatch.setattr("cli.doctor.find_spec", found)
    finding = _native_modules()
    assert finding.verdict == "warn"
    assert finding.detail.startswith("lakefs._plain_reads: not built")
