"""Version, changelog and tags say the same."""

from __future__ import annotations

import re
import subprocess
import tomllib

from lakefs.version import VERSION
from tests.style.source_tree import ROOT

_HEADING = re.compile(r"^## (\S+) \((unreleased|\d{4}-\d{2}-\d{2})\)$", re.MULTILINE)
_NUMBER = re.compile(r"(\d+)\.(\d+)\.(\d+)")


def headings() -> list[tuple[str, str]]:
    text = (ROOT / "CHANGELOG.md").read_text()
    found = [(str(number), str(state)) for number, state in _HEADING.findall(text)]
    assert len(found) == len(re.findall("^## ", text, re.MULTILINE)), "a heading is: ## 1.2.3 (2026-12-31)"
    return found


def test_the_changelog_begins_with_the_version_and_goes_back() -> None:
    numbers = [number for number, _ in headings()]
    assert numbers[0] == VERSION
    keys = [tuple(map(int, _NUMBER.fullmatch(number).groups())) for number in numbers]  # type: ignore[union-attr]
    assert keys == sorted(set(keys), reverse=True)
    assert [state for _, state in headings()[1:] if state == "unreleased"] == []


def test_the_distribution_takes_its_version_from_the_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "lakefs.version.VERSION"}


def test_each_release_that_has_a_tag_is_in_the_changelog_with_its_day() -> None:
    listed = subprocess.run(["git", "tag", "--list", "v*"], cwd=ROOT, capture_output=True, text=True, check=False)
    released = {number for number, state in headings() if state != "unreleased"}
    assert {tag.removeprefix("v") for tag in listed.stdout.split()} <= released
