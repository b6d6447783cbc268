"""`lake doctor` looks for all that a release needs, and says what lake does without it."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec

import pytest

from cli.operate.doctor import NATIVE_MODULES, PYTHON_PACKAGES, _native_modules
from tests.style.source_tree import ROOT


def test_it_looks_for_every_dependency_and_every_native_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [re.split("[<>=]", requirement)[0] for requirement in project["project"]["dependencies"]]
    assert sorted(PYTHON_PACKAGES) == sorted(wanted)
    modules = [module["name"] for module in project["tool"]["setuptools"]["ext-modules"]]
    assert sorted(NATIVE_MODULES) == sorted(modules)


@pytest.mark.parametrize(
    ("module", "verdict", "effect"),
    [
        ("lakefs.grants._batch_plan", "warn", "reads are slower"),
        ("engine.host._io_uring", "warn", "reads are slower"),
        ("lakefs.stamps._stamps", "warn", "reads are slower"),
        ("engine.format._granules", "fail", "the engine does not start"),
        ("lakefs.shared_index._table", "fail", "the engine does not start"),
    ],
)
def test_a_native_module_that_was_not_built_is_named_with_what_follows(
    monkeypatch: pytest.MonkeyPatch, module: str, verdict: str, effect: str
) -> None:
    def found(name: str) -> object:
        return None if name == module else find_spec("sys")

    monkeypatch.setattr("cli.operate.doctor.find_spec", found)
    finding = _native_modules()
    assert finding.verdict == verdict
    assert finding.detail.startswith(f"{module}: not built, {effect}")
