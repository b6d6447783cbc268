"""Steps of a build: wheel and sdist get the commit of the checkout that they are built from, as a file.

setuptools loads this module by its path (`[tool.setuptools.cmdclass]`), so it imports nothing of the project by name.
"""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist


def _version() -> ModuleType:
    """Return lakefs.version, loaded from the tree that is built."""
    spec = importlib.util.spec_from_file_location("_version", os.path.join("lakefs", "version.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_commit(folder: str) -> None:
    """Write the commit into the tree of a distribution, if the tree that it is built from says one."""
    found = _version()
    source = os.path.join("lakefs", found.COMMIT_FILE)
    if os.path.exists(source):  # an sdist, which is no checkout
        with open(source, encoding="utf-8") as file:
            text = file.read()
    else:
        text = found.commit_of(os.getcwd())
    if text:
        os.makedirs(os.path.join(folder, "lakefs"), exist_ok=True)
        with open(os.path.join(folder, "lakefs", found.COMMIT_FILE), "w", encoding="utf-8") as file:
            file.write(text)


class BuildPyWithCommit(build_py):  # type: ignore[misc]  # setuptools has no types
    """Copies the modules, and adds the commit; not into the tree itself, which an editable build would."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_commit(self.build_lib)


class SdistWithCommit(sdist):  # type: ignore[misc]
    """Makes the source distribution, and adds the commit."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)
