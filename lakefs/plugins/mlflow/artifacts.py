"""`LakeArtifactRepository`: artifacts of MLflow in a lake, at `lake://BUCKET/KEY`.

    mlflow.create_experiment("run", artifact_location="lake://models/mlflow")
    mlflow.log_artifact("model.safetensors")          # content that the lake has is not stored again
    mlflow.log_artifact("lake://models/7b/weights")   # an object of the lake: a second name, no byte is read

The engine is found as `lakefs.connect` finds it, and the bucket has to exist.  All repositories of a process share one
connection to an engine; it is used by any thread, and anew after a fork.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from mlflow.entities import FileInfo
from mlflow.store.artifact.artifact_repo import ArtifactRepository

from lakefs.client.address import resolve
from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.errors import KeyNotFound
from lakefs.names import SCHEME, check_path, parse_name


class LakeArtifactRepository(ArtifactRepository):  # type: ignore[misc]
    """Artifacts below one name of a lake.  Errors are those of `lakefs.errors`."""

    def __init__(self, artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        """Parse the URI.  InvalidName."""
        super().__init__(artifact_uri, tracking_uri, registry_uri)
        self._root = str(check_path(parse_name(artifact_uri))).rstrip("/")

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        """Store a file in the folder `artifact_path`; a name of the lake, `lake://BUCKET/KEY`, gets a second one."""
        source = os.fspath(local_file)
        target = f"{self._name(artifact_path)}/{os.path.basename(source)}"
        if source.startswith(SCHEME):
            _lake().copy(source, target)
        else:
            _lake().put(target, Path(source))

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store what is in a folder in the folder `artifact_path`.  What is stored there already is left alone."""
        _lake().put_tree(self._name(artifact_path), local_dir)

    def list_artifacts(self, path: str | None = None) -> list[FileInfo]:
        """Return the files and folders right below a folder, by name; none for a file."""
        name = parse_name(self._name(path) + "/")
        above = len(parse_name(self._root + "/").key)
        found = []
        for entry in _lake().ls(str(name), delimiter="/", folders=True):
            relative = entry.key[above:].rstrip("/")
            if entry.key != name.key and relative:
                is_folder = entry.key.endswith("/")
                found.append(FileInfo(relative, is_folder, None if is_folder else entry.size_bytes))
        return sorted(found, key=lambda one: str(one.path))

    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        """Remove a file, or a folder with all below it; all of the repository if no path is given."""
        name = self._name(artifact_path)
        is_removed = "/" in name and _lake().remove(name)
        try:
            _lake().remove_tree(name)
        except KeyNotFound:
            if not is_removed and artifact_path:
                raise

    def _download_file(self, remote_file_path: str, local_path: str) -> None:
        _lake().get_file(self._name(remote_file_path), local_path)

    def _name(self, path: str | None) -> str:
        """Return the name of an artifact, or of a folder without its slash.  InvalidName for a way out of the root."""
        return str(check_path(parse_name(f"{self._root}/{path.strip('/')}"))) if path else self._root


def _lake() -> Lake:
    address, token = resolve(None, None)
    return _connected(address, token)


@cache
def _connected(address: str, token: str) -> Lake:
    return connect(address, token=token)
