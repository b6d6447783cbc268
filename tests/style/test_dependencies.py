"""Dependencies: none brings a package of our names, all are locked, and each is written about."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from typing import Final

from tests.style.source_tree import PRODUCT_PACKAGES, ROOT

OURS: Final = "lakefs-appliance"
TAKEN_NAMES: Final = {*PRODUCT_PACKAGES, "tests", "bench"}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _top_level_names(distribution: metadata.Distribution) -> set[str]:
    names = {path.parts[0].removesuffix(".py") for path in distribution.files or ()}
    declared = distribution.read_text("top_level.txt") or ""
    return names | set(declared.split())


def _locked(lock: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {_normal(name): version for name, version in pins}


def _declared() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"runtime": project["dependencies"], **project["optional-dependencies"]}
    return {
        group: [_normal(re.split(r"[<>=!~\[; ]", line, maxsplit=1)[0]) for line in lines]
        for group, lines in groups.items()
    }


def test_no_dependency_ships_a_package_of_our_names() -> None:
    others = [
        distribution for distribution in metadata.distributions() if _normal(distribution.metadata["Name"]) != OURS
    ]
    assert len(others) > 10
    clashes = {
        f"{distribution.metadata['Name']}: {name}"
        for distribution in others
        for name in _top_level_names(distribution) & TAKEN_NAMES
    }
    assert clashes == set()


def test_every_declared_dependency_is_locked() -> None:
    declared = _declared()
    assert set(declared["runtime"]) - set(_locked("runtime.txt")) == set()
    assert {*declared["runtime"], *declared["dev"]} - set(_locked("dev.txt")) == set()


def test_the_locks_agree() -> None:
    runtime, demo, dev = _locked("runtime.txt"), _locked("demo.txt"), _locked("dev.txt")
    assert {name: demo.get(name) for name in runtime} == runtime
    assert {name: dev.get(name) for name in demo} == demo


def test_locks_hold_nothing_but_pinned_names() -> None:
    for lock in ("runtime.txt", "demo.txt", "dev.txt"):
        lines = (ROOT / "requirements" / lock).read_text().splitlines()
        odd = [line for line in lines if not re.fullmatch(r"#.*|[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)]
        assert odd == []


def test_every_direct_dependency_has_its_reason_in_the_documents() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    names = {_normal(name) for name in re.findall(r"^\| ([A-Za-z0-9._-]+) \|", page, flags=re.MULTILINE)}
    assert {name for group in _declared().values() for name in group} - names == set()


def test_every_debian_package_has_its_reason_in_the_documents() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    wanted = [
        line.split()[0]
        for name in ("debian-packages.txt", "debian-packages-dev.txt", "debian-packages-lab.txt")
        for line in (ROOT / name).read_text().splitlines()
        if line[:1] not in "#"
    ]
    assert len(wanted) > 3
    assert [name for name in wanted if f"`{name}`" not in page] == []
