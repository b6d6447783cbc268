"""`lake doctor` looks for all that a release needs, and says what lake does without it."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec

import pytest

import engine
from cli.operate import doctor
from cli.operate.doctor import (
    NATIVE_MODULES,
    NEEDED_MODULES,
    PYTHON_PACKAGES,
    SPARED_MODULES,
    _is_built,
    _native_modules,
)  # fmt: skip
from tests.style.source_tree import ROOT


def test_it_looks_for_every_dependency_and_every_native_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [re.split("[<>=]", requirement)[0] for requirement in project["project"]["dependencies"]]
    assert sorted(PYTHON_PACKAGES) == sorted(wanted)
    modules = [module["name"] for module in project["tool"]["setuptools"]["ext-modules"]]
    assert sorted(NATIVE_MODULES) == sorted(modules)


def test_a_package_without_which_only_the_mount_is_missing_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", gone)
    found = {finding.detail.split()[0]: finding for finding in doctor._python_packages() if finding.verdict != "ok"}
    assert found["pyfuse3"].verdict == "warn"
    assert "no lake mount" in found["pyfuse3"].detail
    assert found["lmdb"].verdict == "fail"


def test_the_modules_without_a_substitute_are_those_that_the_engine_refuses_to_run_without() -> None:
    assert sorted(NEEDED_MODULES) == sorted(engine.NATIVE_MODULES)


def test_what_is_built_here_is_found_and_nothing_else() -> None:
    assert [name for name in NATIVE_MODULES if _is_built(name) != (find_spec(name) is not None)] == []
    assert not _is_built("engine.format._gone")
    assert not _is_built("nowhere.at._all")


@pytest.mark.parametrize("module", NATIVE_MODULES)
def test_a_native_module_that_was_not_built_is_named_with_what_follows(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setattr("cli.operate.doctor._is_built", lambda name: name != module)
    finding = _native_modules()
    effect = SPARED_MODULES.get(module, "the engine does not start")
    assert finding.verdict == ("warn" if module in SPARED_MODULES else "fail")
    assert finding.detail.startswith(f"{module}: not built, {effect}; install a C compiler")


def test_each_native_module_has_its_reason_in_the_documents() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+\._\w+)` \| .* \| (.*) \|$", page, flags=re.MULTILINE))
    assert sorted(rows) == sorted(NATIVE_MODULES)
    assert sorted(name for name, without in rows.items() if "does not start" in without) == sorted(NEEDED_MODULES)
