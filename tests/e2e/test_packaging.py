"""The distribution installs from the tree and from its sdist, and works away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from lakefs.version import VERSION
from tests.style.source_tree import PRODUCT_PACKAGES, ROOT, tracked_files

COMMIT = "0123456789abcdef" * 2 + "01234567"
pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def _run(*command: str | Path, cwd: Path) -> str:
    """Run a command; return its stdout.  A failure shows what the command printed.

    Native modules are compiled without optimisation: here they are only imported.
    """
    plain = {"CFLAGS": "-O0 -g0"} | {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LAKE_"))
    }
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=plain, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git would commit: building leaves nothing in the tree.  It says that a commit is checked out."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in tracked_files():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target)
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text(f"{COMMIT}\n")
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the sdist, as an index would serve it."""
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, checkout, cwd=out)
    [built] = out.glob("*.whl")
    return built


def _clean_venv(folder: Path) -> Path:
    """Make a virtual environment without anything of the developer's own; return its interpreter."""
    _run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    return folder / "bin" / "python"


def _assert_works(python: Path, away: Path) -> None:
    lake = python.with_name("lake")
    assert _run(lake, "--version", cwd=away) == f"lake {VERSION} (commit {COMMIT[:12]})\n"
    # -f: mount(8) only pretends.
    _run(python.with_name("mount.lake"), "lake", away, "-f", cwd=away)
    probe = "import lakefs, engine.format, gateway.admin.server, fuse.errno_map, cli.terminal; print(lakefs.__file__)"
    assert _run(python, "-c", probe, cwd=away).startswith(str(python.parents[1]))
    shipped = "import importlib.util as u; print(u.find_spec('tests'), u.find_spec('bench'))"
    assert _run(python, "-c", shipped, cwd=away).split() == ["None", "None"]


def test_pip_installs_the_tree_into_a_clean_environment(checkout: Path, tmp_path: Path) -> None:
    python = _clean_venv(tmp_path / "venv")
    locked = checkout / "requirements" / "runtime.txt"
    _run(python, "-m", "pip", "install", "--quiet", "--constraint", locked, checkout, cwd=tmp_path)
    _assert_works(python, tmp_path)
    _run(python, "-m", "pip", "check", cwd=tmp_path)


def test_the_wheel_made_from_the_sdist_works(wheel: Path, tmp_path: Path) -> None:
    python = _clean_venv(tmp_path / "venv")
    # The test above resolved the dependencies; here only the files of the wheel matter.
    site = _run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip()
    own = Path(_run(sys.executable, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip())
    _run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    Path(site, "dependencies.pth").write_text(f"{own}\n")
    _assert_works(python, tmp_path)


def test_the_wheel_holds_the_packages_the_units_the_types_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    top_level = {name.split("/")[0] for name in names}
    release = f"lakefs_appliance-{VERSION}"
    assert top_level == {*PRODUCT_PACKAGES, f"{release}.dist-info", f"{release}.data"}
    modules = {str(path) for path in tracked_files() if path.parts[0] in PRODUCT_PACKAGES and path.suffix == ".py"}
    assert modules - names == set()
    assert "lakefs/py.typed" in names
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    modules_built = {name.partition(".")[0].replace("/", ".") for name in names if name.endswith(".so")}
    # One that could not be compiled from the sdist, for want of a header, would be left out silently.
    assert modules_built == {module["name"] for module in project["tool"]["setuptools"]["ext-modules"]}
    units = ("lake-engine.service", "lake-mount@.service", "sysusers.d/lake.conf", "tmpfiles.d/lake.conf")
    assert {f"{release}.data/data/share/lake/systemd/{unit}" for unit in units} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
