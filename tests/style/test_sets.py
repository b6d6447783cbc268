"""Every test runs in exactly one of `make test`, the rest of `make test-all`, and `make test-plugins`."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Final

from tests.lengths import longer
from tests.style.source_tree import ROOT, Function, parsed, python_files, statements
from tests.torture import PARTS

SETS: Final = ("test-promises", "test-rest", "test-plugins")
MARKS: Final = ("thorough", "plugins")


def _recipe(target: str) -> str:
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)
    assert recipe is not None, target
    return recipe[1]


def _command(target: str) -> str:
    """Return the call of pytest in a target of the Makefile."""
    (call,) = [line for line in _recipe(target).splitlines() if " -m " in line]
    return call


def _chosen(target: str) -> str:
    """Return the expression of marks by which a target chooses tests."""
    found = re.search(r'-m (?:"([^"]+)"|(\w+))', _command(target).replace("-m pytest", ""))
    assert found is not None, target
    return found[1] or found[2]


def test_every_choice_of_marks_is_in_exactly_one_set() -> None:
    for values in product([True, False], repeat=len(MARKS)):
        marks = dict(zip(MARKS, values, strict=True))
        runs = [target for target in SETS if eval(_chosen(target), {}, marks)]
        assert len(runs) == 1, (marks, runs)


def test_make_test_runs_the_checks_beside_every_promise() -> None:
    assert _recipe("test").endswith("$(STATIC) test-promises\n")


def test_no_set_leaves_out_anything_by_another_way() -> None:
    for target, folder in zip(SETS, ("tests", "tests", "tests/plugins"), strict=True):
        call = _command(target)
        assert call.endswith(f" {folder}"), call
        assert not re.search(r" -k |--ignore|--deselect", call), call
        assert "--ignore" not in (ROOT / "pyproject.toml").read_text()


def test_every_longer_form_of_a_test_runs_in_make_torture() -> None:
    line = "from tests.lengths import repeated\n"
    asking = {ROOT / path for path in _test_modules() if line in (ROOT / path).read_text()}
    assert asking == set(longer())
    assert "tests.lengths" in {part.module for part in PARTS.values()}


def test_tests_for_plugins_are_where_their_target_looks() -> None:
    marked = {path for path in _test_modules() if "mark.plugins" in (ROOT / path).read_text()}
    assert {path for path in marked if path.parts[1] != "plugins"} - {Path("tests/style/test_sets.py")} == set()


def test_tests_are_in_files_that_are_collected() -> None:
    shared = {  # suites that several files run
        name
        for path in _test_modules()
        for name in re.findall(r"from (tests\.[\w.]+) import \*", (ROOT / path).read_text())
    }
    elsewhere = {path for path in _test_modules() if not path.name.startswith("test_") and _has_tests(path)}
    assert {".".join(path.with_suffix("").parts) for path in elsewhere} - shared == set()


def _test_modules() -> list[Path]:
    return [path for path in python_files() if path.parts[0] == "tests"]


def _has_tests(path: Path) -> bool:
    return any(isinstance(node, Function) and node.name.startswith("test_") for node in statements(parsed(path)))
