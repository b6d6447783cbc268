"""fsspec's own file system of local files as the model of a bucket: the same operations, answers and errors.

What is meant to differ, and is evened out here or not asked for:

- a folder of the lake that names imply vanishes with the last of them: `LocalModel` removes empty local folders that
  nobody made;
- an object and a folder may have one name, a name below an object too: operations that would lead to that are not
  done (`LocalModel.is_free`);
- errors are compared by their kind, as the lake has them: below an object nothing exists.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from fsspec.implementations.local import LocalFileSystem

Answer = Any
_KINDS: Final = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)


class Side:
    """A file system, and the folder of it in which an example works.  Paths of operations are below that folder."""

    def __init__(self, fs: Any, root: str) -> None:
        self.fs = fs
        self.root = root

    def at(self, path: str) -> str:
        """Return the path as the file system takes it."""
        return f"{self.root}/{path}" if path else self.root

    def all_at(self, paths: Iterable[str]) -> list[str]:
        """Return `at` of each."""
        return [self.at(path) for path in paths]

    def bare(self, answer: Any) -> Any:
        """Return an answer with the folder taken off all paths in it."""
        if isinstance(answer, str):
            return answer.removeprefix(self.root).removeprefix("/")
        if isinstance(answer, dict):
            return {self.bare(key): self.bare(value) for key, value in answer.items()}
        if isinstance(answer, (list, tuple, set)):
            return type(answer)(self.bare(one) for one in answer)
        return answer

    def ask(self, question: Callable[[Side], Any]) -> Answer:
        """Return the answer to a question, or the kind of its error."""
        try:
            return self.bare(question(self))
        except (OSError, ValueError) as error:
            return kind_of(error)

    def state(self) -> dict[str, Any]:
        """Return all names with their types, and the contents of objects."""
        found = self.fs.find(self.root, withdirs=True, detail=True)
        files = [path for path, entry in found.items() if entry["type"] == "file"]
        contents = self.fs.cat(files) if files else {}
        return {
            str(self.bare(path)): (entry["type"], len(contents[path]) if path in contents else 0, contents.get(path))
            for path, entry in found.items()
            if path != self.root
        }


def kind_of(error: Exception) -> str:
    """Return the kind of an error, the same for both file systems."""
    if isinstance(error, ValueError) and "Cannot delete directory" in str(error):
        return "IsADirectoryError"  # what LocalFileSystem.rm raises for a folder without `recursive`
    if isinstance(error, shutil.Error):
        return "OSError"
    if isinstance(error, NotADirectoryError) and _is_below_a_file(error.filename):
        return "FileNotFoundError"
    return next((kind.__name__ for kind in _KINDS if isinstance(error, kind)), "OSError")


def _is_below_a_file(path: Any) -> bool:
    return isinstance(path, str) and any(map(os.path.isfile, map(str, Path(path).parents)))


class LocalModel(Side):
    """A local folder that behaves as a bucket does."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        super().__init__(LocalFileSystem(auto_mkdir=True), str(root))
        self.made: set[str] = set()
        """Folders that were made, and so stay when they are empty."""

    def names(self) -> list[str]:
        """Return all names, in order."""
        return sorted(str(self.bare(path)) for path in self.fs.find(self.root, withdirs=True) if path != self.root)

    def is_free(self, path: str, *, for_folder: bool = False) -> bool:
        """Return True if no object would have a folder's name after an object, or a folder, is made at the path."""
        parts = path.split("/")
        above = ["/".join(parts[:count]) for count in range(1, len(parts))]
        other = os.path.isfile if for_folder else os.path.isdir
        return not any(map(os.path.isfile, self.all_at(above))) and not other(self.at(path))

    def made_below(self, path: str) -> set[str]:
        """Return the made folders at and below a path."""
        return {one for one in self.made if one == path or one.startswith(path + "/")}

    def moved(self, source: str, target: str) -> None:
        """Note that a folder has another name now."""
        below = self.made_below(source)
        self.made -= below
        self.made |= {target + one.removeprefix(source) for one in below}

    def settle(self) -> None:
        """Forget made folders that are gone, and remove empty ones that nobody made."""
        for folder, _, _ in os.walk(self.root, topdown=False):
            path = str(self.bare(folder))
            if path and path not in self.made and not os.listdir(folder):
                os.rmdir(folder)
        self.made = {one for one in self.made if os.path.isdir(self.at(one))}
